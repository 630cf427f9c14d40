"""The path of a newcomer, as a script: what they type, and the words that they read. README, a starter folder, names,
own images, an own table, an own model with an error in it, and the example notebooks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import everfed
from everfed.cli import app
from everfed.methods import registry as methods
from everfed.recipe import shipped as recipes
from tests.support.waiting import HANG

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
SMALL = ("--set", "engine.kind=eager", "--set", "train.rounds_per_task=1", "--set", "train.local_epochs=1")


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EVERFED_DATA", raising=False)
    return tmp_path


def says(*arguments: str, code: int = 0) -> str:
    """What a command prints, on both streams."""
    found = CliRunner().invoke(app, list(arguments))
    assert found.exit_code == code, found.output
    return found.output


# the README ----------------------------------------------------------------------------------------------------------
def demo_table() -> dict[str, list[float]]:
    """{method: [acc, deviation, forgetting]} as the README prints them."""
    rows = re.findall(r"^\| ([\w+]+) \| ([\d.]+) ± ([\d.]+) \| ([\d.]+) \|$", (ROOT / "README.md").read_text(), re.M)
    return {method: [float(number) for number in numbers] for method, *numbers in rows}


def test_the_readmes_table_is_of_the_demo() -> None:
    recipe = everfed.read_recipe("demo")
    assert recipe.compare is not None and set(demo_table()) == set(recipe.compare.methods)
    accuracies = [row[0] for row in demo_table().values()]
    assert accuracies == sorted(accuracies, reverse=True)
    assert len(recipe.compare.seeds) == 2 and "two seeds" in (ROOT / "README.md").read_text()


@pytest.mark.slow
def test_the_readmes_table_is_what_the_demo_prints() -> None:
    """Another processor may round otherwise, which two points allow for."""
    says("demo", "--out", "demo")
    rows = json.loads(Path("demo/compare.json").read_text())["rows"]
    assert [row["name"] for row in rows] == list(demo_table())
    for row in rows:
        acc, forgetting = (100 * row["metrics"][key]["mean"] for key in ("acc", "forgetting"))
        assert (acc, forgetting) == pytest.approx(tuple(demo_table()[row["name"]][::2]), abs=2.0)


def test_the_readmes_commands_never_collide(work: Path) -> None:
    """Every `everfed run` of the README, in its order, twice: small, in one folder."""
    text = (ROOT / "README.md").read_text()
    lines = [line.partition("#")[0].split() for line in re.findall(r"^everfed (run demo .*)$", text, re.M)]
    assert len(lines) >= 2
    small = [*SMALL, "--set", "stream.tasks=1", "--set", "stream.max_train=60", "--set", "stream.clients=2"]
    for words in lines * 2:
        named = ["--overwrite"] if "--out" in words else []
        assert "run folder: runs/" in says(*words, *small, *named, "--set", "stream.partition={ kind = 'iid' }")


# a starter folder ----------------------------------------------------------------------------------------------------
def test_a_starter_folder_runs_as_it_is(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "next: cd mine && everfed run recipe.toml" in says("init", "mine")
    monkeypatch.chdir(work / "mine")
    monkeypatch.syspath_prepend(str(work / "mine"))
    assert "my_model:Net: 4,810 parameters, outputs (10,)" in says("run", "recipe.toml", *SMALL, "--dry-run")
    text = says("run", "recipe.toml", *SMALL)
    assert "mine seed 0: Acc " in text and "run folder: runs/recipe-mine-0" in text
    assert "method.clip.norm must be positive; got 0" in says(
        "run", "recipe.toml", "--set", "method.clip.norm=0", code=2
    )
    compared = says("compare", "recipe.toml", *SMALL, "--methods", "er,mine", "--seeds", "0", "--scale", "0.2")
    assert "| er " in compared and "| mine " in compared
    assert "recipe.toml is there already; nothing was written" in says("init", ".", code=2)
    for name in ("my_model", "my_part"):
        monkeypatch.delitem(sys.modules, name, raising=False)


# names ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("given", "meant"), [("der+fedgp", "fedgp+der"), ("der+++fedgp", "fedgp+der++")])
def test_fedgp_may_stand_on_either_side(given: str, meant: str) -> None:
    assert methods.build(given).name == meant and methods.build(given).parts == methods.build(meant).parts
    assert everfed.read_recipe("demo", method=given) == everfed.read_recipe("demo", method=meant)
    assert everfed.read_recipe({"method": {"name": given}}).method.name == meant


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["run", "demo", "--method", "fedgpp"],
            r"no method 'fedgpp'\. Did you mean fedgp, [\w+]+ or [\w+]+\?",
        ),
        (
            ["run", "demo", "--set", "model.kind=resnet"],
            r"'resnet'\. Did you mean resnet18, [\w-]+ or [\w-]+\?",
        ),
        (["run", "demo", "--set", "stream.dataset=cifar"], r"Did you mean cifar10, cifar100 or [\w-]+\?"),
        (["run", "demo", "--set", 'method.parts=["fedav"]'], r"'fedav' is not a part\. Did you mean fedavg, fed\w+ or"),
        (["show", "fedgpp"], r"no method, recipe, data set or part 'fedgpp'\. Did you mean fedgp, "),
    ],
)
def test_a_wrong_name_gets_its_nearest_three(arguments: list[str], words: str) -> None:
    found = says(*arguments, code=2)
    assert re.search(words, found), found
    assert len(found) < 400  # and not all 65


# show ----------------------------------------------------------------------------------------------------------------
def test_show_explains_a_method() -> None:
    found = says("show", "der+fedgp")
    for words in (
        *(
            "method: fedgp+der",
            "FedGP: buffer-based gradient projection (Dai et al., 2023",
            "samples: 32",
            "logits: True",
        ),
        *("reference: this round's clients, in every round", "server needs: sums and means over clients suffice"),
        *("needs: nothing", "not beside:\n  parts that keep some parameters on the clients", "--dry-run"),
    ):
        assert words in found, words
    assert all(len(line) <= 100 for line in found.splitlines())
    robust = json.loads(says("show", "mfcl", "--json"))
    assert robust["needs"] == ["boundaries", "classes", "together"] and robust["parts"]["mfcl"]["options"][
        "gen_steps"
    ].startswith("5000 (at least 1): ")


def test_show_gives_bibtex() -> None:
    found = says("show", "fedgp+fedprox")
    assert "@misc{fedgp,\n    author = {Dai, Shenghong and others}," in found
    assert "@inproceedings{fedprox,\n    author = {Li, Tian and others},\n" in found
    assert "title = {{Federated Optimization in Heterogeneous Networks}},\n    booktitle = {MLSys},\n" in found


def test_every_method_and_recipe_can_be_shown() -> None:
    from everfed.commands.show import _facts

    for name in (*methods.names(), *recipes.names()):
        assert _facts(name, None)["about"]


def test_show_explains_recipes_data_sets_and_parts(work: Path) -> None:
    assert "compares: fedavg, der, fedgp+der over seeds [0, 1]" in says("show", "demo")
    assert "samples: 1438 to train on, 359 to test, each (1, 8, 8)" in says("show", "digits")
    assert "not found: missing; https://" in says("show", "mnist")
    assert "mu: 0.01" in says("show", "fedprox")
    np.savez("mine.npz", x=np.ones((10, 3)), y=np.arange(10) % 2)
    assert "classes: 2: 0, 1" in says("show", "mine.npz")


# own images and own tables -------------------------------------------------------------------------------------------
OWN = """\
[stream]
dataset = "{dataset}"
scenario = "class-incremental"
tasks = 2
clients = 2
{more}
[train]
rounds_per_task = 1
[engine]
kind = "eager"
[method]
name = "er"
"""


def test_own_images(work: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="the extra `images` is not installed")
    for label, value in (("ant", 0), ("bee", 80), ("cat", 160), ("dog", 240)):
        (work / "photos" / label).mkdir(parents=True)
        for number in range(10):
            image.new("RGB", (8 + number, 8), (value, value, value)).save(work / f"photos/{label}/{number}.jpg")
    Path("photos.toml").write_text(OWN.format(dataset="photos", more=""))
    found = says("run", "photos.toml", code=2)
    assert "photos.toml, line 1: photos/ant/1.jpg: 9x8 pixels where others have 8x8; set stream.image_size" in found
    assert not (work / "runs").exists()
    assert "run folder: runs/photos-er-0" in says("run", "photos.toml", "--set", "stream.image_size=8")
    assert json.loads(Path("runs/photos-er-0/result.json").read_text())["stream"]["samples"]["train"] == 32


def test_own_table(work: Path) -> None:
    rows = [f"{number % 7},{number},{('ill', 'well', 'new', 'old')[number % 4]}" for number in range(40)]
    Path("clinic.csv").write_text("\n".join(["age,dose,outcome", *rows]))
    Path("clinic.toml").write_text(OWN.format(dataset="clinic.csv", more=""))
    assert "Call it label, or set stream.label; the columns are age, dose, outcome" in says(
        "run", "clinic.toml", code=2
    )
    assert "run folder: runs/clinic-er-0" in says("run", "clinic.toml", "--set", "stream.label=outcome")
    assert "stream.label = 'outcom' is no column" in says("run", "clinic.toml", "--set", "stream.label=outcom", code=2)


# an own model with an error in it ------------------------------------------------------------------------------------
BROKEN = """\
from torch import nn


