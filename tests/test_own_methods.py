"""A method of one's own beside the shipped ones, as a researcher has it all day: by name of a module, by a name of its
own, from Python; and what every table says of its numbers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import everfed
from everfed.cli import app
from everfed.methods.regularise.fedprox import FedProx

TINY: dict[str, Any] = {
    "name": "tiny",
    "stream": {"dataset": "digits", "tasks": 2, "clients": 2, "max_train": 60, "max_test": 40},
    "train": {"rounds_per_task": 1},
    "engine": {"kind": "eager"},
    "method": {"name": "fedavg"},
}
RECIPE = """
[stream]
dataset = "digits"
tasks = 2
clients = 2
max_train = 60
max_test = 40
[train]
rounds_per_task = 1
[engine]
kind = "eager"
[method]
name = "mine"
clip = { norm = 2.0 }
[methods.mine]
parts = ["fedavg", "memory", "er", "day_part:Clip"]
memory = { size = 5 }
[methods.mine-alone]
parts = ["fedavg", "day_part:Clip"]
[compare]
methods = ["fedavg", "mine"]
"""
PART = """
from dataclasses import dataclass
from everfed.method import Part, option

@dataclass(frozen=True)
class Clip(Part):
    norm: float = option(1.0, above=0, about="the greatest length")
    name = "clip"

    def gradient(self, step, gradient):
        return gradient.vector * (self.norm / gradient.vector.norm().clamp(min=self.norm))

