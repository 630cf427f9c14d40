"""One client after the other, in this process: the reference that every other engine must equal; and what simulations
share, one call on one client."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from everfed.core.client import Reply, new_state, run_client
from everfed.core.context import Place, Setup
from everfed.core.data import Data
from everfed.core.engine import ClientError, Engine
from everfed.core.evaluate import EvalSpec, score_tasks
from everfed.core.message import Message, Model, State, addressed, unwrap
from everfed.core.phase import Phase
from everfed.core.trainer import Trainer
from everfed.core.tree import Tree
from everfed.errors import SettingError
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
    place: Place,
    data: Data | None = None,
) -> tuple[State, Reply]:
    """Run `phase` on one client, wherever this is. `data`: what it sees now, when that is at hand already."""
    ctx = setup.client(client, phase, place, trainer)
    plain: dict[str, Tree] | None = None if message is None else unwrap(addressed(message, client))
    data = setup.data(client, phase, place) if data is None else data
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
    forward_part, micro_batch = setup.method.owner("forward"), setup.options.micro_batch
    trainer = kind(setup.stream, setup.facts.layout, build_module, device, precision, forward_part, micro_batch)
    if micro_batch and trainer.replica.mixes_samples:
        raise SettingError(
            f"train.micro_batch = {micro_batch}, but this network has layers that look at a whole batch, such as batch "
            "normalisation; leave it out, or take a network without them"
        )
    return trainer


class Eager(OneTrainer):
    """Debuggers work, memory is one model and one client's data, results are exact."""

    name = "eager"

    def __init__(
        self,
        setup: Setup,
        store: ClientStore,
        build_module: BuildModule,
        device: str = "cpu",
        precision: str = "fp32",
    ) -> None:
        self.setup, self.store = setup, store
        self.trainer = new_trainer(setup, build_module, device, precision)

    def exchange(
        self, phase: Phase, clients: Sequence[int], message: Message | None, place: Place
    ) -> Iterator[tuple[int, Reply]]:
        for client in clients:
            try:
                state, reply = call(self.setup, self.trainer, phase, client, self.store.get(client), message, place)
            except CLIENT_FAULTS as error:
                raise ClientError(client, phase.name, place.round, error) from error
            self.store.put(client, state)
            yield client, reply

    def describe(self) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "engine": self.name,
            "device": str(self.trainer.device),
            "threads": torch.get_num_threads(),
        }
        facts["precision"] = self.trainer.precision
        if self.trainer.device.type == "cuda":
            facts["device_name"] = torch.cuda.get_device_name(self.trainer.device)
            facts["peak_device_bytes"] = torch.cuda.max_memory_allocated(self.trainer.device)
        return facts
