"""Records: written from runs, read back, matched with the tables' runs."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

import everfed
from everfed.cli import app
from everfed.errors import UserError
from everfed.experiments.papers import records
from everfed.experiments.papers.judging import judge, runs_of
from everfed.experiments.papers.planning import Experiment, plan
from everfed.experiments.papers.tables import find
from everfed.recipe import read
from tests.papers.made import STREAM, result

RECIPE = "fedgp/table1-rotated-mnist"


def made(method: str = "fedavg", seed: int = 0, accuracy: float = 0.5, sets: tuple[str, ...] = ()) -> dict[str, Any]:
    """The record of a run of Table 1 on rotated MNIST."""
    outcome = result([[accuracy]], stream={**STREAM, "participation": 1.0}, environment={"precision": "fp32"})
    settings = records.settings_of(read(RECIPE, method=method, seed=seed, sets=sets))
    return records.make({**outcome, "recipe": RECIPE, "method": method, "seed": seed}, settings, {})


def run(tmp_path: Path) -> Path:
    """A finished run of two tasks on the embedded digits."""
    sets = ["train.rounds_per_task=1", "train.local_epochs=1", "stream.tasks=2", "stream.clients=2"]
    recipe = everfed.read_recipe("demo", method="fedavg", seed=3, sets=[*sets, "engine.kind=eager"])
    everfed.run(recipe, tmp_path / "run")
    return tmp_path / "run"


def command(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["record", *arguments])


def test_a_run_is_recorded_and_read_back(tmp_path: Path) -> None:
    folder = run(tmp_path)
    done = command(str(folder), "--records", str(tmp_path / "kept"), "--shared", "--remark", "a test")
    assert done.exit_code == 0, done.output
    (path,) = (tmp_path / "kept").rglob("*.json")
    assert done.output.strip() == str(path) and path.parent.name == "demo"
    (record,) = records.read_all(tmp_path / "kept")
    outcome = json.loads((folder / "result.json").read_text())
    assert path.name == f"fedavg-3-fp32-{record['recipe_hash'][:8]}.json"
    for key in ("method", "seed", "metrics", "accuracy_matrix", "by_logits", "curves", "cost", "environment"):
        assert record[key] == outcome[key]
    assert record["environment"]["engine"] == "eager" and record["everfed"] == everfed.__version__
    assert record["settings"]["stream"]["tasks"] == 2 and "engine" not in record["settings"]
    assert record["stream"]["divisions"] == [one["hash"] for one in outcome["stream"]["who_got_what"]]
    assert record["from_events"]["train_seconds_first_task"] > 0
    assert record["shared_device"] is True and record["remark"] == "a test"
    assert path.stat().st_size < 20_000


def test_a_run_that_diverged_has_a_record_without_metrics(tmp_path: Path) -> None:
    """By its folder and among others; it keeps the stream's facts, so that it can count for a table."""
    sets = ["train.rounds_per_task=1", "stream.tasks=2", "stream.clients=2", "engine.kind=eager"]
    recipe = everfed.read_recipe("demo", method="fedavg", seed=4, sets=[*sets, "train.optimizer.lr=1e30"])
    with pytest.raises(Exception, match="not finite"):
        everfed.run(recipe, tmp_path / "runs" / "ended")
    for named in (tmp_path / "runs", tmp_path / "runs" / "ended"):
        assert command(str(named), "--records", str(tmp_path / "kept")).exit_code == 0
        (record,) = records.read_all(tmp_path / "kept")
    assert "not finite" in record["diverged"] and (record["metrics"], record["accuracy_matrix"]) == ({}, [])
    assert record["seed"] == 4 and record["stream"]["clients"] == 2 and record["environment"]["engine"] == "eager"


def test_of_where_data_lay_only_the_name_is_recorded() -> None:
    outcome = result([[0.5]], stream={**STREAM, "origin": "/home/me/data/mnist.npz"})
    assert records.make(outcome, {}, {})["stream"]["origin"] == "mnist.npz"


def test_all_finished_runs_of_a_folder_are_recorded(tmp_path: Path) -> None:
    folder = run(tmp_path / "runs")
    for named in (tmp_path / "runs", folder / "result.json"):
        assert command(str(named), "--records", str(tmp_path / "kept")).exit_code == 0
        assert len(records.read_all(tmp_path / "kept")) == 1


