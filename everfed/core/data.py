"""The samples a client holds, in storage form, and a bounded cache of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Data:
    """`n` samples in storage form: uint8 images, float features or token ids.

    x: (n, ...) any dtype. y: (n, ...) targets, int64 class ids for classification.
    ids: (n,) int64, unique for one client over its whole life; the same base image
    under another task's transform is another sample and has another id.
    """

    x: Tensor
    y: Tensor
    ids: np.ndarray

    def __post_init__(self) -> None:
        if not len(self.x) == len(self.y) == len(self.ids):
            raise ValueError(
                f"x, y and ids must have one entry per sample, got {len(self.x)}, {len(self.y)}, {len(self.ids)}"
            )

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: np.ndarray) -> Data:
        """The samples at `rows` (positions, not ids)."""
        index = torch.from_numpy(np.ascontiguousarray(rows, dtype=np.int64)).to(self.x.device)
        return Data(self.x[index], self.y[index], self.ids[rows])

    def to(self, device: torch.device) -> Data:
        """The same samples on `device`."""
        return Data(self.x.to(device), self.y.to(device), self.ids)

    @staticmethod
    def union(parts: Sequence[Data]) -> Data:
        """All samples of `parts`, in order, on the device of the last."""
        device = parts[-1].x.device
        return Data(
            torch.cat([p.x.to(device) for p in parts]),
            torch.cat([p.y.to(device) for p in parts]),
            np.concatenate([p.ids for p in parts]),
        )


def device_memory(device: torch.device) -> tuple[int, int]:
    """(free, in all) bytes that this process may have on a CUDA device: one of several that share it has a part only
    (torch.cuda.set_per_process_memory_fraction)."""
    free, total = torch.cuda.mem_get_info(device)
    number = torch.cuda.current_device() if device.index is None else device.index
    allowed = int(torch.cuda.get_per_process_memory_fraction(number) * total)
    return max(0, min(free, allowed - torch.cuda.memory_reserved(device))), allowed


class DataCache:
    """Least recently used data goes first once `limit` bytes of samples are exceeded; the newest always stays."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bytes = 0
        self._held: OrderedDict[Hashable, Data] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Data]) -> Data:
        """The data under `key`, made when it is not held."""
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key]
        data = self._held[key] = make()
        self.bytes += _size(data)
        while self.bytes > self.limit and len(self._held) > 1:
            self.bytes -= _size(self._held.popitem(last=False)[1])
        return data


def _size(data: Data) -> int:
    return data.x.nbytes + data.y.nbytes + data.ids.nbytes
