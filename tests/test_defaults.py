"""What a user gets who says little: defaults that learn, own data that is distinguished, and errors in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

import everfed
from everfed import streams
from everfed.models import build
from everfed.recipe import from_table, scaled, share
from everfed.reports.groups import grouped
from everfed.reports.read import read_run

QUIET = {"engine": {"kind": "eager"}, "method": {"name": "fedavg"}}


def digits(tasks: int = 2, **options: Any) -> dict[str, Any]:
    return {"dataset": "digits", "scenario": "domain-incremental", "tasks": tasks, "clients": 3, **options}


def arrays(shift: int = 0, **options: Any) -> Any:
    """Six classes of 8 noisy vectors; `shift` makes it another data set."""
    rng = np.random.default_rng(shift)
    y = np.arange(96) % 6
    x = (np.eye(6)[y] + 0.1 * rng.normal(size=(96, 6))).astype(np.float32)
    table = {"scenario": "class-incremental", "tasks": 3, "clients": 2, "rounds_per_task": 1, **options}
    return streams.from_arrays(x, y, x, y, **table)


# defaults ------------------------------------------------------------------------------------------------------------
def test_the_defaults_learn_the_embedded_data(tmp_path: Path) -> None:
    result = everfed.run({"stream": digits(), **QUIET}, tmp_path / "run")
    assert result.metrics["learning_accuracy"] > 0.6


@pytest.mark.parametrize(("shape", "kind"), [((20,), "MLP"), ((1, 8, 8), "MLP"), ((3, 32, 32), "McMahanCNN")])
def test_the_default_network_suits_the_data(shape: tuple[int, ...], kind: str) -> None:
    assert type(build("auto", shape, 4, 0)).__name__ == kind


@pytest.mark.parametrize(("given", "lr"), [({}, 0.1), ({"kind": "adam"}, 0.001), ({"kind": "adam", "lr": 0.5}, 0.5)])
def test_the_default_rate_suits_the_optimizer(given: dict[str, Any], lr: float) -> None:
    assert from_table({"method": {"name": "fedavg"}, "train": {"optimizer": given}}).train.optimizer.lr == lr


@pytest.mark.parametrize(("lr", "warned"), [(0.0, True), (0.1, False)])
def test_a_run_that_learned_nothing_ends_with_a_warning(tmp_path: Path, lr: float, warned: bool) -> None:
    events: list[dict[str, Any]] = []
    recipe = {"stream": digits(), "train": {"optimizer": {"lr": lr}}, **QUIET}
    everfed.run(recipe, tmp_path / "run", observers=[events.append])
    found = [event["message"] for event in events if event["event"] == "warning"]
    assert any("guessing gives 10.0 %; try another train.optimizer.lr" in message for message in found) is warned


# scale ---------------------------------------------------------------------------------------------------------------
def test_a_tenth_of_the_scale_is_a_tenth_of_the_work() -> None:
    recipe = from_table({"method": {"name": "fedavg"}, "train": {"rounds_per_task": 100}})
    rounds = scaled(recipe, 0.1).train.rounds_per_task / 100
    assert rounds * share(0.1) == pytest.approx(0.1, rel=0.02)


def test_a_scaled_run_has_tests_enough_and_says_what_it_is(tmp_path: Path) -> None:
    result = everfed.run({"stream": digits(), **QUIET}, tmp_path / "run", scale=0.01)
    assert result.data["scale"] == 0.01 and min(result.data["n_test"]) >= 200
    assert "--scale 0.01" in " ".join(grouped([read_run(tmp_path / "run")]).notes)


# own data ------------------------------------------------------------------------------------------------------------
def test_runs_on_other_data_are_other_experiments(tmp_path: Path) -> None:
    for name, stream in (("a", arrays(0)), ("b", arrays(1)), ("c", arrays(0, seed=1))):
        everfed.run({"seed": int(name == "c"), **QUIET}, tmp_path / name, stream=stream)
    found = grouped([read_run(tmp_path / name) for name in "abc"])
    groups = sorted([run.name for run in group.runs] for group in found.groups)
    assert groups == [["a", "c"], ["b"]]  # seeds, and other data
    assert not [note for note in found.notes if "same experiment" in note]


def test_a_run_is_not_resumed_or_loaded_on_other_data(tmp_path: Path) -> None:
    everfed.run(QUIET, tmp_path / "a", stream=arrays(0))
    assert everfed.load(tmp_path / "a", stream=arrays(0)).recipe.stream.dataset == "python:arrays-class-incremental"
    with pytest.raises(everfed.UserError, match="ran on other data"):
        everfed.load(tmp_path / "a", stream=arrays(1))


@pytest.mark.parametrize("labels", [[1, 2, 3, 4], [0, 5, 7, 9], ["ant", "bee", "cat", "dog"]])
def test_labels_of_any_kind_are_classes(labels: list[Any]) -> None:
    y = np.array(labels * 6)
    x = np.zeros((24, 5), dtype=np.float32)
    stream = streams.from_arrays(x, y, x, y, scenario="class-incremental", tasks=2, clients=2)
    assert (stream.classes, list(stream.class_names)) == (4, [str(label) for label in labels])
    assert [stream.labels(task) for task in range(2)] == [(0, 1), (2, 3)]


# a model that does not fit -------------------------------------------------------------------------------------------
class Narrow(nn.Module):
    """Takes vectors of seven."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(7, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


class Wide(nn.Module):
    """Has two outputs too many."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(input_shape[0], classes + 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Narrow, r"does not fit 'arrays-class-incremental', whose inputs are \(6,\): .*test_defaults.py, line \d+, in"),
        (Wide, r"gives outputs of shape \(2, 8\) for 2 samples of 6 classes; it must be \(2, 6\)"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_in_one_line_before_the_run(
    tmp_path: Path, module: type[nn.Module], message: str
) -> None:
    with pytest.raises(everfed.UserError, match=message) as found:
        everfed.run({"model": {"kind": module}, **QUIET}, tmp_path / "run", stream=arrays())
    assert "\n" not in str(found.value) and not (tmp_path / "run").exists()
