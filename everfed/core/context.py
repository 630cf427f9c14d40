"""What a hook may know: where it is in the run, the facts of the stream, keyed random numbers, and local training.

`Setup` makes the contexts: it is everything a call on a client needs to know of the run, the same in every process that
runs clients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np
from torch import Tensor

from everfed.core import random
from everfed.core.data import Data
from everfed.core.layout import Layout, Pieces, TrainsPieces
from everfed.core.method import Method
from everfed.core.metric import Metrics
from everfed.core.option import TrainOptions
from everfed.core.part import HELD_OUT, HISTORY
from everfed.core.phase import EVALUATE, Phase
from everfed.core.stream import Checks, HeldOut, Hidden, RoundPlan, Stream
from everfed.errors import Fault

if TYPE_CHECKING:
    from everfed.core.trainer import Trainer

PlaceKey = tuple[int, int, int, int]  # of a Place: round, position in its list of phases, repeat, stage


@dataclass(frozen=True)
class Facts:
    """What is fixed for a whole run."""

    classes: int
    input_shape: tuple[int, ...]
    clients: int
    tasks: int
    rounds: int
    rounds_per_task: int
    layout: Layout
    blank: Data  # no samples, but the stored form of one: types and shapes
    personal: Tensor  # first values of the personal parameters, the tail of a parameter vector
    boundaries: bool = True
    task_ids: bool = True
    output_shape: tuple[int, ...] = ()  # of one sample; a classifier's (classes,) need not be said

    @property
    def outputs(self) -> tuple[int, ...]:
        """The shape of what the network gives for one sample."""
        return self.output_shape or (self.classes,)

    def __post_init__(self) -> None:
        """Tasks that are hidden look like a single one, to hooks and to the learning rate's schedule."""
        if not (self.boundaries or self.task_ids):
            object.__setattr__(self, "tasks", 1)
            object.__setattr__(self, "rounds_per_task", self.rounds)


class Ledger(Protocol):
    """Records that are never changed or removed, by key: what a client has revealed cannot be taken back."""

    def find(self, key: str) -> str | None:
        """The value recorded under `key`."""

    def record(self, key: str, value: str) -> None:
        """Durable when it returns. Raises ValueError when `key` has another value already."""


class Credentials(Protocol):
    """A client's long-lived key, under its name, and what it knows of the other clients' keys from elsewhere than the
    server."""

    @property
    def name(self) -> str:
        """Of this client."""

    def sign(self, data: bytes) -> bytes:
        """Its signature."""

    def problem(self, name: str, signature: bytes, data: bytes) -> str:
        """Why this is not the signature of the client `name`; "" if it is, or where no key is known from elsewhere."""


class TooFewSamples(Fault):
    """A client may not compute this from so few samples."""


@dataclass(frozen=True)
class Fewest:
    """From how many samples at least a client computes anything: a step of training or a gradient, and a reply."""

    step: int = 0
    reply: int = 0

    def require(self, step: int, reply: int) -> None:
        """Raises TooFewSamples, which does not say how few; where there are none nothing is computed."""
        for what, found, least in (("a step", step, self.step), ("a reply", reply, self.reply)):
            if 0 < found < least:
                raise TooFewSamples(f"{what} would be computed from fewer than {least} samples")


@dataclass(frozen=True)
class Attempt:
    """What a real client knows of the server that it answers. run: the run's identity; epoch: how often its server was
    started; ledger: the client's own, outside the states that a new epoch may roll back; credentials: None for a client
    without a key. recipe: its digest. asked: the digest of what every client must be asked alike in this phase: recipe,
    scale, message, tasks. fewest: from how many samples it computes anything."""

    run: str
    epoch: int
    ledger: Ledger
    credentials: Credentials | None = None
    recipe: str = ""
    asked: str = ""
    fewest: Fewest = Fewest()


