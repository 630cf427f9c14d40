"""Replies become one value: exact for integers, hardly dependent on grouping, absent replies left out."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everfed.core.phase import Collect, Mean, Reducer, Reduction, Sum
from everfed.errors import CompositionError

vectors = st.lists(st.floats(-1e3, 1e3, width=32), min_size=3, max_size=3).map(torch.tensor)


def reduced(reducer: Reducer, *replies: tuple[object, float]) -> object:
    under_way = reducer.start()
    for client, (value, weight) in enumerate(replies):
        under_way.add(client, value, weight)
    return under_way.result()


def test_mean_and_sum_of_literal_numbers() -> None:
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])
    assert torch.equal(reduced(Mean(), (a, 1.0), (b, 3.0)), torch.tensor([2.0, 4.0]))
    assert torch.equal(reduced(Mean(weighted=True), (a, 1.0), (b, 3.0)), torch.tensor([2.5, 5.0]))
    assert torch.equal(reduced(Sum(), (a, 1.0), (b, 3.0)), torch.tensor([4.0, 8.0]))
    assert reduced(Collect(), (a, 1.0), (b, 3.0)) == {0: a, 1: b}


def test_plain_numbers() -> None:
    assert reduced(Mean(), (1.0, 1.0), (2.0, 1.0)) == 1.5
    assert reduced(Mean(weighted=True), (1.0, 3.0), (5.0, 1.0)) == 2.0
    assert reduced(Sum(), (1, 1.0), (2, 9.0)) == 3.0
    assert reduced(Sum(), (0.0, 1.0)) == 0.0


@pytest.mark.parametrize("reducer", [Mean(), Mean(weighted=True), Sum(), Collect()])
def test_nobody_replied(reducer: Reducer) -> None:
    assert reducer.start().result() is None


@given(st.lists(vectors, min_size=1, max_size=8))
def test_the_mean_of_float32_is_right_to_the_last_bit(values: list[torch.Tensor]) -> None:
    exact = [math.fsum(column) / len(values) for column in zip(*(v.tolist() for v in values), strict=True)]
    result = reduced(Mean(), *((v, 1.0) for v in values))
    assert torch.equal(result, torch.tensor(exact, dtype=torch.float64).float())


@given(vectors)
def test_one_reply_comes_back_exactly(value: torch.Tensor) -> None:
    assert torch.equal(reduced(Mean(), (value, 7.0)), value)
    assert torch.equal(reduced(Sum(), (value, 7.0)), value)


@given(vectors, st.integers(1, 7))
def test_equal_replies_come_back_exactly(value: torch.Tensor, count: int) -> None:
    assert torch.equal(reduced(Mean(), *[(value, 1.0)] * count), value)


@given(st.lists(vectors, min_size=1, max_size=6), st.integers(1, 50))
def test_equal_weights_are_no_weights(values: list[torch.Tensor], weight: int) -> None:
    weighted = reduced(Mean(weighted=True), *((v, float(weight)) for v in values))
    assert torch.allclose(weighted, reduced(Mean(), *((v, 1.0) for v in values)), rtol=1e-6, atol=1e-6)


def test_integers_stay_integers() -> None:
    big = torch.tensor([2**40 + 1, 3])
    total = reduced(Sum(), (big, 1.0), (big, 1.0))
    assert total.dtype == torch.int64 and total.tolist() == [2**41 + 2, 6]
    mean = reduced(Mean(), (torch.tensor([1]), 1.0), (torch.tensor([2]), 1.0), (torch.tensor([2]), 1.0))
    assert mean.dtype == torch.int64 and mean.tolist() == [2]


def test_a_weightless_reply_changes_nothing() -> None:
    a, b = torch.tensor([1.0]), torch.tensor([100.0])
    assert reduced(Mean(weighted=True), (a, 2.0), (b, 0.0)).tolist() == [1.0]
    assert reduced(Mean(weighted=True), (b, 0.0)) is None


def test_collected_replies_of_several_processes_are_in_client_order() -> None:
    """Two ranks with the even and the odd clients: the order in which one process would have collected them."""
    ranks = [Collect().start() for _ in range(2)]
    for client in (0, 2, 10):
        ranks[0].add(client, f"of {client}", 1.0)
    for client in (1, 3):
        ranks[1].add(client, f"of {client}", 1.0)
    exported = [rank.export() for rank in ranks]
    for rank in ranks:
        rank.merge(exported)
        assert list(rank.result().items()) == [(client, f"of {client}") for client in (0, 1, 2, 3, 10)]


def test_values_are_not_changed_by_reducing_them() -> None:
    value = torch.ones(2, dtype=torch.float64)
    under_way = Sum().start()
    for client in range(3):
        under_way.add(client, value, 1.0)
    assert under_way.result().tolist() == [3.0, 3.0]
    assert value.tolist() == [1.0, 1.0]


def test_what_may_run_under_secure_aggregation() -> None:
    assert Mean().secure and Sum().secure and not Collect().secure


def test_a_phase_reduces_by_part_and_key() -> None:
    reduction = Reduction({"a": {"x": Mean(), "never": Sum()}, "b": {"y": Collect()}})
    reduction.add(0, {"a": {"x": torch.tensor([1.0])}, "b": {"y": 5}}, 1.0)
    reduction.add(2, {"a": {"x": None}}, 1.0)
    reduction.add(3, {"a": {"x": torch.tensor([4.0])}, "b": {"y": 6}}, 1.0)
    result = reduction.result()
    assert result["a"]["x"].tolist() == [2.5]
    assert result["a"]["never"] is None
    assert result["b"]["y"] == {0: 5, 3: 6}


@pytest.mark.parametrize("reply", [{"a": {"z": 1.0}}, {"c": {"x": 1.0}}])
def test_a_reply_without_a_reducer_is_an_error(reply: dict[str, dict[str, float]]) -> None:
    name = next(iter(next(iter(reply.values()))))
    said = rf"replied '{name}' and declares no reducer .* reducers\(\), .* Phase\(reduce=\{{'{name}': Mean\(\)\}}"
    with pytest.raises(CompositionError, match=said):
        Reduction({"a": {"x": Mean()}}).add(0, reply, 1.0)
