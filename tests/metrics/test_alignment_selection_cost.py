"""The small metrics: angles, gap, selection quality, bytes and seconds."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
import torch
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


def resnet18(classes: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Parameters and buffers of ResNet-18 with a 7x7 stem, as shapes without values."""

    def shape(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    convolutions = [(64, 3, 7)]
    for inner, outer in ((64, 64), (64, 128), (128, 256), (256, 512)):
        convolutions += [(outer, inner, 3), (outer, outer, 3), (outer, outer, 3), (outer, outer, 3)]
        convolutions += [(outer, inner, 1)] if inner != outer else []
    parameters = [shape(o, i, k, k) for o, i, k in convolutions] + [shape(classes, 512), shape(classes)]
    parameters += [shape(o) for o, _, _ in convolutions for _ in ("weight", "bias")]
    buffers = [shape(o) for o, _, _ in convolutions for _ in ("mean", "variance")]
    return parameters, buffers + [shape(dtype=torch.int64) for _ in convolutions]


def test_bytes_of_resnet18() -> None:
    parameters, buffers = resnet18(classes=100)
    assert metrics.payload_bytes(parameters) == 44_911_248
    assert metrics.payload_bytes(buffers) == 9_600 * 4 + 20 * 8
    assert metrics.payload_bytes([]) == 0


def test_amortised_bytes() -> None:
    assert metrics.amortised_bytes(100, once_per_task=50, rounds_per_task=20) == 102.5
    with pytest.raises(ValueError, match="rounds_per_task is 0"):
        metrics.amortised_bytes(100, 50, 0)


def test_ratio() -> None:
    assert metrics.cost_ratio(2.4, 1.2) == pytest.approx(2)
    with pytest.raises(ValueError, match="must be positive, got 0"):
        metrics.cost_ratio(2.4, 0)


def test_seconds_of_first_and_later_tasks() -> None:
    assert metrics.first_and_later([[1.0, 1.4], [3.0], [4.0, 5.0]]) == (pytest.approx(1.2), pytest.approx(4.0))
    assert metrics.first_and_later([[1.0]]) == (1.0, None)
    assert not math.isnan(metrics.first_and_later([[1.0]])[0])