BOTH = ["fedavg", "memory", {"part": "er"}, Clip(norm=0.5)]
SEVEN = 7
"""


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("day.toml").write_text(RECIPE)
    Path("day_part.py").write_text(PART)
    yield tmp_path
    sys.modules.pop("day_part", None)


def says(*arguments: str, code: int = 0) -> str:
    found = CliRunner().invoke(app, list(arguments))
    assert found.exit_code == code, found.output
    return found.output


def rows(folder: str, stem: str = "compare") -> dict[str, Any]:
    return {row["name"]: row for row in json.loads(Path(folder, f"{stem}.json").read_text())["rows"]}


def recipe_of(folder: str) -> everfed.Recipe:
    return everfed.read_recipe(Path(folder, "recipe.toml"))


# by name of a module, or a name of its own ----------------------------------------------------------------------------
def test_a_part_or_a_list_of_parts_is_a_method_by_its_modules_name() -> None:
    says("compare", "day.toml", "--methods", "fedavg,day_part:Clip,day_part:BOTH,fedgp+day_part:Clip", "--out", "c")
    assert set(rows("c")) == {"fedavg", "day_part:Clip", "day_part:BOTH", "fedgp+day_part:Clip"}
    from everfed.methods import registry

    assert [part.name for part in registry.build("day_part:Clip").parts] == ["fedavg", "clip"]
    assert [part.name for part in registry.build("fedgp+day_part:Clip").parts] == ["fedavg", "clip", "memory", "fedgp"]
    assert registry.build("day_part:BOTH").parts[-1].norm == 0.5  # type: ignore[attr-defined]
    assert Path("c/day_part.Clip-0/result.json").exists()  # a colon is no sign for a folder
    assert "SEVEN is a int; expected a part, or a list of parts" in says(
        "run", "day.toml", "--method", "day_part:SEVEN", code=2
    )


def test_a_composition_of_the_recipe_has_a_name_in_run_compare_and_sweep() -> None:
    assert "mine seed 0: Acc " in says("run", "day.toml")
    assert recipe_of("runs/day-mine-0").method.parts == ["fedavg", "memory", "er", "day_part:Clip"]
    says("compare", "day.toml", "--methods", "er,mine,mine-alone", "--out", "c")
    assert set(rows("c")) == {"er", "mine", "mine-alone"}
    assert recipe_of("c/mine-alone-0").method.parts == ["fedavg", "day_part:Clip"]
    for own in ("mine", "mine-alone"):  # what [method] says of a part serves every method that has it
        assert recipe_of(f"c/{own}-0").method.model_extra["clip"] == {"norm": 2.0}  # type: ignore[index]
    assert recipe_of("c/er-0").method.model_extra["memory"] == {"size": 5}  # type: ignore[index]
    assert "best: --set method.clip.norm=" in says(
        "sweep", "day.toml", "--method", "mine-alone", "--grid", "method.clip.norm=0.5,1", "--out", "s"
    )


def test_a_shipped_name_is_not_taken_for_a_composition_of_ones_own() -> None:
    Path("day.toml").write_text(RECIPE.replace("methods.mine-alone", "methods.er"))
    assert "'er' is the name of a shipped method; choose another" in says("run", "day.toml", code=2)


def test_from_python_a_method_is_a_list_of_parts() -> None:
    from everfed import compare

    parts = ["fedavg", FedProx(mu=0.5)]
    found = compare(TINY, ["fedavg", {"mine": parts, "alone": FedProx}], out="c")
    assert set(found.results) == {"fedavg", "mine", "alone"}
    assert recipe_of("c/mine-0").method.parts[1]["mu"] == 0.5  # type: ignore[index]
    assert set(compare(TINY, ["fedavg", parts], out="listed").results) == {"fedavg", "fedavg+fedprox"}
    with pytest.raises(everfed.UserError, match="a method is a part or a list of parts; got 'er'"):
        compare(TINY, {"mine": "er"})


# a folder that has a table already -----------------------------------------------------------------------------------
def test_a_second_comparison_in_a_folder_adds_to_its_table() -> None:
    says("compare", "day.toml", "--methods", "fedavg", "--seeds", "0,1", "--out", "c")
    first = rows("c")["fedavg"]
    printed = says("compare", "day.toml", "--methods", "mine", "--seeds", "0,1", "--out", "c")
    assert "| fedavg" in printed and "| mine" in printed
    assert rows("c")["fedavg"] == first and set(rows("c")) == {"fedavg", "mine"}
    says("compare", "day.toml", "--methods", "mine", "--seeds", "2", "--out", "c")  # and so do further seeds
    assert [run["seed"] for run in rows("c")["mine"]["runs"]] == [0, 1, 2]
    refused = says("compare", "day.toml", "--methods", "er", "--out", "c", "--set", "train.batch_size=8", code=2)
    assert "train.batch_size is 32 in fedavg-0, and 8 here. Choose another --out" in refused
    assert "--scale is 1.0 in fedavg-0, and 0.5 here" in says(
        "compare", "day.toml", "--methods", "er", "--out", "c", "--scale", "0.5", code=2
    )
    assert set(rows("c")) == {"fedavg", "mine"}  # what is refused changes nothing


def test_two_comparisons_in_a_folder_at_the_same_time_end_in_one_table() -> None:
    beside = []

    def other(event: dict[str, Any]) -> None:
        if not beside:
            beside.append(event)
            everfed.compare(TINY, ["er"], out="c")  # begins after the first, and ends before it

    everfed.compare(TINY, ["fedavg"], out="c", observers=[other])
    assert set(rows("c")) == {"fedavg", "er"}


def test_a_second_sweep_adds_its_cells() -> None:
    for values in ("0.05", "0.2"):
        says("sweep", "day.toml", "--method", "fedavg", "--grid", f"train.optimizer.lr={values}", "--out", "s")
    assert set(rows("s", "sweep")) == {"--set train.optimizer.lr=0.05", "--set train.optimizer.lr=0.2"}
    refused = ("sweep", "day.toml", "--method", "er", "--grid", "train.optimizer.lr=0.1", "--out", "s")
    assert "s holds runs that do not belong into one table with these: method." in says(*refused, code=2)


# seed by seed --------------------------------------------------------------------------------------------------------
def test_methods_are_compared_with_the_first_one_seed_by_seed() -> None:
    from everfed.metrics import paired_difference

    found = everfed.compare(TINY, ["fedavg", "er", "ideal"], [0, 1, 2], out="c")
    acc = {name: [run.metrics["acc"] for run in runs] for name, runs in found.results.items()}
    for row in found.rows:
        if row.name == "fedavg":
            assert row.difference is None
            continue
        expected = paired_difference(acc[row.name], acc["fedavg"])  # type: ignore[arg-type]
        assert row.difference == expected
        assert rows("c")[row.name]["difference"] == vars(expected)
        shown = f"{100 * expected.mean:+.2f} ({100 * expected.low:+.2f} to {100 * expected.high:+.2f})"  # type: ignore[operator]
        assert shown in Path("c/compare.md").read_text() and shown in repr(found)
    assert "vs fedavg (95 %)" in repr(found)
    assert "difference_low" in Path("c/compare.csv").read_text().splitlines()[0]
    single = everfed.compare(TINY, ["fedavg", "er"], out="single")
    assert "vs fedavg" not in repr(single)  # one seed has no interval


# what the numbers of a table are of -----------------------------------------------------------------------------------
def test_a_table_of_scaled_runs_says_so_wherever_it_stands() -> None:
    printed = says("compare", "day.toml", "--methods", "fedavg", "--scale", "0.5", "--out", "c")
    assert "at --scale 0.5 of the work" in printed and "At --scale 0.5 of the work" in Path("c/compare.md").read_text()
    head, line = Path("c/compare.csv").read_text().splitlines()
    assert dict(zip(head.split(","), line.split(","), strict=True))["scale"] == "0.5"
    assert "--scale" not in says("compare", "day.toml", "--methods", "fedavg", "--out", "full").partition("| Method")[2]


def test_a_sweeps_table_says_that_it_is_of_validation_data() -> None:
    printed = says("sweep", "day.toml", "--method", "fedavg", "--grid", "train.optimizer.lr=0.1", "--out", "s")
    assert "scored on validation data; written to s" in printed
    assert "Scored on validation data." in Path("s/sweep.md").read_text()
    head, line = Path("s/sweep.csv").read_text().splitlines()
    assert head.split(",")[2] == "split" and ",validation," in line
    assert "scored on validation data" in says(
        "run", "day.toml", "--set", "eval.split=validation", "--set", "stream.validation=0.2"
    )


def test_a_method_that_diverges_is_said_to_in_the_table() -> None:
    lost = ("--set", "train.optimizer.lr=1e30", "--methods", "fedavg", "--out", "c")
    printed = says("compare", "day.toml", *lost, code=1)
    for text in (printed, Path("c/compare.md").read_text()):
        (line,) = [line for line in text.splitlines() if line.startswith("| fedavg")]
        assert [cell.strip() for cell in line.split("|")[2:4]] == ["0/1, diverged", "diverged"]
    assert rows("c")["fedavg"]["runs"][0]["diverged"] is True


def test_sets_take_parts_and_classes(work: Path) -> None:
    """As an author has them at hand in Python: a part with options, a part's class, a class of a policy."""
    from day_part import Clip  # type: ignore[import-not-found]

    from everfed.methods.replay.herding import Herding

    small = {**TINY, "train": {"rounds_per_task": 1}}
    everfed.run(small, "r", sets={"method.parts": ["fedavg", Clip(norm=0.5)]}, progress=False)
    assert recipe_of("r").method.parts == ["fedavg", {"part": "day_part:Clip", "norm": 0.5}]
    assert everfed.read_recipe(small, sets={"method.parts": Clip}).method.parts == ["fedavg", "day_part:Clip"]
    chosen = everfed.read_recipe(small, method="er", sets={"method.memory.policy": Herding})
    assert chosen.method.model_extra == {"memory": {"policy": "everfed.methods.replay.herding:Herding"}}
    found = everfed.compare(small, ["er"], out="c", sets={"method.memory.policy": Herding}, progress=False)
    assert found.best == "er"
    with pytest.raises(everfed.RecipeError, match="sets: train.batch_size: a recipe holds text, numbers, lists and"):
        everfed.run(small, sets={"train.batch_size": object()})