def test_a_run_is_recorded_and_all_pages_are_written_by_one_command(tmp_path: Path) -> None:
    kept = ("--records", str(tmp_path / "kept"))
    done = command(str(run(tmp_path)), *kept, "--pages", str(tmp_path / "written"))
    assert done.exit_code == 0, done.output
    assert "1 runs have a record" in (tmp_path / "written" / "REPRODUCIBILITY.md").read_text()
    assert (tmp_path / "written/docs/results/fedgp.md").exists()


def test_what_cannot_be_recorded_is_refused(tmp_path: Path) -> None:
    empty, unfinished = tmp_path / "empty", tmp_path / "unfinished"
    empty.mkdir()
    unfinished.mkdir()
    (unfinished / "recipe.toml").write_text('[method]\nname = "fedavg"\n')
    for arguments, message in (
        ((), "name run folders to record, or a folder for the pages"),
        ((str(empty),), "holds no finished run"),
        ((str(tmp_path / "nowhere"),), "there is no folder"),
        ((str(unfinished),), "the run is not finished"),
    ):
        refused = command(*arguments)
        assert refused.exit_code == 2 and message in refused.output, refused.output


def test_the_help_has_its_examples_one_below_the_other() -> None:
    shown = command("--help").output
    assert "\\b" not in shown and "everfed record runs/reproduce --pages ." in shown


def test_a_file_that_is_no_table_is_no_record(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("null")
    with pytest.raises(UserError, match=r"broken.json is no record: it has no recipe"):
        records.read_all(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record: record.pop("metrics"), "it has no metrics"),
        (
            lambda record: record["settings"].update(train={"local_epochs": 9}),
            "recipe_hash does not belong to settings",
        ),
    ],
)
def test_a_file_that_is_no_record_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    path = records.write(made(), tmp_path)
    broken = json.loads(path.read_text())
    change(broken)
    path.write_text(json.dumps(broken))
    with pytest.raises(UserError, match=message):
        records.read_all(tmp_path)


def test_records_belong_to_the_runs_of_the_tables() -> None:
    found = runs_of([made(), made(seed=1), made("fedgp+der")])
    assert set(found) == {Experiment(RECIPE, "fedavg"), Experiment(RECIPE, "fedgp+der")}
    assert set(found[Experiment(RECIPE, "fedavg")]) == {0, 1}
    assert all(run.differs == () for runs in found.values() for run in runs.values())


def test_a_record_of_other_settings_is_taken_with_the_keys_that_differ() -> None:
    experiment, changed = Experiment(RECIPE, "fedavg"), made(sets=("train.optimizer.lr=0.5",))
    assert runs_of([changed])[experiment][0].differs == ("train.optimizer.lr",)
    both = runs_of([changed, made(accuracy=0.7)])[experiment][0]
    assert both.differs == () and both.result["metrics"]["acc"] == 0.7
    cell = plan(find("fedgp/table1"), ["fedavg"], ["rotated"])[0]
    (one,) = judge([cell], runs_of([changed]))
    assert one.verdict == "not judged: another recipe than the table's: train.optimizer.lr"


def test_of_records_of_one_run_the_most_exact_is_taken() -> None:
    """Whatever their names sort like: tf32 comes after fp32."""
    made_in = {
        precision: {**made(accuracy=accuracy), "environment": {"precision": precision}}
        for precision, accuracy in (("fp32", 0.7), ("tf32", 0.6), ("bf16", 0.5), ("of a newer version", 0.4))
    }
    for exact, other in itertools.combinations(made_in.values(), 2):
        for order in ([exact, other], [other, exact]):
            assert runs_of(order)[Experiment(RECIPE, "fedavg")][0].result["metrics"] == exact["metrics"]


