"""Ours against the paper's: levels, effects over the baseline, and what is not judged."""

from __future__ import annotations

from typing import Any

import pytest

from everfed.experiments.papers.judging import Judged, judge
from everfed.experiments.papers.measures import Sample
from everfed.experiments.papers.planning import Experiment, TableCell
from everfed.experiments.papers.tables import TableMetric
from tests.papers.made import STREAM, accuracy, cell, sample, target


def judged(cells: list[TableCell], **accuracies: list[float]) -> list[Judged]:
    """Cells with the accuracies of their methods' runs, seed by seed."""
    runs = {
        Experiment("recipe", method.replace("_", "+")): {seed: accuracy(value) for seed, value in enumerate(values)}
        for method, values in accuracies.items()
    }
    return judge(cells, runs)


def pair(paper: float = 50.0, baseline: float = 40.0, std: float | None = None) -> list[TableCell]:
    """DER, and DER+FedGP as it is printed."""
    improved = cell("DER+FedGP", paper, std, baseline="DER", claimed=paper - baseline)
    return [cell("DER", baseline), improved]


@pytest.mark.parametrize(
    ("ours", "paper", "std", "level"),
    [
        # sample deviations of 1 over three seeds and five: an error of sqrt(1/3 + 1/5) = 0.73, 4.3 degrees of freedom
        ([0.49, 0.50, 0.51], 50.0, 0.8944, "equivalent"),
        ([0.49, 0.50, 0.51], 51.3, 0.8944, "equivalent"),
        ([0.49, 0.50, 0.51], 51.7, 0.8944, "unresolved"),
        ([0.49, 0.50, 0.51], 52.2, 0.8944, "differs"),
        ([0.40, 0.50, 0.60], 60.0, 5.0, "unresolved"),  # far away, but seeds differ as much
    ],
)
def test_a_level_is_that_of_both_spreads(ours: list[float], paper: float, std: float, level: str) -> None:
    (one,) = judged([cell(value=paper, std=std)], FedAvg=ours)
    assert one.level == one.verdict == level and one.why == ""
    assert one.difference == pytest.approx(100 * sum(ours) / len(ours) - paper)


@pytest.mark.parametrize(
    ("ours", "changes", "why"),
    [
        ([0.5], {}, "1 of at least 3 seeds"),
        ([0.5, 0.51], {}, "2 of at least 3 seeds"),
        ([0.5, 0.51, 0.52], {"std": None}, "the paper prints no deviation over seeds"),
        ([0.5, 0.51, 0.52], {"over_seeds": False}, "the paper prints no deviation over seeds"),
        ([0.5, 0.51, 0.52], {"seeds": 1}, "the paper prints no deviation over seeds"),
    ],
)
def test_a_level_needs_three_seeds_and_a_printed_deviation(
    ours: list[float], changes: dict[str, Any], why: str
) -> None:
    (one,) = judged([cell(**{"std": 1.0, **changes})], FedAvg=ours)
    assert (one.level, one.verdict) == ("", f"not judged: {why}")


def test_levels_are_corrected_over_the_cells_of_the_table() -> None:
    """2.2 points are a difference for one cell, and none where another ten are tested beside it."""
    alone = judged([cell(value=52.2, std=0.8944)], FedAvg=[0.49, 0.50, 0.51])
    beside = [cell(f"M{n}", 50.0, 0.8944) for n in range(10)]
    others = {f"M{n}": [0.49, 0.50, 0.51] for n in range(10)}
    (first, *_) = judged([cell(value=52.2, std=0.8944), *beside], FedAvg=[0.49, 0.50, 0.51], **others)
    assert alone[0].level == "differs" and first.level == "unresolved"


def test_deviation_is_that_of_the_population() -> None:
    (one,) = judged([cell()], FedAvg=[0.4, 0.6])
    assert one.spread is not None
    assert (one.spread.mean, one.spread.deviation, one.spread.count) == (50.0, pytest.approx(10.0), 2)


def test_what_is_not_judged_says_why() -> None:
    cells = [
        cell(missing="method x is not in everfed"),
        cell(not_judged="the numbers repeat Table 2"),
        cell(value=None),
        cell(stated=None),
        cell(method="DER"),
    ]
    found = [one.verdict for one in judged(cells, FedAvg=[0.5])]
    assert found == [
        "missing: method x is not in everfed",
        "not judged: the numbers repeat Table 2",
        "not judged: no number is printed",
        "not judged: tables.toml holds nothing that the paper states about this experiment",
        "not measured",
    ]


def test_a_number_in_the_band_is_not_judged_on_part_of_the_data() -> None:
    """50.0 as printed, but on a tenth of MNIST in one of two seeds."""
    less = {**STREAM, "samples": {"train": 6_000, "validation": 0, "test": 10_000}}
    runs = {Experiment("recipe", "FedAvg"): {0: accuracy(0.5), 1: sample([[0.5]], stream=less)}}
    (one,) = judge([cell()], runs)
    assert one.difference == 0.0 and one.level == ""
    assert one.verdict == "not judged: 6,000 of the 60,000 published training samples"


def test_runs_whose_samples_are_counted_by_client_and_period_have_numbers() -> None:
    """Coordinated replay: the stream reports a table of samples, and no number is printed."""
    facts = {"dataset": "chitchat", "clients": 2, "samples": {"train": [[3, 4]], "test": [[1, 1]]}}
    (one,) = judge([cell(value=None)], {Experiment("recipe", "FedAvg"): {0: sample([[0.5]], stream=facts)}})
    assert one.spread is not None and one.verdict == "not judged: no number is printed"


