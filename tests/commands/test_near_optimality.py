"""The experiment of Figures 1 and 4 as a command."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from everfed.commands.near_optimality import near_optimality
from everfed.errors import UserError

app = typer.Typer()
app.command()(near_optimality)


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def test_numbers_and_plot_are_written(tmp_path: Path) -> None:
    text = run("--sizes", "8,10", "--keep", "3", "--repetitions", "4", "--out", str(tmp_path / "out"))
    assert "zero-diagonal" in text and "per-coordinate" in text
    facts = json.loads((tmp_path / "out" / "near_optimality.json").read_text())
    assert (facts["keep"], facts["repetitions"], len(facts["means"])) == (3, 4, 2 * 2 * 6)
    with open(tmp_path / "out" / "near_optimality.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * 6 * 4 and all(float(row["ratio"]) >= 1 - 1e-9 for row in rows)
    pytest.importorskip("matplotlib", reason="pip install 'everfed[plots]'")
    assert (tmp_path / "out" / "near_optimality.png").read_bytes().startswith(b"\x89PNG")


def test_the_seed_draws_other_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everfed.commands.near_optimality.find_spec", lambda name: None)  # no plot
    few = ["--sizes", "8", "--keep", "3", "--repetitions", "2", "--reading", "per-vector", "--json"]
    first, again, other = (run(*few, "--seed", seed, "--out", str(tmp_path)) for seed in ("1", "1", "2"))
    assert first == again != other


def test_the_ordering_of_the_paper(tmp_path: Path) -> None:
    """Zero-diagonal, convex, GSS-greedy, random, from the best to the worst (per-vector reading)."""
    arguments = ["--sizes", "30", "--repetitions", "25", "--reading", "per-vector", "--json", "--out", str(tmp_path)]
    rows = [json.loads(line) for line in run(*arguments).splitlines()]
    means = {row["policy"]: row["mean_ratio"] for row in rows}
    assert means["zero-diagonal"] < 1.06 < means["convex"] < means["gss-greedy"] < means["random"]


@pytest.mark.slow
def test_the_figure_of_the_issue(tmp_path: Path) -> None:
    """n = 50, 200 clients: at most 1.05 for zero-diagonal."""
    arguments = ["--sizes", "50", "--repetitions", "200", "--reading", "per-vector", "--json", "--out", str(tmp_path)]
    means = {row["policy"]: row["mean_ratio"] for row in map(json.loads, run(*arguments).splitlines())}
    assert means["zero-diagonal"] <= 1.05
    assert means["zero-diagonal"] < means["convex"] < means["gss-greedy"] < means["random"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--sizes", "10,x"], "--sizes 10,x: write positive whole numbers"),
        (["--reading", "literal"], "--reading must be one of per-vector, per-coordinate or both; got 'literal'"),
        (["--sizes", "4"], "--keep 5 is more than the 4 samples"),
    ],
)
def test_what_is_not_allowed_is_named(arguments: list[str], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        run(*arguments)
