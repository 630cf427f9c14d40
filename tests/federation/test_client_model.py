"""A client exports its personal model from its own folder: it is the one that it was scored with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from everfed.cli import app
from everfed.core.context import PlaceKey
from everfed.core.engine import Engine
from everfed.federation.client import Identity, RealClient
from everfed.federation.client_model import client_model
from everfed.federation.engine import Federated, RunIdentity
from everfed.federation.phase_options import PhaseOptions
from everfed.federation.runtime import RuntimeBuilder
from everfed.recipe import from_table, to_toml
from everfed.session import Run, assemble, execute
from everfed.store.run import RunFolder
from tests.federation.loop import Loop

TABLE = {
    "stream": {"dataset": "digits", "scenario": "class-incremental", "tasks": 2, "clients": 2, "max_train": 200},
    "model": {"kind": "mlp", "hidden": [12]},
    "method": {"name": "fedas"},
    "train": {"rounds_per_task": 2},
    "engine": {"kind": "eager", "device": "cpu"},
}


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("federation")
    recipe = from_table(TABLE)
    run = assemble(recipe)
    sites = {c: RealClient(folder / str(c), Identity(f"site-{c}", c), RuntimeBuilder()) for c in range(2)}

    def build(run: Run, notify: Any, durable: Callable[[], PlaceKey]) -> Engine:
        identity = RunIdentity("a1", 1, to_toml(recipe), 1.0)
        return Federated(run.setup, run.build_module, Loop(sites), identity, PhaseOptions(), durable, notify)

    opened = RunFolder.create(folder / "run", to_toml(recipe), {})
    return folder, run, execute(run, opened, [], 0.0, build)


def test_the_personal_models_are_those_that_were_scored(federation: tuple[Path, Run, dict[str, Any]]) -> None:
    folder, run, result = federation
    right = torch.zeros(2)
    for client in range(2):
        module, description = client_model(folder / str(client), RuntimeBuilder())
        assert description.classes == 10
        for task in range(2):
            test = run.stream.test(task)
            with torch.no_grad():
                right[task] += (module(run.stream.inputs(test.x)).argmax(1) == test.y).double().mean() / 2
    assert result["accuracy_matrix"][-1] == pytest.approx(right.tolist())


def test_a_client_s_folder_on_the_command_line(federation: tuple[Path, Run, dict[str, Any]], tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["export", str(federation[0] / "1"), "--to", "torch", "--out", str(tmp_path / "out")]
    )
    assert done.exit_code == 0, done.output
    module, _ = client_model(federation[0] / "1", RuntimeBuilder())
    saved = torch.load(tmp_path / "out/model.pt", weights_only=True)
    assert all(torch.equal(value, saved[name]) for name, value in module.state_dict().items())


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["export", str(tmp_path), "--to", "torch"])
    assert done.exit_code == 2 and "not a run" in done.output