@dataclass(frozen=True)
class Context:
    """One call of a hook: `client` is None on the server. Immutable; `trainer` is the engine's local training;
    `attempt` is None in a simulation."""

    seed: int
    facts: Facts
    options: TrainOptions
    round: int = 0
    phase: str = ""
    repeat: int = 0
    client: int | None = None
    current_task: int | None = None
    rate: float = 0.0
    progress: tuple[int, int] = (0, 1)  # rounds of the client's task behind it, rounds that it lasts
    trainer: Trainer | None = None
    past: Callable[[], list[Data]] | None = None
    tests: HeldOut | None = None
    allowed_labels: tuple[int, ...] | None = None
    attempt: Attempt | None = None

    def key(self, tag: str) -> int:
        """A 63-bit key for (seed, round, phase, repeat, client, tag)."""
        return random.key(self.seed, self.round, self.phase, self.repeat, self.client, tag)

    def rng(self, tag: str) -> np.random.Generator:
        """A numpy generator of this call's own, for `tag`."""
        return random.generator(self.seed, self.round, self.phase, self.repeat, self.client, tag)

    @property
    def task(self) -> int:
        """The current task's index; refused when the stream hides it."""
        if not self.facts.task_ids or self.current_task is None:
            raise Hidden("this stream does not tell which task a client is in")
        return self.current_task

    @property
    def synchronises(self) -> bool:
        """Is the model sent to the server after this round?"""
        return (self.round + 1) % self.options.sync_every == 0

    def require_samples(self, step: int, reply: int = 0) -> None:
        """Raises TooFewSamples where this client computes nothing from so few."""
        if self.attempt is not None:
            self.attempt.fewest.require(step, reply)

    @property
    def train(self) -> Trainer:
        """Local training and gradients as functions: on clients, and in the server's own phases (without any data)."""
        if self.trainer is None:
            raise Hidden("there is no local training on the server outside its own phases")
        return self.trainer

    def history(self) -> list[Data]:
        """The client's data of all earlier tasks, for parts that need HISTORY."""
        if self.past is None:
            raise Hidden("the data of earlier tasks is gone; a part that reads it needs HISTORY (`needs`)")
        return self.past()

    @property
    def held_out(self) -> HeldOut:
        """The test sets, for scoring, and for parts that need HELD_OUT."""
        if self.tests is None:
            raise Hidden("test sets are for scoring; a part that measures on them needs HELD_OUT (`needs`)")
        return self.tests

    def at(self, **changes: object) -> Context:
        """A copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Place:
    """Where in the run a phase is. position: in the round's list of phases. stage: of an engine that carries one phase
    out in several exchanges. attempt: on a real client, which server it answers."""

    round: int
    plan: RoundPlan
    repeat: int = 0
    position: int = 0
    stage: int = 0
    attempt: Attempt | None = None

    @property
    def key(self) -> PlaceKey:
        """Grows from one exchange to the next; a run that is resumed comes by the same places again."""
        return self.round, self.position, self.repeat, self.stage


@dataclass(frozen=True)
class Setup:
    """Method, stream and options of a run."""

    method: Method
    stream: Stream
    facts: Facts
    options: TrainOptions
    seed: int
    metrics: Metrics = field(default_factory=Metrics, compare=False)
    held_out: HeldOut = field(init=False, compare=False)
    _checks: Checks = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "held_out", HeldOut(self.stream, metrics=self.metrics))
        object.__setattr__(self, "_checks", Checks(self.stream))

    @cached_property
    def pieces(self) -> Pieces | None:
        """The pieces of the shared vector, where a part trains some of them at a time."""
        owner = next((part for part in self.method.parts if isinstance(part, TrainsPieces)), None)
        if owner is None:
            return None
        return Pieces.of(owner, self.facts.layout, [self.stream.labels(task) for task in range(self.stream.tasks)])

    @property
    def personal(self) -> bool:
        """Are models scored on the clients, because parts or statistics of them never leave?"""
        layout = self.facts.layout
        local_statistics = self.options.batchnorm == "local" and bool(layout.stats)
        return self.method.personal or local_statistics or layout.shared < layout.size

    def server(self, phase: str, place: Place | None = None, trainer: Trainer | None = None) -> Context:
        """The context of a server hook; the server's own phases are given a trainer to work with."""
        if place is None:
            return Context(self.seed, self.facts, self.options, phase=phase)
        where = (place.round, phase, place.repeat)
        task = self._visible_task(place.plan.task_of_server)
        tests = self.held_out if self.method.needs(HELD_OUT) else None
        return Context(self.seed, self.facts, self.options, *where, current_task=task, trainer=trainer, tests=tests)

    def _visible_task(self, task: int | None) -> int | None:
        """What a hook may know of a task's index."""
        return task if self.stream.task_ids or self.stream.boundaries else None

    def client(self, client: int, phase: Phase, place: Place, trainer: Trainer) -> Context:
        """The context of a call on a client."""
        task = place.plan.tasks.get(client)
        return Context(
            self.seed,
            self.facts,
            self.options,
            place.round,
            phase.name,
            place.repeat,
            client,
            current_task=self._visible_task(task),
            rate=self.options.optimizer.round_rate(*self._progress(client, place.round)),
            progress=self._progress(client, place.round),
            trainer=trainer,
            past=self._past(client, task),
            tests=self.held_out if phase.name == EVALUATE or self.method.needs(HELD_OUT) else None,
            allowed_labels=self._allowed(client, task),
            attempt=place.attempt,
        )

    def _progress(self, client: int, index: int) -> tuple[int, int]:
        """(rounds of the client's task behind it, rounds that it lasts), as far as the client may know."""
        length = self.facts.rounds_per_task
        within = self.stream.clock_of(client, index) if self.stream.boundaries else None
        return within or (index % length, length)

    def data(self, client: int, phase: Phase, place: Place) -> Data:
        """What the client sees now."""
        task = place.plan.tasks.get(client)
        if task is None or phase.name == EVALUATE:
            return self.facts.blank
        if client in place.plan.drifting:
            return self._checks.drifting(client, place.round, self.stream.data_in(client, place.round))
        return self._checks.training(client, task, self.stream.data(client, task))

    def _past(self, client: int, task: int | None) -> Callable[[], list[Data]] | None:
        if task is None or not self.method.needs(HISTORY):
            return None
        return lambda: [self.stream.data(client, earlier) for earlier in range(task)]

    def _allowed(self, client: int, task: int | None) -> tuple[int, ...] | None:
        if self.options.logits == "full" or task is None:
            return None
        tasks = (task,) if self.options.logits == "task" else range(task + 1)
        return tuple(sorted({label for t in tasks for label in self.stream.labels_of(client, t)}))
