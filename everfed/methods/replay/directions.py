"""Gradients as directions: their norms, their unit vectors, and what to do with those that have no direction."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

NO_DIRECTION = 1e-12  # a gradient this short is rounding noise, not a direction
_BLOCK_BYTES = 2**26


def as_rows(vectors: Tensor | np.ndarray) -> Tensor:
    """`vectors` as a floating (n, d) tensor, one row per sample, without a copy where possible."""
    rows = torch.as_tensor(vectors).detach()
    if rows.ndim != 2:
        raise ValueError(f"one row per sample is needed, shape (samples, d), got {tuple(rows.shape)}")
    return rows if rows.is_floating_point() else rows.double()


def row_norms(rows: Tensor) -> Tensor:
    """(n,) float64 lengths of the rows; refuses a row that is not finite."""
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    broken = torch.nonzero(~torch.isfinite(norms)).flatten().tolist()
    if broken:
        raise ValueError(f"the gradient of sample {broken[0]} is not finite ({len(broken)} of {len(rows)} samples)")
    return norms


def unit_rows(vectors: Tensor | np.ndarray) -> Tensor:
    """(n, d) float64 rows of length 1; a row without direction becomes zero, so its cosine with anything is 0."""
    rows = as_rows(vectors)
    norms = row_norms(rows)
    return rows.double() * inverse(norms)[:, None]


def inverse(norms: Tensor) -> Tensor:
    """1 / norm, and 0 where there is no direction."""
    return torch.where(norms > NO_DIRECTION, 1.0 / norms.clamp_min(NO_DIRECTION), torch.zeros_like(norms))


def column_blocks(rows: Tensor) -> Iterator[Tensor]:
    """The columns of `rows` in float64, in blocks, so that a long matrix is never copied whole."""
    width = max(1, _BLOCK_BYTES // (8 * max(1, len(rows))))
    for first in range(0, rows.shape[1], width):
        yield rows[:, first : first + width].double()
