"""Holding samples out in proportion to their classes."""

from __future__ import annotations

import numpy as np

SPLIT_SEED = 0  # of parts that are the same in every run


def stratified(labels: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """`count` positions of `labels`, ascending, every class in proportion (largest remainder).

    A rare class may get none when `count` is small.
    """
    order, sizes = _grouped(labels, rng)
    take = largest_remainder(sizes, count)
    starts = np.cumsum(sizes) - sizes
    chosen = [order[start : start + k] for start, k in zip(starts, take, strict=True)]
    return np.sort(np.concatenate([*chosen, np.empty(0, np.int64)]))


def thinned(labels: np.ndarray, most: int | None) -> np.ndarray:
    """`most` positions of `labels`, every class in proportion, the same ones in every run; all of them for None."""
    if most is None or most >= len(labels):
        return np.arange(len(labels))
    return stratified(labels, most, np.random.default_rng(SPLIT_SEED))


def held_out(labels: np.ndarray, fraction: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(kept, held): positions with `fraction` of every class held out, both ascending."""
    held = stratified(labels, round(fraction * len(labels)), rng)
    kept = np.ones(len(labels), dtype=bool)
    kept[held] = False
    return np.flatnonzero(kept), held


def largest_remainder(sizes: np.ndarray, count: int) -> np.ndarray:
    """Whole numbers summing to `count`, proportional to `sizes` and nowhere above them."""
    total = int(sizes.sum())
    if not 0 <= count <= total:
        raise ValueError(f"cannot take {count} of {total} samples")
    # In whole numbers, so that equal classes tie exactly and the earlier one wins.
    take, left_over = np.divmod(sizes.astype(np.int64) * count, max(total, 1))
    first = np.argsort(-left_over, kind="stable")[: count - int(take.sum())]
    take[first] += 1
    return take


def _grouped(labels: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(order, sizes): positions shuffled within their class, classes one after the other; samples per class."""
    shuffled = rng.permutation(len(labels))
    order = shuffled[np.argsort(labels[shuffled], kind="stable")]
    return order, np.unique(labels, return_counts=True)[1]
