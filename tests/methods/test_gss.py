"""GSS-greedy and GSS-clustering on streams whose right answer is known."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from everfed.methods.replay.diversity import objective
from everfed.methods.replay.gss import (
    cluster_offer,
    cluster_select,
    distances,
    draw_references,
    greedy_score,
    greedy_select,
    greedy_slot,
)

quick = settings(max_examples=60)
streams = arrays(
    np.float64, st.tuples(st.integers(1, 15), st.integers(1, 3)), elements=st.integers(-2, 2).map(float)
)  # zero, equal and opposite gradients are common


@quick
@given(streams, st.integers(1, 6), st.integers(1, 8), st.integers(0, 100))
def test_greedy_fills_up_and_never_overflows(rows: np.ndarray, n: int, references: int, seed: int) -> None:
    kept = greedy_select(rows, n, references, np.random.default_rng(seed))
    assert len(kept) == min(n, len(rows)) and len(set(kept.tolist())) == len(kept)
    assert (kept == greedy_select(rows, n, references, np.random.default_rng(seed))).all()


@quick
@given(streams, st.integers(0, 100))
def test_score_is_between_zero_and_two(rows: np.ndarray, seed: int) -> None:
    score = greedy_score(rows[0], rows[1:])
    assert 0 <= score <= 2
    if len(rows) == 1:
        assert score == 0.1
    elif not rows[0].any() or not rows[1:].any():
        assert score == 1  # no direction: cosine 0


def test_score_by_hand() -> None:
    references = np.array([[1.0, 0], [0, 2.0]])
    assert greedy_score(np.array([3.0, 0]), references) == pytest.approx(2)
    assert greedy_score(np.array([-1.0, -1]), references) == pytest.approx(1 - np.sqrt(0.5))
    assert greedy_score(torch.tensor([-1.0, 0]), torch.tensor([[1.0, 0]])) == 0


def test_a_full_buffer_takes_only_opposed_samples() -> None:
    rng = np.random.default_rng(0)
    assert greedy_slot(np.array([0.5]), 1.9, 2, rng) == 1  # room left: appended whatever the score
    assert all(greedy_slot(np.array([0.1, 2.0]), 1.0, 2, rng) is None for _ in range(50))
    assert all(greedy_slot(np.array([0.0, 2.0]), 0.0, 2, rng) == 1 for _ in range(50))
    assert greedy_slot(np.zeros(2), 0.0, 2, rng) is None


def test_replacement_frequencies() -> None:
    """Slot i is drawn with C_i / sum C and given up with C_i / (C_i + c)."""
    rng = np.random.default_rng(1)
    slots = [greedy_slot(np.array([0.5, 1.5]), 0.5, 2, rng) for _ in range(20_000)]
    assert np.mean([slot == 0 for slot in slots]) == pytest.approx(0.25 * 0.5, abs=0.01)
    assert np.mean([slot == 1 for slot in slots]) == pytest.approx(0.75 * 0.75, abs=0.01)


def test_a_sample_like_a_stored_one_never_replaces() -> None:
    rng = np.random.default_rng(2)
    rows = rng.standard_normal((40, 4))
    units = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    for row in range(6, 40):
        before, after = (greedy_select(rows[:end], 5, 10, np.random.default_rng(7)) for end in (row, row + 1))
        if (units[before] @ units[row]).max() >= 0:
            assert (before == after).all()


@pytest.mark.parametrize("seed", range(20))
def test_opposite_clusters_are_both_kept(seed: int) -> None:
    rng = np.random.default_rng(seed)
    minority = rng.random(200) < 0.05
    minority[rng.integers(200)] = True
    rows = np.where(minority[:, None], -1.0, 1.0) * np.array([1.0, 2.0, -0.5])
    assert len(set(minority[greedy_select(rows, 5, 10, rng)])) == 2


def test_orthogonal_clusters_keep_the_first_samples() -> None:
    rng = np.random.default_rng(3)
    rows = np.eye(2)[rng.integers(2, size=100)]
    assert greedy_select(rows, 5, 10, rng).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("seed", range(5))
def test_no_heuristic_beats_the_best_subset(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((8, 5))
    best = min(objective(rows, np.array(subset)) for subset in combinations(range(8), 3))
    assert objective(rows, greedy_select(rows, 3, rng=rng)) >= best - 1e-12
    same = np.ones((8, 5))
    assert objective(same, greedy_select(same, 3, rng=rng)) == pytest.approx(9)


def test_references_are_distinct_and_at_most_all() -> None:
    rng = np.random.default_rng(4)
    assert sorted(draw_references(3, 10, rng)) == [0, 1, 2]
    assert len(set(draw_references(100, 10, rng))) == 10
    assert len(draw_references(0, 10, rng)) == 0


# --- clustering -----------------------------------------------------------------------------------------------------


@quick
@given(streams, st.integers(1, 6), st.integers(0, 100))
def test_centroids_stay_apart_and_within_capacity(rows: np.ndarray, capacity: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    kept, threshold = np.empty(0, dtype=np.int64), 0.0
    for row in range(len(rows)):
        offered = np.append(kept, row)
        stay, new_threshold = cluster_offer(rows[offered], threshold, capacity, rng)
        kept = offered[stay]
        assert new_threshold >= threshold
        threshold = new_threshold
        assert 1 <= len(kept) <= capacity
        apart = distances(rows[kept])[np.triu_indices(len(kept), 1)]
        assert (apart > threshold).all()
    assert (cluster_select(rows, capacity, rng=np.random.default_rng(seed)) == np.sort(kept)).all()


def test_identical_points_are_one_centroid() -> None:
    row = np.random.default_rng(5).standard_normal(50)
    assert cluster_select(np.tile(row, (9, 1)), 4).tolist() == [0]
    assert cluster_select(np.outer([1.0, 3.0, 0.1], row), 4).tolist() == [0]


def test_threshold_starts_at_the_smallest_distance_and_grows_by_steps() -> None:
    rng = np.random.default_rng(6)
    angles = np.array([0.0, 0.4, 1.0])
    rows = np.column_stack([np.cos(angles), np.sin(angles)])
    kept, threshold = cluster_offer(rows, 0.0, 2, rng)
    assert threshold == pytest.approx(1 - np.cos(0.4)) and len(kept) == 2
    kept, threshold = cluster_offer(rows, 0.05, 2, rng, growth=0.1)
    steps = np.log(threshold / 0.05) / np.log(1.1)
    assert steps == pytest.approx(round(steps), abs=1e-9) and len(kept) == 2
    assert threshold / 1.1 < 1 - np.cos(0.4) <= threshold


def test_a_point_within_the_threshold_is_left_out() -> None:
    rows = np.array([[1.0, 0], [0, 1], [1, 0.1]])
    kept, threshold = cluster_offer(rows, 0.2, 5, np.random.default_rng(0))
    assert kept.tolist() == [0, 1] and threshold == 0.2


@pytest.mark.parametrize(("capacity", "growth"), [(0, 0.01), (3, 0.0)])
def test_clustering_refuses(capacity: int, growth: float) -> None:
    with pytest.raises(ValueError, match="capacity|growth"):
        cluster_offer(np.eye(3), 0.0, capacity, np.random.default_rng(0), growth)
