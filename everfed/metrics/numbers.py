"""Arithmetic on numbers of which some may be missing: a value that cannot be computed is None, never NaN."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

Entry = float | None
Row = Sequence[Entry]
Matrix = Sequence[Row]


class Unbounded(list[Row]):
    """A matrix of a score that is no fraction: its entries may be any number."""


def measured(values: Iterable[Entry]) -> list[float] | None:
    """All values, or None when one of them is missing or there are none."""
    found = list(values)
    present = [value for value in found if value is not None]
    return present if present and len(present) == len(found) else None


def mean(values: Iterable[Entry]) -> Entry:
    """Arithmetic mean; None when a value is missing. `fsum` rounds once, so the order of the values cannot matter."""
    present = measured(values)
    return None if present is None else math.fsum(present) / len(present)


def weighted_mean(values: Sequence[Entry], weights: Sequence[float]) -> Entry:
    """sum w_i v_i / sum w_i; None when a value is missing or no weight is positive."""
    if len(values) != len(weights):
        raise ValueError(f"one weight per value is needed, got {len(weights)} weights for {len(values)} values")
    if not all(0 <= weight < math.inf for weight in weights):
        raise ValueError(f"weights must be finite and not negative, got {list(weights)}")
    present, total = measured(values), math.fsum(weights)
    if present is None or total == 0:
        return None
    return math.fsum(w * v for w, v in zip(weights, present, strict=True)) / total


def maximum(values: Iterable[Entry]) -> Entry:
    """The largest value; None when one is missing."""
    present = measured(values)
    return None if present is None else max(present)


def difference(a: Entry, b: Entry) -> Entry:
    """a - b; None when either is missing, or both are infinite."""
    found = None if a is None or b is None else a - b
    return None if found is None or math.isnan(found) else found


def accuracies(row: Row, width: int, name: str, bounded: bool = True) -> list[Entry]:
    """The row, checked to hold fractions (bounded) or None, and padded with None to at least `width` entries."""
    for i, value in enumerate(row):
        if bounded and value is not None and not 0 <= value <= 1:
            raise ValueError(f"{name}[{i}] is {value}; allowed: an accuracy in [0, 1], or None where not measured")
    return [*row, *[None] * (width - len(row))]