def test_a_run_on_official_data_is_taken_before_a_more_exact_one_on_another_split() -> None:
    """A new run in bf16 on the official CIFAR-100, and an old one in tf32 on a split of the user's own."""
    facts = {"dataset": "cifar100", "clients": 10, "tasks": 10, "samples": {"train": 50_000, "test": 10_000}}
    recipe = "fedgp/table1-cifar100"
    settings = records.settings_of(read(recipe, method="fedavg"))

    def on(labels: str, precision: str, accuracy: float) -> dict[str, Any]:
        stream = {**facts, "test_labels": labels}
        ours = {"recipe": recipe, "settings": settings, "stream": stream, "environment": {"precision": precision}}
        return {**made(accuracy=accuracy), **ours}

    official, other = on("80031c23f8300724", "bf16", 0.09), on("a16c06c2fce42f06", "tf32", 0.08)
    for order in ([official, other], [other, official]):
        assert runs_of(order)[Experiment(recipe, "fedavg")][0].result["metrics"]["acc"] == 0.09


def test_another_run_of_the_same_name_is_kept_beside_the_first(tmp_path: Path) -> None:
    first, second, third = (made(accuracy=accuracy) for accuracy in (0.5, 0.6, 0.7))
    paths = [records.write(one, tmp_path) for one in (first, second, first, third)]
    assert [path.name.partition("fp32")[2][9:] for path in paths] == [".json", ".2.json", ".json", ".3.json"]
    assert [one["metrics"]["acc"] for one in records.read_all(tmp_path)] == [0.5, 0.6, 0.7]
    assert runs_of(records.read_all(tmp_path))[Experiment(RECIPE, "fedavg")][0].result["metrics"]["acc"] == 0.7


def test_a_record_of_a_setting_belongs_to_the_cell_with_that_setting() -> None:
    """B=5120 of Table 8 is the recipe of B=500 with another buffer."""
    settings = ("method.memory.size=5120",)
    recipe = "fedgp/table8-permuted-mnist"
    record = {**made("der"), "recipe": recipe}
    record["settings"] = records.settings_of(read(recipe, method="der", sets=settings))
    (experiment,) = runs_of([record])
    assert experiment == Experiment(recipe, "der", settings)


def test_a_record_belongs_to_the_recipe_that_has_its_very_settings() -> None:
    """Table 1 with a buffer of 500 is a run of Table 2; with one of 300 it is none."""
    recipe, method = "fedgp/table1-cifar100", "fedgp+agem"
    own = {**made(method), "recipe": recipe}
    for size, expected, differs in ((500, "fedgp/table2-cifar100", ()), (300, recipe, ("method.memory.size",))):
        own["settings"] = records.settings_of(read(recipe, method=method, sets=(f"method.memory.size={size}",)))
        ((experiment, runs),) = runs_of([own]).items()
        assert (experiment.recipe, runs[0].differs) == (expected, differs)


def test_records_of_no_table_are_left_out() -> None:
    assert runs_of([{**made(), "recipe": "demo"}, {**made(), "method": "feddbe"}]) == {}


TABLES = st.recursive(
    st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2),
    lambda inner: st.dictionaries(st.text("abc", min_size=1, max_size=2), inner, min_size=1, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text("abc", min_size=1, max_size=2), TABLES, max_size=3))
def test_settings_differ_from_others_and_not_from_themselves(settings: dict[str, Any]) -> None:
    again = json.loads(json.dumps(settings))
    assert records.differences(settings, again) == () and records.recipe_hash(settings) == records.recipe_hash(again)
    other = {**again, "further": 1}
    assert records.differences(settings, other) == ("further",) == records.differences(other, settings)
    assert records.recipe_hash(settings) != records.recipe_hash(other)


def test_a_value_that_became_the_default_is_no_difference() -> None:
    """Records hold what was not the default when they were written."""
    written = {"train": {"optimizer": {"lr": 0.1}}}
    assert records.differences(written, {}) == () == records.differences({}, written)
    assert records.differences({"train": {"optimizer": {"lr": 0.2}}}, {}) == ("train.optimizer.lr",)


def test_defaults_that_records_leave_out_stay() -> None:
    """Records hold only what is not the default. Before one is changed here, write the old one into all records that
    leave it out; a new key is to be added."""
    kept = json.loads((Path(__file__).parent / "defaults.json").read_text())
    assert json.loads(json.dumps(records._defaults())) == kept


def test_an_empty_table_is_a_difference() -> None:
    """Differential privacy with all its defaults is not the same as none."""
    assert records.differences({"privacy": {"dp": {}}}, {}) == ("privacy.dp",)
