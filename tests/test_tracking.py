"""`--track`: what the command line hands to trackers, with the real library reading it back."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from everfed.cli import app
from everfed.commands.options import Tracker
from everfed.reports.trackers import TRACKERS

TINY = ("--set", "stream.tasks=2", "--set", "stream.clients=3", "--set", "stream.max_train=90")
TINY = (*TINY, "--set", "stream.max_test=60", "--set", "model.hidden=[8]", "--set", "train.rounds_per_task=2")


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def everfed(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def scalars(folder: Path) -> dict[str, list[int]]:
    """The steps of every value that TensorBoard finds."""
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="pip install 'everfed[trackers]'"
    )
    found = accumulator.EventAccumulator(str(folder))
    found.Reload()
    return {tag: [event.step for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_the_option_names_the_trackers_there_are() -> None:
    assert {str(kind) for kind in Tracker} == set(TRACKERS)
    text = everfed("run", "--help").output
    assert all(kind in text for kind in TRACKERS)


def test_a_run_and_its_rounds_reach_tensorboard() -> None:
    pytest.importorskip("tensorboard", reason="pip install 'everfed[trackers]'")
    done = everfed("run", "demo", *TINY, "--out", "mine", "--track", "tensorboard")
    assert done.exit_code == 0, done.output
    found = scalars(Path("mine/tensorboard"))
    assert found["train/loss"] == [1, 2, 3, 4]
    assert found["evaluation/acc"] == [2, 4]
    assert found["final/acc"] == [4]


def test_every_cell_of_a_comparison_is_tracked() -> None:
    pytest.importorskip("tensorboard", reason="pip install 'everfed[trackers]'")
    options = ("--methods", "fedavg,er", "--seeds", "0", "--out", "both", "--track", "tensorboard")
    done = everfed("compare", "demo", *TINY, *options)
    assert done.exit_code == 0, done.output
    for method in ("fedavg", "er"):
        assert scalars(Path(f"both/{method}-0/tensorboard"))["train/loss"] == [1, 2, 3, 4]


def test_a_finished_run_is_resumed_without_a_word_to_the_tracker() -> None:
    assert everfed("run", "demo", *TINY, "--out", "mine").exit_code == 0
    assert everfed("resume", "mine", "--track", "tensorboard").exit_code == 0
    assert not Path("mine/tensorboard").exists()


def test_a_missing_library_is_refused_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused = everfed("run", "demo", *TINY, "--out", "mine", "--track", "wandb")
    assert refused.exit_code == 2
    assert "tracking with wandb needs its library" in refused.output
    assert not Path("mine").exists()


def test_an_unknown_tracker_is_refused_with_those_there_are() -> None:
    refused = everfed("run", "demo", "--track", "neptune")
    assert refused.exit_code == 2
    assert "tensorboard" in refused.output and "neptune" in refused.output
