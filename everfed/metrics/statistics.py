"""Spread over seeds, and paired comparison of two methods that ran on the same seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Spread:
    """mean and population deviation (ddof = 0) of `count` values, as the papers' tables print them."""

    mean: float
    deviation: float
    count: int


@dataclass(frozen=True)
class PairedDifference:
    """Mean of ours - theirs over pairs, with a t-interval; `low` and `high` are None for a single pair."""

    mean: float
    low: float | None
    high: float | None
    count: int
    confidence: float


def mean_and_deviation(values: Sequence[float]) -> Spread:
    """Population mean and deviation; one value has deviation 0."""
    _check(values)
    mean = math.fsum(values) / len(values)
    return Spread(mean, math.sqrt(_squares(values, mean) / len(values)), len(values))


def interval(spread: Spread, confidence: float = 0.95) -> tuple[float, float]:
    """The t-interval of the mean of two or more values."""
    half = _t_quantile(confidence, spread.count - 1) * spread.deviation / math.sqrt(spread.count - 1)
    return spread.mean - half, spread.mean + half


def paired_difference(ours: Sequence[float], theirs: Sequence[float], confidence: float = 0.95) -> PairedDifference:
    """Difference seed by seed (the k-th values share a seed); its sample deviation (ddof = 1) gives the interval."""
    if len(ours) != len(theirs):
        raise ValueError(f"a paired comparison needs the same seeds on both sides, got {len(ours)} and {len(theirs)}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; allowed: between 0 and 1, both excluded")
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    _check(differences)
    count, mean = len(differences), math.fsum(differences) / len(differences)
    if count == 1:
        return PairedDifference(mean, None, None, count, confidence)
    half = _t_quantile(confidence, count - 1) * math.sqrt(_squares(differences, mean) / (count - 1) / count)
    return PairedDifference(mean, mean - half, mean + half, count, confidence)


def paired_by_seed(ours: Mapping[Any, float], theirs: Mapping[Any, float]) -> PairedDifference | None:
    """`paired_difference` over the seeds that both have, of {seed: value}; None where they share none."""
    shared = sorted(ours.keys() & theirs.keys())
    return paired_difference([ours[s] for s in shared], [theirs[s] for s in shared]) if shared else None


def _t_quantile(confidence: float, freedom: int) -> float:
    from scipy.special import stdtrit  # the t quantile without scipy.stats, which takes a second to import

    return float(stdtrit(freedom, (1 + confidence) / 2))


def _squares(values: Sequence[float], mean: float) -> float:
    return math.fsum((value - mean) ** 2 for value in values)


def _check(values: Sequence[float]) -> None:
    if len(values) == 0 or not all(map(math.isfinite, values)):
        raise ValueError(f"statistics need one or more finite values, got {list(values)}")
