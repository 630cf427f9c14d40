"""Stratified hold-outs: exact counts, proportion, disjointness."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everfed.data.targets import held_out, largest_remainder, stratified

label_columns = st.lists(st.integers(0, 5), min_size=1, max_size=80).map(np.array)


@given(label_columns, st.floats(0, 1), st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_kept_and_held_are_a_division_with_every_class_in_proportion(labels, fraction, seed):
    kept, held = held_out(labels, fraction, np.random.default_rng(seed))
    assert sorted([*kept, *held]) == list(range(len(labels)))
    assert len(held) == round(fraction * len(labels))
    for c in np.unique(labels):
        share = len(held) * (labels == c).sum() / len(labels)
        assert abs((labels[held] == c).sum() - share) < 1


@given(label_columns, st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_same_seed_same_positions_in_order(labels, seed):
    count = len(labels) // 2
    one, two = (stratified(labels, count, np.random.default_rng(seed)) for _ in range(2))
    assert np.array_equal(one, two)
    assert np.array_equal(one, np.unique(one))


def test_largest_remainder_by_hand():
    # 10 of (5, 3, 2) * 2: quotas 5, 3, 2. 7 of the same: 3.5, 2.1, 1.4 -> 4, 2, 1.
    assert largest_remainder(np.array([10, 6, 4]), 10).tolist() == [5, 3, 2]
    assert largest_remainder(np.array([10, 6, 4]), 7).tolist() == [4, 2, 1]
    assert largest_remainder(np.array([1, 1, 1]), 2).tolist() == [1, 1, 0]


def test_more_than_there_is_is_refused():
    with pytest.raises(ValueError, match="cannot take 4 of 3"):
        largest_remainder(np.array([1, 2]), 4)
