"""`everfed reproduce --status`: cells with records, verdicts, and what the rest costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from everfed.cli import app
from everfed.experiments.papers import records
from everfed.experiments.papers.matching import runs_of
from everfed.experiments.papers.status import Rates, Status, measured_rates, status
from tests.papers.test_records import made

MNIST, CIFAR = 12e6, 5e6  # samples of one run; ideal trains on (T + 1) / 2 times as many
TABLE1 = 2 * MNIST * (10 + 5.5) + CIFAR * (10 + 3) + CIFAR * (10 + 5.5)  # of one seed


def fedgp(*found: dict, rates: Rates, seeds: int = 1) -> Status:
    return next(
        row for row in status("fedgp/", runs_of(found), lambda recipe: list(range(seeds)), rates)
        if row.table == "fedgp/table1"
    )  # fmt: skip


def test_without_records_everything_is_left() -> None:
    row = fedgp(rates=Rates(given=1000.0))
    assert (row.cells, row.recorded, row.verdicts, row.runs, row.samples) == (66, 0, {}, 44, TABLE1)
    assert row.hours == pytest.approx(TABLE1 / 1000 / 3600) and row.without_rate == 0
    assert row.line() == ["fedgp/table1", "0/66", "-", "44", f"{TABLE1 / 1e6:,.1f} M", f"{TABLE1 / 3.6e6:,.1f}"]


def test_records_count_and_leave_less() -> None:
    """FedAvg as printed, 68.02, and FedGP far from its 79.46, on one of two seeds."""
    row = fedgp(made("fedavg", accuracy=0.6802), made("fedgp", accuracy=0.70), rates=Rates(given=1.0), seeds=2)
    assert (row.recorded, row.verdicts) == (2, {"reproduced": 1, "not reproduced": 1})
    assert row.runs == 86 and row.samples == 2 * TABLE1 - 2 * MNIST


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
    assert fedgp(rates=Rates()).line()[-1] == "?"


def test_the_command(tmp_path: Path) -> None:
    records.write(made(accuracy=0.6802), tmp_path)
    arguments = ["reproduce", "fedgp/table1", "--status", "--records", str(tmp_path), "--rate", "1000", "--seeds", "1"]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    assert "1/66" in shown.output and "1 reproduced" in shown.output and "1 records in" in shown.output
    (row,) = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)
    assert row["runs"] == 43 and row["samples"] == TABLE1 - MNIST
    refused = CliRunner().invoke(app, ["reproduce", "nowhere", "--status", "--records", str(tmp_path)])
    assert refused.exit_code == 2 and "papers: fedgp" in refused.output
