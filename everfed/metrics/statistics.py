"""Spread over seeds, paired comparison of two methods on the same seeds, and the verdicts on a published number:
is its level ours, and is a method's effect over its baseline?"""

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


# ours against the papers' --------------------------------------------------------------------------------------------
MARGIN = 3.0  # levels that are no further apart are equivalent
CLAIM = 2.0  # a printed difference of at most this many points claims nothing
LEAST_SEEDS = 3
ALPHA = 0.05
ROUNDING = 1e-9  # published decimals are not exact in binary: 10.02 - 8.02 must not be above 2 points

EQUIVALENT, DIFFERS, UNRESOLVED = "equivalent", "differs", "unresolved"
CONFIRMED, CONTRADICTED = "confirmed", "contradicted"
UNCLAIMED, NONE_CLAIMED = "not in the paper", "none claimed"
LEVELS = (EQUIVALENT, DIFFERS, UNRESOLVED)
EFFECTS = (CONFIRMED, CONTRADICTED, UNRESOLVED)  # of those that the paper claims


@dataclass(frozen=True)
class LevelGap:
    """ours - paper between two means, its standard error, and Welch's degrees of freedom."""

    difference: float
    error: float
    freedom: float

    @property
    def p_differs(self) -> float:
        """Welch's test: how probable so large a difference is where there is none. Two-sided."""
        return 2 * self._beyond(abs(self.difference))

    @property
    def p_equivalent(self) -> float:
        """Two one-sided tests: the larger of both probabilities where the levels are MARGIN apart."""
        return self._beyond(MARGIN - abs(self.difference))

    def _beyond(self, distance: float) -> float:
        """The probability of an error of at least `distance` to one side."""
        if self.error == 0:
            return 0.5 - math.copysign(0.5, distance) if abs(distance) > ROUNDING else 0.5
        from scipy.special import stdtr  # Student's distribution without scipy.stats, which takes a second to import

        return float(stdtr(self.freedom, -distance / self.error))


def gap(ours: Spread, paper: Spread) -> LevelGap:
    """The difference of two means over seeds; each side needs at least two."""
    for name, side in (("ours", ours), ("paper", paper)):
        if side.count < 2 or not side.deviation >= 0:
            raise ValueError(f"{name}: a level needs two or more seeds and a deviation of 0 or more, got {side}")
    parts = [side.deviation**2 / (side.count - 1) for side in (ours, paper)]  # of the mean, from the sample deviation
    whole = sum(parts)
    below = sum(part**2 / (side.count - 1) for part, side in zip(parts, (ours, paper), strict=True))
    return LevelGap(ours.mean - paper.mean, math.sqrt(whole), whole**2 / below if below else math.inf)


def levels(gaps: Sequence[LevelGap]) -> list[str]:
    """The verdicts on the levels of a table's cells. Those that differ are found with Holm's correction for all."""
    differ = _holm([one.p_differs for one in gaps])
    return [
        EQUIVALENT if one.p_equivalent < ALPHA else DIFFERS if differs else UNRESOLVED
        for one, differs in zip(gaps, differ, strict=True)
    ]


def effect(ours: PairedDifference, claimed: float) -> str:
    """The verdict on a method's difference to its baseline. claimed: the difference of the printed numbers. One that
    the paper does not have must exceed CLAIM to count here."""
    if ours.low is None or ours.high is None:
        raise ValueError("an effect needs two or more seeds")
    sure = ours.low > 0 or ours.high < 0
    if not claims(claimed):
        return UNCLAIMED if sure and claims(ours.mean) else NONE_CLAIMED
    if not sure:
        return UNRESOLVED
    return CONFIRMED if ours.mean * claimed > 0 else CONTRADICTED


def claims(difference: float) -> bool:
    """Whether a difference is large enough to be a claim."""
    return abs(difference) > CLAIM + ROUNDING


def covers(ours: PairedDifference, claimed: float) -> bool:
    """Whether our interval holds the paper's difference."""
    return ours.low is not None and ours.high is not None and ours.low <= claimed <= ours.high


def _holm(probabilities: Sequence[float]) -> list[bool]:
    """Which hypotheses are rejected at ALPHA for all together: the smallest of m against ALPHA / m, the next against
    ALPHA / (m - 1), and so on until the first that is not."""
    rejected = [False] * len(probabilities)
    for rank, index in enumerate(sorted(range(len(probabilities)), key=probabilities.__getitem__)):
        if probabilities[index] >= ALPHA / (len(probabilities) - rank):
            break
        rejected[index] = True
    return rejected


def never_compared(paper: str, table: str, metric: str) -> str | None:
    """Why a published cell must not be compared with ours, or None when it may be.

    Names as in the papers' tables: table "T7 scalability" or "F3" (figure), metric "sec/round", "hours".
    """
    if paper == "FedSSI" and table == "T7 scalability":
        return "these numbers repeat the paper's Table 2"
    if paper == "STAMP" and table.startswith("F"):
        return "the authors' plotting scripts add constants to the logged accuracies"
    if metric == "hours" or "s/round" in metric or "sec/round" in metric:
        return "absolute times depend on the machine; compare ratios to FedAvg on one machine"
    return None
