"""Following a folder of runs: what appears, moves and goes, and nothing outside it."""

from __future__ import annotations

import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from everfed.errors import UserError
from everfed.reports.dashboard import QUIET_AFTER, Dashboard, Index, NoRun, Note, Updates
from everfed.reports.figures import View
from everfed.store.run import RunError
from tests.reports.folders import create, evaluation, finished, log, phase, start

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


def test_a_run_that_scores_for_long_is_not_silent_while_it_scores_again(index: Index, clock: Clock) -> None:
    scoring = {"event": "scoring", "round": 1, "task": 0, "tasks": 1}
    folder = create(index.guard.root / "a")
    log(folder, [start(), phase(1), scoring], NOW)
    log(folder, [evaluation(1, 0, [0.5]), phase(3, 1), scoring], NOW + 2 * QUIET_AFTER)
    clock.now = NOW + 4 * QUIET_AFTER
    assert statuses(index) == {"a": "running"}
    clock.now = NOW + 20 * QUIET_AFTER
    assert statuses(index) == {"a": "silent"}


@pytest.mark.parametrize("file", ["recipe.toml", "result.json", "settings.json"])
def test_a_damaged_run_is_reported_and_heals(index: Index, file: str) -> None:
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


def test_a_note_is_there_at_once_and_a_poll_changes_nothing_about_it(index: Index) -> None:
    finished(index.guard.root / "a")
    index.poll()
    before = index.version
    index.annotate("a", Note(name="best"))
    assert index.notes == {"a": Note(name="best")} and index.version > before
    assert not index.poll() and index.notes == {"a": Note(name="best")}
    index.annotate("a", Note())
    assert index.notes == {} and not index.poll()


def test_a_note_on_one_run_keeps_the_others(index: Index) -> None:
    for name in ("a", "b"):
        finished(index.guard.root / name)
    index.poll()
    index.annotate("a", Note(name="best"))
    index.annotate("b", Note(tags=["slow"]))
    assert index.notes == {"a": Note(name="best"), "b": Note(tags=["slow"])} and not index.poll()
    index.annotate("a", Note())
    assert index.notes == {"b": Note(tags=["slow"])} and not index.poll()


def test_a_listener_gets_changed_and_removed_runs_only(index: Index) -> None:
    feed, known = Updates(index, every=1.0), dict[str, int]()

    def news() -> tuple[list[str], list[str]]:
        index.poll()
        found = feed._difference(known)
        return [run["id"] for run in found["runs"]], found["gone"]

    running = create(index.guard.root / "a")
    finished(index.guard.root / "b")
    assert news() == (["a", "b"], []) and news() == ([], [])
    log(running, [start(), phase(0)], NOW)
    assert news() == (["a"], [])
    finished(index.guard.root / "c")
    shutil.rmtree(index.guard.root / "b")
    assert news() == (["c"], ["b"]) and news() == ([], [])


def test_only_runs_that_were_found_can_be_asked_for(tmp_path: Path) -> None:
    finished(tmp_path / "runs" / "a")
    finished(tmp_path / "b")
    dashboard = Dashboard(tmp_path / "runs")
    dashboard.index.poll()
    for name in ("../b", "/etc/passwd", str(tmp_path / "b"), "a/../../b", "a/", "", ".", "a\0"):
        for asked in (
            dashboard.run,
            lambda n: dashboard.report([n]),
            lambda n: dashboard.compare([n], ["acc"], EVERY_RUN),
        ):
            with pytest.raises(NoRun):
                asked(name)
    assert dashboard.run("a")["summary"]["id"] == "a"


EVERY_RUN = View("run", along="round")


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
    both = dashboard.compare(["a", "b"], ["loss"], EVERY_RUN)
    assert both.count("<polyline") == 2 and "fedavg · seed 1" in both
    mean = dashboard.compare(["a", "b"], ["loss"], View(along="round", window=(3, 5)))
    assert mean.count("<polyline") == 1 and 'data-frame="3 5 ' in mean
    nowhere = View(along="round", window=(100, 200))
    assert "No run has measured this yet." in dashboard.compare(["a"], ["loss"], nowhere)


def other_data(folder: Path, method: str = "fedavg", **options: Any) -> None:
    stream = {"dataset": "mnist", "scenario": "domain-incremental", "tasks": 3, "clients": 4}
    finished(folder, method, stream=stream, **options)


def test_data_sets_share_an_axis_only_when_they_are_asked_to(tmp_path: Path) -> None:
    finished(tmp_path / "a")
    other_data(tmp_path / "b")
    dashboard = Dashboard(tmp_path)
    dashboard.index.poll()
    apart = dashboard.compare(["a", "b"], ["acc", "loss"], View(along="round"))
    assert apart.count('<svg viewBox="0 0 1000') == 4 and apart.count("<polyline") == 4
    assert re.findall(r'class="data-name">(.*?)<', apart) == [
        "digits, domain-incremental",
        "mnist, domain-incremental",
    ]
    assert set(re.findall(r'<g data-line="(.*?)"', apart)) == {"fedavg"}
    together = dashboard.compare(["a", "b"], ["acc", "loss"], View(along="round"), together=True)
    assert together.count('<svg viewBox="0 0 1000') == 2 and together.count("<polyline") == 4
    assert set(re.findall(r'<g data-line="(.*?)"', together)) == {"fedavg (digits)", "fedavg (mnist)"}


