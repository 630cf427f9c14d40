"""What a stream must tell the runner: who takes part in a round, what each client sees, whose task begins or ends.

The runner and the engines know only this protocol; `everfed.streams` holds the scenarios.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from everfed.core.data import Data


@dataclass(frozen=True)
class RoundPlan:
    """One round of a stream.

    task: the task this round is counted under in reports.
    participants: the clients that train, ascending.
    tasks: the current task of every client that has one (participants at least).
    begins, ends: the clients whose task begins or ends with this round, whether or not they take part.
    evaluate: score every task after this round (the last round of a task).
    notes: further facts that the events of this round's training tell (who was too late, say).

    Where clients change tasks at different rounds: server_task is the task that the server is in (None: `task`), opens
    and closes say whether a task begins or ends for the server (None: when one does for anybody).
    drifting: clients that see more than one task at once; what they see is the stream's `data_in(client, round)`.
    """

    task: int
    participants: tuple[int, ...]
    tasks: Mapping[int, int]
    begins: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    evaluate: bool = False
    notes: Mapping[str, Any] = field(default_factory=dict)
    server_task: int | None = None
    opens: bool | None = None
    closes: bool | None = None
    drifting: frozenset[int] = frozenset()

    @property
    def task_of_server(self) -> int:
        return self.task if self.server_task is None else self.server_task

    @property
    def task_opens(self) -> bool:
        """Does a task begin for the server?"""
        return bool(self.begins) if self.opens is None else self.opens

    @property
    def task_closes(self) -> bool:
        """Does a task end for the server?"""
        return bool(self.ends) if self.closes is None else self.closes


@runtime_checkable
class Stream(Protocol):
    """Deterministic in its own seed alone, so that every method of a comparison sees the same stream.

    A stream may have more: `asynchronous = True`, when clients change tasks at different rounds, with
    `clock_of(client, round) -> (rounds of its task behind it, rounds that it lasts)`; `data_in(client, round)`, for
    clients that drift; tests or labels that differ by client (`everfed.core.score`); `loss` and `measure`;
    `fingerprint`, text that tells what was read from files beside the data.
    """

    name: str
    clients: int
    tasks: int
    rounds: int
    classes: int
    input_shape: tuple[int, ...]
    score: str  # "accuracy", "perplexity" or "map"
    boundaries: bool  # may a method know when a task begins or ends?
    task_ids: bool  # may a method know which task it is in?

    def round(self, index: int) -> RoundPlan:
        """The plan of round `index`, 0 <= index < rounds."""

    def data(self, client: int, task: int) -> Data:
        """What `client` sees in `task`; may be empty."""

    def test(self, task: int, split: str = "test") -> Data:
        """The held-out samples of `task`: split "test", or "validation" when one was held out of the training data."""

    def labels(self, task: int) -> tuple[int, ...]:
        """The classes of `task`, ascending."""

    def inputs(self, x: Tensor) -> Tensor:
        """Storage form -> network input (scaling, normalisation); batched, on x's device, no host synchronisation."""

    def draw_augmentation(self, rng: np.random.Generator, count: int) -> np.ndarray | None:
        """(count, k) integers that fix the augmentation of `count` samples, or None when there is none."""

    def augment(self, x: Tensor, draws: Tensor) -> Tensor:
        """Apply drawn augmentations in storage form: same shape and dtype, batched, no host synchronisation."""

    def describe(self) -> dict[str, Any]:
        """JSON-ready facts for result.json, with who got what."""