def test_a_part_alone_has_one_name_from_python_and_the_command_line() -> None:
    from day_part import Clip

    for part in (Clip, Clip(), "day_part:Clip"):
        assert set(everfed.compare(TINY, [part], out="c", progress=False).results) == {"day_part:Clip"}
    assert set(everfed.compare(TINY, [Clip(norm=2.0)], out="d", progress=False).results) == {"fedavg+clip"}


def test_a_wrong_name_of_ones_own_says_how_to_write_it(work: Path) -> None:
    said = says("run", "day.toml", "--method", "fedavg+er+day_part:Clip", code=2)
    assert "'day_part:Clip' stands on top of fedavg by itself, and `fedgp+day_part:Clip` has FedGP on top" in said
    assert 'method.parts = ["fedavg", "er", "day_part:Clip"]' in said
    said = says("run", "day.toml", "--method", "elsewhere:Clip", code=2)
    assert f"it is neither in the current folder, {work}, nor in PYTHONPATH, nor installed" in said
    Path("broken_part.py").write_text("import no_such_library")
    said = says("run", "day.toml", "--method", "broken_part:Clip", code=2)
    assert "module 'broken_part' cannot be imported: No module named 'no_such_library'" in said


def test_a_folder_with_ones_own_code_says_what_to_allow() -> None:
    Path("day_part.py").write_text(
        f"{PART}\nfrom torch import nn\ndef net(shape, classes):\n    return nn.Sequential("
        "nn.Flatten(), nn.Linear(shape[-1] ** 2, classes))\n"
    )
    everfed.run("day.toml", out="r", sets={"model.kind": "day_part:net"}, progress=False)
    with pytest.raises(everfed.UserError, match=r"everfed.load\(folder, allow_code=\['day_part'\]\)"):
        everfed.load("r")
    assert everfed.load("r", allow_code=["day_part"]).result["method"] == "mine"


