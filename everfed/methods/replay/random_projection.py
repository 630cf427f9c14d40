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
        full, rest = divmod(rows.shape[1], self.size)
        projected = rows.new_zeros(len(rows), self.size)
        sources, signs = _full_runs(self, full, rows.device)
        for piece, places, sign in zip(rows.split(self.size, dim=1), sources, signs, strict=False):
            projected += piece.index_select(1, places) * sign.to(rows.dtype)
        if rest:
            slots, last_signs = map(torch.from_numpy, self.run(full, rest))
            projected[:, slots.to(rows.device)] += rows[:, -rest:] * last_signs.to(rows)
        return projected

    def run(self, number: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Distinct output slots and signs of the `length` coordinates of one run."""
        # raw words, because numpy promises that their stream never changes
        raw = np.random.PCG64(np.random.SeedSequence([self.seed, number])).random_raw(self.size)
        return np.argsort(raw, kind="stable")[:length], (raw[:length] & np.uint64(1)).astype(np.int8) * 2 - 1


@lru_cache(maxsize=4)  # drawing them takes longer than the projection of a minibatch; 9 bytes a coordinate
def _full_runs(projection: RandomProjection, runs: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(sources, signs), (runs, size) each: output k of a run is its coordinate sources[k], times signs[k]."""
    sources = np.empty((runs, projection.size), dtype=np.int64)
    signs = np.empty(sources.shape, dtype=np.int8)
    for number in range(runs):
        slots, own = projection.run(number, projection.size)
        sources[number, slots] = np.arange(projection.size)
        signs[number, slots] = own
    return torch.from_numpy(sources).to(device), torch.from_numpy(signs).to(device)
