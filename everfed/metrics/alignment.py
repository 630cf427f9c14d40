"""How well clients and tasks agree: angles between updates and the local-global gap (STAMP)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from everfed.metrics.numbers import Entry, difference, mean


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