class Net(nn.Module):
    def __init__(self, input_shape, classes):
        super().__init__()
        self.layer = nn.Linear(7, classes)

    def forward(self, x):
        return self.layer(x.flatten(1))
"""


def test_an_own_model_with_an_error_in_it(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("broken_net.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(str(work))
    found = says("run", "demo", "--set", "model={ kind = 'broken_net:Net' }", code=2)
    assert "model.kind = 'broken_net:Net' does not fit 'digits-rotate', whose inputs are (1, 8, 8)" in found
    assert re.search(r"broken_net.py, line 10, in forward", found)
    assert len(found.splitlines()) == 1 and not (work / "runs").exists()
    monkeypatch.delitem(sys.modules, "broken_net", raising=False)


# notebooks -----------------------------------------------------------------------------------------------------------
def sources(notebook: Path) -> list[str]:
    cells = json.loads(notebook.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


@pytest.fixture(scope="module")
def kernel() -> Iterator[Any]:
    """A Jupyter kernel for all notebooks, None where there is none: starting one and importing torch takes seconds."""
    if not (find_spec("nbclient") and find_spec("ipykernel")):
        yield None
        return
    from jupyter_client.manager import AsyncKernelManager
    from jupyter_core.utils import run_sync

    manager = AsyncKernelManager()
    yield manager
    if manager.has_kernel:
        run_sync(manager.shutdown_kernel)(now=True)


def executed(notebook: Path, folder: Path, kernel: Any) -> str:
    """Everything that the notebook shows: by a Jupyter kernel, or as a script where there is none."""
    if kernel is not None:
        import nbformat
        from nbclient import NotebookClient

        read = nbformat.read(notebook, as_version=4)
        # without the names of the notebook before, and on one core, where no process is forked for clients
        begin = f"%reset -f\nimport os\nos.chdir({str(folder)!r})\n"
        begin += "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
        read.cells.insert(0, nbformat.v4.new_code_cell(begin))
        NotebookClient(read, km=kernel, timeout=HANG, startup_timeout=HANG, iopub_timeout=HANG).execute()
        return json.dumps([cell.get("outputs") for cell in read.cells])
    (folder / "notebook.py").write_text("\n".join(sources(notebook)))
    return subprocess.run(
        [sys.executable, "notebook.py"], cwd=folder, capture_output=True, text=True, check=True
    ).stdout


EXPECTED: dict[str, list[str]] = {
    "first_steps": ["there is no method 'fedgp+err'. Did you mean fedgp+er, "],
    "own_data": ["'__main__:Wrong' does not fit 'species-class-incremental', whose inputs are (4,)"],
}


def test_there_are_two_notebooks() -> None:
    assert [notebook.stem for notebook in NOTEBOOKS] == list(EXPECTED)
    for notebook in NOTEBOOKS:
        assert all(not cell.get("outputs") for cell in json.loads(notebook.read_text())["cells"])  # none is committed


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_a_notebook_runs(notebook: Path, work: Path, kernel: Any) -> None:
    shown: Any = executed(notebook, work, kernel)
    for words in EXPECTED[notebook.stem]:
        assert words in shown
    if find_spec("ipykernel"):
        assert "<progress value=" in shown and "<table" in shown  # the bar, and a result as a table
    assert len(list(work.glob("runs/**/result.json"))) >= 3
