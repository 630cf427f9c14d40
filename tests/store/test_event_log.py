"""Events become what a run has measured: in any pieces, half written, damaged, and superseded after a resume."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everfed.store.event_log import LONGEST_LINE, Log, Tail, events, read_log
from tests.reports.folders import Event, evaluation, phase, start, whole


def as_bytes(events: list[Event]) -> bytes:
    return b"".join(json.dumps({"time": 100.0 + i, **event}).encode() + b"\n" for i, event in enumerate(events))


def folded(events: list[Event]) -> Log:
    log = Log()
    log.feed(as_bytes(events))
    return log


@given(st.lists(st.integers(1, 2000), max_size=20))
def test_the_pieces_in_which_bytes_arrive_do_not_matter(cuts: list[int]) -> None:
    data = as_bytes(list(whole()))
    log = Log()
    while data:
        size = cuts.pop() if cuts else len(data)
        log.feed(data[:size])
        data = data[size:]
    assert log == folded(list(whole()))


def test_a_whole_run() -> None:
    log = folded(list(whole()))
    assert log.start is not None and (log.start.rounds, log.start.tasks, log.start.clients) == (6, 3, 4)
    assert log.rounds_done == 6
    assert (log.bytes_up, log.bytes_down) == (600, 1200)
    assert [log.evaluations[index].accuracy for index in (1, 3, 5)] == [(0.8,), (0.6, 0.7), (0.5, 0.6, 0.9)]
    assert log.evaluations[5].score == pytest.approx(2.0 / 3)
    assert log.seconds_by_phase() == {"train": 3.0}
    assert (log.first_time, log.last_time) == (100.0, 110.0)
    assert not log.failed and not log.interrupted and log.unreadable == 0


def test_half_a_line_waits_for_the_rest() -> None:
    data = as_bytes([start(), phase(0)])
    log = Log()
    log.feed(data[:-20])
    assert log.rounds_done == 0 and log.unreadable == 0
    log.feed(data[-20:])
    assert log.rounds_done == 1 and log.unreadable == 0


def test_a_line_that_a_killed_run_left_half_written_is_counted_and_skipped() -> None:
    data = as_bytes([start(), phase(0)])
    log = Log()
    log.feed(data[:-20] + b"\n" + as_bytes([{"event": "resume", "round": 0}, start(), phase(0), phase(1)]))
    assert log.unreadable == 1
    assert log.rounds_done == 2


@pytest.mark.parametrize(
    "line",
    [
        b"not json",
        b"[]",
        b"7",
        b"null",
        b"{}",
        b'{"event": "phase"}',
        b'{"event": "phase", "round": "x", "task": 0, "phase": "train", "clients": [], "bytes_up": 0}',
        b'{"event": "evaluation", "round": 1, "task": 0, "accuracy": 3}',
        b'{"event": ["phase"]}',
        b"\xff\xfe\x00",
    ],
)
def test_damaged_lines_are_counted_and_the_rest_is_read(line: bytes) -> None:
    log = Log()
    log.feed(as_bytes([start()]) + line + b"\n" + as_bytes([phase(0)]))
    assert log.unreadable == 1
    assert log.rounds_done == 1


def test_a_line_without_end_does_not_fill_the_memory() -> None:
    log = Log()
    for _ in range(LONGEST_LINE // (1 << 20) + 2):
        log.feed(b"x" * (1 << 20))
    assert len(log._half) <= 2 << 20
    log.feed(b"\n" + as_bytes([start(), phase(0)]))
    assert log.unreadable == 1 and log.rounds_done == 1


def test_after_a_resume_new_lines_supersede_old_ones() -> None:
    """Killed after round 4 with a checkpoint before round 2: rounds 2 to 4 are run again."""
    first = [start(), *(phase(i, loss=1.0) for i in range(5)), evaluation(4, 0, [0.1])]
    log = folded([*first, {"event": "resume", "round": 2}, start(at=2), phase(2, loss=9.0)])
    assert [line.loss for line in log.phases.values()] == [1.0, 1.0, 9.0]
    assert log.evaluations == {}
    assert log.rounds_done == 3
    assert (log.bytes_up, log.bytes_down) == (300, 600)
    assert [note.kind for note in log.notes] == ["resume"]


def test_a_resume_within_a_round_keeps_the_phases_that_were_done() -> None:
    """Killed in round 1 after `reference`, which was saved before the checkpoint; `train` is run again."""
    first = [start(), phase(0), phase(1, name="reference"), phase(1, seconds=2.0)]
    log = folded([*first, {"event": "resume", "round": 1}, start(at=1), phase(1, seconds=3.0)])
    assert log.seconds_by_phase() == {"train": 3.5, "reference": 0.5}


def test_a_run_that_begins_anew_forgets_what_was_before() -> None:
    log = folded([start(), phase(0, loss=5.0), phase(1), start(), phase(0, loss=2.0)])
    assert [line.loss for line in log.phases.values()] == [2.0]
    assert log.rounds_done == 1 and log.bytes_up == 100


def test_repeats_of_a_phase_are_different_lines() -> None:
    log = folded([start(), phase(0, name="select"), phase(0, name="select", repeat=1), phase(0)])
    assert log.seconds_by_phase() == {"select": 1.0, "train": 0.5}


def test_skipped_clients_and_cohorts_that_are_only_counted() -> None:
    silent = {key: value for key, value in phase(2).items() if key not in ("loss", "trained")}
    log = folded([start(), phase(0, trained=3), phase(1, clients=500, trained=498), silent])
    assert log.skipped == 1 + 2 + 4
    assert [line.clients for line in log.phases.values()] == [(0, 1, 2, 3), None, (0, 1, 2, 3)]
    assert [line.count for line in log.phases.values()] == [4, 500, 4]


def test_faults_and_interruptions() -> None:
    failed = folded([start(), phase(0), {"event": "fault", "message": "Diverged: loss is not finite"}])
    assert failed.failed and not failed.interrupted and len(failed.faults) == 1
    stopped = folded([start(), phase(0), {"event": "fault", "message": "KeyboardInterrupt: "}])
    assert stopped.interrupted and not stopped.failed and stopped.faults == []
    again = folded([start(), {"event": "fault", "message": "OSError"}, {"event": "resume", "round": 0}, start()])
    assert not again.failed and len(again.faults) == 1


def test_unknown_events_are_kept_as_they_are() -> None:
    log = folded([start(), {"event": "dropped", "client": 3}, {"event": "odd", "message": "said"}])
    assert [(note.kind, note.message) for note in log.notes] == [("dropped", "client 3"), ("odd", "said")]


def test_values_that_are_not_finite_are_missing() -> None:
    log = Log()
    log.feed(b'{"event":"evaluation","round":0,"task":0,"task_end":true,"accuracy":[NaN,0.5],"acc":Infinity}\n')
    assert log.evaluations[0].accuracy == (None, 0.5) and log.evaluations[0].score is None


def test_a_tail_reads_only_what_is_new(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = Tail(path.parent)
    assert not tail.poll()
    path.write_bytes(as_bytes([start(), phase(0)]))
    assert tail.poll() and tail.log.rounds_done == 1
    assert not tail.poll()
    with open(path, "ab") as file:
        file.write(as_bytes([phase(1)]))
    assert tail.poll() and tail.log.rounds_done == 2 and tail.log.lines == 3


def test_a_tail_takes_its_turn_in_slices(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(as_bytes(list(whole())))
    tail, turns = Tail(path.parent), 0
    while tail.poll(100):
        turns += 1
    assert turns == -(-path.stat().st_size // 100)
    assert tail.log == folded(list(whole()))


@pytest.mark.parametrize("how", ["cut", "replaced"])
def test_a_tail_begins_anew_with_another_file(tmp_path: Path, how: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(as_bytes([start(), *(phase(i) for i in range(5))]))
    tail = Tail(path.parent)
    tail.poll()
    if how == "cut":
        path.write_bytes(as_bytes([start()]))
    else:
        (tmp_path / "other").write_bytes(as_bytes([start(), *(phase(i, bytes_up=7) for i in range(9))]))
        os.replace(tmp_path / "other", path)
    assert tail.poll()
    assert tail.log.rounds_done == (0 if how == "cut" else 9)
    assert tail.log.bytes_up == (0 if how == "cut" else 63)  # of the new file alone
    assert not tail.poll()


def test_buffers_by_task() -> None:
    assert folded([start(), {"event": "buffer", "round": 1, "task": 0, "by_task": [8, 4]}]).buffers == {1: (8, 4)}


def test_what_parts_measure_is_kept_by_round_and_is_no_note() -> None:
    log = Log()
    for index, value in ((0, 0.5), (1, 0.25), (1, 0.75)):
        event = {
            "event": "measure",
            "time": 1.0,
            "round": index,
            "task": 0,
            "part": "stamp",
            "cosine": value,
            "x": None,
        }
        log.feed(json.dumps(event).encode() + b"\n")
    assert log.measures == {"stamp: cosine": {0: 0.5, 1: 0.75}} and not log.notes
    log.feed(b'{"event": "resume", "round": 0}\n' + json.dumps(start(at=0)).encode() + b"\n")
    assert log.measures == {"stamp: cosine": {0: 0.5}}


def test_events_are_those_of_one_consistent_run(tmp_path: Path) -> None:
    """Rounds 1 and 2 are run again, round 3 is not reached again; what has no round stays; half a line waits."""
    client = {"event": "client", "client": 0, "kind": "gone", "reason": ""}
    again = [{"event": "resume", "round": 1}, start(at=1), phase(1, bytes_up=7)]
    lines = [start(), *(phase(i) for i in range(4)), client, client, *again]
    (tmp_path / "events.jsonl").write_bytes(as_bytes(lines) + b'{"event": "phase", "rou')
    assert [event["round"] for event in events(tmp_path, "phase")] == [0, 1]
    assert events(tmp_path, "phase")[1]["bytes_up"] == 7
    assert len(events(tmp_path, "client")) == 2 and len(events(tmp_path, "start", "resume")) == 3
    assert len(events(tmp_path)) == 7


def test_what_is_said_between_a_resume_and_its_start_does_not_begin_the_run_anew(tmp_path: Path) -> None:
    lines = [start(), phase(0), {"event": "resume", "round": 1}, {"event": "warning", "message": "slow"}, start(at=1)]
    (tmp_path / "events.jsonl").write_bytes(as_bytes(lines))
    assert len(events(tmp_path, "phase")) == len(read_log(tmp_path).phases) == 1


def test_without_a_file_there_are_no_events(tmp_path: Path) -> None:
    assert events(tmp_path) == [] and read_log(tmp_path) == Log()
