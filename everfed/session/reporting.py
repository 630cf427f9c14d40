"""Events around a run's rounds: its start, a resume, the contents of buffers, its end, the error that ended it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from everfed.core.context import Setup
from everfed.core.events import Event, Observer
from everfed.core.server import RunState
from everfed.engines.group import Group
from everfed.errors import UserError
from everfed.session import buffers
from everfed.session.assembly import Assembly
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
    if not buffers.reports(setup):
        return None

    def report(state: RunState) -> None:
        index, known = state.round - 1, store.clients()
        task = setup.stream.round(index).task
        read = known[:_MOST_CLIENTS]
        states = ((client, held) for client in read if (held := store.peek(client)) is not None)
        here: dict[str, Any] = {"by_task": buffers.samples_by_task(setup, states, task + 1)}
        here |= {"clients": len(read), "of": len(known)}
        ranks = [here] if group is None else group.gather(here)
        by_task = [sum(counts) for counts in zip_longest(*(one["by_task"] for one in ranks), fillvalue=0)]
        total = {key: sum(one[key] for one in ranks) for key in ("clients", "of")}
        notify({"event": "buffer", "round": index, "task": task, "by_task": by_task, **total})

    return report


def announce(notify: Observer, assembly: Assembly, state: RunState | None) -> None:
    """Report the start, with the round and the bytes that a resumed run begins with."""
    stream = assembly.stream
    so_far = {"round": state.round, **_bytes(state)} if state is not None else {"round": 0}
    if state is not None:
        notify({"event": "resume", "round": state.round})
    notify(
        {
            "event": "start",
            "method": assembly.method.name,
            "recipe": assembly.recipe.name,
            "seed": assembly.recipe.seed,
            "rounds": stream.rounds,
            "tasks": stream.tasks,
            "clients": stream.clients,
            **so_far,
        }
    )
    for warning in assembly.method.warnings:
        notify({"event": "warning", "message": warning})


def report_end(notify: Observer, assembly: Assembly, result: dict[str, Any], seconds: float) -> None:
    """Report the main numbers of a finished run, after a warning where it has learned nothing."""
    if (warning := at_chance(assembly.stream, result)) is not None:
        notify({"event": "warning", "message": warning})
    notify({"event": "end", "score": result["score"], "metrics": result["metrics"], "seconds": seconds})


def _bytes(state: RunState) -> Event:
    traffic = state.traffic
    return {"bytes_up": sum(traffic.up.values()), "bytes_down": sum(traffic.down.values())}
