"""Mean, population deviation, and the paired t-interval."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from everfed import metrics

values = st.lists(st.floats(-100, 100), min_size=1, max_size=10)
pairs = st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), min_size=2, max_size=10)


def test_population_deviation() -> None:
    assert metrics.mean_and_deviation([2, 4, 4, 4, 5, 5, 7, 9]) == metrics.Spread(5.0, 2.0, 8)
    assert metrics.mean_and_deviation([0.7]) == metrics.Spread(0.7, 0.0, 1)


@given(values)
def test_deviation_is_numpys_default(sample: list[float]) -> None:
    spread = metrics.mean_and_deviation(sample)
    assert spread.mean == pytest.approx(np.mean(sample), abs=1e-9)
    assert spread.deviation == pytest.approx(np.std(sample), abs=1e-9)


def test_paired_interval_from_the_t_table() -> None:
    """Differences 1, 2, 3: mean 2, sample deviation 1; t_{0.975, 2} = 4.302653 (printed tables: 4.303)."""
    result = metrics.paired_difference([11, 22, 33], [10, 20, 30])
    assert (result.mean, result.count, result.confidence) == (2, 3, 0.95)
    assert result.high == pytest.approx(2 + 4.302653 / math.sqrt(3), abs=1e-5)
    assert result.low == pytest.approx(2 - 4.302653 / math.sqrt(3), abs=1e-5)


@given(pairs, st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_paired_interval_is_scipys(sample: list[tuple[float, float]], confidence: float) -> None:
    ours, theirs = zip(*sample, strict=True)
    differences = np.subtract(ours, theirs)
    result = metrics.paired_difference(ours, theirs, confidence)
    half = stats.t.ppf((1 + confidence) / 2, len(sample) - 1) * differences.std(ddof=1) / math.sqrt(len(sample))
    assert result.mean == pytest.approx(differences.mean(), abs=1e-9)
    assert result.low == pytest.approx(differences.mean() - half, abs=1e-6)
    assert result.high == pytest.approx(differences.mean() + half, abs=1e-6)


@given(pairs)
def test_swapping_the_sides_flips_the_interval(sample: list[tuple[float, float]]) -> None:
    ours, theirs = zip(*sample, strict=True)
    result, swapped = metrics.paired_difference(ours, theirs), metrics.paired_difference(theirs, ours)
    assert (swapped.mean, swapped.low, swapped.high) == (-result.mean, -result.high, -result.low)


def test_pairing_removes_what_the_seeds_share() -> None:
    result = metrics.paired_difference([50.5, 60.5, 70.5], [50, 60, 70])
    assert result.low == result.high == 0.5


def test_one_pair_has_no_interval() -> None:
    assert metrics.paired_difference([0.5], [0.25]) == metrics.PairedDifference(0.25, None, None, 1, 0.95)


def test_errors() -> None:
    with pytest.raises(ValueError, match="same seeds on both sides, got 2 and 1"):
        metrics.paired_difference([1, 2], [1])
    with pytest.raises(ValueError, match="confidence is 95"):
        metrics.paired_difference([1, 2], [1, 2], 95)
    with pytest.raises(ValueError, match="one or more finite values"):
        metrics.mean_and_deviation([])
    with pytest.raises(ValueError, match="one or more finite values"):
        metrics.mean_and_deviation([0.5, math.nan])
    with pytest.raises(ValueError, match="one or more finite values"):
        metrics.paired_difference([], [])


def test_seeds_that_one_side_lacks_are_left_out() -> None:
    ours, theirs = {0: 11.0, 1: 22.0, 2: 33.0, 7: 0.0}, {2: 30.0, 1: 20.0, 0: 10.0, 3: 99.0}
    assert metrics.paired_by_seed(ours, theirs) == metrics.paired_difference([11, 22, 33], [10, 20, 30])
    assert metrics.paired_by_seed({0: 1.0}, {1: 1.0}) is None
