"""Searching for good values as a researcher does: a range, so many trials, go on tomorrow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import everfed
from everfed.cli import app
from everfed.experiments.search import Search, axis_of, drawn

TINY: dict[str, Any] = {
    "name": "tiny",
    "stream": {"dataset": "digits", "tasks": 1, "clients": 2, "max_train": 60, "max_test": 40},
    "train": {"rounds_per_task": 1},
    "engine": {"kind": "eager"},
    "method": {"name": "fedavg"},
}
RECIPE = """
[stream]
dataset = "digits"
tasks = 1
clients = 2
max_train = 60
[train]
rounds_per_task = 1
[engine]
kind = "eager"
[method]
name = "fedavg"
"""
RATES = axis_of(["train.optimizer.lr=0.001..1"])


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(RECIPE)


def says(*arguments: str, code: int = 0) -> str:
    found = CliRunner().invoke(app, list(arguments))
    assert found.exit_code == code, found.output
    return found.output


def cells(folder: str) -> list[str]:
    return [row["name"] for row in json.loads(Path(folder, "sweep.json").read_text())["rows"]]


# at random -----------------------------------------------------------------------------------------------------------
def test_a_range_is_searched_at_random_and_more_trials_go_on_with_it() -> None:
    command = ("sweep", "tiny.toml", "--grid", "train.optimizer.lr=0.001..1", "--grid", "train.batch_size=8..32")
    says(*command, "--trials", "2", "--out", "s")
    first = set(cells("s"))
    assert len(first) == 2
    printed = says(*command, "--trials", "3", "--out", "s")
    assert "already finished" in printed and first < set(cells("s")) and len(cells("s")) == 3
    for name in cells("s"):
        rate, batch = (word.partition("=")[2] for word in name.split() if "=" in word)
        assert 0.001 <= float(rate) <= 1 and 8 <= int(batch) <= 32 and len(rate) <= 8


def test_the_same_trials_are_drawn_every_time_and_rates_by_their_logarithm() -> None:
    found = drawn([RATES], 400)
    assert found[:50] == drawn([RATES], 50) and len(set(found)) == 400
    rates = [RATES.value(entry) for (entry,) in found]
    assert 0.4 < sum(rate < 0.0316 for rate in rates) / 400 < 0.6  # half of them below the middle of the logarithms
    few = axis_of(["train.batch_size=8..10"])
    assert sorted(drawn([few], 9)) == [("train.batch_size=10",), ("train.batch_size=8",), ("train.batch_size=9",)]


def test_a_stream_of_ones_own_holds_validation_data_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every period, where the recipe asks for it or a sweep needs it; nothing is trained on it."""
    monkeypatch.syspath_prepend(".")
    Path("day_stream.py").write_text(
        "import numpy as np\n"
        "def make(client):\n"
        "    rng = np.random.default_rng(client)\n"
        "    for _ in range(2):\n"
        "        yield rng.normal(size=(60, 4)).astype('float32'), rng.integers(0, 3, 60)\n"
    )
    Path("own.toml").write_text(
        '[stream]\nscenario = "own"\ndataset = "day_stream:make"\nclasses = 3\nclients = 2\ntasks = 2\n'
        '[model]\nkind = "mlp"\n[train]\nrounds_per_task = 1\n[engine]\nkind = "eager"\n[method]\nname = "fedavg"\n'
    )
    printed = says("sweep", "own.toml", "--grid", "train.optimizer.lr=0.01..1", "--trials", "2", "--out", "s")
    assert "holds out no validation data; using eval.split=validation, stream.validation=0.1" in printed
    result = json.loads(next(Path("s").glob("*/result.json")).read_text())
    assert result["split"] == "validation" and result["n_test"] == [10, 10]  # a tenth of 48 of each of two clients


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--grid", "train.optimizer.lr=0.001..1"], "only some values can be tried; say how many: --trials 20"),
        (["--grid", "train.optimizer.lr=1..0.1", "--trials", "2"], "the range must go up"),
        (["--grid", "train.optimizer.lr=0.1..1,2", "--trials", "2"], "give values, or one range LOW..HIGH"),
        (["--grid", "train.optimizer.lr=0.1", "--search", "grid"], "--search grid: allowed are random, tpe"),
        (["--grid", "train.optimizer.lr=0.1", "--search", "tpe"], "--search tpe needs --trials N"),
    ],
)  # fmt: skip
def test_a_mistake_is_named(arguments: list[str], words: str) -> None:
    assert words in says("sweep", "tiny.toml", *arguments, "--out", "s", code=2)
    assert not Path("s").exists()