# messages that an author meets ----------------------------------------------------------------------------------------
REPORTS = """
from dataclasses import dataclass
from everfed.method import Mean, Part

@dataclass(frozen=True)
class Tells(Part):
    reply_as: str = "share"
    name = "tells"

    def reply(self, client):
        return {self.reply_as: 1.0 * client.id}

    def reducers(self):
        return {"share": Mean()}

    def update(self, server):
        server.report("share", server.reduced["share"] + server.round)
"""


def test_reported_numbers_are_columns_of_the_history(work: Path) -> None:
    (work / "telling.py").write_text(REPORTS)
    found = everfed.run("day.toml", method="telling:Tells", progress=False)
    history = found.history
    assert list(history["tells: share"]) == [0.5, 1.5]  # the mean of clients 0 and 1, and the round


def test_a_reply_without_a_reducer_says_where_to_declare_it(work: Path) -> None:
    (work / "telling.py").write_text(REPORTS)
    said = says("run", "day.toml", "--set", "method.parts=['fedavg', {part='telling:Tells', reply_as='other'}]", code=2)
    assert "part 'tells' replied 'other' and declares no reducer for it: name it in its reducers()" in said
    assert "Phase(reduce={'other': Mean()}" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--set", "memory.policy=herding"), "memory is not a key. Did you mean method.memory?"),
        (("--method", "der", "--set", "method.memory.logits=false"), "set method.memory.logits = true"),
        (
            ("--set", "method.parts=['fedavg', {part='day_part:Clip', norm=-1}]"),
            "--set method.parts=['fedavg', {part='day_part:Clip', norm=-1}]: method.clip.norm must be positive",
        ),
    ],
)
def test_a_wrong_setting_is_blamed_where_it_was_set(arguments: tuple[str, ...], said: str) -> None:
    assert said in says("run", "demo", *arguments, code=2)


def test_options_of_a_comparison_need_no_list_of_methods(work: Path) -> None:
    """The methods come from the command line, and what one alone is compared with from the recipe."""
    text = RECIPE.replace('methods = ["fedavg", "mine"]', "[compare.options]\nfedprox = ['method.fedprox.mu=0.5']")
    (work / "day.toml").write_text(text)
    says("compare", "day.toml", "--methods", "fedavg,fedprox", "--out", "c")
    extra = recipe_of("c/fedprox-0").method.model_extra
    assert extra is not None and extra["fedprox"] == {"mu": 0.5}
    assert "compare.methods is missing; or name them with --methods" in says("compare", "day.toml", code=2)
