"""Run folders are read whatever state they are in, or refused with a message that names the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from everfed.errors import UserError
from everfed.reports.read import find_runs, read_run, read_runs
from tests.reports.folders import MATRIX, create, evaluation, finished, log, phase, start, whole


def test_a_finished_run(tmp_path: Path) -> None:
    run = read_run(finished(tmp_path / "a", "der", 3).path)
    assert (run.name, run.method, run.seed, run.score) == ("a", "der", 3, "accuracy")
    assert run.accuracy_matrix() == MATRIX
    assert (run.rounds, run.rounds_done) == (6, 6)
    assert run.result is not None and run.result.cost.bytes_by_part["fedgp"] == {"up": 200, "down": 300}


def test_an_unfinished_run_has_what_was_measured_so_far(tmp_path: Path) -> None:
    folder = create(tmp_path / "a")
    log(
        folder, [start(), phase(0), phase(1), evaluation(1, 0, [0.8]), phase(2, 1), evaluation(2, 1, [0.7, 0.1], False)]
    )
    run = read_run(folder.path)
    assert run.result is None and run.rounds_done == 3
    assert run.accuracy_matrix() == [[0.8, None, None]]
    assert [value.round for value in run.evaluations()] == [1, 2]


def test_a_run_without_any_event(tmp_path: Path) -> None:
    run = read_run(create(tmp_path / "a", "fedprox", 2).path)
    assert (run.method, run.seed, run.rounds, run.accuracy_matrix()) == ("fedprox", 2, 0, [])


def test_curves_come_from_the_result_where_events_are_gone(tmp_path: Path) -> None:
    folder = finished(tmp_path / "a")
    (folder.path / "events.jsonl").unlink()
    data = {**folder.read_result(), "curves": [{"round": 1, "task": 1, "accuracy": [0.4, 0.6, 0.1]}]}
    folder.write_result(data)
    (value,) = read_run(folder.path).evaluations()
    assert (value.round, value.score) == (1, 0.5)  # task 3 has not begun: what is measured on it does not count


def test_the_time_left_is_that_of_the_rounds_since_the_resume(tmp_path: Path) -> None:
    """Resumed after two of six rounds, one round in three seconds: the other three take nine."""
    folder = create(tmp_path / "a")
    log(folder, [start(), phase(0), phase(1)], clock=100.0)
    log(folder, [{"event": "resume", "round": 2}, start(at=2)], clock=500.0)
    log(folder, [phase(2, 1)], clock=504.0)
    assert read_run(folder.path).seconds_left == 9.0


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("recipe.toml", b"seed = = 3", "recipe.toml is not valid TOML"),
        ("recipe.toml", b"\xff\xfe", "recipe.toml is not UTF-8 text"),
        ("result.json", b'{"method": "fed', "result.json is not valid JSON"),
        ("result.json", b"[]", "result.json must hold a JSON object, not list"),
        ("result.json", b'{"method": "x", "metrics": {}}', "accuracy_matrix: Field required"),
        ("result.json", b'{"method": "x", "metrics": {"acc": "high"}, "accuracy_matrix": []}', "metrics.acc"),
        ("settings.json", b"[1]", "settings.json must hold a JSON object"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, file: str, content: bytes, said: str) -> None:
    folder = finished(tmp_path / "a")
    (folder.path / file).write_bytes(content)
    with pytest.raises(UserError, match=said):
        read_run(folder.path)


def test_folders_that_are_no_runs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere does not exist"):
        read_runs([tmp_path / "nowhere"])
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="file is not a folder"):
        read_runs([tmp_path / "file"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds none"):
        read_runs([tmp_path / "empty"])
    with pytest.raises(UserError, match=r"empty is not a run: it has no recipe\.toml"):
        read_run(tmp_path / "empty")


def test_runs_are_found_below_a_folder_each_once_and_by_short_names(tmp_path: Path) -> None:
    for name in ("x/a", "x/b", "y/a"):
        finished(tmp_path / name)
    (tmp_path / ".hidden").mkdir()
    assert [path.relative_to(tmp_path).as_posix() for path in find_runs(tmp_path)] == ["x/a", "x/b", "y/a"]
    runs = read_runs([tmp_path, tmp_path / "x" / "a", tmp_path / "x" / ".." / "x"])
    assert [run.name for run in runs] == ["x/a", "x/b", "y/a"]
    assert [run.name for run in read_runs([tmp_path / "x"])] == ["a", "b"]


def test_a_damaged_log_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    folder = finished(tmp_path / "a")
    lines = (folder.path / "events.jsonl").read_bytes().splitlines(keepends=True)
    (folder.path / "events.jsonl").write_bytes(lines[0] + b"garbage\n" + b"".join(lines[1:])[:-40])
    run = read_run(folder.path)
    assert run.log.unreadable == 1  # the half line at the end waits for its rest
    assert run.log.rounds_done == len([event for event in whole() if event["event"] == "phase"])