def test_without_optuna_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    found = says(
        "sweep", "tiny.toml", "--grid", "train.optimizer.lr=0.01..1", "--trials", "2", "--search", "tpe", code=2
    )
    assert "--search tpe needs Optuna; install it with: pip install 'everfed[search]'" in found


# by TPE --------------------------------------------------------------------------------------------------------------
def searched(folder: Path, trials: int, told: int | None = None, width: int = 1) -> Search:
    """A search for the rate 0.1, where the score is highest; `told` of its trials have ended."""
    search = Search([RATES], trials, folder, width)
    queue = list(search.asked)
    while queue and (told is None or len(search.scores) < told):
        cell = queue.pop(0)
        rate = RATES.value(cell[0])
        queue += search.tell(cell, -abs(rate - 0.1), better=1)
    return search


def test_tpe_comes_nearer_than_chance(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="the extra `search` is not installed")
    found = [RATES.value(cell[0]) for cell in searched(tmp_path, 30).asked]
    assert len(set(found)) == 30
    near = [abs(rate - 0.1) < 0.05 for rate in found]
    assert sum(near[15:]) > 2 * sum(abs(RATES.value(cell[0]) - 0.1) < 0.05 for cell in drawn([RATES], 15))


def test_a_search_that_was_interrupted_goes_on_with_its_trials(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="the extra `search` is not installed")
    whole = searched(tmp_path / "whole", 12)
    broken = searched(tmp_path / "broken", 12, told=8)
    assert len(broken.asked) < 12
    assert searched(tmp_path / "broken", 12).asked == whole.asked  # told anew of what is finished, it proposes the same
    assert len(searched(tmp_path / "wide", 12, width=3).asked) == 12
    with pytest.raises(everfed.UserError, match="search.json is of a search over other keys; choose another --out"):
        Search([axis_of(["train.batch_size=8..32"])], 12, tmp_path / "whole", 1)


def test_tpe_from_python_and_the_command_line() -> None:
    pytest.importorskip("optuna", reason="the extra `search` is not installed")
    grid = {"train.optimizer.lr": "0.01..1", "train.local_epochs": [1, 2]}
    found = everfed.sweep(TINY, grid, [0, 1], trials=7, search="tpe", out="p")
    assert len(found.rows) == 7 and all(len(row.outcomes) == 2 for row in found.rows)
    assert len(json.loads(Path("p/search.json").read_text())["asked"]) == 7
    command = (
        "sweep",
        "tiny.toml",
        "--grid",
        "train.optimizer.lr=0.01..1",
        "--search",
        "tpe",
        "--out",
        "c",
        "--jobs",
        "1",
    )
    says(*command, "--trials", "6")
    first = set(cells("c"))
    says(*command, "--trials", "7")
    assert first < set(cells("c")) and len(cells("c")) == 7


# stopping cells that fall behind -------------------------------------------------------------------------------------
GRID = ("sweep", "tiny.toml", "--set", "stream.tasks=3", "--grid", "train.optimizer.lr=0.2,0.1,0.15,1e-9")
HOPELESS = "--set train.optimizer.lr=1e-9"


