"""The round protocol as data: which clients do what, when, and how their replies become one.

A round is a list of phases. `train` is one of them; parts add their own. Because `reduce` is data, so is what a method
reveals: a phase reduced by mean or sum can run under secure aggregation, one that collects cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from everfed.core.message import Values
from everfed.core.reduce import Reducer
from everfed.core.stream import RoundPlan

if TYPE_CHECKING:
    from everfed.core.handle import Client, Server

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
