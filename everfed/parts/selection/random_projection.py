"""A seeded random projection to fewer dimensions that keeps cosines, the same at every client.

A sparse sign matrix with one entry per column: each run of k coordinates is shuffled, given random signs and added to
the k outputs. Inner products are kept in expectation with an error of about 1/sqrt(k) times the lengths, at O(d) work,
and the matrix itself is never formed: the shuffle and signs of run b come from (seed, b) alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional


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
        n, d = rows.shape
        projected = rows.new_zeros(n, self.size)
        sources, signs = _runs(self, d, rows.device)
        padded = functional.pad(rows, (0, len(sources) * self.size - d))
        for piece, places, sign in zip(padded.split(self.size, dim=1), sources, signs, strict=True):
            projected += piece.index_select(1, places) * sign.to(rows.dtype)
        return projected

    def run(self, number: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Distinct output slots and signs of the `length` coordinates of one run."""
        # raw words, because numpy promises that their stream never changes
        raw = np.random.PCG64(np.random.SeedSequence([self.seed, number])).random_raw(self.size)
        slots = np.argsort(raw, kind="stable")[:length]
        return slots, (raw[:length] & np.uint64(1)).astype(np.int8) * 2 - 1


@lru_cache(maxsize=4)  # drawing them takes longer than a projection; 9 bytes a coordinate
def _runs(projection: RandomProjection, d: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(sources, signs), (runs, size) each: output k of run b is the coordinate sources[b, k] of that run times
    signs[b, k], which is 0 behind the last coordinate."""
    size = projection.size
    sources = np.zeros((-(-d // size), size), dtype=np.int64)
    signs = np.zeros(sources.shape, dtype=np.int8)
    for number in range(len(sources)):
        slots, own = projection.run(number, min(size, d - number * size))
        sources[number, slots] = np.arange(len(slots))
        signs[number, slots] = own
    return torch.from_numpy(sources).to(device), torch.from_numpy(signs).to(device)
