"""From which tasks the samples in the clients' buffers come: reported in simulations, where the stream knows it and the
states are at hand. The clients of a federation are not asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, runtime_checkable

import numpy as np

from everfed.core.context import Setup
from everfed.core.message import State
from everfed.core.stream import Stream
from everfed.core.tree import Tree

TaskOf = Callable[[np.ndarray], np.ndarray]


@runtime_checkable
class HasBuffer(Protocol):
    """A part whose clients keep samples between rounds."""

    def buffer_tasks(self, own: Tree, task_of: TaskOf) -> np.ndarray:
        """(n,) the task of each sample in the buffer; `task_of` finds it by the samples' ids."""


def reports(setup: Setup) -> bool:
    """Has the method a buffer, on a stream that knows where its samples come from?"""
    knows = type(setup.stream).task_of is not Stream.task_of
    return knows and any(isinstance(part, HasBuffer) for part in setup.method.parts)


def samples_by_task(setup: Setup, clients: Iterable[tuple[int, State]], tasks: int) -> list[int]:
    """How many buffered samples of each task the clients have together; at least `tasks` numbers."""
    counts = np.zeros(tasks, dtype=np.int64)
    for client, state in clients:
        for part in setup.method.parts:
            if part.name in state and isinstance(part, HasBuffer):
                counts = _added(counts, part.buffer_tasks(state[part.name], _task_of(setup, client)))
    return [int(count) for count in counts]


def _task_of(setup: Setup, client: int) -> TaskOf:
    def find(ids: np.ndarray) -> np.ndarray:
        found = setup.stream.task_of(client, ids)
        assert found is not None  # `reports` has asked
        return found

    return find


def _added(counts: np.ndarray, tasks: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.bincount(tasks, minlength=len(counts))
    found[: len(counts)] += counts
    return found
