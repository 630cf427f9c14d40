"""One client after the other, in this process: the reference that every other engine must equal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from everfed.core.client import Reply
from everfed.core.context import Moment, Setup
from everfed.core.engine import ClientError
from everfed.core.message import Message
from everfed.core.phase import Phase
from everfed.engines.base import CLIENT_FAULTS, BuildModule, ClientStore, OneTrainer, call, new_trainer


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
        self, phase: Phase, clients: Sequence[int], message: Message | None, moment: Moment
    ) -> Iterator[tuple[int, Reply]]:
        for client in clients:
            try:
                state, reply = call(self.setup, self.trainer, phase, client, self.store.get(client), message, moment)
            except CLIENT_FAULTS as error:
                raise ClientError(client, phase.name, moment.round, error) from error
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
