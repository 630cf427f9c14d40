"""Everything a call on a client needs to know of the run, the same in every process that runs clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from everfed.core.context import Context, Facts, TrainOptions
from everfed.core.data import Data
from everfed.core.held_out import HeldOut
from everfed.core.method import Method
from everfed.core.part import HELD_OUT, HISTORY
from everfed.core.phase import EVALUATE, Phase
from everfed.core.stream import RoundPlan, Stream
from everfed.core.trainer import Trainer

Place = tuple[int, int, int, int]  # round, position in its agenda, repeat, stage inside the phase


@dataclass(frozen=True)
class Moment:
    """Where in the run a phase is: round, repeat of the phase, the plan, place in the round's agenda. stage: of an
    engine that carries one phase out in several exchanges."""

    round: int
    plan: RoundPlan
    repeat: int = 0
    position: int = 0
    stage: int = 0

    @property
    def place(self) -> Place:
        """Grows from one exchange to the next; a run that is resumed comes by the same places again."""
        return self.round, self.position, self.repeat, self.stage


@dataclass(frozen=True)
class World:
    """Method, stream and options of a run."""

    method: Method
    stream: Stream
    facts: Facts
    options: TrainOptions
    seed: int
    held_out: HeldOut = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "held_out", HeldOut(self.stream))

    @property
    def personal(self) -> bool:
        """Are models scored on the clients, because parts or statistics of them never leave?"""
        layout = self.facts.layout
        local_statistics = self.options.batchnorm == "local" and bool(layout.stats)
        return self.method.personal or local_statistics or layout.shared < layout.size

    def server(self, phase: str, moment: Moment | None = None, trainer: Trainer | None = None) -> Context:
        """The context of a server hook; the server's own phases are given a trainer to work with."""
        if moment is None:
            return Context(self.seed, self.facts, self.options, phase=phase)
        place = (moment.round, phase, moment.repeat)
        task = self._told(moment.plan.task_of_server)
        return Context(self.seed, self.facts, self.options, *place, current_task=task, trainer=trainer)

    def _told(self, task: int | None) -> int | None:
        """What a hook may know of a task's index."""
        return task if self.stream.task_ids or self.stream.boundaries else None

    def client(self, client: int, phase: Phase, moment: Moment, trainer: Trainer) -> Context:
        """The context of a call on a client."""
        task = moment.plan.tasks.get(client)
        return Context(
            self.seed,
            self.facts,
            self.options,
            moment.round,
            phase.name,
            moment.repeat,
            client,
            current_task=self._told(task),
            rate=self.options.optimizer.rate(*self._progress(client, moment.round)),
            trainer=trainer,
            past=self._past(client, task),
            tests=self.held_out if phase.name == EVALUATE or self.method.needs(HELD_OUT) else None,
            allowed_labels=self._allowed(client, task),
        )

    def _progress(self, client: int, index: int) -> tuple[int, int]:
        """(rounds of the client's task behind it, rounds that it lasts), as far as the client may know."""
        clock = getattr(self.stream, "clock_of", None)
        length = self.facts.rounds_per_task
        if clock is None or not self.stream.boundaries:
            return index % length, length
        within: tuple[int, int] = clock(client, index)
        return within

    def data(self, client: int, phase: Phase, moment: Moment) -> Data:
        """What the client sees now."""
        task = moment.plan.tasks.get(client)
        if task is None or phase.name == EVALUATE:
            return _no_data(self.stream)
        if client in moment.plan.drifting:
            seen: Data = self.stream.data_in(client, moment.round)  # type: ignore[attr-defined]
            return seen
        return self.stream.data(client, task)

    def _past(self, client: int, task: int | None) -> Callable[[], list[Data]] | None:
        if task is None or not self.method.needs(HISTORY):
            return None
        return lambda: [self.stream.data(client, earlier) for earlier in range(task)]

    def _allowed(self, client: int, task: int | None) -> tuple[int, ...] | None:
        if self.options.logits == "full" or task is None:
            return None
        tasks = (task,) if self.options.logits == "task" else range(task + 1)
        own = getattr(self.stream, "labels_of", None)  # where clients' tasks differ
        found = (self.stream.labels(t) if own is None else own(client, t) for t in tasks)
        return tuple(sorted({label for labels in found for label in labels}))


def _no_data(stream: Stream) -> Data:
    return stream.test(0).take(np.zeros(0, dtype=np.int64))
