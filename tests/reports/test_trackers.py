"""Trackers, each with its real library writing locally; a test skips where the library is not installed."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from everfed.core.events import Event
from everfed.errors import UserError
from everfed.reports import trackers
from everfed.reports.trackers import numbers, scalars, tracker
from tests.reports.folders import evaluation, phase, recipe, start, whole

Track = Callable[[str, list[Event]], None]


@pytest.fixture
def warned() -> list[str]:
    return []


@pytest.fixture
def track(tmp_path: Path, warned: list[str]) -> Track:
    """Shows events to a new tracker of the run in `run`; nothing may go wrong."""

    def show(kind: str, events: list[Event]) -> None:
        observe = tracker(kind, tmp_path / "run", recipe(), warned.append)
        for event in events:
            observe(event)
        assert warned == []

    return show


METRICS = {"event": "end", "metrics": {"acc": 0.75, "fwt": None}, "seconds": 1.0}


def test_what_events_are_called() -> None:
    assert scalars(phase(3, loss=0.5, trained=2)) == {
        **{"train/loss": 0.5, "train/clients_trained": 2, "train/seconds": 0.5},
        **{"train/bytes_up": 100, "train/bytes_down": 200},
    }
    assert scalars(evaluation(3, 1, [0.2, 0.4])) == pytest.approx(
        {"evaluation/acc": 0.3, "evaluation/task_1": 0.2, "evaluation/task_2": 0.4}
    )
    assert scalars({"event": "checkpoint", "round": 3}) == {}
    assert numbers({"a": 1, "b": None, "c": "x"}) == {"a": 1.0}


def test_unknown_and_missing_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="there is no tracker 'neptune'; allowed: tensorboard, mlflow, wandb"):
        tracker("neptune", tmp_path, recipe(), print)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="tracking with wandb needs its library: pip install wandb"):
        tracker("wandb", tmp_path, recipe(), print)


def test_a_tracker_that_fails_does_not_end_the_run(
    tmp_path: Path, warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(folder: Path, recipe: Any, at: int) -> Any:
        raise OSError("disk full")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setitem(trackers.TRACKERS, "wandb", (broken, "wandb", ""))
    observe = tracker("wandb", tmp_path, recipe(), warned.append)
    for event in whole():
        observe(event)
    assert warned == ["wandb tracks this run no longer: OSError: disk full"]


@pytest.mark.parametrize(
    ("last", "expected"),
    [(METRICS, ({"acc": 0.75}, False)), ({"event": "fault", "message": "OSError: x"}, ({}, True))],
)
def test_a_tracker_is_closed_as_finished_or_failed(
    last: Event, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = Mock()
    monkeypatch.setitem(trackers.TRACKERS, "wandb", (lambda *given: sink, "everfed", ""))
    observe = tracker("wandb", tmp_path, recipe(), print)
    for event in (start(), phase(0), last, phase(1)):
        observe(event)
    assert [given.args for given in sink.end.call_args_list] == [expected]
    assert [given.args[0] for given in sink.log.call_args_list] == [1]  # no event after the last one


def read_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_tensorboard(track: Track, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="pip install tensorboard")
    track("tensorboard", [start(), phase(0), phase(1), evaluation(1, 0, [0.8]), METRICS])
    found = read_tensorboard(tmp_path / "run" / "tensorboard")
    assert found["train/loss"] == [(1, 1.0), (2, 0.5)]
    assert found["evaluation/acc"] == [(2, pytest.approx(0.8))]
    assert found["final/acc"] == [(2, 0.75)]


def test_tensorboard_after_a_resume(track: Track, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="pip install tensorboard")
    track("tensorboard", [start(), phase(0), phase(1), phase(2), {"event": "fault", "message": "KeyboardInterrupt: "}])
    track("tensorboard", [{"event": "resume", "round": 1}, start(at=1), phase(1, loss=7.0), METRICS])
    found = read_tensorboard(tmp_path / "run" / "tensorboard")
    assert found["train/loss"] == [(1, 1.0), (2, 7.0)]


def test_mlflow(track: Track, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="pip install mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    track("mlflow", [start(), phase(0), {"event": "fault", "message": "OSError: x"}])
    track("mlflow", [{"event": "resume", "round": 1}, start(at=1), phase(1), evaluation(1, 0, [0.8]), METRICS])
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("toy").experiment_id])
    assert run.info.status == "FINISHED" and run.info.run_name == "run"
    assert run.data.params["stream.dataset"] == "digits"
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "train/loss")] == [(1, 1.0), (2, 0.5)]
    assert run.data.metrics["final/acc"] == 0.75


def test_wandb_stays_offline(track: Track, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="pip install wandb")
    for name in ("WANDB_MODE", "WANDB_DIR", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "run").mkdir()
    track("wandb", [start(), phase(0), phase(1), evaluation(1, 0, [0.8]), METRICS])
    wandb.teardown()  # a process of wandb's own writes the file; this waits for it
    assert read_wandb(tmp_path / "run")["train/loss"] == [1.0, 0.5]
    assert read_wandb(tmp_path / "run")["evaluation/acc"] == [pytest.approx(0.8)]


def read_wandb(folder: Path) -> dict[str, list[float]]:
    """The history in the file that an offline run leaves, which is what `wandb sync` sends."""
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    found: dict[str, list[float]] = {}
    for data in wandb_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        for item in record.history.item:
            found.setdefault(item.key or "/".join(item.nested_key), []).append(json.loads(item.value_json))
    return found


def wandb_records(data: bytes) -> Iterator[bytes]:
    """Records of a log in LevelDB's form: blocks of 32 KiB, in which every piece of a record has a checksum (4 bytes),
    a length (2) and a kind (1 byte: 1 whole, 2 first, 3 middle, 4 last). The file begins with a header of 7 bytes."""
    place, pieces = 7, b""
    while place < len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        pieces += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield pieces
            pieces = b""
