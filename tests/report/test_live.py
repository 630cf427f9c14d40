"""Following a folder of runs: what appears, moves and goes, and nothing outside it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from everfed.report.dashboard import Dashboard, NoRun
from everfed.report.live import QUIET_AFTER, Index
from everfed.store.run import RunError
from tests.report.folders import create, evaluation, finished, log, phase, start

NOW = 1_000_000.0


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def index(tmp_path: Path, clock: Clock) -> Index:
    (tmp_path / "runs").mkdir()
    return Index(tmp_path / "runs", clock)


def statuses(index: Index) -> dict[str, str]:
    index.poll()
    return {name: run.summary["status"] for name, run in index.runs.items()}


def test_a_run_from_its_beginning_to_its_end(index: Index, clock: Clock) -> None:
    root = index.guard.root
    assert not index.poll() and index.runs == {}
    folder = create(root / "a")
    assert statuses(index) == {"a": "waiting"}
    log(folder, [start(), phase(0, trained=3)], NOW)
    assert statuses(index) == {"a": "running"}
    summary = index.runs["a"].summary
    assert (summary["done"], summary["rounds"], summary["skipped"], summary["sent"]) == (1, 6, 1, 300)
    assert not index.poll()
    log(folder, [phase(1), evaluation(1, 0, [0.75])], NOW + 2)
    assert index.poll() and index.runs["a"].summary["acc"] == 0.75
    shutil.rmtree(folder.path)
    finished(root / "a")
    assert statuses(index) == {"a": "finished"}
    assert index.runs["a"].summary["acc"] == pytest.approx(2.0 / 3)
    shutil.rmtree(folder.path)
    assert index.poll() and index.runs == {}


def test_silence_failure_and_interruption(index: Index, clock: Clock) -> None:
    for name, last in (("a", phase(1)), ("b", {"event": "fault", "message": "OSError: disk full"})):
        log(create(index.guard.root / name), [start(), last], NOW)
    log(create(index.guard.root / "c"), [start(), {"event": "fault", "message": "KeyboardInterrupt: "}], NOW)
    log(create(index.guard.root / "d"), [start(), phase(0, seconds=100.0)], NOW)
    assert statuses(index) == {"a": "running", "b": "failed", "c": "interrupted", "d": "running"}
    clock.now = NOW + QUIET_AFTER + 2
    # a run whose phases are long may be quiet for longer
    assert statuses(index) == {"a": "silent", "b": "failed", "c": "interrupted", "d": "running"}
    assert index.runs["b"].summary["faults"] == 1 and index.runs["c"].summary["faults"] == 0


@pytest.mark.parametrize("file", ["recipe.toml", "result.json", "settings.json"])
def test_a_damaged_run_is_told_and_heals(index: Index, file: str) -> None:
    folder = finished(index.guard.root / "a")
    finished(index.guard.root / "b")
    good = (folder.path / file).read_bytes()
    (folder.path / file).write_bytes(b"\xff not what it should be")
    assert statuses(index) == {"a": "unreadable", "b": "finished"}
    assert file in index.runs["a"].summary["problem"]
    assert statuses(index)["a"] == "unreadable"
    (folder.path / file).write_bytes(good)
    assert statuses(index) == {"a": "finished", "b": "finished"}
    assert index.runs["a"].summary["problem"] == ""


def test_runs_are_found_in_folders_and_the_folder_itself_may_be_one(tmp_path: Path) -> None:
    finished(tmp_path / "x" / "y" / "a")
    finished(tmp_path / "b")
    index = Index(tmp_path)
    index.poll()
    assert list(index.runs) == ["b", "x/y/a"]
    alone = Index(tmp_path / "b")
    alone.poll()
    assert list(alone.runs) == ["b"]


def test_links_that_lead_outside_are_not_followed(index: Index, tmp_path: Path) -> None:
    root = index.guard.root
    finished(tmp_path / "secret")
    (root / "linked").symlink_to(tmp_path / "secret")
    folder = finished(root / "a")
    (folder.path / "events.jsonl").unlink()
    (folder.path / "events.jsonl").symlink_to(tmp_path / "secret" / "events.jsonl")
    other = finished(root / "b")
    (other.path / "recipe.toml").unlink()
    (other.path / "recipe.toml").symlink_to(tmp_path / "secret" / "recipe.toml")
    (root / "inside").symlink_to(root / "a")
    assert statuses(index) == {"a": "unreadable", "b": "unreadable", "inside": "unreadable"}
    assert index.problems == (f"linked is a link that leads out of {root}; it is not followed.",)
    assert index.runs["a"].tail.log.lines == 0 and index.runs["b"].recipe_text == ""
    with pytest.raises(RunError, match="leads out of"):
        index.guard.open(root / "a" / ".." / ".." / "secret" / "recipe.toml")


def test_a_pipe_or_a_folder_in_the_place_of_a_file_does_not_hold_things_up(index: Index) -> None:
    folder = create(index.guard.root / "a")
    os.mkfifo(folder.path / "events.jsonl")
    other = create(index.guard.root / "b")
    (other.path / "result.json").mkdir()
    assert statuses(index) == {"a": "unreadable", "b": "unreadable"}
    assert "not a regular file" in index.runs["a"].summary["problem"]


def test_only_runs_that_were_found_can_be_asked_for(tmp_path: Path) -> None:
    finished(tmp_path / "runs" / "a")
    finished(tmp_path / "b")
    dashboard = Dashboard(tmp_path / "runs")
    dashboard.index.poll()
    for name in ("../b", "/etc/passwd", str(tmp_path / "b"), "a/../../b", "a/", "", ".", "a\0"):
        for asked in (
            dashboard.run,
            lambda n: dashboard.report([n]),
            lambda n: dashboard.compare([n], "acc", "run", ALL),
        ):
            with pytest.raises(NoRun):
                asked(name)
    assert dashboard.run("a")["summary"]["id"] == "a"


ALL = (float("-inf"), float("inf"))


def test_a_run_that_is_deleted_between_two_looks(tmp_path: Path) -> None:
    folder = finished(tmp_path / "a")
    dashboard = Dashboard(tmp_path)
    dashboard.index.poll()
    shutil.rmtree(folder.path)
    with pytest.raises(RunError, match="does not exist"):
        dashboard.report(["a"])
    dashboard.index.poll()
    with pytest.raises(NoRun, match="there is no run a, or not any more"):
        dashboard.run("a")


def test_comparisons_can_be_windowed_and_drawn_by_run(tmp_path: Path) -> None:
    finished(tmp_path / "a", "fedavg", 0)
    finished(tmp_path / "b", "fedavg", 1)
    dashboard = Dashboard(tmp_path)
    dashboard.index.poll()
    both = dashboard.compare(["a", "b"], "loss", "run", ALL)
    assert both.count("<polyline") == 2 and "fedavg · seed 1" in both
    mean = dashboard.compare(["a", "b"], "loss", "method", (3, 5))
    assert mean.count("<polyline") == 1 and 'data-frame="3 5 ' in mean
    assert "No run has measured this yet." in dashboard.compare(["a"], "loss", "method", (100, 200))


def test_nothing_is_written_to_the_runs(tmp_path: Path) -> None:
    finished(tmp_path / "a")
    log(create(tmp_path / "b", "der"), [start("der"), phase(0)])
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in tmp_path.rglob("*")}
    dashboard = Dashboard(tmp_path)
    dashboard.index.poll()
    dashboard.run("a"), dashboard.report(["a", "b"]), dashboard.compare(["a", "b"], "acc", "run", ALL)
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in tmp_path.rglob("*")} == before
