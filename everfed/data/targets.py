"""The targets of a data set: one class a sample, several labels a sample, or numbers (regression); and samples held out
in proportion to them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from everfed.errors import DataError

CLASSES, MULTI_LABEL, REGRESSION, TOKENS = "classes", "multi-label", "regression", "tokens"
KINDS = {
    CLASSES: "one class a sample: whole numbers or words (n,)",
    MULTI_LABEL: "several labels a sample: 0 and 1 (n, labels), at least two labels",
    REGRESSION: "regression: floats (n,) or (n, targets)",
    TOKENS: "the token to be predicted at every place: whole numbers (n, length), -100 where there is none",
}
NONE = -100  # the target of a token that is not to be predicted
ALLOWED = "; ".join(KINDS.values())
TENTHS = 10


def kind_of(y_train: np.ndarray | Tensor, y_test: np.ndarray | Tensor, name: str) -> str:
    """One of KINDS, by the type and shape of both parts. Raises DataError where they are of none, or of two."""
    train, test = as_array(y_train), as_array(y_test)
    found = [_forms(y) for y in (train, test)]
    common = [kind for kind in KINDS if all(kind in forms for forms in found)]
    if not common:
        shown = ", ".join(f"{part} {y.dtype} of shape {y.shape}" for part, y in (("train", train), ("test", test)))
        raise DataError(f"{name}: targets are {shown}; allowed, and alike in both parts: {ALLOWED}")
    return common[0]


def storage_targets(y: np.ndarray | Tensor, kind: str, name: str) -> Tensor:
    """Several labels as uint8 (n, labels), numbers as float32 (n, targets), tokens as int64 (n, length)."""
    array = as_array(y)
    if kind == MULTI_LABEL:
        if MULTI_LABEL not in _forms(array):
            raise DataError(_wrong(name, array, kind))
        return torch.from_numpy(array.astype(np.uint8))
    if kind == TOKENS:
        if array.ndim != 2 or array.dtype.kind not in "iu":
            raise DataError(_wrong(name, array, kind))
        return torch.from_numpy(array.astype(np.int64))
    if array.ndim not in (1, 2) or array.dtype.kind not in "iuf" or array.shape[1:] == (0,):
        raise DataError(_wrong(name, array, kind))
    numbers = array.reshape(len(array), -1).astype(np.float32)
    if not np.isfinite(numbers).all():
        raise DataError(f"{name}: sample {int(np.argmin(np.isfinite(numbers).all(1)))} has no finite target")
    return torch.from_numpy(numbers)


def blank_targets(kind: str, width: int) -> Tensor:
    """Targets of no sample in storage form; width: of one sample's."""
    if kind == CLASSES:
        return torch.zeros(0, dtype=torch.int64)
    if kind == TOKENS:
        return torch.zeros((0, width), dtype=torch.int64)
    return torch.zeros((0, width), dtype=torch.uint8 if kind == MULTI_LABEL else torch.float32)


def strata(y: np.ndarray | Tensor) -> np.ndarray:
    """(n,) int64 groups by which samples are held out and divided among clients: classes; the first label of a sample
    that has several (one group more for those without any); tenths of the first number; one group of tokens."""
    array = as_array(y)
    if array.dtype.kind in "iu" and array.ndim == 1:
        return array
    if len(array) == 0 or (array.dtype == np.int64 and array.ndim == 2):
        return np.zeros(len(array), dtype=np.int64)
    if array.dtype.kind == "f":
        first = array.reshape(len(array), -1)[:, 0]
        return np.searchsorted(np.quantile(first, np.arange(1, TENTHS) / TENTHS), first, side="left")
    return np.where(array.any(1), array.argmax(1), array.shape[1])


def as_array(y: np.ndarray | Tensor) -> np.ndarray:
    return y.numpy(force=True) if isinstance(y, Tensor) else np.asarray(y)


def _forms(y: np.ndarray) -> set[str]:
    """The kinds that an array may be of."""
    column = y.ndim == 1 or (y.ndim == 2 and y.shape[1] == 1)
    found = {CLASSES} if column and y.dtype.kind in "iuUO" else set()
    if y.ndim == 2 and y.shape[1] > 1 and y.dtype.kind in "biuf" and bool(((y == 0) | (y == 1)).all()):
        found.add(MULTI_LABEL)
    if y.ndim in (1, 2) and y.shape[1:] != (0,) and y.dtype.kind == "f":
        found.add(REGRESSION)
    return found


def _wrong(name: str, y: np.ndarray, kind: str) -> str:
    return f"{name}: targets are {y.dtype} of shape {y.shape}; allowed: {KINDS[kind]}"


# samples held out in proportion to their classes ---------------------------------------------------------------------
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
