"""Minibatches: every sample once per epoch, in an order of its own, and never a last one of a single sample."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everfed.core.data import Data, Table, minibatches


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@given(st.integers(1, 60), st.integers(1, 3), st.integers(2, 12))
def test_every_epoch_visits_every_sample_once(samples: int, epochs: int, size: int) -> None:
    ids = np.arange(samples) + 100
    schedule = minibatches(ids, epochs, size, rng())
    visited = np.concatenate([schedule.ids_of(step) for step in range(schedule.steps)])
    assert len(visited) == samples * epochs
    for epoch in range(epochs):
        assert sorted(visited[epoch * samples : (epoch + 1) * samples]) == sorted(ids)


@given(st.integers(2, 60), st.integers(2, 12))
def test_a_last_minibatch_of_one_joins_the_one_before(samples: int, size: int) -> None:
    lengths = minibatches(np.arange(samples), 1, size, rng()).rows.lengths.tolist()
    expected = [size] * (samples // size) + ([samples % size] if samples % size else [])
    if samples > size and samples % size == 1:
        expected[-2:] = [size + 1]
    assert lengths == expected
    assert min(lengths) >= 2


@pytest.mark.parametrize(
    ("samples", "size", "lengths"),
    [(33, 32, [33]), (32, 32, [32]), (65, 32, [32, 33]), (66, 32, [32, 32, 2]), (1, 32, [1]), (0, 32, []), (3, 2, [3])],
)
def test_literal_lengths(samples: int, size: int, lengths: list[int]) -> None:
    assert minibatches(np.arange(samples), 1, size, rng()).rows.lengths.tolist() == lengths


def test_minibatches_of_one_when_they_are_asked_for() -> None:
    assert minibatches(np.arange(3), 1, 1, rng()).rows.lengths.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("samples", "lengths"), [(12, [5, 5]), (10, [5, 5]), (11, [5, 5]), (4, [4]), (1, [1]), (6, [5])]
)
def test_drop_last_keeps_whole_minibatches_only(samples: int, lengths: list[int]) -> None:
    assert minibatches(np.arange(samples), 1, 5, rng(), drop_last=True).rows.lengths.tolist() == lengths


def test_epochs_have_orders_of_their_own() -> None:
    schedule = minibatches(np.arange(50), 2, 50, rng())
    assert schedule.rows.row(0).tolist() != schedule.rows.row(1).tolist()


def test_the_order_is_the_generators_and_nothing_else() -> None:
    a, b, c = (minibatches(np.arange(20), 2, 6, rng(seed)).rows.values for seed in (1, 1, 2))
    assert np.array_equal(a, b) and not np.array_equal(a, c)


@given(st.lists(st.lists(st.integers(-5, 5), max_size=4).map(np.array), max_size=5))
def test_a_table_gives_its_rows_back(rows: list[np.ndarray]) -> None:
    table = Table.of(rows)
    assert [table.row(i).tolist() for i in range(len(rows))] == [row.tolist() for row in rows]


def test_a_table_of_rows_with_columns() -> None:
    table = Table.of([np.ones((2, 3), dtype=np.int64), np.full((1, 3), 7)])
    assert table.values.shape == (2, 2, 3)
    assert table.row(1).tolist() == [[7, 7, 7]]


def test_a_union_lies_on_the_device_of_the_last() -> None:
    here = Data(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), np.arange(2))
    there = Data(here.x.to("meta"), here.y.to("meta"), here.ids + 2)
    assert Data.union([here, there]).x.device.type == "meta"
    assert Data.union([here, here]).x.device.type == "cpu"
    assert Data.union([here, there]).ids.tolist() == [0, 1, 2, 3]
