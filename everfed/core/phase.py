"""The round protocol as data: which clients do what, when, and how their replies become one.

A round is a list of phases. `train` is one of them; parts add their own. Because `reduce` is data, so is what a method
reveals: a phase reduced by mean or sum can run under secure aggregation, one that collects cannot.

Sums are kept in float64, so a result hardly depends on how replies are grouped (over ranks, say); replies are added in
client order, so it does not depend on who finished first. An absent reply is legal: a mean is (sum, weight).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from everfed.core.message import Values
from everfed.core.stream import RoundPlan
from everfed.core.tree import Tree
from everfed.errors import CompositionError

if TYPE_CHECKING:
    from everfed.core.context import Facts
    from everfed.core.handle import Client, Server

    Numbers = Callable[[Facts], int] | None

TRAIN = "train"
EVALUATE = "evaluate"


class Cohort(Enum):
    """Who takes part in a phase."""

    SAMPLED = "sampled"  # this round's participants
    ALL = "all"  # every client that has a task
    BOUNDARY = "boundary"  # the clients whose task begins or ends with this round
    SERVER = "server"  # no client


class When(Enum):
    """Before or after this round's aggregation, or inside another phase (the steps of secure aggregation, which an
    engine runs itself)."""

    BEFORE = "before"
    AFTER = "after"
    INSIDE = "inside"


@dataclass(frozen=True)
class Rounds:
    """In which rounds a phase runs."""

    kind: str
    every: int = 1
    offset: int = 0

    @property
    def needs_boundaries(self) -> bool:
        return self.kind in ("begin", "end")


ALWAYS = Rounds("every")
FIRST = Rounds("first")
BEGIN = Rounds("begin")
END = Rounds("end")
ON_REQUEST = Rounds("request")  # in no round: when a user asks for it, once a run is over


def every(rounds: int, offset: int = 0) -> Rounds:
    """Every `rounds`-th round, starting with round `offset`."""
    if rounds < 1 or not 0 <= offset < rounds:
        raise ValueError(f"every(k, offset) needs k >= 1 and 0 <= offset < k; got {rounds}, {offset}")
    return Rounds("every", rounds, offset)


@dataclass(frozen=True)
class Phase:
    """One exchange between the server and a cohort, or a piece of server work, with the functions that carry it out.

    reduce: reply key -> reducer. repeat: how often it runs in a row; a checkpoint may fall between two repeats.
    in_last_round: False leaves it out of the run's last round (what prepares the next task is useless there).
    sends: False sends clients no message at all; they use what they hold.

    Functions of the owning part, all optional, in order of execution:
    broadcast(server): what clients receive beside the model.
    run(client): on each client; its reply, if any.
    update(server): reads `server.reduced`, writes state, may change the model; True ends a repeated phase before its
    last repeat.

    owner: the part's name; composition fills it in.
    """

    name: str
    cohort: Cohort = Cohort.SAMPLED
    rounds: Rounds = ALWAYS
    when: When = When.AFTER
    reduce: Mapping[str, Reducer] = field(default_factory=dict)
    repeat: int = 1
    in_last_round: bool = True
    sends: bool = True
    broadcast: Callable[[Server], Values] | None = field(default=None, compare=False)
    run: Callable[[Client], Values | None] | None = field(default=None, compare=False)
    update: Callable[[Server], bool | None] | None = field(default=None, compare=False)
    owner: str = ""

    @property
    def needs_boundaries(self) -> bool:
        """Does running it reveal when a task begins or ends?"""
        return self.rounds.needs_boundaries or self.cohort is Cohort.BOUNDARY

    def due(self, index: int, plan: RoundPlan, rounds: int) -> bool:
        """Does it run in round `index` of `rounds`? Tasks begin and end for the clients concerned (BOUNDARY), or for
        the server."""
        if index + 1 == rounds and not self.in_last_round:
            return False
        if self.rounds.kind == "request":
            return False
        if self.rounds.kind == "first":
            return index == 0
        if self.rounds.kind == "begin":
            return bool(plan.begins) if self.cohort is Cohort.BOUNDARY else plan.task_opens
        if self.rounds.kind == "end":
            return bool(plan.ends) if self.cohort is Cohort.BOUNDARY else plan.task_closes
        return index % self.rounds.every == self.rounds.offset

    def clients(self, plan: RoundPlan) -> tuple[int, ...]:
        if self.cohort is Cohort.SERVER:
            return ()
        if self.cohort is Cohort.SAMPLED:
            return plan.participants
        if self.cohort is Cohort.ALL:
            return tuple(sorted(plan.tasks))
        moving = plan.begins if self.rounds.kind == "begin" else plan.ends
        return tuple(sorted(moving))


# how replies become one ----------------------------------------------------------------------------------------------
class Reducing(ABC):
    """A reduction under way."""

    @abstractmethod
    def add(self, client: int, value: Any, weight: float) -> None: ...

    @abstractmethod
    def result(self) -> Any:
        """The reduced value, or None when no reply carried one."""


class Shared(Reducing):
    """A reduction that several processes make together, each with the replies of its own clients."""

    @abstractmethod
    def export(self) -> Tree:
        """The state of this process's reduction, for the other processes."""

    @abstractmethod
    def merge(self, exported: Sequence[Tree]) -> None:
        """Replace the state by that of all processes together, this one included."""


