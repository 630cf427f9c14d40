"""Client data kept on the GPU, so that a minibatch is gathered there; the least recently used goes first."""

from __future__ import annotations

from collections import OrderedDict

import torch

from everfed.core.data import Data
from everfed.core.phase import EVALUATE, Phase
from everfed.core.world import Moment, World

_SHARE = 0.3  # of the memory that is free at the start


class DeviceData:
    """What (client, task) sees, on the device; where tasks mix, what it sees in a round."""

    def __init__(self, device: torch.device, budget: int | None = None) -> None:
        self.device = device
        self.budget = int(torch.cuda.mem_get_info(device)[0] * _SHARE) if budget is None else budget
        self._kept: OrderedDict[tuple[int, int | None, int | None], Data] = OrderedDict()
        self._bytes = 0

    def get(self, world: World, client: int, phase: Phase, moment: Moment) -> Data:
        task = None if phase.name == EVALUATE else moment.plan.tasks.get(client)
        key = (client, task, moment.round if client in moment.plan.drifting else None)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        data = world.data(client, phase, moment)
        data = Data(data.x.to(self.device), data.y.to(self.device), data.ids)
        self._kept[key] = data
        self._bytes += _size(data)
        while self._bytes > self.budget and len(self._kept) > 1:
            self._bytes -= _size(self._kept.popitem(last=False)[1])
        return data


def _size(data: Data) -> int:
    return data.x.numel() * data.x.element_size() + data.y.numel() * data.y.element_size()