def test_a_printed_ratio_is_to_the_printed_baseline() -> None:
    """FedSSI, Table 5: 4.46 hours beside 3.13 is 1.42."""
    hours = TableMetric(measure="seconds", unit="ratio", against="FedAvg")
    base = Experiment("recipe", "FedAvg")
    cells = [
        cell(method, measured=hours, against=base, target=target(value, method=method), not_judged="a ratio")
        for method, value in (("FedAvg", 3.13), ("DER", 4.46))
    ]
    seconds = {"FedAvg": 100.0, "DER": 130.0}
    runs = {Experiment("recipe", m): {0: sample(cost={"seconds": s, "rounds": 1})} for m, s in seconds.items()}
    ours, theirs = zip(*((one.spread.mean, one.paper) for one in judge(cells, runs)), strict=True)
    assert ours == (1.0, 1.3) and theirs == pytest.approx((1.0, 1.4249), abs=1e-4)


def test_paired_differences_have_intervals_over_seeds() -> None:
    """Differences 2, 4, 6: mean 4, sample deviation 2, t(0.975, 2) = 4.3027, so 4 ± 4.9683."""
    _, found = judged(pair(), DER=[0.40, 0.41, 0.42], DER_FedGP=[0.42, 0.45, 0.48])
    assert found.effect is not None and found.effect.baseline == "DER"
    ours = found.effect.ours
    assert ours.mean == pytest.approx(4.0)
    assert (ours.low, ours.high) == (pytest.approx(-0.9683, abs=1e-4), pytest.approx(8.9683, abs=1e-4))
    assert (found.effect.paper, found.effect.verdict, found.effect.covers) == (10.0, "unresolved", False)


@pytest.mark.parametrize(
    ("paper", "ours", "verdict", "covers"),
    [
        (45.0, (0.43, 0.44, 0.45), "confirmed", True),  # 4 [1.5, 6.5], the paper 5
        (50.0, (0.43, 0.44, 0.45), "confirmed", False),
        (35.0, (0.43, 0.44, 0.45), "contradicted", False),
        (45.0, (0.40, 0.44, 0.48), "unresolved", True),
        (41.0, (0.43, 0.44, 0.45), "not in the paper", False),
        (41.0, (0.40, 0.41, 0.42), "none claimed", True),
    ],
)
def test_an_effect_has_a_verdict_of_its_own(paper: float, ours: tuple[float, ...], verdict: str, covers: bool) -> None:
    _, found = judged(pair(paper), DER=[0.40, 0.40, 0.40], DER_FedGP=list(ours))
    assert found.effect is not None and (found.effect.verdict, found.effect.covers) == (verdict, covers)


def test_an_effect_needs_three_common_seeds_of_the_papers_own_experiment() -> None:
    ours = {seed: accuracy(0.5 + seed / 100) for seed in range(3)}
    plain = {seed: accuracy(0.4) for seed in range(3)}
    scaled = sample([[0.4]], stream={**STREAM, "scale": 0.1})
    for baseline, why in (
        ({0: plain[0], 1: plain[1]}, "2 of at least 3 seeds that DER has, too"),
        ({**plain, 2: scaled}, "DER: --scale 0.1"),
        ({**plain, 2: diverging()}, "DER diverged in 2"),
    ):
        runs = {Experiment("recipe", "DER+FedGP"): ours, Experiment("recipe", "DER"): baseline}
        effect = judge(pair(), runs)[1].effect
        assert effect is not None and (effect.verdict, effect.why) == ("", why)


def diverging() -> Sample:
    """A run of the paper's experiment that ended without a number."""
    return sample(diverged="the loss of client 0 is not finite", metrics={}, accuracy_matrix=[], cost={})


def test_a_run_that_diverged_is_a_result() -> None:
    """A cell whose runs diverged, all or some, keeps its place and is no mean over the others."""
    runs = {0: accuracy(0.5), 1: diverging(), 2: accuracy(0.5), 3: accuracy(0.5)}
    (some,) = judge([cell(std=1.0)], {Experiment("recipe", "FedAvg"): runs})
    assert (some.level, some.verdict, some.diverged) == ("diverged", "diverged in 1", (1,))
    (every,) = judge([cell(std=1.0)], {Experiment("recipe", "FedAvg"): {0: diverging()}})
    assert every.measured and (every.spread, every.level) == (None, "diverged")
    elsewhere = sample(diverged="so", stream={**STREAM, "scale": 0.1})
    (other,) = judge([cell(std=1.0)], {Experiment("recipe", "FedAvg"): {0: elsewhere}})
    assert (other.level, other.verdict) == ("", "not judged: --scale 0.1; diverged in 0")


def test_only_common_seeds_are_paired() -> None:
    _, found = judged(pair(), DER=[0.4, 0.5], DER_FedGP=[0.6])
    assert found.effect is not None and found.effect.why == "1 of at least 3 seeds that DER has, too"
    assert found.effect.ours.count == 1 and found.effect.ours.mean == pytest.approx(20.0)


def test_other_columns_are_not_paired() -> None:
    elsewhere = cell("DER+FedGP", 50.0, dataset="CIFAR", baseline="DER", claimed=10.0)
    assert judged([cell("DER"), elsewhere], DER=[0.4], DER_FedGP=[0.6])[1].effect is None
