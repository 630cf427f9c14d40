"""Ours against the paper's: the acceptance rule, and paired differences."""

from __future__ import annotations

import pytest

from everfed.reproduction.judging import NOT_REPRODUCED, REPRODUCED, SCALED, Judged, differences, judge
from everfed.reproduction.planning import Cell, Experiment
from everfed.reproduction.tables import Metric, find
from tests.reproduction.made import accuracy, cell, sample, target

TABLE = find("fedgp/table1")


def judged(cells: list[Cell], scaled: bool = False, **accuracies: list[float]) -> list[Judged]:
    """Cells with the accuracies of their methods' runs, seed by seed."""
    runs = {
        Experiment("recipe", method.replace("_", "+")): {seed: accuracy(value) for seed, value in enumerate(values)}
        for method, values in accuracies.items()
    }
    return judge(cells, runs, scaled)


@pytest.mark.parametrize(
    ("ours", "paper", "std", "verdict"),
    [
        ([0.47], 50.0, None, REPRODUCED),  # 3 points are allowed to everyone
        ([0.4699], 50.0, None, NOT_REPRODUCED),
        ([0.40, 0.44], 50.0, 2.0, REPRODUCED),  # 8 points off; 2 (2 + 2) = 8 allowed
        ([0.40, 0.4398], 50.0, 2.0, NOT_REPRODUCED),
        ([0.60], 50.0, 5.0, REPRODUCED),
    ],
)
def test_a_cell_is_judged_by_the_acceptance_rule(
    ours: list[float], paper: float, std: float | None, verdict: str
) -> None:
    (one,) = judged([cell(value=paper, std=std)], FedAvg=ours)
    assert one.verdict == verdict
    assert one.difference == pytest.approx(100 * sum(ours) / len(ours) - paper)


def test_deviation_is_that_of_the_population() -> None:
    (one,) = judged([cell()], FedAvg=[0.4, 0.6])
    assert one.spread is not None
    assert (one.spread.mean, one.spread.deviation, one.spread.count) == (50.0, pytest.approx(10.0), 2)


def test_what_is_not_judged_says_why() -> None:
    cells = [
        cell(missing="method x is not in everfed"),
        cell(not_judged="the numbers repeat Table 2"),
        cell(value=None),
        cell(method="DER"),
    ]
    found = [one.verdict for one in judged(cells, FedAvg=[0.5])]
    assert found[0] == "missing: method x is not in everfed"
    assert found[1:] == ["the numbers repeat Table 2", "no number is printed", "not measured"]
    assert judged([cell()], scaled=True, FedAvg=[0.5])[0].verdict == SCALED


def test_a_run_on_part_of_the_data_is_not_comparable() -> None:
    facts = {"dataset": "cifar10", "samples": {"train": 10_000, "validation": 0}}
    run = {Experiment("recipe", "FedAvg"): {0: sample([[0.5]], stream=facts)}}
    (one,) = judge([cell()], run, scaled=False)
    assert one.verdict == "not comparable: on 10,000 of the 50,000 published training samples"


def test_a_printed_ratio_is_to_the_printed_baseline() -> None:
    """FedSSI, Table 5: 4.46 hours beside 3.13 is 1.42."""
    hours = Metric(measure="seconds", unit="ratio", against="FedAvg")
    base = Experiment("recipe", "FedAvg")
    cells = [
        cell(method, measured=hours, against=base, target=target(value, method=method), not_judged="a ratio")
        for method, value in (("FedAvg", 3.13), ("DER", 4.46))
    ]
    seconds = {"FedAvg": 100.0, "DER": 130.0}
    runs = {Experiment("recipe", m): {0: sample(cost={"seconds": s, "rounds": 1})} for m, s in seconds.items()}
    ours, theirs = zip(*((one.spread.mean, one.paper) for one in judge(cells, runs, False)), strict=True)
    assert ours == (1.0, 1.3) and theirs == pytest.approx((1.0, 1.4249), abs=1e-4)


def test_paired_differences_have_intervals_over_seeds() -> None:
    """Differences 2, 4, 6: mean 4, sample deviation 2, t(0.975, 2) = 4.3027, so 4 ± 4.9683."""
    cells = [cell("DER", 40.0), cell("DER+FedGP", 50.0)]
    (found,) = differences(TABLE, judged(cells, DER=[0.40, 0.41, 0.42], DER_FedGP=[0.42, 0.45, 0.48]))
    assert (found.method, found.baseline) == ("DER+FedGP", "DER")
    assert found.ours.mean == pytest.approx(4.0)
    assert (found.ours.low, found.ours.high) == (pytest.approx(-0.9683, abs=1e-4), pytest.approx(8.9683, abs=1e-4))
    assert found.paper == 10.0 and found.agrees is True


@pytest.mark.parametrize(
    ("paper", "ours", "agrees"), [(45.0, 0.39, False), (45.0, 0.41, True), (41.9, 0.39, None), (35.0, 0.39, True)]
)
def test_signs_are_judged_where_the_paper_claims_more_than_two_points(
    paper: float, ours: float, agrees: bool | None
) -> None:
    cells = [cell("DER", 40.0), cell("DER+FedGP", paper)]
    (found,) = differences(TABLE, judged(cells, DER=[0.40], DER_FedGP=[ours]))
    assert found.agrees is agrees
    assert found.ours.low is None


def test_only_common_seeds_are_paired_and_scaled_signs_are_not_judged() -> None:
    cells = [cell("FedAvg", 40.0), cell("DER", 60.0)]
    found = judged(cells, scaled=True, FedAvg=[0.4, 0.5], DER=[0.6])
    (one,) = differences(TABLE, found)
    assert one.ours.count == 1 and one.ours.mean == pytest.approx(20.0) and one.agrees is None


def test_other_columns_are_not_paired() -> None:
    elsewhere = cell("DER", 60.0, dataset="CIFAR")
    assert differences(TABLE, judged([cell("FedAvg"), elsewhere], FedAvg=[0.4], DER=[0.6])) == []
