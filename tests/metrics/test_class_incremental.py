"""Class-incremental evaluation: our numbers, and what other codes print for the same matrix (never reported by us)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everfed.core.evaluate import class_mask, hits
from everfed.metrics.matrix import (
    acc_t,
    acc_t_micro,
    average_incremental_accuracy,
    bwt,
    forgetting_standard,
    over_time,
    summary,
)

TWO = [[0.80, None], [0.50, 0.70]]
THREE = [[0.60, 0.0, 0.0], [0.70, 0.40, 0.0], [0.30, 0.35, 0.50]]


# 1 -------------------------------------------------------------------------------------------------------------------
def test_two_tasks() -> None:
    assert over_time(acc_t, TWO) == pytest.approx([0.8, 0.6])
    assert average_incremental_accuracy(TWO) == pytest.approx(0.7)
    assert average_incremental_accuracy(TWO, [100, 100]) == pytest.approx(0.7)
    assert acc_t(TWO) == pytest.approx(0.6)
    assert forgetting_standard(TWO) == pytest.approx(0.3)
    assert bwt(TWO) == pytest.approx(-0.3)


def test_known_bug_what_mfcls_code_prints_mixes_fractions_and_percent() -> None:
    best = [0.80, 70.0]  # the first task's is stored as a fraction, the rest in percent
    printed = sum(m - a for m, a in zip(best, [50.0, 70.0], strict=True)) / 2
    assert printed == pytest.approx(-24.6)
    assert summary(TWO)["forgetting_mfcl_code"] == pytest.approx(0.15)  # its formula without the mixed units


# 2 -------------------------------------------------------------------------------------------------------------------
def lander_script(matrix: list[list[float]]) -> float:
    """The maximum over tasks instead of over time, over all tasks."""
    return sum(max(row) - last for row, last in zip(matrix, matrix[-1], strict=True)) / len(matrix)


def test_known_bug_landers_script_takes_the_maximum_along_the_wrong_axis() -> None:
    assert lander_script([[80, 0], [50, 70]]) == pytest.approx(15)
    assert lander_script([[100 * a for a in row] for row in THREE]) == pytest.approx(21.67, abs=0.005)
    assert forgetting_standard(THREE) == pytest.approx(0.225)


# 3, 4, 5 -------------------------------------------------------------------------------------------------------------
def test_unequal_tasks_are_weighed_by_their_samples() -> None:
    rows = [[0.9, None], [0.9, 0.5]]
    assert acc_t_micro(rows, [100, 300]) == pytest.approx(0.6)
    assert acc_t(rows) == pytest.approx(0.7)


def test_a_task_that_gets_better_counts_as_negative_forgetting() -> None:
    assert forgetting_standard([[0.5, None], [0.6, 0.7]]) == pytest.approx(-0.1)


def test_one_task_forgets_nothing_that_can_be_said() -> None:
    assert forgetting_standard([[0.5]]) is None
    assert bwt([[0.5]]) is None


# 6, 7, 8 -------------------------------------------------------------------------------------------------------------
@given(seed=st.integers(0, 1000))
def test_another_order_of_the_classes_changes_nothing(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    logits, labels = torch.randn(20, 6, generator=rng), torch.randint(0, 4, (20,), generator=rng)
    order = torch.randperm(6, generator=rng)
    seen = class_mask(range(4), 6)
    place = torch.argsort(order)
    assert torch.equal(hits(logits, labels, seen), hits(logits[:, order], place[labels], seen[order]))


def test_classes_never_seen_cannot_answer_however_large_their_logits() -> None:
    logits, labels = torch.randn(20, 6), torch.randint(0, 4, (20,))
    loud = logits.clone()
    loud[:, 4:] += 1e6
    seen = class_mask(range(4), 6)
    assert torch.equal(hits(logits, labels, seen), hits(loud, labels, seen))
    assert not hits(loud, labels).any()


def test_ten_answers_are_at_least_as_good_as_one() -> None:
    logits, labels = torch.randn(50, 20), torch.randint(0, 20, (50,))
    assert (hits(logits, labels, k=10) >= hits(logits, labels)).all()
    ten = class_mask(range(10), 20)
    assert hits(logits, labels % 10, ten, k=10).all()
