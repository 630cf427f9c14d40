"""Random selection: counts, shares by period, and the edges."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everfed.methods.replay.random_selection import (
    FixedProportion,
    approximate_uniform,
    fixed_proportion,
    naive_uniform,
)

Choose = Callable[[int, int, int, int, np.random.Generator], np.ndarray]
POLICIES: dict[str, Choose] = {
    "naive": lambda new, stored, seen, n, rng: naive_uniform(new, stored, n, rng),
    "approximate": approximate_uniform,
    "fixed": lambda new, stored, seen, n, rng: fixed_proportion(new, stored, n, 0.25, rng),
}


def shares(choose: Choose, periods: int, size: int, n: int, repetitions: int) -> np.ndarray:
    """Mean number of samples of each period in the buffer after the last one."""
    rng, total = np.random.default_rng(0), np.zeros(periods)
    for _ in range(repetitions):
        buffer = np.empty(0, dtype=np.int64)
        for period in range(periods):
            held = np.concatenate([np.full(size, period), buffer])
            buffer = held[choose(size, len(buffer), period * size, n, rng)]
        total += np.bincount(buffer, minlength=periods)
    return total / repetitions


def test_approximate_uniform_keeps_every_period_alike() -> None:
    np.testing.assert_allclose(shares(approximate_uniform, 10, 40, 20, 2000), np.full(10, 2.0), rtol=0.05)


def test_fixed_proportion_fades_by_its_complement() -> None:
    mean = shares(POLICIES["fixed"], 5, 40, 20, 2000)
    expected = [20 * 0.75**4, *(0.25 * 20 * 0.75 ** (5 - tau) for tau in range(2, 6))]
    np.testing.assert_allclose(mean, expected, rtol=0.05)
    assert mean[-1] == pytest.approx(5, rel=0.02)


def test_naive_uniform_fades_geometrically() -> None:
    kept = 20 / 60
    expected = [20 * kept**4, *(20 * (40 / 60) * kept ** (5 - tau) for tau in range(2, 6))]
    np.testing.assert_allclose(shares(POLICIES["naive"], 5, 40, 20, 4000), expected, rtol=0.06)


def test_fractional_share_is_exact_in_expectation() -> None:
    rng = np.random.default_rng(1)
    news = [(fixed_proportion(10, 10, 3, 0.25, rng) < 10).sum() for _ in range(8000)]
    assert set(news) == {0, 1}
    assert np.mean(news) == pytest.approx(0.75, abs=0.02)


@pytest.mark.parametrize("name", POLICIES)
@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 12), st.integers(0, 15), st.integers(0, 99))
def test_counts(name: str, new: int, stored: int, unstored: int, n: int, seed: int) -> None:
    chosen = POLICIES[name](new, stored, stored + unstored, n, np.random.default_rng(seed))
    assert len(chosen) == min(n, new + stored) == len(set(chosen.tolist()))
    assert set(chosen.tolist()) <= set(range(new + stored))
    assert (chosen == POLICIES[name](new, stored, stored + unstored, n, np.random.default_rng(seed))).all()


@pytest.mark.parametrize("name", POLICIES)
def test_first_period_and_empty_period(name: str) -> None:
    rng = np.random.default_rng(2)
    assert len(POLICIES[name](30, 0, 0, 8, rng)) == 8  # all from the new side
    assert POLICIES[name](0, 8, 100, 8, rng).tolist() == list(range(8))  # nothing new: the buffer stays


def test_a_side_too_small_is_made_up_by_the_other() -> None:
    rng = np.random.default_rng(3)
    chosen = fixed_proportion(2, 50, 10, 0.5, rng)
    assert (chosen < 2).sum() == 2 and len(chosen) == 10
    chosen = fixed_proportion(50, 3, 10, 0.5, rng)
    assert (chosen >= 50).sum() == 3 and len(chosen) == 10


def test_refusals() -> None:
    rng = np.random.default_rng(4)
    for proportion in (0.0, 1.0, -0.2):
        with pytest.raises(ValueError, match="proportion must be"):
            FixedProportion(proportion)
    with pytest.raises(ValueError, match="at least the 5 stored"):
        approximate_uniform(5, 5, 4, 3, rng)
