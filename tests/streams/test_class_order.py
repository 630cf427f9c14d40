"""A larger first task, and a class order of one's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everfed.core.stream import Stream
from everfed.streams import OptionError, from_arrays

CLASSES = 10


def stream(scenario: str = "class-incremental", **options: Any) -> Stream:
    y = np.arange(120) % CLASSES
    x = y[:, None].repeat(3, 1).astype(float)
    return from_arrays(x[:80], y[:80], x[80:], y[80:], scenario=scenario, clients=2, rounds_per_task=1, **options)


@pytest.mark.parametrize("scenario", ["class-incremental", "task-incremental"])
def test_half_of_the_classes_first(scenario: str) -> None:
    made = stream(scenario, tasks=3, first_task=5)
    assert [made.labels(task) for task in range(3)] == [(0, 1, 2, 3, 4), (5, 6, 7), (8, 9)]
    assert set(made.data(0, 0).y.tolist()) | set(made.data(1, 0).y.tolist()) == {0, 1, 2, 3, 4}
    assert made.describe()["first_task"] == 5


def test_an_order_of_one_s_own() -> None:
    made = stream(tasks=5, class_order=[9, 1, 8, 2, 7, 3, 6, 4, 5, 0])
    assert [made.labels(task) for task in range(5)] == [(1, 9), (2, 8), (3, 7), (4, 6), (0, 5)]
    both = stream(tasks=2, class_order=list(range(9, -1, -1)), first_task=8)
    assert both.labels(1) == (0, 1)


@settings(deadline=None, max_examples=20)
@given(order=st.permutations(range(CLASSES)), first=st.integers(1, 7), tasks=st.integers(2, 4))
def test_tasks_share_all_classes(order: list[int], first: int, tasks: int) -> None:
    made = stream(tasks=tasks, class_order=order, first_task=first)
    assert sorted(label for task in range(tasks) for label in made.labels(task)) == list(range(CLASSES))
    assert made.labels(0) == tuple(sorted(order[:first]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"class_order": [0, 1]}, "every class from 0 to 9 once"),
        ({"class_order": [0] * 10}, "every class from 0 to 9 once"),
        ({"class_order": "mine"}, "natural, shuffled"),
        ({"first_task": 0}, "at least 1"),
        ({"first_task": 9, "tasks": 3}, "leave 1 for the 2 other tasks"),
        ({"first_task": 5, "tasks": 1}, "leave 5 for the 0 other tasks"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        stream(**{"tasks": 2, **options})
