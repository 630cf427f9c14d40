"""The acceptance rule, on cells of FedGP's Table 1 (per cent)."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everfed import metrics

points = st.floats(0, 100)
stds = st.none() | st.floats(0, 10)

PAPER = {"FedAvg": 17.44, "FedAvg+FedGP": 18.02, "DER": 18.44, "DER+FedGP": 30.94}


@pytest.mark.parametrize(
    ("std_ours", "std_paper", "tolerance"), [(0.1, 0.2, 3.0), (1.0, 3.1, 8.2), (None, 2.0, 4.0), (None, None, 3.0)]
)
def test_tolerance(std_ours, std_paper, tolerance) -> None:
    assert metrics.cell_tolerance(std_ours, std_paper) == pytest.approx(tolerance)


def test_cell() -> None:
    assert metrics.cell_reproduced(76.0, 68.02, std_ours=1.0, std_paper=3.1)
    assert not metrics.cell_reproduced(76.3, 68.02, std_ours=1.0, std_paper=3.1)


def test_the_border_counts_whatever_the_rounding() -> None:
    assert 8.05 - 5.05 > 3  # in binary
    assert metrics.cell_reproduced(8.05, 5.05)
    assert metrics.cell_reproduced(5.05, 8.05)
    assert not metrics.cell_reproduced(8.06, 5.05)


@given(points, points, stds, stds)
def test_both_sides_are_alike(ours, paper, std_ours, std_paper) -> None:
    forth = metrics.cell_reproduced(ours, paper, std_ours, std_paper)
    assert forth == metrics.cell_reproduced(paper, ours, std_paper, std_ours)
    assert metrics.cell_reproduced(paper, paper, std_ours, std_paper)


@pytest.mark.parametrize("std", [-1.0, math.nan])
def test_impossible_deviation(std: float) -> None:
    with pytest.raises(ValueError, match="std_paper is .*; allowed: 0 or more, or None"):
        metrics.cell_tolerance(1.0, std)


def test_only_differences_above_two_points_must_agree() -> None:
    ours = {"FedAvg": 20.0, "FedAvg+FedGP": 15.0, "DER": 10.0, "DER+FedGP": 20.1}
    assert metrics.sign_disagreements(ours, PAPER, "FedAvg") == ()
    assert metrics.experiment_reproduced(ours, PAPER, "FedAvg")


@pytest.mark.parametrize("value", [20.0, 19.9])
def test_a_claim_that_fails_is_named(value: float) -> None:
    ours = {"FedAvg": 20.0, "FedAvg+FedGP": 30.0, "DER": 30.0, "DER+FedGP": value}
    assert metrics.sign_disagreements(ours, PAPER, "FedAvg") == ("DER+FedGP",)
    assert not metrics.experiment_reproduced(ours, PAPER, "FedAvg")


def test_two_points_exactly_is_not_larger_than_two() -> None:
    assert 8.05 - 6.05 > 2  # in binary
    assert metrics.experiment_reproduced({"a": 1.0, "b": 0.0}, {"a": 6.05, "b": 8.05}, "a")
    assert not metrics.experiment_reproduced({"a": 1.0, "b": 0.0}, {"a": 6.05, "b": 8.06}, "a")


@given(st.dictionaries(st.sampled_from("abcdef"), points, min_size=1))
def test_the_paper_reproduces_itself(paper: dict[str, float]) -> None:
    assert all(metrics.experiment_reproduced(paper, paper, baseline) for baseline in paper)


def test_incomplete_experiments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"only on one: \['DER', 'DER\+FedGP', 'FedAvg\+FedGP'\]"):
        metrics.experiment_reproduced({"FedAvg": 20.0}, PAPER, "FedAvg")
    with pytest.raises(ValueError, match="baseline 'fedavg' is not among the methods"):
        metrics.experiment_reproduced(PAPER, PAPER, "fedavg")


@pytest.mark.parametrize(
    ("cell", "compared"),
    [
        (("FedGP", "T1", "Acc_T"), True),
        (("FedSSI", "T7 bandwidth", "A(f)"), True),
        (("FedSSI", "T7 scalability", "A(f)"), False),
        (("STAMP", "T1", "AF"), True),
        (("STAMP", "F2", "Accuracy"), False),
        (("STAMP", "T1", "sec/round"), False),
        (("MFCL", "T1", "client s/round T>=1"), False),
        (("FedSSI", "T5", "hours"), False),
        (("STAMP", "T1", "C->S"), True),
    ],
)
def test_cells_that_are_never_compared(cell: tuple[str, str, str], compared: bool) -> None:
    assert (metrics.never_compared(*cell) is None) == compared
