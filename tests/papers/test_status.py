"""`everfed reproduce --status`: cells with records, verdicts, and what the rest costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from everfed.cli import app
from everfed.experiments.papers import records
from everfed.experiments.papers.judging import runs_of
from everfed.experiments.papers.overview import Plan, SampleRates, Status, measured_rates, planned, status
from everfed.recipe import read
from tests.papers.test_records import made

MNIST, CIFAR = 12e6, 5e6  # samples of one run; ideal trains on (T + 1) / 2 times as many
TABLE1 = 2 * MNIST * (10 + 5.5) + CIFAR * (10 + 3) + CIFAR * (10 + 5.5)  # of one seed


def fedgp(*found: dict, rates: SampleRates, seeds: int = 1) -> Status:
    return next(
        row for row in status("fedgp/", runs_of(found), lambda recipe: list(range(seeds)), rates)
        if row.table == "fedgp/table1"
    )  # fmt: skip


def test_without_records_everything_is_left() -> None:
    row = fedgp(rates=SampleRates(given=1000.0))
    assert (row.cells, row.recorded, row.levels, row.runs, row.samples) == (66, 0, {}, 44, TABLE1)
    assert row.hours == pytest.approx(TABLE1 / 1000 / 3600) and row.without_rate == 0
    assert row.line() == ["fedgp/table1", "0/66", "-", "-", "44", f"{TABLE1 / 1e6:,.1f} M", f"{TABLE1 / 3.6e6:,.1f}"]


def test_records_count_and_leave_less() -> None:
    """FedAvg as printed, 68.02, and FedGP far from its 79.46, over three of four seeds."""
    near = [made("fedavg", seed, 0.6802 + seed / 1000) for seed in range(3)]
    far = [made("fedgp", seed, 0.60 + seed / 1000) for seed in range(3)]
    row = fedgp(*near, *far, rates=SampleRates(given=1.0), seeds=4)
    assert (row.recorded, row.levels, row.effects) == (2, {"differs": 1, "unresolved": 1}, {"contradicted": 1})
    assert row.runs == 4 * 44 - 6 and row.samples == 4 * TABLE1 - 6 * MNIST


def test_records_that_cannot_be_judged_leave_their_runs() -> None:
    """A run at a tenth of the scale, one with other settings; a run that diverged is none of these."""
    small, other, ended = made("fedavg"), made("fedgp", sets=("train.optimizer.lr=0.5",)), made("der")
    small["stream"] = {**small["stream"], "scale": 0.1}
    ended |= {"diverged": "the loss of client 0 is not finite", "metrics": {}, "accuracy_matrix": [], "cost": {}}
    row = fedgp(small, other, ended, rates=SampleRates(given=1.0))
    assert (row.recorded, row.runs, row.unjudged, row.levels) == (3, 43, 2, {"diverged": 1})


def test_what_the_recipe_itself_lacks_leaves_no_run() -> None:
    """Images at 32 pixels are not the paper's 224, and no run of that recipe would change it."""
    recipe, method = "stamp/table1-imagenet32", "fedavg"
    facts = {"dataset": "imagenet-32", "clients": 10, "tasks": 50, "samples": {"train": 600_000, "test": 100_000}}
    record = {**made(), "recipe": recipe, "stream": facts, "settings": records.settings_of(read(recipe, method=method))}
    rows = status("stamp/table1-32px", runs_of([record]), lambda name: [0], SampleRates(given=1.0))
    assert [(row.runs, row.unjudged) for row in rows] == [(12, 3)]


def test_what_is_planned_counts_its_runs() -> None:
    """Six methods on CIFAR-100 over three seeds: 18 runs, of which a record of the official split is one."""

    def plan(*kept: dict) -> Plan:
        found = planned("fedgp", runs_of(kept))
        return next(one for one in found if "six methods" in one.what and "CIFAR-100" in one.what)

    assert (plan().done, plan().runs, plan().minutes) == (0, 18, 46)
    recipe = "fedgp/table1-cifar100"
    facts = {"dataset": "cifar100", "clients": 10, "tasks": 10, "samples": {"train": 50_000, "test": 10_000}}
    settings = records.settings_of(read(recipe, method="fedavg"))
    own = {**made(), "recipe": recipe, "settings": settings, "stream": {**facts, "test_labels": "another split"}}
    assert plan(own).done == 0
    own["stream"] = {**facts, "test_labels": "80031c23f8300724"}
    assert plan(own).done == 1 and plan(own).minutes == pytest.approx(46 * 17 / 18)


def test_rates_come_from_records_of_the_same_method_recipe_or_network() -> None:
    """600 samples/s for FedAvg, 300 for DER; other methods of the recipe run at 600, permuted MNIST as well."""
    fedavg, der = made("fedavg"), made("der")
    fedavg["cost"] = {**fedavg["cost"], "samples": 6000, "seconds": 10.0}
    der["cost"] = {**der["cost"], "samples": 6000, "seconds": 20.0}
    rates = measured_rates([fedavg, der])
    row = fedgp(fedavg, der, rates=rates)
    assert row.without_rate == 22  # CIFAR
    left = 2 * MNIST * 15.5 - 2 * MNIST
    assert row.hours == pytest.approx(left / 600 / 3600)
    more = fedgp(fedavg, der, rates=rates, seeds=2)
    assert more.hours - row.hours == pytest.approx(
        (2 * MNIST * 15.5 - MNIST + 2 * MNIST) / 600 / 3600
    )  # DER at half the rate
    assert "+ 22 runs without a rate" in row.line()[-1]


def test_a_table_without_a_rate_says_so() -> None:
    assert fedgp(rates=SampleRates()).line()[-1] == "?"


def test_the_command(tmp_path: Path) -> None:
    for seed in range(3):
        records.write(made(seed=seed, accuracy=0.6802 + seed / 100), tmp_path)
    arguments = ["reproduce", "fedgp/table1", "--status", "--records", str(tmp_path), "--rate", "1000", "--seeds", "3"]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    assert "1/66" in shown.output and "1 unresolved" in shown.output
    assert "3 records; 1 cells judged, 1 of them distinct: 1 unresolved; effects: -." in shown.output
    found = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)
    (row,) = found["tables"]
    assert row["runs"] == 3 * 44 - 3 and row["samples"] == 3 * TABLE1 - 3 * MNIST
    assert found["overall"]["levels"] == {"equivalent": 0, "differs": 0, "unresolved": 1}
    assert sum(plan["minutes"] for plan in found["planned"]) > 100
    refused = CliRunner().invoke(app, ["reproduce", "nowhere", "--status", "--records", str(tmp_path)])
    assert refused.exit_code == 2 and "papers: fedgp" in refused.output
