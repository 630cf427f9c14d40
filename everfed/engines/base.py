"""What simulation engines share: one call on one client, with its state taken from and put back into the store."""

from __future__ import annotations

from collections.abc import Callable

import torch

from everfed.core.client import Reply, new_state, run_client
from everfed.core.fit import Trainer
from everfed.core.message import Message, unwrap
from everfed.core.part import State
from everfed.core.phase import Phase
from everfed.core.tree import Tree
from everfed.core.world import Moment, World
from everfed.store.clients import ClientStore

BuildModule = Callable[[], torch.nn.Module]


def call(
    world: World,
    trainer: Trainer,
    phase: Phase,
    client: int,
    state: State | None,
    message: Message | None,
    moment: Moment,
) -> tuple[State, Reply]:
    """Run `phase` on one client, wherever this is."""
    ctx = world.client(client, phase, moment, trainer)
    plain: dict[str, Tree] | None = None if message is None else unwrap(message)
    data = world.data(client, phase, moment)
    return run_client(world.method, phase, state or new_state(world.method, ctx), plain, data, ctx)


__all__ = ["BuildModule", "ClientStore", "call"]
