"""F1 and R^2 from sums over samples equal scikit-learn's; forgetting has its direction where less is better."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import f1_score, mean_squared_error, r2_score

from everfed.metrics import forgetting, over_time, summary
from everfed.metrics.matrix import oriented
from everfed.metrics.scores import METRICS, SCORES, plain_text
from everfed.streams.objectives import MultiLabel, Regression

LOGITS = torch.tensor([[2.0, -1.0], [1.0, 3.0], [-1.0, 0.0]])
LABELS = torch.tensor([[1, 1], [0, 1], [0, 0]], dtype=torch.uint8)


def test_f1_by_hand() -> None:
    """Label 0: one right, one false. Label 1: one right, one missed. A logit of 0 is a probability of 0.5, no label."""
    objective = MultiLabel(2)
    sums = objective.sums(LOGITS, LABELS).tolist()
    assert sums == [3, 1, 1, 1, 0, 0, 1]
    assert objective.value("f1", sums) == pytest.approx(2 / 3)
    assert objective.value("f1_micro", sums) == 4 / 6
    assert objective.value("f1", [0.0] * 7) is None and objective.value("f1", [5, 0, 0, 0, 0, 0, 0]) == 0


def test_binary_cross_entropy_by_hand() -> None:
    loss = MultiLabel(2).loss(torch.zeros(1, 2), torch.tensor([[0, 1]], dtype=torch.uint8))
    assert loss.item() == pytest.approx(math.log(2))


def test_a_model_that_diverged_predicts_nothing() -> None:
    several, numbers = MultiLabel(2), Regression((0.0,))
    assert several.value("f1", several.sums(torch.full((3, 2), math.nan), LABELS).tolist()) == 0
    sums = numbers.sums(torch.tensor([[math.nan], [1.0]]), torch.tensor([[1.0], [2.0]])).tolist()
    assert numbers.value("mse", sums) == math.inf and numbers.value("r2", sums) is None


def test_squared_errors_by_hand() -> None:
    """Errors 1, 0, 2: 5 / 3. Targets 1, 2, 3 with variance sum 2: 1 - 5 / 2."""
    objective = Regression((2.0,))
    outputs, y = torch.tensor([[2.0], [2.0], [5.0]]), torch.tensor([[1.0], [2.0], [3.0]])
    sums = objective.sums(outputs, y).tolist()
    assert sums == [3, 5, 0, 2]
    assert objective.value("mse", sums) == pytest.approx(5 / 3) and objective.loss(outputs, y).item() == pytest.approx(
        5 / 3
    )
    assert objective.value("r2", sums) == -1.5
    assert objective.value("r2", objective.sums(outputs, torch.ones(3, 1)).tolist()) is None  # a constant target
    assert objective.value("mse", [0.0] * 4) is None


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 40), st.integers(1, 4), st.integers(1, 3))
def test_sums_of_parts_give_the_scores_of_scikit_learn(seed: int, count: int, width: int, parts: int) -> None:
    rng = np.random.default_rng(seed)
    logits, labels = rng.normal(size=(count, width)), rng.integers(0, 2, (count, width))
    several = MultiLabel(width)
    sums = added(several, logits, labels.astype(np.uint8), parts)
    if width > 1:
        for name, average in (("f1", "macro"), ("f1_micro", "micro")):
            expected = f1_score(labels, logits > 0, average=average, zero_division=0)
            assert several.value(name, sums) == pytest.approx(expected, abs=1e-12)
    targets = 1000 + rng.normal(size=(count, width))
    outputs = targets + rng.normal(size=(count, width))
    numbers = Regression(tuple([1000.5] * width))
    sums = added(numbers, outputs, targets, parts)
    assert numbers.value("mse", sums) == pytest.approx(mean_squared_error(targets, outputs), rel=1e-9)
    assert numbers.value("r2", sums) == pytest.approx(r2_score(targets, outputs), rel=1e-6, abs=1e-6)


def added(objective: MultiLabel | Regression, outputs: np.ndarray, y: np.ndarray, parts: int) -> list[float]:
    """The sums of several parts of a test set, added up."""
    cut = zip(np.array_split(outputs, parts), np.array_split(y, parts), strict=True)
    found: list[float] = sum(objective.sums(torch.from_numpy(z), torch.from_numpy(t)) for z, t in cut).tolist()  # type: ignore[union-attr]
    return found


def test_outputs_of_another_shape_are_not_broadcast() -> None:
    with pytest.raises(ValueError, match=r"outputs of shape \(3,\) for targets of shape \(3, 1\)"):
        Regression((0.0,)).loss(torch.zeros(3), torch.zeros(3, 1))
    with pytest.raises(ValueError, match=r"outputs of shape \(3, 1\) for targets of shape \(3, 2\)"):
        MultiLabel(2).loss(torch.zeros(3, 1), LABELS)


# direction -----------------------------------------------------------------------------------------------------------
def test_errors_that_grow_are_forgetting() -> None:
    """Task 1: 4, then 5; task 2: 9 before it was learned, then 1. In every round of task 2 task 1 gets worse."""
    matrix = [[4.0, 9.0], [5.0, 1.0]]
    curves = [[[8.0], [4.0]], [[4.0, 2.0], [5.0, 1.0]]]
    found = summary(matrix, [10, 30], [10.0, 10.0], curves, score=SCORES["mse"])
    assert (found["acc"], found["acc_micro"], found["learning_accuracy"]) == (3.0, 2.0, 2.5)
    assert (found["forgetting"], found["forgetting_clipped"], found["bwt"], found["fwt"]) == (1.0, 1.0, -1.0, 1.0)
    assert found["acc_avg_incremental"] == 3.5
    assert (found["rounds_to_best"], found["learning_accuracy_best"]) == (2 + 1, 2.5)
    assert over_time(forgetting, oriented(matrix, SCORES["mse"])) == [None, 1.0]


def test_every_kind_of_forgetting_is_above_zero_where_errors_grew() -> None:
    found = summary([[4.0], [5.0, 1.0]], score=SCORES["mse"])
    kinds = {key: value for key, value in found.items() if key.startswith("forgetting")}
    assert kinds.pop("forgetting_mfcl_code") == 0.5 and kinds and set(kinds.values()) == {1.0}


def test_errors_that_shrink_are_none() -> None:
    found = summary([[4.0], [1.0, 2.0]], score=SCORES["mse"])
    assert (found["forgetting"], found["forgetting_clipped"], found["bwt"]) == (-3.0, 0.0, 3.0)


def test_scores_below_zero_and_infinite_errors() -> None:
    found = summary([[0.5], [-1.5, 0.25]], score=SCORES["r2"])
    assert (found["acc"], found["forgetting"], found["bwt"]) == (-0.625, 2.0, -2.0)
    found = summary([[math.inf], [math.inf, 2.0]], score=SCORES["mse"])
    assert found["acc"] == math.inf and found["forgetting"] is None
    with pytest.raises(ValueError, match=r"accuracy_matrix\[0\]\[0\] is 85.0; allowed: an accuracy in \[0, 1\]"):
        summary([[85.0]], score=SCORES["f1"])


def test_units_and_directions_follow_the_score() -> None:
    for name, kind, better in (
        ("f1", "percent", 1),
        ("accuracy", "percent", 1),
        ("mse", "plain", -1),
        ("r2", "plain", 1),
    ):
        score = SCORES[name]
        assert [METRICS["acc"].kind_of(score), METRICS["acc"].better_of(score)] == [kind, better]
        assert [METRICS["forgetting"].kind_of(score), METRICS["forgetting"].better_of(score)] == [kind, -1]
        assert METRICS["bwt"].better_of(score) == 1
    assert METRICS["rounds_to_best"].kind_of(SCORES["f1"]) == "plain"
    assert [plain_text(value) for value in (31.5, 0.0, 0.00123, -0.25)] == ["31.50", "0.00", "0.00123", "-0.25"]