def row_of(name: str) -> dict[str, Any]:
    rows: list[dict[str, Any]] = json.loads(Path("s/sweep.json").read_text())["rows"]
    return next(row for row in rows if row["name"] == name)


def test_a_cell_that_falls_behind_is_stopped_stays_stopped_and_can_be_finished() -> None:
    printed = says(*GRID, "--stop-early", "--out", "s", "--jobs", "1")
    assert "stopped after task 1: acc" in printed and "the median of 3 finished runs there" in printed
    assert "0/1, stopped early" in printed and printed.count("1/1") == 3
    (run,) = row_of(HOPELESS)["runs"]
    assert run["stopped"] and not run["diverged"] and run["metrics"] is None
    before = Path(run["folder"], "events.jsonl").read_bytes()
    says(*GRID, "--stop-early", "--out", "s", "--jobs", "1")
    assert Path(run["folder"], "events.jsonl").read_bytes() == before
    says(*GRID, "--out", "s", "--jobs", "1")
    (run,) = row_of(HOPELESS)["runs"]
    whole = everfed.run("tiny.toml", "whole", sets=[*HOPELESS.split()[1:], "stream.tasks=3",
                                                    "eval.split=validation", "stream.validation=0.1"])  # fmt: skip
    assert not run["stopped"] and run["metrics"] == whole.metrics


def test_two_finished_runs_are_too_few_to_stop_one() -> None:
    found = everfed.sweep(
        "tiny.toml", {"train.optimizer.lr": [0.2, 0.1, 1e-9]}, sets={"stream.tasks": 2}, stop_early=True, out="s"
    )
    assert [row.runs for row in found.rows] == ["1/1"] * 3


def test_a_cell_with_a_stopped_seed_is_never_the_best() -> None:
    from everfed.experiments.comparison import rows
    from everfed.experiments.grid import plan_sweep
    from everfed.experiments.jobs import Outcome

    jobs = plan_sweep("tiny.toml", [["train.optimizer.lr=0.1", "train.optimizer.lr=0.2"]], [0, 1], "s").jobs
    scored = [{"score": "accuracy", "metrics": {"acc": acc}, "cost": {}, "accuracy_matrix": []} for acc in (0.5, 0.9)]
    outcomes = [Outcome(jobs[0], scored[0]), Outcome(jobs[1], scored[0]), Outcome(jobs[2], scored[1]),
                Outcome(jobs[3], None, "behind", stopped=True)]  # fmt: skip
    assert [row.runs for row in rows(outcomes)] == ["2/2", "1/2, 1 stopped early"]


def test_a_value_named_twice_is_one_cell() -> None:
    says("sweep", "tiny.toml", "--grid", "train.optimizer.lr=0.1,0.1", "--out", "s", "--jobs", "2")
    assert cells("s") == ["--set train.optimizer.lr=0.1"]


def test_a_stopped_run_is_no_failure_in_dashboard_and_report() -> None:
    from everfed.experiments.stopping import StoppedEarly
    from everfed.reports import dashboard, tables
    from everfed.reports.read import read_run
    from everfed.store.event_log import STOPPED

    assert StoppedEarly.__name__ == STOPPED
    says(*GRID, "--stop-early", "--out", "s", "--jobs", "1")
    folder = Path(row_of(HOPELESS)["runs"][0]["folder"])
    assert tables.state(read_run(folder, "one")) == "stopped early at round 1 of 3"
    index = dashboard.Index(Path("s"))
    index.poll()
    (found,) = (run for run in index.runs.values() if run.folder.name == folder.name)
    shown = dashboard.summary(found, now=0.0)
    assert shown["status"] == "stopped" and shown["faults"] == 0


def test_nothing_forgotten_is_not_less_than_nothing() -> None:
    from everfed.metrics.scores import score_of
    from everfed.reports.formats import with_deviation

    assert with_deviation(-0.001, 0.0) == "0.00 ± 0.00" and score_of("accuracy").text(-1e-9) == "0.00 %"
