"""Exact unlearning: a run that samples were withdrawn from equals the run that never saw them, to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

import everfed
from everfed import streams
from everfed.cli import app
from everfed.core import tree
from everfed.data.withdrawn import Withdrawn
from everfed.errors import CompositionError, SettingError, UserError
from everfed.session.forgetting import require_able
from everfed.store.checkpoint import newest
from tests.support.phases import phase_of
from tests.support.toy import Bench

STREAM = {"dataset": "digits", "scenario": "class-incremental", "tasks": 2, "clients": 4, "max_train": 160,
          "max_test": 60}  # fmt: skip
PARTS: dict[str, Any] = {"ridge": {}, "ranpac": {"width": 24}}


def recipe(method: str = "ridge", own: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    stream = {**STREAM, **changes.pop("stream", {})}
    defaults = {**PARTS, **({method: own} if own else {})}
    return {"stream": stream, "model": {"kind": "mlp", "hidden": [16]}, "train": {"rounds_per_task": 1},
            "method": {"name": method, "defaults": defaults}, "engine": {"kind": "eager"}, **changes}  # fmt: skip


def sums(folder: Path, method: str) -> Any:
    """What the server keeps, without the penalties of earlier rounds."""
    state = newest(folder / "checkpoint")
    assert state is not None
    return {key: state.server[method][key] for key in ("gram", "products", "counts", "clipped")}


def model(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / "model.safetensors")


def assert_never_saw(folder: Path, table: dict[str, Any], without: dict[str, Any], place: Path) -> None:
    """Model, sums and scores of the last task are those of a run on the stream without the samples."""
    method = table["method"]["name"]
    other = everfed.run({**table, "stream": {**table["stream"], "withdrawn": without}}, place, progress=False)
    assert tree.equal(model(folder), model(place))
    assert tree.equal(sums(folder, method), sums(place, method))
    found = json.loads((folder / "result.json").read_text())
    assert found["accuracy_matrix"][-1] == other.data["accuracy_matrix"][-1]
    assert found["metrics"]["acc"] == other.metrics["acc"]


@pytest.mark.parametrize("method", PARTS)
@pytest.mark.parametrize("without", [{"clients": [3]}, {"classes": [7]}, {"clients": [1, 2], "classes": [0, 9]}])
def test_the_model_is_that_of_the_run_that_never_saw_them(method: str, without: Any, tmp_path: Path) -> None:
    table = recipe(method)
    before = everfed.run(table, tmp_path / "run", progress=False)
    old = model(before.folder)
    everfed.forget(before.folder, **without)
    assert not tree.equal(old, model(before.folder))
    assert_never_saw(before.folder, table, without, tmp_path / "other")


def test_single_samples_of_an_earlier_task_under_secure_aggregation(tmp_path: Path) -> None:
    """The samples are of the first task; the run went on with another."""
    pytest.importorskip("cryptography", reason="pip install 'everfed[privacy]'")
    table = recipe(privacy={"secure_aggregation": True})
    ran = everfed.run(table, tmp_path / "run", progress=False)
    ids = streams.build(STREAM, 0, 1).data(2, 0).ids[:3].tolist()
    without = {"clients": [2], "samples": ids}
    everfed.forget(ran.folder, **without)
    assert_never_saw(ran.folder, table, without, tmp_path / "other")
    plain = everfed.run(recipe(stream={"withdrawn": without}), tmp_path / "plain", progress=False)
    assert tree.equal(model(plain.folder), model(ran.folder))


def test_a_run_that_goes_on_with_further_tasks_never_saw_them(tmp_path: Path) -> None:
    """Samples of the first task are withdrawn after the second, then a third task comes."""
    stream = {**STREAM, "scenario": "domain-incremental", "transform": "rotate"}
    ran = everfed.run(recipe(stream=stream), tmp_path / "run", progress=False)
    ids = streams.build(stream, 0, 1).data(2, 0).ids[:5].tolist()
    everfed.forget(ran.folder, clients=[2], samples=ids)
    everfed.resume(ran.folder, tasks=3, progress=False)
    longer = {**stream, "tasks": 3, "withdrawn": {"clients": [2], "samples": ids}}
    other = everfed.run(recipe(stream=longer), tmp_path / "other", progress=False)
    assert tree.equal(model(ran.folder), model(other.folder))
    assert tree.equal(sums(ran.folder, "ridge"), sums(other.folder, "ridge"))


def test_what_was_withdrawn_is_recorded_and_twice_is_once(tmp_path: Path) -> None:
    ran = everfed.run(recipe(eval={"snapshots": True}), tmp_path / "run", progress=False)
    assert (ran.folder / "model-task1.safetensors").exists()
    done = CliRunner().invoke(app, ["forget", str(ran.folder), "--client", "3"])
    assert done.exit_code == 0, done.output
    once = model(ran.folder)
    everfed.forget(ran.folder, clients=[3])
    assert tree.equal(once, model(ran.folder))
    first, second = map(json.loads, (ran.folder / "forgotten.jsonl").read_text().splitlines())
    assert first["withdrawn"] == {"clients": [3]}
    assert first["model_before"] != first["model_after"] == second["model_before"] == second["model_after"]
    assert not (ran.folder / "model-task1.safetensors").exists()


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (recipe("fedavg"), "method 'fedavg' cannot forget exactly.*stream.withdrawn"),
        (recipe(own={"sums": "float"}), "cannot forget exactly"),
        (recipe(own={"groups": 3}), "cannot forget exactly"),
    ],
)
def test_methods_that_cannot_are_refused(table: dict[str, Any], said: str, tmp_path: Path) -> None:
    ran = everfed.run(table, tmp_path / "run", progress=False)
    old = model(ran.folder)
    with pytest.raises(UserError, match=said):
        everfed.forget(ran.folder, clients=[3])
    assert tree.equal(old, model(ran.folder))
    assert not (ran.folder / "forgotten.jsonl").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "nothing is withdrawn"),
        ({"clients": [4]}, r"stream.withdrawn.clients must be within 0\.\.3"),
        ({"classes": ["a"]}, "withdrawn.classes must be a list of whole numbers"),
        ({"samples": [1]}, "samples are withdrawn from one client"),
        ({"client": [1]}, "withdrawn.client is not a key"),
    ],
)
def test_what_is_named_is_checked(given: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        Withdrawn.of(given, 4, 10)


def test_a_real_client_gives_no_sums_of_samples_that_a_server_chose() -> None:
    bench = Bench("ridge")
    part = bench.build_method().part("ridge")
    client = bench.client("ridge", messages={"ridge": Withdrawn(samples=(1,)).to_tree()})
    client.context = client.context.at(attempt=object())
    with pytest.raises(CompositionError, match="may not ask a client"):
        phase_of(part, "withdraw").run(client)  # type: ignore[misc]


def test_train_first_is_refused_since_the_network_was_trained_on_the_samples() -> None:
    with pytest.raises(CompositionError, match="cannot forget exactly"):
        require_able(Bench("ridge", {"ridge": {"train_first": True}}).setup())


def test_phases_on_request_run_in_no_round() -> None:
    phases = {event["phase"] for event in Bench("ridge").run().events if event["event"] == "phase"}
    assert "statistics" in phases
    assert not {"withdraw", "refit"} & phases
