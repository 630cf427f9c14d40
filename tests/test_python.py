"""The Python path: the powers of the commands, the same words for errors, results for notebooks, run folders."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import everfed
from everfed import api, session, streams
from everfed.cli import app
from everfed.errors import SettingError
from everfed.experiments import comparison
from everfed.experiments.comparison import Comparison
from everfed.experiments.jobs import Outcome, new_job
from everfed.method import Client, Part
from everfed.recipe import as_entries, to_toml
from everfed.reports import progress
from everfed.reports import result as results
from everfed.store.run import RunFolder
from tests.reports import folders

TINY = {
    "name": "tiny",
    "stream": {"dataset": "digits", "tasks": 2, "clients": 2, "max_train": 60, "max_test": 40},
    "model": {"kind": "mlp", "hidden": [8]},
    "train": {"rounds_per_task": 1},
    "engine": {"kind": "eager"},
    "method": {"name": "fedavg"},
}
TOML = """\
[stream]
dataset = "digits"
tasks = 2
clients = 2
max_train = 60
max_test = 40
[model]
kind = "mlp"
hidden = [8]
[train]
rounds_per_task = 1
[engine]
kind = "eager"
[method]
name = "fedavg"
"""


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EVERFED_DATA", raising=False)
    (tmp_path / "tiny.toml").write_text(TOML)
    return tmp_path


def arrays(seed: int = 0, **options: Any) -> everfed.method.Stream:
    rng = np.random.default_rng(seed)
    y = np.arange(48) % 4
    x = (np.eye(4)[y] + 0.1 * rng.normal(size=(48, 4))).astype(np.float32)
    table = {"scenario": "class-incremental", "tasks": 2, "clients": 2, "rounds_per_task": 1, **options}
    return streams.from_arrays(x, y, x, y, **table)


# the powers of the commands ------------------------------------------------------------------------------------------
def test_run_takes_what_the_command_takes() -> None:
    result = everfed.run("tiny.toml", method="er", seed=3, sets={"stream.tasks": 1, "method.memory.size": 5})
    assert (result.data["method"], result.data["seed"], len(result.data["accuracy_matrix"])) == ("er", 3, 1)
    assert everfed.run(TINY, "listed", sets=["stream.tasks=1"]).data["stream"]["tasks"] == 1
    recipe = everfed.read_recipe("tiny.toml")
    assert everfed.run(recipe, "seeded", seed=2).data["seed"] == 2


def test_a_comparison_equals_that_of_the_command() -> None:
    found = everfed.compare("tiny.toml", ["fedavg", "fedprox"], seeds=[0, 1], sets={"method.fedprox.mu": 0.5})
    assert CliRunner().invoke(
        app,
        ["compare", "tiny.toml", "--methods", "fedavg,fedprox", "--seeds", "0,1", "--out", "commanded"]
        + ["--set", "method.fedprox.mu=0.5"],
    ).exit_code == 0  # fmt: skip
    ours, theirs = (json.loads(Path(f, "compare.json").read_text()) for f in ("runs/tiny-compare", "commanded"))
    assert [row["metrics"]["acc"] for row in ours["rows"]] == [row["metrics"]["acc"] for row in theirs["rows"]]
    assert set(found.results) == {"fedavg", "fedprox"} and len(found.results["fedavg"]) == 2
    assert found.best == found.rows[0].name and found.problems == {}
    assert repr(found).startswith("| Method") and "<table>" in found._repr_html_()
    assert list(found.table["method"]) == [row.name for row in found.rows]


def test_a_comparison_on_a_stream_of_ones_own_and_on_one_for_every_seed() -> None:
    same = everfed.compare(TINY, ["fedavg", "er"], seeds=[0, 1], out="same", stream=arrays())
    assert {len(runs) for runs in same.results.values()} == {2}
    other = everfed.compare(TINY, "fedavg", seeds=[0, 1], out="other", stream=lambda seed: arrays(seed))
    names = {
        everfed.read_recipe(run.folder / "recipe.toml").stream.model_extra["identity"]
        for run in other.results["fedavg"]
    }
    assert len(names) == 2
    again = everfed.compare(TINY, ["fedavg", "er"], seeds=[0, 1], out="same", stream=arrays())
    assert [row.spreads for row in again.rows] == [row.spreads for row in same.rows]


def test_a_sweep_is_scored_on_validation_data_and_names_the_best() -> None:
    learns = {"stream.max_train": 400, "train.rounds_per_task": 4, "stream.tasks": 1}
    found = everfed.sweep(TINY, {"train.optimizer.lr": [0.0, 0.2], "train.local_epochs": [5]}, sets=learns)
    assert found.best == "--set train.optimizer.lr=0.2 --set train.local_epochs=5"
    assert {run.data["split"] for runs in found.results.values() for run in runs} == {"validation"}
    own = everfed.sweep(TINY, {"train.optimizer.lr": [0.1]}, out="own", stream=arrays(validation=0.2))
    assert len(own.rows) == 1
    with pytest.raises(everfed.UserError, match="the grid is empty"):
        everfed.sweep(TINY, {})


def test_no_row_is_the_best_where_no_run_finished() -> None:
    cells = [new_job(row, "tiny.toml", Path(row), method=row, seed=0, sets=[]) for row in ("fedavg", "er")]
    failed = comparison.rows([Outcome(cell, None, "the loss is not finite") for cell in cells])
    assert Comparison(Path("out"), failed, "Method").best == ""
    assert Comparison(Path("out"), [], "Method").best == ""


def test_one_seed_has_no_deviation() -> None:
    found = everfed.sweep(TINY, {"train.optimizer.lr": [0.1]})
    assert "±" not in repr(found) and "±" not in Path(found.folder, "sweep.md").read_text().partition("\n\n")[0]


def test_a_report_is_written_by_calling_the_package_however_it_was_imported() -> None:
    run = everfed.run(TINY)
    assert everfed.report(run.folder, "page.html", figures=False) == Path("page.html")
    assert run.report(figures=False) == run.folder / "report.html"
    from everfed.reports.html import write

    assert everfed.report([run.folder], figures=False) == write(run.folder, figures=False)
    with pytest.raises(everfed.UserError, match="there is no run to report"):
        everfed.report([])
    code = "import everfed, everfed.reports; assert callable(everfed.report)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_trackers_are_observers_from_python_too() -> None:
    pytest.importorskip("tensorboard", reason="the extra `trackers` is not installed")
    assert (everfed.run(TINY, track=["tensorboard"]).folder / "tensorboard").is_dir()


# errors --------------------------------------------------------------------------------------------------------------
WRONG = [
    {"method.name": "fedgpp"},
    {"stream.dataset": "nonsense"},
    {"stream.scenario": "domain"},
    {"stream.partition": {"kind": "dirichlet", "alpha": -1}},
    {"model.kind": "mlpp"},
    {"model.kind": "nowhere:Net"},
    {"train.batchsize": 3},
    {"method.memory.size": 3},
    {"stream.max_train": 0},
    {"stream.seed": "a"},
]


@pytest.mark.parametrize("sets", WRONG, ids=lambda sets: next(iter(sets)))
def test_an_error_is_a_users_error_in_the_words_of_the_command_line(sets: dict[str, Any], work: Path) -> None:
    with pytest.raises(everfed.UserError) as found:
        everfed.run("tiny.toml", sets=sets)
    entries = [word for entry in as_entries(sets) for word in ("--set", entry)]
    commanded = CliRunner().invoke(app, ["run", "tiny.toml", *entries])
    assert commanded.exit_code == 2 and not (work / "runs").exists()
    assert commanded.stderr.strip() == f"error: {found.value}"
    for refused in (everfed.check, everfed.compare):
        with pytest.raises(everfed.UserError):
            refused(everfed.read_recipe("tiny.toml", sets=sets))


REFUSALS = (
    *("errors:DataError", "errors:PartitionError", "models:ModelError", "naming:NameProblem"),
    *("streams.options:OptionError", "core.part:CompositionError"),
)


@pytest.mark.parametrize("name", REFUSALS)
def test_every_refusal_of_a_setting_is_a_users_error(name: str) -> None:
    module, _, kind = name.partition(":")
    found = getattr(importlib.import_module(f"everfed.{module}"), kind)
    assert issubclass(found, SettingError) and issubclass(found, everfed.UserError) and issubclass(found, ValueError)


class Breaks(Part):
    """Fails in the first round, or in a later one."""

    name = "breaks"
    first = 0

    def receive(self, client: Client) -> None:
        if client.round >= self.first:
            raise RuntimeError("a mistake of mine")


class BreaksLater(Breaks):
    name = "later"
    first = 1


def test_a_run_that_fails_before_its_first_round_leaves_nothing_behind(work: Path) -> None:
    def failing(part: type[Part]) -> dict[str, Any]:
        return {**TINY, "method": {"parts": ["fedavg", part]}}

    with pytest.raises(RuntimeError, match="client 0 failed in phase 'train' of round 1"):
        everfed.run(failing(Breaks), "deep/mine")
    assert not (work / "deep").exists()
    with pytest.raises(RuntimeError, match="of round 2"):
        everfed.run(failing(BreaksLater), "deep/mine")
    assert (work / "deep/mine/events.jsonl").exists()  # there is something to go on with


# run folders ---------------------------------------------------------------------------------------------------------
def test_run_folders_get_a_number_where_their_name_is_taken(work: Path) -> None:
    folders = [everfed.run(TINY).folder for _ in range(3)]
    assert [folder.name for folder in folders] == ["tiny-fedavg-0", "tiny-fedavg-0-2", "tiny-fedavg-0-3"]
    assert "run folder: runs/tiny-fedavg-0-4" in CliRunner().invoke(app, ["run", "tiny.toml"]).stdout
    with pytest.raises(everfed.UserError, match="finished run; choose another --out, or use --overwrite"):
        everfed.run(TINY, folders[0])


def test_overwrite_removes_a_run_only_for_one_that_is_not_refused(work: Path) -> None:
    first = everfed.run(TINY, "mine").folder
    with pytest.raises(everfed.UserError):
        everfed.run(TINY, "mine", overwrite=True, sets={"stream.dataset": "nonsense"})
    assert (first / "result.json").exists()
    again = everfed.run(TINY, "mine", overwrite=True, seed=1)
    assert again.data["seed"] == 1
    (work / "precious").mkdir()
    (work / "precious/thesis.tex").write_text("years")
    with pytest.raises(everfed.UserError, match="--overwrite: precious is not a run"):
        everfed.run(TINY, "precious", overwrite=True)
    assert (work / "precious/thesis.tex").exists()


def stop(event: dict[str, Any]) -> None:
    if event["event"] == "evaluation":
        raise KeyboardInterrupt


def test_resume_or_run_runs_goes_on_and_returns(work: Path) -> None:
    whole = everfed.run(TINY, "whole")
    with pytest.raises(KeyboardInterrupt):
        everfed.run(TINY, "job", resume_or_run=True, observers=[stop], checkpoint_every=0.0)
    events: list[dict[str, Any]] = []
    resumed = everfed.run(TINY, "job", resume_or_run=True, observers=[events.append])
    assert resumed.metrics == whole.metrics and events[0]["event"] == "resume"
    commanded = CliRunner().invoke(app, ["run", "tiny.toml", "--out", "queue", "--resume-or-run"])
    again = CliRunner().invoke(app, ["run", "tiny.toml", "--out", "queue", "--resume-or-run"])
    assert commanded.exit_code == again.exit_code == 0 and "already finished" in again.stderr
    with pytest.raises(everfed.UserError, match="job belongs to another recipe or --scale"):
        everfed.run(TINY, "job", resume_or_run=True, seed=1)
    with pytest.raises(everfed.UserError, match="exclude each other"):
        everfed.run(TINY, "job", resume_or_run=True, overwrite=True)


def test_a_run_goes_on_with_its_data_in_another_folder(work: Path) -> None:
    """By every way to go on with it: alone, as a command, in a table."""
    x, y = np.zeros((40, 8, 8), dtype=np.uint8), np.arange(40) % 10
    (work / "then").mkdir()
    np.savez(work / "then" / "mnist.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    recipe = {**TINY, "stream": {**TINY["stream"], "dataset": "mnist"}}
    folders = ["alone", "commanded", "again", "table/fedavg-0"]
    for folder in folders:
        with pytest.raises(KeyboardInterrupt):
            everfed.run(recipe, folder, data_dir="then", observers=[stop], checkpoint_every=0.0)
    Path("moved.toml").write_text((work / "alone/recipe.toml").read_text())
    (work / "then").rename(work / "now")
    with pytest.raises(everfed.UserError, match="then"):
        everfed.resume("alone")
    everfed.resume("alone", data_dir="now")
    everfed.run(recipe, "again", data_dir="now", resume_or_run=True)
    commanded = CliRunner().invoke(app, ["resume", "commanded", "--data", "now"])
    table = ["--methods", "fedavg", "--seeds", "0", "--jobs", "1", "--out", "table", "--data", "now"]
    compared = CliRunner().invoke(app, ["compare", "moved.toml", *table])
    assert commanded.exit_code == compared.exit_code == 0, commanded.stderr + compared.stderr
    assert len({str(RunFolder(work / folder).read_result()["metrics"]) for folder in folders}) == 1


@pytest.mark.parametrize(("there", "asked"), [({"scale": 0.5}, 1.0), ({"scale": 1.0}, 0.5), ({}, 0.5)])
def test_a_run_at_another_scale_is_not_gone_on_with(work: Path, there: dict[str, float], asked: float) -> None:
    folder = RunFolder.create(work / "job", to_toml(everfed.read_recipe(TINY)), there)
    with pytest.raises(everfed.UserError, match="job belongs to another recipe or --scale"):
        everfed.run(TINY, "job", resume_or_run=True, scale=asked)
    assert folder.read_settings() == there and not (work / "job" / "events.jsonl").exists()


def test_what_is_finished_already_is_said() -> None:
    for _ in range(2):
        found = CliRunner().invoke(app, ["compare", "tiny.toml", "--methods", "fedavg"])
    assert "already finished: fedavg seed 0" in found.stdout
    assert "already finished" in CliRunner().invoke(app, ["resume", "runs/tiny-compare/fedavg-0"]).stderr


def test_a_stream_is_drawn_by_its_own_seed_or_by_that_of_the_run() -> None:
    def pixels(run: int, **own: int) -> list[float]:
        recipe = everfed.read_recipe({**TINY, "stream": {**TINY["stream"], **own}}, seed=run)
        return session.assemble(recipe).stream.data(0, 0).x.flatten().tolist()

    assert pixels(5, seed=0) == pixels(0) != pixels(5) == pixels(0, seed=5)


# results -------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> everfed.Result:
    return everfed.run({**TINY, "train": {"rounds_per_task": 2}}, tmp_path_factory.mktemp("runs") / "mine")


def test_a_result_reads_in_one_line_and_in_html(finished: everfed.Result) -> None:
    acc, lost = (100 * finished.metrics[key] for key in ("acc", "forgetting"))
    text = f"fedavg seed 0: Acc {acc:.2f} %  Forgetting {lost:.2f} %"
    assert repr(finished) == f"<Result {text}, in {finished.folder}>"
    html = finished._repr_html_()
    assert text in html and html.count("<tr>") == 3 and str(finished.folder) in html


def test_the_history_has_a_row_for_every_round(finished: everfed.Result) -> None:
    frame = finished.history
    assert list(frame.index) == [1, 2, 3, 4] and list(frame["task"]) == [1, 1, 2, 2]
    assert frame["bytes_up"].sum() == finished.data["cost"]["bytes_up"]
    assert frame["accuracy"].notna().tolist() == [False, True, False, True]
    assert frame["accuracy"].iloc[-1] == pytest.approx(finished.metrics["acc"])
    events = [json.loads(line) for line in (finished.folder / "events.jsonl").read_text().splitlines()]
    assert frame["loss"].tolist() == [e["loss"] for e in events if e["event"] == "phase"]


def test_bytes_and_seconds_of_a_round_are_those_of_all_its_phases(work: Path) -> None:
    made = folders.create(work / "phases")
    reference = folders.phase(0, name="reference", bytes_up=7, bytes_down=30, seconds=0.25, loss=None)
    folders.log(made, [folders.start(), folders.phase(0), reference, folders.phase(1)])
    frame = results.Result(made.path, {}).history
    assert frame["bytes_up"].tolist() == [107, 100] and frame["bytes_down"].tolist() == [230, 200]
    assert frame["seconds"].tolist() == [0.75, 0.5] and frame["loss"].tolist() == [1.0, 0.5]


def test_the_accuracy_matrix_is_that_of_the_result(finished: everfed.Result) -> None:
    frame = finished.accuracy_matrix
    assert list(frame.columns) == ["task 1", "task 2"] and list(frame.index) == ["after task 1", "after task 2"]
    assert frame.loc["after task 2"].tolist() == finished.data["accuracy_matrix"][1]


def test_without_pandas_there_are_plain_lists(finished: everfed.Result, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "find_spec", lambda name: None)
    assert finished.accuracy_matrix == finished.data["accuracy_matrix"]
    assert [row["round"] for row in finished.history] == [1, 2, 3, 4]
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(everfed.UserError, match=r"a plot needs the package matplotlib; .* 'everfed\[plots\]'"):
        finished.plot()


def test_the_plot_has_every_task_and_the_loss(finished: everfed.Result, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plots` is not installed").use("agg")
    scores, losses = finished.plot().axes
    assert [line.get_label() for line in scores.lines] == ["task 1", "task 2"]
    assert scores.lines[0].get_ydata().tolist() == [100 * row[0] for row in finished.data["accuracy_matrix"]]
    assert losses.lines[0].get_xdata().tolist() == [1, 2, 3, 4]


# progress ------------------------------------------------------------------------------------------------------------
def test_progress_is_shown_where_a_person_looks_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    everfed.run(TINY)
    assert capsys.readouterr().out == ""
    everfed.run(TINY, progress=True)
    assert "fedavg seed 0: task 2/2, round 2/2" in capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert progress.is_watched()
    everfed.run(TINY, progress=False)
    assert capsys.readouterr().out == ""


def test_in_a_notebook_one_line_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    class Handle:
        def update(self, thing: Any) -> None:
            shown.append(thing._repr_html_())

    monkeypatch.setattr(progress, "notebook_display", lambda: lambda thing, display_id: Handle())
    everfed.run(TINY)
    assert 'value="2" max="2"' in shown[-1] and "fedavg seed 0: task 2/2, round 2/2" in shown[-1]
    assert all("task 1/0" not in line for line in shown)


# what it would cost --------------------------------------------------------------------------------------------------
def test_a_dry_run_counts_bytes_and_parameters_and_leaves_nothing(work: Path) -> None:
    """8x8 pixels to 8 units to 10 classes: 64 * 8 + 8 + 8 * 10 + 10 = 610 parameters; 2 clients, 2 rounds, 4 bytes."""
    found = api.estimate(TINY)
    assert (found["parameters"], found["rounds"], found["samples"]) == (610, 2, 60)
    assert found["bytes_up"] == found["bytes_down"] == 610 * 4 * 2 * 2
    whole = everfed.run(TINY, "whole").data["cost"]
    assert (whole["bytes_up"], whole["bytes_down"]) == (found["bytes_up"], found["bytes_down"])
    text = CliRunner().invoke(app, ["run", "tiny.toml", "--dry-run"]).stdout
    assert "mlp: 610 parameters, outputs (10,)" in text and "9.8 kB up, 9.8 kB down" in text and "memory" in text
    assert not (work / "runs").exists()
    assert CliRunner().invoke(app, ["run", "tiny.toml", "--dry-run", "--set", "model.kind=mlpp"]).exit_code == 2


def test_a_dry_run_counts_every_phase_of_a_round() -> None:
    """fedgp has two phases a round; the third round, which is not finished, is not counted."""
    recipe = {**TINY, "train": {"rounds_per_task": 3}, "method": {"name": "fedgp"}}
    found, whole = api.estimate(recipe), everfed.run(recipe, "whole").data["cost"]
    assert (found["bytes_up"], found["bytes_down"]) == (whole["bytes_up"], whole["bytes_down"])


def test_a_dry_run_leaves_the_warm_up_of_the_first_round_out(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("everfed.session.execution")
    seconds = [(0, 9.0), (0, 5.0), (1, 0.5), (1, 0.25), (2, 70.0)]

    def execute(run: Any, folder: Any, observers: Any, checkpoint_every: float) -> None:
        for index, duration in seconds:
            observers[0](folders.phase(index, seconds=duration))

    monkeypatch.setattr(module, "execute", execute)
    found = api.estimate(TINY)
    assert (found["seconds_per_round"], found["seconds"], found["bytes_up"]) == (0.75, 1.5, 400)
