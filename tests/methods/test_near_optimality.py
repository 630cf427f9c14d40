"""The experiment of Figures 1 and 4: its generator, its exhaustive search, its outcome."""

from __future__ import annotations

from itertools import combinations
from math import comb

import numpy as np
import pytest

from everfed.methods.replay.near_optimality import (
    POLICIES,
    READINGS,
    brute_force,
    draw_gradients,
    mean_ratios,
    near_optimality,
)


@pytest.mark.parametrize("n", [1, 2, 5, 9])
@pytest.mark.parametrize("seed", range(3))
def test_brute_force_equals_plain_enumeration(n: int, seed: int) -> None:
    rows = np.random.default_rng(seed).standard_normal((n, 4))
    gram = rows @ rows.T
    for keep in range(1, n + 1):
        best, subset = brute_force(gram, keep)
        values = [gram[np.ix_(s, s)].sum() for s in map(list, combinations(range(n), keep))]
        assert len(values) == comb(n, keep) and best == pytest.approx(min(values), abs=1e-10)
        assert gram[np.ix_(subset, subset)].sum() == pytest.approx(best, abs=1e-10)
        assert len(set(subset.tolist())) == keep and (np.diff(subset) > 0).all()


def test_brute_force_finds_a_planted_optimum_among_two_million() -> None:
    gram = np.full((50, 50), 0.5)
    planted = np.array([3, 17, 29, 30, 49])
    gram[np.ix_(planted, planted)] = -0.1
    np.fill_diagonal(gram, 1.0)
    best, subset = brute_force(gram, 5)
    assert subset.tolist() == planted.tolist() and best == pytest.approx(5 - 20 * 0.1)


@pytest.mark.parametrize("keep", [0, 4])
def test_brute_force_refuses(keep: int) -> None:
    with pytest.raises(ValueError, match="between 1 and 3"):
        brute_force(np.eye(3), keep)


def test_generator_normalises_as_each_reading_says() -> None:
    for seed in range(20):
        per_vector = draw_gradients(np.random.default_rng(seed), 30)
        np.testing.assert_allclose(per_vector.mean(axis=1), 0, atol=1e-12)
        np.testing.assert_allclose(per_vector.std(axis=1), 1, atol=1e-12)
        literal = draw_gradients(np.random.default_rng(seed), 30, reading="per-coordinate")
        np.testing.assert_allclose(literal.sum(axis=0), 0, atol=1e-10)  # why the convex relaxation is empty there
        np.testing.assert_allclose(literal.std(axis=0), 1, atol=1e-12)
        assert per_vector.shape == literal.shape == (30, 300)


def test_unknown_reading_is_refused() -> None:
    with pytest.raises(ValueError, match="per-vector, per-coordinate"):
        draw_gradients(np.random.default_rng(0), 5, reading="per-row")


def test_rows_cover_everything_once_and_repeat() -> None:
    rows = list(near_optimality((6, 8), repetitions=2, keep=3, dimension=20))
    assert len({(r.reading, r.samples, r.repetition, r.policy) for r in rows}) == len(rows) == 2 * 2 * 2 * len(POLICIES)
    assert all(row.ratio >= 1 - 1e-9 for row in rows)
    assert rows == list(near_optimality((6, 8), repetitions=2, keep=3, dimension=20))
    alone = list(near_optimality((8,), READINGS[1:], 2, keep=3, dimension=20))
    assert alone == [row for row in rows if row.samples == 8 and row.reading == READINGS[1]]


def test_zero_diagonal_is_near_the_optimum() -> None:
    """The fast version: 50 clients, n = 30."""
    policies = {name: POLICIES[name] for name in ("zero-diagonal", "convex", "random")}
    means = mean_ratios(near_optimality((30,), ("per-vector",), 50, policies=policies))
    ratio = {policy: value for (_, _, policy), value in means.items()}
    assert ratio["zero-diagonal"] < 1.06 < ratio["convex"] < ratio["random"]


@pytest.mark.slow
def test_ordering_of_the_paper_at_fifty_samples() -> None:
    means = mean_ratios(near_optimality((50,), ("per-vector",), 200))
    ratio = {policy: value for (_, _, policy), value in means.items()}
    assert ratio["zero-diagonal"] <= 1.05
    assert ratio["zero-diagonal"] < ratio["convex"] < ratio["gss-greedy"] < ratio["random"]


@pytest.mark.slow
def test_zero_diagonal_is_the_best_of_the_papers_policies_in_both_readings() -> None:
    """And its gap grows with n."""
    means = mean_ratios(near_optimality(repetitions=60))
    for reading in READINGS:
        gaps = [means[reading, n, "zero-diagonal"] for n in (10, 30, 50)]
        assert gaps == sorted(gaps)
        for n in (10, 30, 50):
            others = ("convex", "gss-greedy", "gss-clustering", "random")
            assert means[reading, n, "zero-diagonal"] < min(means[reading, n, policy] for policy in others)
