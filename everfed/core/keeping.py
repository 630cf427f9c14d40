"""From which tasks the samples come that clients keep. Told in simulations, where the stream knows it and states are at
hand; nothing of it is asked of the clients of a federation."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from everfed.core.part import State, overrides
from everfed.core.world import World


def tells(world: World) -> bool:
    """Is there anything to tell: a part that keeps samples, on a stream that knows where they come from?"""
    return hasattr(world.stream, "task_of") and any(overrides(part, "kept") for part in world.method.parts)


def kept_by_task(world: World, clients: Iterable[tuple[int, State]], tasks: int) -> list[int]:
    """How many samples of each task the clients keep together; at least `tasks` numbers."""
    counts = np.zeros(tasks, dtype=np.int64)
    for client, state in clients:
        for part in world.method.parts:
            if part.name in state and overrides(part, "kept"):
                counts = _added(counts, part.kept(state[part.name], _task_of(world, client)))
    return [int(count) for count in counts]


def _task_of(world: World, client: int) -> Callable[[np.ndarray], np.ndarray]:
    find: Callable[[int, np.ndarray], np.ndarray] = world.stream.task_of  # type: ignore[attr-defined]
    return lambda ids: find(client, ids)


def _added(counts: np.ndarray, tasks: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.bincount(tasks, minlength=len(counts))
    found[: len(counts)] += counts
    return found
