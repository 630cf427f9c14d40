"""What simulation engines share: one call on one client, with its state taken from and put back into the store."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from everfed.core.client import Reply, new_state, run_client
from everfed.core.context import Moment, Setup
from everfed.core.data import Data
from everfed.core.engine import ClientError, Engine
from everfed.core.evaluate import EvalSpec, score_tasks
from everfed.core.message import Message, Model, State, addressed, unwrap
from everfed.core.phase import Phase
from everfed.core.trainer import Trainer
from everfed.core.tree import Tree
from everfed.store.clients import ClientStore

BuildModule = Callable[[], torch.nn.Module]


# what a client's code may raise; anything else is a bug of ours and keeps its own name
CLIENT_FAULTS = (RuntimeError, ValueError, KeyError, IndexError, TypeError, AttributeError, ArithmeticError, OSError,
                 MemoryError)  # fmt: skip


def call(
    setup: Setup,
    trainer: Trainer,
    phase: Phase,
    client: int,
    state: State | None,
    message: Message | None,
    moment: Moment,
    data: Data | None = None,
) -> tuple[State, Reply]:
    """Run `phase` on one client, wherever this is. `data`: what it sees now, when that is at hand already."""
    ctx = setup.client(client, phase, moment, trainer)
    plain: dict[str, Tree] | None = None if message is None else unwrap(addressed(message, client))
    data = setup.data(client, phase, moment) if data is None else data
    return run_client(setup.method, phase, state or new_state(setup.method, ctx), plain, data, ctx)


def failed(client: int, phase: str, index: int, error: Exception) -> Exception:
    """What to raise for an error in round `index`: a ClientError, which names client and phase, for errors of a
    client's code; others as they are."""
    if not isinstance(error, CLIENT_FAULTS):
        return error
    named = ClientError(client, phase, index, error)
    named.__cause__ = error
    return named


class OneTrainer(Engine):
    """For engines that score, and do the server's own work, with one trainer in this process."""

    setup: Setup
    trainer: Trainer

    def workbench(self) -> Trainer:
        return self.trainer

    def evaluate(self, model: Model, spec: EvalSpec) -> Tensor:
        return score_tasks(self.trainer, self.setup.held_out, model, spec)


def new_trainer(
    setup: Setup,
    build_module: BuildModule,
    device: str = "cpu",
    precision: str = "fp32",
    kind: type[Trainer] = Trainer,
) -> Trainer:
    """A trainer for this run's clients that runs every step as it comes."""
    forward_part = setup.method.owner("forward")
    return kind(setup.stream, setup.facts.layout, build_module, device, precision, forward_part)


__all__ = ["CLIENT_FAULTS", "BuildModule", "ClientStore", "OneTrainer", "call", "failed", "new_trainer"]
