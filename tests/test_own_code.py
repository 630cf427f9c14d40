"""A model, arrays and parts of a user's own: the README's twenty lines, the examples, and what is refused."""

from __future__ import annotations

import ast
import json
import re
import runpy
import shutil
import sys
import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import everfed
from everfed.cli import app
from everfed.core.option import declared_options
from everfed.method import Client, Gradient, Mean, Phase, Server, Step, Stream
from everfed.methods import registry as methods
from everfed.methods.aggregate.fedavg import FedAvg
from everfed.methods.replay.er import Replay
from everfed.methods.replay.herding import Herding
from everfed.methods.replay.memory import Memory, Policy, Pool
from everfed.methods.replay.sample_gradients import GradientOptions
from everfed.recipe import from_table, read, to_toml
from everfed.recipe.objects import named
from everfed.streams import from_arrays
from tests.support.child import Child

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples/own_part.py"
README = ROOT / "README.md"


class Net(nn.Sequential):
    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__(nn.Linear(input_shape[0], 8), nn.ReLU(), nn.Linear(8, classes))


def net(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Linear(input_shape[0], classes)


@dataclass(frozen=True)
class Frozen(everfed.method.Part):
    """Steps are multiplied by `factor`: with 0 nothing is learned."""

    factor: float = 0.0
    limit: float | None = 3.0
    tags: tuple[str, ...] = field(default=())

    name = "frozen"

    def gradient(self, step: Any, gradient: Gradient) -> Tensor:
        return gradient.vector * self.factor


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def own_stream(**options: Any) -> Stream:
    x = np.random.default_rng(0).normal(size=(150, 6))
    y = x[:, :3].argmax(axis=1)
    chosen = {"scenario": "domain-incremental", "transform": "permute", "tasks": 2, "clients": 3, "rounds_per_task": 3}
    return from_arrays(x[:100], y[:100], x[100:], y[100:], **{**chosen, **options})


def recipe(**sections: Any) -> dict[str, Any]:
    return {
        "model": {"kind": Net},
        "method": {"parts": ["fedavg", Frozen(0.5)]},
        "engine": {"kind": "eager"},
    } | sections


# the twenty lines ------------------------------------------------------------------------------------------------


def readme_block() -> str:
    """The code between the README's markers."""
    if not README.exists():
        pytest.skip("README.md is not there")
    found = re.search(r"<!-- own-code -->\s*```python\n(.*?)```\s*<!-- /own-code -->", README.read_text(), re.DOTALL)
    assert found, "README.md has no python block between <!-- own-code --> and <!-- /own-code -->"
    return found.group(1)


def lines_of_code(text: str) -> int:
    """Without blank lines, comments and the docstring."""
    document = {1} if ast.get_docstring(ast.parse(text)) else set()
    lines = {number for number, line in enumerate(text.splitlines(), 1) if line.strip() and line.strip()[0] != "#"}
    return len(lines - document)


def test_the_readmes_twenty_lines(work: Path) -> None:
    """A user's own model on a user's own two arrays with a user's own part, as a script in an empty folder."""
    text = readme_block()
    assert lines_of_code(text) <= 20
    (work / "script.py").write_text(text)
    done = Child(work, module="script").wait()
    assert done.code == 0, done.stderr
    result = json.loads((work / "runs/own-parts-0/result.json").read_text())
    assert done.stdout.strip().endswith(str(result["metrics"]["acc"]))
    assert result["metrics"]["acc"] > 0.4, "four classes: chance is 0.25"


def test_the_examples_twenty_lines(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lines_of_code(EXAMPLE.read_text()) <= 20
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    found = re.fullmatch(r"accuracy (0\.\d+), forgetting (-?0\.\d+)\n", capsys.readouterr().out)
    assert found and float(found[1]) > 0.7, "ten digits: chance is 0.1"
    assert json.loads((work / "runs/own/result.json").read_text())["method"] == "fedavg+memory+er+clip"


# by name, in a recipe --------------------------------------------------------------------------------------------


@pytest.fixture
def example(work: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the recipe and its module, as a user would have them; a small run."""
    for name in ("own_part_recipe.toml", "my_parts.py"):
        shutil.copy(ROOT / "examples" / name, work)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_parts", raising=False)
    return work


def test_the_example_recipe(example: Path) -> None:
    small = ["--set", "train.rounds_per_task=2", "--set", "stream.tasks=2", "--set", "stream.max_train=200"]
    done = CliRunner().invoke(app, ["run", "own_part_recipe.toml", "--out", "mine", *small])
    assert done.exit_code == 0, done.output
    assert json.loads((example / "mine/result.json").read_text())["method"] == "fedavg+memory+er+clip+server-momentum"
    assert type(everfed.load("mine", allow_code=["my_parts"]).model).__name__ == "Net"


def test_a_wrong_option_of_a_users_part_is_refused(example: Path) -> None:
    text = (example / "own_part_recipe.toml").read_text()
    for old, new, message in (
        ("norm = 0.5", "norm = -1", "norm must be positive"),
        ("norm = 0.5", "nrom = 1", "method.clip.nrom is not an option"),
        ("hidden = 64", "hiden = 64", "model.hiden is not an option"),
    ):
        (example / "wrong.toml").write_text(text.replace(old, new))
        done = CliRunner().invoke(app, ["run", "wrong.toml"])
        assert done.exit_code == 2 and message in done.stderr


def test_the_example_parts_do_what_they_say(example: Path) -> None:
    parts = runpy.run_path(str(example / "my_parts.py"))
    clip = parts["Clip"](norm=2.0)
    for given, expected in (([3.0, 4.0], [1.2, 1.6]), ([0.3, 0.4], [0.3, 0.4])):
        gradient = Gradient.of(None, torch.tensor(given))  # type: ignore[arg-type]
        assert torch.equal(clip.gradient(None, gradient), torch.tensor(expected))
    momentum, states = parts["ServerMomentum"](beta=0.5), {"server-momentum": {"before": torch.tensor([1.0])}}
    models = {"before": {"params": torch.tensor([3.0])}, "model": {"params": torch.tensor([10.0])}}
    server = Server(momentum.name, states, None, **models)  # type: ignore[arg-type]
    momentum.update(server)
    assert server.model["params"].item() == 10.0 + 0.5 * (3.0 - 1.0)
    assert server.state["before"].item() == 3.0


# objects in a recipe ---------------------------------------------------------------------------------------------


def test_classes_and_parts_become_names() -> None:
    here = __name__
    table = named(recipe(method={"parts": ["memory", FedAvg(), Frozen, Frozen(0.25, tags=("a",))]}))
    assert table["model"] == {"kind": f"{here}:Net"}
    assert table["method"]["parts"] == [
        "memory",
        {"part": "everfed.methods.aggregate.fedavg:FedAvg"},
        f"{here}:Frozen",
        {"part": f"{here}:Frozen", "factor": 0.25, "tags": ("a",)},
    ]
    made = from_table(table)
    assert from_table(tomllib.loads(to_toml(made))) == made, "the run folder holds all of it"


def test_names_and_tables_stay_as_they_are() -> None:
    table = {"model": {"kind": "mlp"}, "method": {"parts": ["fedavg", {"part": "memory", "size": 3}]}}
    assert named(table) == table
    assert named({"method": {"name": "fedavg"}}) == {"method": {"name": "fedavg"}}


def test_a_function_may_build_the_model(work: Path) -> None:
    everfed.run(recipe(model={"kind": net}), "mine", stream=own_stream())
    assert isinstance(everfed.load("mine", stream=own_stream(), allow_code=[__name__]).model, nn.Linear)


def test_what_cannot_be_found_again_is_refused() -> None:
    class Inner(Net):
        pass

    for kind, message in ((Inner, "top level of a module"), (lambda shape, classes: None, "top level")):
        with pytest.raises(everfed.RecipeError, match=message):
            named(recipe(model={"kind": kind}))
    with pytest.raises(everfed.RecipeError, match="model.kind: give the class .* not an object of class Net"):
        named(recipe(model={"kind": Net((4,), 2)}))
    with pytest.raises(everfed.RecipeError, match="a recipe cannot hold None; give limit another default"):
        named(recipe(method={"parts": [Frozen(limit=None)]}))


# options of parts in a recipe -------------------------------------------------------------------------------------
def written_and_read(parts: list[Any]) -> list[everfed.method.Part]:
    """The parts as a run folder holds them, built again."""
    made = from_table(named({"model": {"kind": "mlp"}, "method": {"parts": parts}}))
    again = from_table(tomllib.loads(to_toml(made)))
    return list(methods.build(parts=again.method.parts).parts)


PRESET_OF = {cls: name for name in ("fedgp", *methods.PRESETS) for cls in map(type, methods.build(name).parts)}
OTHERS: dict[str, Any] = {
    "policy": {"kind": "coordinated", "exchanges": 4},
    "gradients": {"layers": "last", "projection": 7},
    "levels": 1,
    "length": 10,
    "targets": ("fc1",),
}


def other(cls: type[everfed.method.Part], name: str, default: Any) -> Any:
    """A value of an option that is not its default: another number, another of the allowed words."""
    if name in OTHERS:
        return OTHERS[name]
    if isinstance(default, tuple):
        return (*default, 7)
    if isinstance(default, str):
        return next(word for word in allowed_words(cls, name) if word != default)
    if isinstance(default, bool | None):
        return 3 if default is None else not default
    return default + 1 if isinstance(default, int) else default / 2 or 0.5


def allowed_words(cls: type[everfed.method.Part], name: str) -> list[str]:
    """As its refusal names them; an option that refuses nothing takes any word."""
    try:
        cls(**{name: "?"})
    except ValueError as error:
        listed = str(error).partition("must be ")[2].removeprefix("one of").partition(";")[0]
        return re.findall(r"[\w+-]+", listed.replace(" or ", ", "))
    return ["any"]


@pytest.mark.parametrize("cls", methods.part_classes().values())
def test_the_options_of_every_part_survive(cls: type[everfed.method.Part]) -> None:
    beside = list(methods.build(PRESET_OF[cls]).parts) if cls in PRESET_OF else [*methods.build("fedavg").parts, cls()]
    assert written_and_read(beside) == beside
    for option in fields(cls):
        if dict(declared_options(cls))[option.name].one_of == (option.default,):
            continue  # the only value that a subclass can take
        part = cls(**{option.name: other(cls, option.name, option.default)})
        assert getattr(part, option.name) != option.default
        parts = [part if type(one) is cls else one for one in beside]
        assert written_and_read(parts) == parts


def stop(event: dict[str, Any]) -> None:
    """Interrupts a run at its first evaluation."""
    if event["event"] == "evaluation":
        raise KeyboardInterrupt


@dataclass(frozen=True)
class Newest(Policy):
    """The newest samples, `share` of the buffer."""

    share: float = 1.0

    def choose(self, pool: Pool, size: int) -> np.ndarray:
        return np.arange(pool.new)[-int(self.share * size) :]


@pytest.mark.parametrize(
    ("memory", "options"),
    [
        (Memory(size=50), {"size": 50}),
        (Memory(policy=Herding), {"policy": "everfed.methods.replay.herding:Herding"}),
        (Memory(policy=Newest(0.5)), {"policy": {"kind": f"{__name__}:Newest", "share": 0.5}}),
        (
            Memory(policy={"kind": Newest}, gradients=GradientOptions("last")),
            {"policy": {"kind": f"{__name__}:Newest"}, "gradients": {"layers": "last"}},
        ),
    ],
    ids=["plain", "class", "object", "table"],
)
def test_a_run_with_a_memory_can_be_loaded_and_resumed(work: Path, memory: Memory, options: dict[str, Any]) -> None:
    table = recipe(method={"parts": ["fedavg", memory, Replay(mode="union")]})
    whole = everfed.run(table, "whole", stream=own_stream())
    loaded = everfed.load("whole", stream=own_stream(), allow_code=[__name__])
    assert loaded.recipe.method.parts[1] == {"part": "everfed.methods.replay.memory:Memory", **options}
    assert methods.build(parts=loaded.recipe.method.parts).part("memory").chooser == memory.chooser
    with pytest.raises(KeyboardInterrupt):
        everfed.run(table, "mine", stream=own_stream(), observers=[stop], checkpoint_every=0.0)
    assert everfed.resume("mine", stream=own_stream()).metrics == whole.metrics
    assert (work / "mine/model.safetensors").read_bytes() == (work / "whole/model.safetensors").read_bytes()


def test_a_policy_may_stand_in_the_options_of_a_preset() -> None:
    table = named({"method": {"name": "er", "memory": {"size": 3, "policy": Newest(0.5)}}})
    assert table["method"]["memory"] == {"size": 3, "policy": {"kind": f"{__name__}:Newest", "share": 0.5}}
    memory = methods.build("er", {"memory": table["method"]["memory"]}).part("memory")
    assert isinstance(memory, Memory) and memory.chooser == Newest(0.5)


def test_options_that_a_recipe_cannot_hold_are_refused() -> None:
    with pytest.raises(
        everfed.RecipeError, match="method.parts: tags: a recipe holds text, .* not an object of Tensor"
    ):
        named(recipe(method={"parts": [Frozen(tags=(torch.ones(1),))]}))  # type: ignore[arg-type]
    table = named({"method": {"name": "er", "memory": {"policy": everfed.method.Optimizer()}}})
    with pytest.raises(methods.MethodError, match=r"method.memory.policy.*everfed.core.optimizer:Optimizer"):
        methods.build("er", {"memory": table["method"]["memory"]})


# a stream of one's own -------------------------------------------------------------------------------------------


def test_a_run_on_own_arrays_can_be_resumed_and_loaded(work: Path) -> None:
    whole = everfed.run(recipe(), "whole", stream=own_stream())
    with pytest.raises(KeyboardInterrupt):
        everfed.run(recipe(), "mine", stream=own_stream(), observers=[stop], checkpoint_every=0.0)
    with pytest.raises(everfed.UserError, match=r"same stream again, from Python: everfed.resume\('mine', stream="):
        everfed.resume("mine")
    assert everfed.resume("mine", stream=own_stream()).metrics == whole.metrics
    assert (work / "mine/model.safetensors").read_bytes() == (work / "whole/model.safetensors").read_bytes()


def test_another_stream_than_before_is_refused(work: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        everfed.run(recipe(), "mine", stream=own_stream(), observers=[stop], checkpoint_every=0.0)
    with pytest.raises(everfed.UserError, match="ran on other data, or other settings of the stream"):
        everfed.resume("mine", stream=own_stream(clients=4))


def test_the_part_is_used(work: Path) -> None:
    """Nothing is learned with a factor of 0."""
    still = everfed.run(recipe(method={"parts": ["fedavg", Frozen(0.0)]}), "still", stream=own_stream())
    moved = everfed.run(recipe(), "moved", stream=own_stream())
    assert (work / "still/model.safetensors").read_bytes() != (work / "moved/model.safetensors").read_bytes()
    rows = still.data["accuracy_matrix"]
    assert rows[1][0] == rows[0][0] and moved.data["cost"]["rounds"] == 6


def test_the_stream_says_how_long_a_task_is(work: Path) -> None:
    everfed.run(recipe(), "mine", stream=own_stream(rounds_per_task=4))
    assert read(work / "mine/recipe.toml").train.rounds_per_task == 4
    with pytest.raises(everfed.RecipeError, match="train.rounds_per_task = 5, but the stream has 3"):
        everfed.run(recipe(train={"rounds_per_task": 5}), "other", stream=own_stream())
    with pytest.raises(everfed.RecipeError, match="multiple of sync_every"):
        everfed.run(recipe(train={"sync_every": 2}), "other", stream=own_stream())
    with pytest.raises(everfed.RecipeError, match="scale shrinks"):
        everfed.run(recipe(), "other", stream=own_stream(), scale=0.5)
    assert not (work / "other").exists()


def test_the_rate_moves_over_the_streams_own_rounds(work: Path) -> None:
    """A linear schedule over tasks of 4 rounds, of which the recipe says nothing."""
    RATES.clear()
    schedule = {"optimizer": {"lr": 0.4, "schedule": "linear"}}
    parts = {"parts": ["fedavg", _Rates]}
    everfed.run(recipe(train=schedule, method=parts), "mine", stream=own_stream(rounds_per_task=4, clients=1, tasks=1))
    assert pytest.approx([0.4, 0.3, 0.2, 0.1]) == RATES


RATES: list[float] = []


class _Rates(everfed.method.Part):
    """Notes the learning rate of every round, for the test above."""

    name = "rates"

    def receive(self, client: Client) -> None:
        RATES.append(client.rate)


# mistakes in code of one's own ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class NothingReturned(everfed.method.Part):
    name = "mistaken"

    def gradient(self, step: Step, gradient: Gradient) -> Tensor:
        gradient.vector.mul_(0.5)  # and forgets to return it


@dataclass(frozen=True)
class SomeReturned(everfed.method.Part):
    name = "mistaken"

    def gradient(self, step: Step, gradient: Gradient) -> Tensor:
        return gradient.vector[:5]


@dataclass(frozen=True)
class WordMissing(everfed.method.Part):
    name = "mistaken"

    def gradient(self, step: Step, gradient: Gradient) -> Tensor:
        return gradient.vector * step.message["never sent"]


@dataclass(frozen=True)
class OnePhase(everfed.method.Part):
    name = "mistaken"

    def phases(self) -> Any:
        return Phase("measure", run=lambda client: {})


@dataclass(frozen=True)
class VectorReported(everfed.method.Part):
    name = "mistaken"

    def update(self, server: Server) -> None:
        server.report("update", server.model["params"])


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (NothingReturned(), r"part 'mistaken': gradient\(\) must return the gradient, .*, not NoneType"),
        (SomeReturned(), r"a vector of shape \(\d+,\) made from gradient.vector, not a tensor of shape \(5,\)"),
        (WordMissing(), r"client 0 failed in .*: KeyError: 'never sent' \(.*test_own_code.py, line \d+, in gradient\)"),
        (OnePhase(), r"part 'mistaken': phases\(\) must return a tuple, \(Phase\(...\),\), not a Phase"),
        (VectorReported(), r"part 'mistaken': report\('update'\) takes one number, not a tensor of shape \(\d+,\)"),
    ],
)
def test_a_mistake_in_an_own_part_is_named(part: everfed.method.Part, words: str, work: Path) -> None:
    with pytest.raises(Exception, match=words):
        everfed.run(recipe(method={"parts": ["fedavg", part]}), work / "run", stream=own_stream())


@dataclass(frozen=True)
class LengthReported(everfed.method.Part):
    """Sends a number, a tensor that the server reports as it is."""

    name = "lengths"

    def phases(self) -> tuple[Phase, ...]:
        return (Phase("lengths", reduce={"length": Mean()}, run=self.measure, update=self.keep),)

    def measure(self, client: Client) -> dict[str, Tensor]:
        return {"length": client.gradient(client.data.x, client.data.y).norm()}

    def keep(self, server: Server) -> None:
        server.report("length", server.reduced["length"])


def test_a_reduced_tensor_is_reported_as_the_number_in_it(work: Path) -> None:
    everfed.run(recipe(method={"parts": ["fedavg", LengthReported()]}), work / "run", stream=own_stream())
    lines = [json.loads(line) for line in (work / "run/events.jsonl").read_text().splitlines()]
    lengths = [line["length"] for line in lines if line["event"] == "measure"]
    assert len(lengths) == 6 and all(isinstance(one, float) and one > 0 for one in lengths)


@dataclass(frozen=True)
class Chooses(Policy):
    """Gives what it is told to."""

    what: str = "too many"
    about = "for tests"
    needs_model = False

    def choose(self, pool: Pool, size: int) -> Any:
        found = {"too many": np.arange(len(pool)), "twice": np.zeros(size, dtype=int), "torch": torch.arange(size)}
        return found[self.what]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("too many", r"policy 'Chooses': choose\(\) must return at most 4 different positions from 0 to \d+, not \d+"),
        ("twice", "at most 4 different positions from 0 to .*, not 4"),
        ("torch", r"policy 'Chooses': choose\(\) must return a numpy array of positions, not tensor"),
    ],
)
def test_a_policy_that_chooses_wrongly_is_named(what: str, words: str, work: Path) -> None:
    parts = ["fedavg", Memory(size=4, policy={"kind": f"{__name__}:Chooses", "what": what}), "er"]
    with pytest.raises(Exception, match=words):
        everfed.run(recipe(method={"parts": parts}), work / "run", stream=own_stream())


def test_everything_that_authors_write_against_comes_through_one_door() -> None:
    names = {name: getattr(everfed.method, name) for name in everfed.method.__all__}
    assert names["Policy"] is Policy and names["Pool"] is Pool
    assert {"IncrementalStream", "PlannedStream", "Part", "Phase"} <= names.keys()
    with pytest.raises(AttributeError, match="no attribute 'Polcy'"):
        _ = everfed.method.Polcy
