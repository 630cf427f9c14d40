"""Events around a run's rounds: its start, a resume, the contents of buffers, its end, the error that ended it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any, Protocol, runtime_checkable

import numpy as np

from everfed.core.context import Setup
from everfed.core.events import Event, Observer
from everfed.core.message import State
from everfed.core.server import RunState
from everfed.core.stream import Stream
from everfed.core.tree import Tree
from everfed.engines.group import Group
from everfed.errors import UserError
from everfed.session.assembly import Run
from everfed.session.result import at_chance
from everfed.store.clients import ClientStore

_MOST_CLIENTS = 1000  # whose buffers are read at a task's end


def fan_out(observers: Sequence[Observer]) -> Observer:
    def notify(event: Event) -> None:
        for observer in observers:
            observer(event)

    return notify


def report_fault(observers: Sequence[Observer], error: BaseException) -> None:
    """Report an error to every observer that still works: the log may be what failed."""
    for observer in observers:
        with contextlib.suppress(OSError, UserError):
            observer({"event": "fault", "message": f"{type(error).__name__}: {error}"})


def buffer_reporter(
    setup: Setup, store: ClientStore, group: Group | None, notify: Observer
) -> Callable[[RunState], None] | None:
    """Reports at a task's end from which tasks the buffered samples come; None where there are no buffers."""
    if not has_buffers(setup):
        return None

    def report(state: RunState) -> None:
        index, known = state.round - 1, store.clients()
        task = setup.stream.round(index).task
        read = known[:_MOST_CLIENTS]
        states = ((client, held) for client in read if (held := store.peek(client)) is not None)
        here: dict[str, Any] = {"by_task": samples_by_task(setup, states, task + 1)}
        here |= {"clients": len(read), "of": len(known)}
        ranks = [here] if group is None else group.gather(here)
        by_task = [sum(counts) for counts in zip_longest(*(one["by_task"] for one in ranks), fillvalue=0)]
        total = {key: sum(one[key] for one in ranks) for key in ("clients", "of")}
        notify({"event": "buffer", "round": index, "task": task, "by_task": by_task, **total})

    return report


def announce(notify: Observer, run: Run, state: RunState | None) -> None:
    """Report the start, with the round and the bytes that a resumed run begins with."""
    stream = run.stream
    so_far = {"round": state.round, **_bytes(state)} if state is not None else {"round": 0}
    if state is not None:
        notify({"event": "resume", "round": state.round})
    notify(
        {
            "event": "start",
            "method": run.method.name,
            "recipe": run.recipe.name,
            "seed": run.recipe.seed,
            "rounds": stream.rounds,
            "tasks": stream.tasks,
            "clients": stream.clients,
            **so_far,
        }
    )
    for warning in (*run.method.warnings, *stream.warnings):
        notify({"event": "warning", "message": warning})


def report_end(notify: Observer, run: Run, result: dict[str, Any], seconds: float) -> None:
    """Report the main numbers of a finished run, after a warning where it has learned nothing."""
    if (warning := at_chance(run.stream, result)) is not None:
        notify({"event": "warning", "message": warning})
    notify({"event": "end", "score": result["score"], "metrics": result["metrics"], "seconds": seconds})


def _bytes(state: RunState) -> Event:
    traffic = state.traffic
    return {"bytes_up": sum(traffic.up.values()), "bytes_down": sum(traffic.down.values())}


# from which tasks the samples in buffers come: where the stream knows it and the states are at hand ------------------
# The clients of a federation are not asked.

TaskOf = Callable[[np.ndarray], np.ndarray]


@runtime_checkable
class HasBuffer(Protocol):
    """A part whose clients keep samples between rounds."""

    def buffer_tasks(self, own: Tree, task_of: TaskOf) -> np.ndarray:
        """(n,) the task of each sample in the buffer; `task_of` finds it by the samples' ids."""


def has_buffers(setup: Setup) -> bool:
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
        assert found is not None  # `has_buffers` has asked
        return found

    return find


def _added(counts: np.ndarray, tasks: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.bincount(tasks, minlength=len(counts))
    found[: len(counts)] += counts
    return found
