"""Mistakes of a day with one's own code and data: each ends in one line that says where and what, before it costs."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import everfed
from everfed.cli import app

RECIPE = """
[stream]
dataset = "mine.npz"
scenario = "class-incremental"
tasks = 3
clients = 2
[model]
kind = "mlp"
[train]
rounds_per_task = 1
[engine]
kind = "eager"
[method]
name = "fedavg"
"""
PART = "from everfed.method import Metric, Part\nfrom dataclasses import dataclass\nfrom torch import nn, ones\n"
PART += "@dataclass(frozen=True)\nclass Clip(Part):\n    name = 'clip'\n    def gradient(self, step, gradient):\n"
METRIC = PART + "        pass\nclass Q(Metric):\n    name = 'q'\n    def measure(self, scored):\n"
NET = (
    "from torch import nn\nclass Net(nn.Module):\n    def __init__(self, shape, classes):\n        super().__init__()\n"
)


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("r.toml").write_text(RECIPE)
    y = np.arange(90) % 3
    np.savez("mine.npz", x=np.random.default_rng(0).normal(size=(90, 4)).astype("float32"), y=y)


def says(*arguments: str, code: int = 2) -> str:
    found = CliRunner().invoke(app, ["run", "r.toml", *arguments])
    assert found.exit_code == code and not Path("runs").exists(), found.output
    return " ".join(found.output.split())


@pytest.mark.parametrize(
    ("code", "arguments", "words"),
    [
        ("class Clip(\n", "--method {m}:Clip",
         "module '{m}' cannot be imported: SyntaxError: '(' was never closed ({m}.py, line 1)"),
        ("import os\nos.nothing\n", "--method {m}:Clip", "cannot be imported: AttributeError: module 'os' has no"),
        (PART + "        pass\n", "--method {m}:Clipp", "module '{m}' has no 'Clipp'. Did you mean Clip? It has Clip"),
        (PART + "        gradient.vector * 2\n", "--method {m}:Clip",
         "client 0 failed in phase 'train' of round 1: part 'clip': gradient() must return the gradient"),
        (METRIC + "        return 'good'\n", "--set eval.metrics=['{m}:Q']",
         "eval.metrics: 'q' (Q): measure() must give a tensor of sums; got str"),
        (METRIC + "        return ones(2)\n    def value(self, sums): return 'good'\n", "--set eval.metrics=['{m}:Q']",
         "eval.metrics: 'q' (Q): value() must give a number, a list or table of numbers, or None; got str"),
        (NET + "    def forward(self, x): return x[:, :3]\n", "--set model.kind={m}:Net",
         "has no parameters, so there is nothing to train"),
        (NET + "        self.out = nn.Linear(4, classes).double()\n    def forward(self, x): return self.out(x)\n",
         "--set model.kind={m}:Net", "trainable parameters are torch.float64 (out.weight); they must be float32"),
    ],
)  # fmt: skip
def test_a_mistake_in_ones_own_code(code: str, arguments: str, words: str) -> None:
    module = f"mistake_{abs(hash(code))}"
    Path(f"{module}.py").write_text(code)
    option, _, value = arguments.format(m=module).partition(" ")
    found = says(option, value)
    assert words.format(m=module) in found and "Traceback" not in found
    sys.modules.pop(module, None)


def test_classes_of_the_test_part_that_training_lacks_are_named_with_their_counts() -> None:
    x, y = np.zeros((90, 4), "float32"), np.arange(90) % 3
    np.savez("mine.npz", x_train=x[y < 2], y_train=y[y < 2], x_test=x[:30], y_test=y[:30])
    found = says()
    assert "r.toml, line 3: stream.dataset: mine.npz: " in found
    assert "the train part lacks, so that nothing can learn them: '2' (10). Add samples to the train part" in found
    words = np.array(["ill", "well", "dead"])[y]
    np.savez("mine.npz", x_train=x[y < 1], y_train=words[y < 1], x_test=x, y_test=words)
    assert "'dead' (30), 'well' (30). Add" in says()


def test_too_few_images_to_hold_any_out() -> None:
    image = pytest.importorskip("PIL.Image", reason="the extra `images` is not installed")
    for label in "ab":
        Path("photos", label).mkdir(parents=True)
        image.new("L", (4, 4)).save(f"photos/{label}/1.png")
    found = says("--set", "stream.dataset=photos", "--set", "stream.tasks=1")
    assert "photos: the test part is empty; a fifth is held out where a set has no test part, which takes 3" in found


def test_a_column_of_words_shows_one() -> None:
    Path("t.csv").write_text("a,colour,label\n" + "1,red,x\n3,blue,y\n" * 20)
    assert "column 'colour' holds text such as 'red'; features are numbers" in says("--set", "stream.dataset=t.csv")


def test_a_stream_in_place_of_the_recipe_says_where_it_belongs() -> None:
    x, y = np.zeros((30, 4), "float32"), np.arange(30) % 3
    stream = everfed.streams.from_arrays(x, y, x, y, scenario="class-incremental", tasks=3, clients=2)
    with pytest.raises(everfed.RecipeError, match="a recipe is a dict, .*got a ClassIncremental; a stream goes into"):
        everfed.run(stream)  # type: ignore[arg-type]