def test_a_colour_belongs_to_a_method_whatever_is_shown(tmp_path: Path) -> None:
    """Each choice of runs, in any order of appearance, draws a method in one colour."""
    finished(tmp_path / "a", "fedavg")
    finished(tmp_path / "b", "fedavg", parts={"weighting": "samples"})
    other_data(tmp_path / "c", "fedavg")
    finished(tmp_path / "d", "der")
    dashboard = Dashboard(tmp_path)
    dashboard.index.poll()
    found: dict[str, set[str]] = {}
    for chosen in (["a"], ["b"], ["c"], ["d"], ["a", "d"], ["b", "d"], ["a", "b", "c", "d"]):
        for method, colour in lines(dashboard.compare(chosen, ["loss"], View(along="round"), together=True)):
            found.setdefault(method, set()).add(colour)
        finished(tmp_path / f"new-{len(chosen)}-{chosen[0]}", "er", len(found))  # runs that come meanwhile
        dashboard.index.poll()
    assert {method: len(colours) for method, colours in found.items()} == {"fedavg": 1, "der": 1}
    assert not found["fedavg"] & found["der"]


def lines(drawn: str) -> list[tuple[str, str]]:
    """(method, colour) of every line."""
    found = re.findall(r'<g data-line="(.*?)" style="--c:(.*?)"', drawn)
    return [(label.partition(" ")[0], colour) for label, colour in found]


def test_curves_across_time_and_bytes_smoothed_and_logarithmic(tmp_path: Path) -> None:
    """Six rounds of half a second and 300 bytes; the losses are 1, 1/2, 1/3, ..."""
    finished(tmp_path / "a")
    dashboard = Dashboard(tmp_path)
    dashboard.index.poll()

    def frame(view: View) -> list[float]:
        drawn = dashboard.compare(["a"], ["loss"], view)
        return [float(value) for value in re.search(r'data-frame="(.*?)"', drawn).group(1).split()]

    assert frame(View(along="time"))[:2] == [0.5, 3.0]
    assert frame(View(along="bytes"))[:2] == [300, 1800]
    assert frame(View(along="round", log=True))[2:] == pytest.approx([math.log10(1 / 6), 0.0])
    forgetting = dashboard.compare(["a"], ["forgetting"], View(along="round"))
    assert 'data-frame="4 6 ' in forgetting  # tasks 2 and 3 end with rounds 4 and 6
    with pytest.raises(UserError, match="smooth is at least 0 and below 1; got 1"):
        dashboard.compare(["a"], ["loss"], View(along="round", smooth=1))


def test_a_run_that_goes_on_shows_what_is_known_and_how_long_it_still_takes(tmp_path: Path) -> None:
    """Two of six rounds in four seconds: eight seconds are left."""
    log(create(tmp_path / "a"), [start(), phase(0), phase(1), phase(1), evaluation(1, 0, [0.5])], clock=1000.0)
    index = Index(tmp_path, clock=lambda: 1005.0)
    index.poll()
    assert (index.runs["a"].summary["left"], index.runs["a"].summary["duration"]) == (8.0, 4.0)
    dashboard = Dashboard(tmp_path)
    dashboard.index.clock = lambda: 1005.0
    dashboard.index.poll()
    sections = dashboard.run("a")["sections"]
    for text in (
        "<dt>state</dt><dd>running, round 2 of 6",
        "<dt>task</dt><dd>1 of 3",
        "<dt>score now</dt><dd>50.00 % (round 2)",
        "<dt>time left</dt><dd>about 8.0 s",
    ):
        assert text in sections["facts"]
    assert "Time by phase, so far" in sections["time"] and "Bytes by direction, so far" in sections["traffic"]
    assert not [name for name, text in sections.items() if 'class="missing"' in text]
    index.clock = lambda: 9000.0
    index.poll()
    assert index.runs["a"].summary["left"] is None  # silent


def test_nothing_is_written_to_the_runs(tmp_path: Path) -> None:
    finished(tmp_path / "a")
    log(create(tmp_path / "b", "der"), [start("der"), phase(0)])
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in tmp_path.rglob("*")}
    dashboard = Dashboard(tmp_path)
    dashboard.index.poll()
    dashboard.run("a"), dashboard.report(["a", "b"]), dashboard.compare(["a", "b"], ["acc"], EVERY_RUN)
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in tmp_path.rglob("*")} == before
