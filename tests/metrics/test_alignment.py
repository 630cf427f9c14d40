"""Angles between updates, the gap of aggregation, and the quality of a selection."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everfed import metrics

seeds = st.integers(0, 2**31)


def test_cosine_of_known_angles() -> None:
    assert metrics.mean_pairwise_cosine(np.array([[1.0, 0], [0, 2], [3, 0]])) == pytest.approx(1 / 3)
    assert metrics.mean_pairwise_cosine(np.array([[1.0, 0], [-5, 0]])) == pytest.approx(-1)
    assert metrics.mean_pairwise_cosine(np.array([[1.0, 0]])) is None


def test_a_zero_update_is_at_right_angles() -> None:
    assert metrics.mean_pairwise_cosine(np.array([[1.0, 0], [0, 0]])) == 0


@given(seeds, st.integers(2, 6))
def test_the_codes_diagonal_adds_one_over_n(seed: int, n: int) -> None:
    updates = np.random.default_rng(seed).normal(size=(n, 5))
    plain, code = metrics.mean_pairwise_cosine(updates), metrics.mean_pairwise_cosine(updates, diagonal=True)
    assert code == pytest.approx(1 / n + (n - 1) / n * plain)


@given(seeds)
def test_cosine_ignores_lengths(seed: int) -> None:
    rng = np.random.default_rng(seed)
    updates = rng.normal(size=(4, 5))
    scaled = updates * rng.uniform(0.1, 10, size=(4, 1))
    assert metrics.mean_pairwise_cosine(scaled) == pytest.approx(metrics.mean_pairwise_cosine(updates))


def test_gap() -> None:
    assert metrics.local_global_gap([0.8, 0.6], 0.5) == pytest.approx(0.2)
    assert metrics.local_global_gap([0.8, None], 0.5) is None


def test_objective_includes_the_diagonal() -> None:
    gradients = np.array([[2.0, 0], [0, 3], [1, 0]])
    assert metrics.selection_objective(gradients, [0]) == pytest.approx(1)
    assert metrics.selection_objective(gradients, [0, 1]) == pytest.approx(2)
    assert metrics.selection_objective(gradients, [0, 2]) == pytest.approx(4)
    assert metrics.optimal_objective(gradients, 2) == pytest.approx(2)
    assert metrics.objective_ratio(gradients, [0, 2]) == pytest.approx(2)


def test_gradients_that_cancel_have_no_ratio() -> None:
    gradients = np.array([[1.0, 0], [0, 1], [-1, 0], [0, -1]])
    assert metrics.optimal_objective(gradients, 2) == 0
    assert metrics.objective_ratio(gradients, [0, 1]) is None


@given(seeds, st.integers(1, 6))
@settings(max_examples=30)
def test_optimum_is_the_best_of_all_choices(seed: int, size: int) -> None:
    gradients = np.random.default_rng(seed).normal(size=(6, 10))
    values = [metrics.selection_objective(gradients, chosen) for chosen in combinations(range(6), size)]
    assert metrics.optimal_objective(gradients, size) == pytest.approx(min(values), abs=1e-9)
    assert metrics.objective_ratio(gradients, range(size)) >= 1 - 1e-9


def test_selection_errors() -> None:
    with pytest.raises(ValueError, match=r"gradients \[1\] are zero"):
        metrics.selection_objective(np.array([[1.0, 0], [0, 0]]), [0])
    with pytest.raises(ValueError, match="size is 3; allowed: 1 to 2"):
        metrics.optimal_objective(np.eye(2), 3)
