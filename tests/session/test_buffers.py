"""What a simulation reports of the samples in the clients' buffers, by task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everfed
from everfed.methods.project.stamp import STAMP
from everfed.reports import figures
from everfed.reports.read import read_run
from everfed.session import reporting
from everfed.store.clients import ClientStore
from everfed.streams import build
from tests.support.toy import Bench


def buffer_events(folder: Path, method: str, **options: Any) -> list[dict[str, Any]]:
    """The buffer events of a small run with three tasks and three clients."""
    recipe = {
        "stream": {"dataset": "digits", "scenario": "class-incremental", "tasks": 3, "clients": 3},
        "model": {"kind": "mlp", "hidden": [8]},
        "train": {"rounds_per_task": 1, "local_epochs": 1},
        "method": {"name": method, **options},
        "engine": {"kind": "eager"},
    }
    everfed.run(recipe, folder)
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [event for event in events if event["event"] == "buffer"]


def samples_by_task(folder: Path) -> list[int]:
    reports = json.loads((folder / "result.json").read_text())["stream"]["who_got_what"]
    return [int(np.sum(report["table"])) for report in reports]


def test_a_buffer_that_holds_everything_holds_every_task_in_full(tmp_path: Path) -> None:
    found = buffer_events(tmp_path / "a", "er", memory={"size": 2000})
    sizes = samples_by_task(tmp_path / "a")
    assert [event["by_task"] for event in found] == [sizes[:1], sizes[:2], sizes]
    assert [(event["round"], event["task"], event["clients"], event["of"]) for event in found] == [
        (0, 0, 3, 3),
        (1, 1, 3, 3),
        (2, 2, 3, 3),
    ]


def test_of_many_clients_some_buffers_are_read_and_all_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "_MOST_CLIENTS", 2)
    found = buffer_events(tmp_path / "a", "er", memory={"size": 50})
    assert [(event["clients"], event["of"], sum(event["by_task"])) for event in found] == [(2, 3, 100)] * 3


def test_a_small_buffer_is_shared_by_the_tasks(tmp_path: Path) -> None:
    found = buffer_events(tmp_path / "a", "er", memory={"size": 50})
    assert [sum(event["by_task"]) for event in found] == [150, 150, 150]
    assert all(count > 0 for count in found[-1]["by_task"])
    drawn = figures.buffers(read_run(tmp_path / "a"))
    assert "All clients together." in drawn and f"task 1 {found[-1]['by_task'][0]}" in drawn


def test_a_method_without_a_buffer_reports_nothing(tmp_path: Path) -> None:
    assert buffer_events(tmp_path / "a", "fedavg") == []


def test_stamps_pool() -> None:
    pool = {str(task): {"x": np.zeros((n, 2)), "y": np.zeros(n)} for task, n in ((0, 3), (2, 1))}
    assert STAMP().buffer_tasks({"host": {"pool": pool}}, lambda ids: ids).tolist() == [0, 0, 0, 2]
    assert STAMP().buffer_tasks({"host": {"pool": {}}}, lambda ids: ids).tolist() == []


def test_a_stream_that_does_not_know_the_tasks_reports_nothing() -> None:
    assert not reporting.has_buffers(Bench("er").setup())


@pytest.mark.parametrize("paged", [False, True])
def test_looking_at_a_state_moves_nothing(paged: bool, tmp_path: Path) -> None:
    from torch import ones

    store = ClientStore(tmp_path, budget=100 if paged else 10_000)
    for client in range(3):
        store.put(client, {"a": {"x": ones(20) * client}})
    before = list(store._hot)
    assert [float((store.peek(client) or {})["a"]["x"][0]) for client in range(3)] == [0, 1, 2]
    assert list(store._hot) == before and len(before) == (1 if paged else 3)
    assert store.peek(7) is None


@pytest.mark.parametrize(
    "options",
    [
        {"scenario": "class-incremental", "tasks": 3},
        {"scenario": "domain-incremental", "tasks": 3, "transform": "rotate"},
        {"scenario": "task-incremental", "tasks": 3},
        {"scenario": "task-pool", "tasks": 3, "classes_per_task": 2},
    ],
    ids=lambda options: options["scenario"],
)
def test_a_stream_knows_the_task_of_its_samples(options: dict[str, Any]) -> None:
    stream = build({"dataset": "digits", "clients": 3, **options}, 0, 1)
    for task in range(3):
        ids = stream.data(1, task).ids
        assert len(ids) and set(stream.task_of(1, ids).tolist()) == {task}
