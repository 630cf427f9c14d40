"""What a hook may know: where it is in the run, the facts of the stream, keyed random numbers, and local training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from everfed.core import random
from everfed.core.data import Data
from everfed.core.layout import Layout
from everfed.core.optimizer import Optimizer

if TYPE_CHECKING:
    from everfed.core.held_out import HeldOut
    from everfed.core.trainer import Trainer


class Hidden(RuntimeError):
    """A part asked for what this stream does not tell."""


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


@dataclass(frozen=True)
class TrainOptions:
    """How a client trains. logits: which of them the task loss sees: "full", "seen" or "task".
    batchnorm: statistics are averaged ("mean") or stay on the client ("local")."""

    local_epochs: int = 1
    batch_size: int = 32
    optimizer: Optimizer = field(default_factory=Optimizer)
    sync_every: int = 1
    logits: str = "full"
    drop_last: bool = False
    batchnorm: str = "mean"


@dataclass(frozen=True)
class Context:
    """One call of a hook: `client` is None on the server. Immutable; `trainer` is the engine's local training."""

    seed: int
    facts: Facts
    options: TrainOptions
    round: int = 0
    phase: str = ""
    repeat: int = 0
    client: int | None = None
    current_task: int | None = None
    rate: float = 0.0
    trainer: Trainer | None = None
    past: Callable[[], list[Data]] | None = None
    tests: HeldOut | None = None
    allowed_labels: tuple[int, ...] | None = None

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
    def train(self) -> Trainer:
        """Local training and gradients as functions: on clients, and in the server's own phases (without any data)."""
        if self.trainer is None:
            raise Hidden("there is no local training on the server outside its own phases")
        return self.trainer

    def history(self) -> list[Data]:
        """The client's data of all earlier tasks, for parts that declare HISTORY."""
        if self.past is None:
            raise Hidden("the data of earlier tasks is gone; a part that needs it must declare 'history'")
        return self.past()

    @property
    def held_out(self) -> HeldOut:
        """The test sets, for scoring, and for parts that declare HELD_OUT."""
        if self.tests is None:
            raise Hidden("test sets are for scoring; a part that measures on them must declare 'held_out'")
        return self.tests

    def at(self, **changes: object) -> Context:
        """A copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]
