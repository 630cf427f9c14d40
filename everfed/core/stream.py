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
    """

    task: int
    participants: tuple[int, ...]
    tasks: Mapping[int, int]
    begins: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    evaluate: bool = False
    notes: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class Stream(Protocol):
    """Deterministic in its own seed alone, so that every method of a comparison sees the same stream."""

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
