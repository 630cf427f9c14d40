"""The samples a client holds, as the network will see them."""

from __future__ import annotations

from collections.abc import Sequence
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
