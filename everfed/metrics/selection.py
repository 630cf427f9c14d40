"""How good a choice of replay samples is (coordinated replay selection, objective (3))."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, islice

import numpy as np

_CHUNK = 100_000
_ZERO = 1e-24  # round-off of a sum of unit vectors that cancel, squared


def selection_objective(gradients: np.ndarray, chosen: Sequence[int]) -> float:
    """|| sum_{i in chosen} g_i / ||g_i|| ||^2 for the rows of `gradients` (n, d), none of them zero."""
    total = _units(gradients)[list(chosen)].sum(axis=0)
    return float(total @ total)


def optimal_objective(gradients: np.ndarray, size: int) -> float:
    """The smallest objective of any `size` rows, by enumeration: C(n, size) subsets."""
    if not 1 <= size <= len(gradients):
        raise ValueError(f"size is {size}; allowed: 1 to {len(gradients)}, the number of gradients")
    units = _units(gradients)
    gram, subsets, best = units @ units.T, combinations(range(len(units)), size), np.inf
    while chunk := list(islice(subsets, _CHUNK)):
        rows = np.array(chunk)
        values = sum(gram[rows[:, a], rows[:, b]] for a in range(size) for b in range(size))
        best = min(best, float(np.min(values)))
    return max(best, 0.0)


def objective_ratio(gradients: np.ndarray, chosen: Sequence[int]) -> float | None:
    """Objective of the choice over that of the best choice of the same size, >= 1; None when the best is 0."""
    optimum = optimal_objective(gradients, len(chosen))
    return selection_objective(gradients, chosen) / optimum if optimum > _ZERO else None


def _units(gradients: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(gradients, axis=1, keepdims=True)
    if not np.all(norms > 0):
        raise ValueError(f"gradients {np.flatnonzero(norms <= 0).tolist()} are zero and have no direction")
    return gradients / norms
