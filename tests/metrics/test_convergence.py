"""Rounds to best, Delta and the other metrics of the per-round curves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everfed import metrics

curve = st.lists(st.floats(0, 1), min_size=1, max_size=20)


def test_first_round_wins_a_tie() -> None:
    assert metrics.rounds_to_best((0.1, 0.5, 0.5, 0.4)) == 2


def test_unmeasured_rounds_keep_their_place_but_cannot_win() -> None:
    assert metrics.rounds_to_best([None, 0.1, None, 0.5]) == 4
    assert metrics.rounds_to_best([None, None]) is None
    assert metrics.rounds_to_best([]) is None


@pytest.mark.parametrize(
    ("ours", "baseline", "cor_ours", "cor_baseline", "printed"),
    [
        (42.58, 35.88, 304, 315, 22.17),
        (42.58, 36.68, 304, 304, 16.09),
        (42.58, 37.96, 304, 312, 14.73),
        (37.96, 27.15, 798, 839, 44.70),
        (37.96, 35.84, 798, 870, 14.19),
        (40.56, 30.16, 906, 893, 33.03),
        (40.56, 34.98, 906, 880, 13.00),
        (72.09, 68.12, 225, 208, -2.35),
        (72.09, 69.71, 225, 217, -0.27),
        (55.28, 48.97, 174, 165, 7.43),
        (62.57, 55.41, 143, 132, 4.59),
        (62.57, 58.53, 143, 141, 5.48),
    ],
)
def test_delta_of_fedssi_table_4(ours, baseline, cor_ours, cor_baseline, printed) -> None:
    assert metrics.delta(ours, baseline, cor_ours, cor_baseline) == pytest.approx(printed, abs=0.0101)


def test_delta_of_a_method_with_itself_is_zero() -> None:
    assert metrics.delta(0.4, 0.4, 100, 100) == 0


def test_delta_needs_a_baseline() -> None:
    with pytest.raises(ValueError, match="positive accuracy and rounds"):
        metrics.delta(0.4, 0.0, 100, 100)


CURVES = [
    [[0.5, 0.0], [0.9, 0.0], [0.8, 0.0]],
    [[0.6, 0.2], [0.5, 0.9], [0.6, 0.8]],
]


def test_task_curve_averages_the_tasks_learned() -> None:
    assert metrics.task_curve(CURVES, 0) == [0.5, 0.9, 0.8]
    assert metrics.task_curve(CURVES, 1) == [pytest.approx(0.4), pytest.approx(0.7), pytest.approx(0.7)]


def test_rounds_to_best_over_tasks() -> None:
    assert metrics.rounds_to_best_per_task(CURVES) == [2, 2]
    assert metrics.rounds_to_best_sum(CURVES) == 4
    assert metrics.rounds_to_best_sum([CURVES[0], []]) is None


def test_learning_accuracy_with_best_rounds() -> None:
    assert metrics.learning_accuracy_best(CURVES) == pytest.approx(0.9)
    assert metrics.learning_accuracy_best([[[0.5], [None]], [[0.1, None], [0.1, 0.7]]]) == pytest.approx(0.6)
    assert metrics.learning_accuracy_best([[[None]]]) is None


def test_final_accuracy_over_the_last_rounds() -> None:
    assert metrics.acc_last_rounds(CURVES, rounds=2) == pytest.approx(0.7)
    assert metrics.acc_last_rounds(CURVES, rounds=1) == pytest.approx(0.7)
    assert metrics.acc_last_rounds(CURVES) is None  # fewer than ten rounds
    with pytest.raises(ValueError, match="rounds is 0"):
        metrics.acc_last_rounds(CURVES, rounds=0)


def test_percent_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"curves\[1\]\[0\]\[0\] is 42.58"):
        metrics.task_curve([[[0.1]], [[42.58, 0.1]]], 1)


@given(curve)
def test_best_round_holds_the_best_value_and_none_before_does(values: list[float]) -> None:
    best = metrics.rounds_to_best(values)
    assert values[best - 1] == max(values)
    assert all(value < max(values) for value in values[: best - 1])


@given(st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=5), min_size=1, max_size=4))
def test_best_rounds_are_no_worse_than_last_rounds(current: list[list[float]]) -> None:
    """`current[t]`: the accuracy on task t itself over its rounds; other tasks are not measured."""
    curves = [[[None] * t + [value] for value in values] for t, values in enumerate(current)]
    assert metrics.learning_accuracy_best(curves) >= metrics.learning_accuracy([rounds[-1] for rounds in curves])