class Tells(StrEnum):
    """What a value tells the server of the client that sent it. A part may say it in words of its own instead."""

    GRADIENTS = "what training changed, a sum of gradients: samples can be reconstructed from it, from few best"
    MOMENTS = "sums of products of features or inputs: of few samples these samples' features"
    SUMS = "sums or means of features, by class or group"
    CLASSES = "which classes a client has"
    COUNTS = "how many samples a client has of each class"
    AMOUNT = "how much data a client has"
    STATISTICS = "means and variances of BatchNorm's inputs"


OF_MODEL = {"params": Tells.GRADIENTS, "stats": Tells.STATISTICS, "counters": Tells.AMOUNT}


class Reducer(ABC):
    """A way to reduce; `secure` says whether the server may learn nothing but the result (secure aggregation).
    numbers: how many a client's value has, declared where they may be more than 64 models. tells: what a value tells
    of the client that sent it; the vectors of the model need not say it."""

    secure: bool = False
    numbers: Numbers = None
    tells: str = ""

    @abstractmethod
    def start(self) -> Reducing: ...


class Total(Reducing):
    """Weighted sum in float64 (integers stay exact)."""

    def __init__(self, mean: bool, weighted: bool) -> None:
        self.mean = mean
        self.weighted = weighted
        self.total: Tensor | float | None = None
        self.weight = 0.0
        self.dtype: torch.dtype | None = None

    def add(self, client: int, value: Any, weight: float) -> None:
        factor = weight if self.weighted else 1.0
        if isinstance(value, Tensor):
            self.dtype = value.dtype
            term = value.to(torch.float64, copy=True).mul_(factor)
            self.total = term if self.total is None else self.total.add_(term)  # type: ignore[union-attr]
        else:
            self.total = float(value) * factor + (self.total or 0.0)
        self.weight += factor

    def result(self) -> Any:
        if self.total is None or self.weight == 0.0:
            return None
        value = self.total / self.weight if self.mean else self.total
        if not isinstance(value, Tensor) or self.dtype is None:
            return value
        return value.to(self.dtype) if self.dtype.is_floating_point else value.round().to(self.dtype)


@dataclass(frozen=True)
class Mean(Reducer):
    """Mean over the clients that replied; `weighted` weighs them by their number of samples."""

    weighted: bool = False
    numbers: Numbers = field(default=None, compare=False, repr=False)
    tells: str = field(default="", compare=False, repr=False)
    secure = True

    def start(self) -> Reducing:
        return Total(mean=True, weighted=self.weighted)


@dataclass(frozen=True)
class Sum(Reducer):
    """Sum over the clients that replied."""

    numbers: Numbers = field(default=None, compare=False, repr=False)
    tells: str = field(default="", compare=False, repr=False)
    secure = True

    def start(self) -> Reducing:
        return Total(mean=False, weighted=False)


class Collected(Shared):
    def __init__(self) -> None:
        self.values: dict[int, Any] = {}

    def add(self, client: int, value: Any, weight: float) -> None:
        self.values[client] = value

    def export(self) -> Tree:
        return {str(client): value for client, value in self.values.items()}

    def merge(self, exported: Sequence[Tree]) -> None:
        found = {int(client): value for values in exported for client, value in values.items()}
        self.values = {client: found[client] for client in sorted(found)}

    def result(self) -> dict[int, Any] | None:
        return self.values or None


@dataclass(frozen=True)
class Collect(Reducer):
    """Every reply by itself, {client: value}. The server sees each client's value."""

    numbers: Numbers = field(default=None, compare=False, repr=False)
    tells: str = field(default="", compare=False, repr=False)

    def start(self) -> Reducing:
        return Collected()


class Reduction:
    """All reducers of one phase: {part: {key: reducer}} fed with replies {part: {key: value}}."""

    def __init__(self, reducers: dict[str, dict[str, Reducer]]) -> None:
        self.under_way = {part: {k: r.start() for k, r in keys.items()} for part, keys in reducers.items()}

    def add(self, client: int, reply: dict[str, dict[str, Any]], weight: float) -> None:
        for part, values in reply.items():
            for name, value in values.items():
                if value is None:
                    continue
                if name not in self.under_way.get(part, {}):
                    raise CompositionError(
                        f"part {part!r} replied {name!r} and declares no reducer for it: name it in its reducers(), or "
                        f"for a phase of its own in Phase(reduce={{{name!r}: Mean()}}, ...)"
                    )
                self.under_way[part][name].add(client, value, weight)

    def weights(self) -> dict[str, dict[str, float]]:
        """By what the sums are divided: how many replies, or their weights together."""
        return {p: {k: r.weight for k, r in keys.items() if isinstance(r, Total)} for p, keys in self.under_way.items()}

    def result(self) -> dict[str, dict[str, Any]]:
        return {part: self.result_of(part) for part in self.under_way}

    def result_of(self, part: str) -> dict[str, Any]:
        """The values of one part."""
        return {k: r.result() for k, r in self.under_way.get(part, {}).items()}
