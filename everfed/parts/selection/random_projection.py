"""A seeded random projection to fewer dimensions that keeps cosines, the same at every client.

A sparse sign matrix with one entry per column: each run of k coordinates is shuffled, given random signs and added to
the k outputs. Inner products are kept in expectation with an error of about 1/sqrt(k) times the lengths, at O(d) work,
and the matrix itself is never formed: the shuffle and signs of run b come from (seed, b) alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class RandomProjection:
    """From any d to `size` dimensions. Equal (size, seed) project equally, on every machine and device."""

    size: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size must be at least 1, got {self.size}")

    def project(self, rows: Tensor) -> Tensor:
        """(n, d) -> (n, size). Up to d = size nothing is lost: coordinates are only shuffled and signed."""
        projected = rows.new_zeros(len(rows), self.size)
        for run, first in enumerate(range(0, rows.shape[1], self.size)):
            piece = rows[:, first : first + self.size]
            slots, signs = self._run(run, piece.shape[1])
            projected[:, slots.to(rows.device)] += piece * signs.to(rows)
        return projected

    def _run(self, run: int, length: int) -> tuple[Tensor, Tensor]:
        """Distinct output slots and signs of the `length` coordinates of one run."""
        # raw words, because numpy promises that their stream never changes
        raw = np.random.PCG64(np.random.SeedSequence([self.seed, run])).random_raw(self.size)
        slots = np.argsort(raw, kind="stable")[:length]
        signs = (raw[:length] & np.uint64(1)).astype(np.int8) * 2 - 1
        return torch.from_numpy(slots), torch.from_numpy(signs)
