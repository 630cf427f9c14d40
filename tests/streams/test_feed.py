"""A user's own periods, as a client reads them: in order, once each, checked, with a test share held out."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from everfed.errors import DataError
from everfed.streams.own import Feed, Period

CALLS: list[int] = []


def made(client: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Three periods of ten 4 x 4 images; period p has classes 0 ... p + 1."""
    CALLS.append(client)
    rng = np.random.default_rng(client)
    for period in range(3):
        yield rng.integers(0, 255, (10, 4, 4), dtype=np.uint8), np.arange(10) % (period + 2)


def test_periods_come_one_after_the_other_and_end() -> None:
    feed = Feed(made, 1, classes=4)
    first, last = feed.period(0), feed.period(2)
    assert first is not None
    assert last is not None
    assert first.train.x.shape == (8, 1, 4, 4)
    assert first.train.x.dtype == torch.uint8
    assert len(first.test) == 2
    assert set(last.train.y.tolist()) <= {0, 1, 2, 3}
    assert feed.period(3) is None
    assert feed.test(3) is None


def test_nothing_is_read_before_it_is_asked_for() -> None:
    read: list[int] = []

    def endless(client: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for period in range(10**9):
            read.append(period)
            yield np.zeros((2, 3), np.float32), np.zeros(2, np.int64)

    Feed(endless, 0, 1).period(1)
    assert read == [0, 1]


def test_ids_are_unique_over_the_clients_life_and_tests_are_no_training_samples() -> None:
    feed = Feed(made, 0, classes=4)
    arrived = [feed.period(index) for index in range(3)]
    ids = np.concatenate([part.ids for one in arrived if one is not None for part in (one.train, one.test)])
    assert len(np.unique(ids)) == 30


def test_a_sample_is_known_by_the_period_that_brought_it() -> None:
    assert Feed(made, 0, classes=4).periods_of(np.array([0, 9, 10, 29])).tolist() == [0, 0, 1, 2]
    assert Feed(made, 0, classes=4).periods_of(np.zeros(0, np.int64)).tolist() == []


def test_what_is_held_out_is_drawn_anew_in_every_period() -> None:
    periods = [(np.arange(40, dtype=np.uint8).reshape(40, 1, 1), np.zeros(40, dtype=np.int64))] * 2
    feed = Feed(lambda client: periods, 0, classes=1)
    first, second = (set(feed.test(index).x.flatten().tolist()) for index in (0, 1))
    assert len(first) == len(second) == 8 and first != second


def test_an_earlier_period_is_read_again_and_is_the_same() -> None:
    CALLS.clear()
    feed = Feed(made, 5, classes=4)
    first = feed.period(0)
    feed.period(2)
    again = feed.period(0)
    assert CALLS == [5, 5]
    assert first is not None
    assert again is not None
    assert torch.equal(first.train.x, again.train.x)
    assert np.array_equal(first.train.ids, again.train.ids)
    assert torch.equal(first.test.x, again.test.x)
    assert len(feed.held_out) == 3


def test_tests_of_its_own_are_used_and_nothing_is_held_out() -> None:
    x, y = np.zeros((4, 2), np.float32), np.array([0, 1, 0, 1])
    arrived = Feed(lambda client: [Period(x, y, test=(x[:1], y[:1]))], 0, 2).period(0)
    assert arrived is not None
    assert (len(arrived.train), len(arrived.test)) == (4, 1)


@pytest.mark.parametrize(
    ("periods", "message"),
    [
        (
            [(np.zeros((1, 2)), [7])],
            "client 3, period 1: class 7 does not fit the head, which has classes 0 to 3",
        ),
        ([(np.zeros((1, 2)), [-1])], "client 3, period 1: class -1 does not fit"),
        ([(np.zeros((2, 2)), [1])], "2 samples but 1 labels"),
        (
            [(np.zeros((1, 2)), [0]), (np.zeros((1, 3)), [0])],
            r"period 2: samples are float32 \(3,\), those of the stream",
        ),
        ([(np.zeros((1, 2)), [0.5])], "labels must be one whole number per sample"),
        ([np.zeros((1, 2))], r"expected a Period or a pair \(x, y\), got ndarray"),
    ],
)
def test_what_does_not_fit_is_refused_with_client_and_period(periods: list, message: str) -> None:
    feed = Feed(lambda client: periods, 3, classes=4)
    with pytest.raises(DataError, match=message):
        feed.period(len(periods) - 1)
