"""Client data kept on the GPU, so that a minibatch is gathered there; the least recently used goes first."""

from __future__ import annotations

import torch

from everfed.core.context import Moment, Setup
from everfed.core.data import Data, DataCache, device_memory
from everfed.core.phase import EVALUATE, Phase

_SHARE = 0.3  # of the memory that is free at the start


class DeviceData:
    """What (client, task) sees, on the device; where tasks mix, what it sees in a round."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._kept = DataCache(int(device_memory(device)[0] * _SHARE))

    def get(self, setup: Setup, client: int, phase: Phase, moment: Moment) -> Data:
        task = None if phase.name == EVALUATE else moment.plan.tasks.get(client)
        key = (client, task, moment.round if client in moment.plan.drifting else None)
        return self._kept.get(key, lambda: setup.data(client, phase, moment).to(self.device))
