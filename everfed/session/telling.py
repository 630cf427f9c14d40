"""What a session says around its rounds: that it starts, from where it goes on, what clients keep, what ended it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from everfed.core import keeping
from everfed.core.run_state import RunState
from everfed.core.telling import Event
from everfed.core.world import World
from everfed.engines.group import Group
from everfed.errors import UserError
from everfed.session.assembly import Assembly
from everfed.store.clients import ClientStore

Observer = Callable[[Event], None]
_MOST_LOOKED_AT = 1000  # clients whose states are read at a task's end for what they keep


def fan_out(observers: Sequence[Observer]) -> Observer:
    def notify(event: Event) -> None:
        for observer in observers:
            observer(event)

    return notify


def tell_fault(observers: Sequence[Observer], error: BaseException) -> None:
    """Tell whoever still listens: the log may be what failed."""
    for observer in observers:
        with contextlib.suppress(OSError, UserError):
            observer({"event": "fault", "message": f"{type(error).__name__}: {error}"})


def kept_teller(
    world: World, store: ClientStore, group: Group | None, notify: Observer
) -> Callable[[RunState], None] | None:
    """Tells at a task's end from which tasks the samples come that clients keep; None when there is nothing to tell."""
    if not keeping.tells(world):
        return None

    def tell(state: RunState) -> None:
        index, known = state.round - 1, store.clients()
        task = world.stream.round(index).task
        looked = known[:_MOST_LOOKED_AT]
        states = ((client, held) for client in looked if (held := store.peek(client)) is not None)
        note: dict[str, Any] = {"by_task": keeping.kept_by_task(world, states, task + 1)}
        note |= {"clients": len(looked), "of": len(known)}
        notes = [note] if group is None else group.gather(note)
        by_task = [sum(counts) for counts in zip_longest(*(one["by_task"] for one in notes), fillvalue=0)]
        total = {key: sum(one[key] for one in notes) for key in ("clients", "of")}
        notify({"event": "buffer", "round": index, "task": task, "by_task": by_task, **total})

    return tell


def announce(notify: Observer, assembly: Assembly, state: RunState | None) -> None:
    """That it starts, with what a run that goes on has behind it."""
    stream = assembly.stream
    behind = {"round": state.round, **_bytes(state)} if state is not None else {"round": 0}
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
            **behind,
        }
    )
    for warning in assembly.method.warnings:
        notify({"event": "warning", "message": warning})


def _bytes(state: RunState) -> Event:
    traffic = state.traffic
    return {"bytes_up": sum(traffic.up.values()), "bytes_down": sum(traffic.down.values())}
