"""How well clients, tasks and samples agree: angles between updates and the local-global gap (STAMP), and how good a
choice of replay samples is (coordinated replay selection, objective (3)).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, islice

import numpy as np

from everfed.metrics.numbers import Entry, difference, mean

_CHUNK = 100_000
_ZERO = 1e-24  # round-off of a sum of unit vectors that cancel, squared


def mean_pairwise_cosine(updates: np.ndarray, diagonal: bool = False) -> float | None:
    """Mean cosine over pairs i < j of the rows of `updates` (n, d); None for fewer than two rows.

    Rows are one client's updates over tasks (temporal angle) or the clients' updates of a round (spatial angle).
    A zero update is at right angles to all. diagonal: average over all ordered pairs including i = j, as the authors'
    code does.
    """
    n = len(updates)
    if n < 2:
        return None
    norms = np.linalg.norm(updates.astype(np.float64), axis=1, keepdims=True)
    units = np.divide(updates, norms, out=np.zeros(updates.shape), where=norms > 0)
    gram = units @ units.T
    return float(gram.mean() if diagonal else gram[np.triu_indices(n, 1)].mean())


def local_global_gap(local: Sequence[Entry], aggregated: float) -> Entry:
    """Mean accuracy of the clients' models after local training, less the aggregated model's, on the same test data."""
    return difference(mean(local), aggregated)


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
