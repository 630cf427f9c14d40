"""Progress: what is shown of a run, in plain lines, as JSON and on a terminal."""

import io
import json
from collections.abc import Iterator
from itertools import chain

import pytest
from rich.console import Console

from everfed.reports.progress import JsonLines, PlainLines, ProgressState, Several, watching

START = {"event": "start", "method": "fedgp+der", "seed": 3, "rounds": 4, "tasks": 2, "clients": 5, "round": 0}


def phase(round_index: int, task: int, **more: object) -> dict:
    return {
        "event": "phase",
        "phase": "train",
        "round": round_index,
        "task": task,
        "bytes_up": 1000,
        "bytes_down": 2000,
        "seconds": 0.1,
        **more,
    }


def evaluation(round_index: int, task: int, acc: float | None, task_end: bool = True) -> dict:
    accuracy = [acc] * (task + 1)
    return {
        "event": "evaluation",
        "round": round_index,
        "task": task,
        "task_end": task_end,
        "accuracy": accuracy,
        "acc": acc,
    }


class Clock:
    """A clock that the test winds."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def whole_run(clock: Clock | None = None) -> Iterator[dict]:
    yield START
    for index in range(4):
        if clock:
            clock.now += 2.0
        yield phase(index, index // 2, loss=1.0 / (index + 1))
        yield phase(index, index // 2, phase="reference", bytes_up=500, bytes_down=0)
        if index % 2:
            yield evaluation(index, index // 2, 0.5)
    yield {"event": "end", "metrics": {"acc": 0.5}}


def test_standing_adds_up_bytes_and_keeps_the_last_loss() -> None:
    state = ProgressState()
    for event in whole_run():
        state.update(event)
    assert (state.done, state.rounds, state.task, state.tasks) == (4, 4, 1, 2)
    assert (state.bytes_up, state.bytes_down) == (6000, 8000)
    assert (state.loss, state.acc) == (0.25, 0.5)


def test_time_left_follows_the_pace() -> None:
    clock = Clock()
    state = ProgressState(clock=clock)
    state.update(START)
    assert state.left is None
    clock.now += 10
    state.update(phase(0, 0))
    assert state.left == pytest.approx(30)  # one of four rounds took ten seconds
    state.update(phase(3, 1))
    assert state.left is None


def test_time_left_after_a_resume_counts_only_what_was_done_since() -> None:
    clock = Clock()
    state = ProgressState(clock=clock)
    state.update({**START, "rounds": 10, "round": 6})
    clock.now += 5
    state.update(phase(6, 1))
    assert state.left == pytest.approx(15)


def test_plain_lines_have_task_round_loss_accuracy_and_bytes() -> None:
    lines: list[str] = []
    watch = PlainLines(lines.append, ProgressState(clock=Clock()))
    for event in whole_run():
        watch(event)
    assert lines == [
        "fedgp+der seed 3: 2 tasks, 4 rounds, 5 clients",
        "fedgp+der seed 3: task 1/2, round 2/4, loss 0.500, acc 50.0 %, 0:00 left, 3.0 kB up 4.0 kB down",
        "fedgp+der seed 3: task 2/2, round 4/4, loss 0.250, acc 50.0 %, 6.0 kB up 8.0 kB down",
    ]


def test_plain_lines_come_now_and_then_between_tasks() -> None:
    clock, lines = Clock(), []
    watch = PlainLines(lines.append, ProgressState(clock=clock))
    watch({**START, "rounds": 100, "tasks": 1})
    for index in range(20):
        clock.now += 1.0
        watch(phase(index, 0))
    assert [line.split(", ")[1] for line in lines[1:]] == [
        "round 5/100",
        "round 10/100",
        "round 15/100",
        "round 20/100",
    ]


def scored(clock: Clock, seconds: float, round_index: int) -> Iterator[dict]:
    yield {"event": "scoring", "round": round_index, "task": round_index // 2, "tasks": 1}
    clock.now += seconds
    yield evaluation(round_index, round_index // 2, 0.5)


def test_scores_that_take_long_are_announced_from_the_second_time_on() -> None:
    """Twenty clients that score ten networks each take minutes, in which a log would stand still."""
    clock, lines = Clock(), []
    watch = PlainLines(lines.append, ProgressState(clock=clock))
    slow, quick, again = scored(clock, 60.0, 1), scored(clock, 1.0, 3), scored(clock, 1.0, 3)
    for event in chain([START, phase(1, 0)], slow, [phase(3, 1)], quick, again):
        watch(event)
    assert [", scoring, " in line for line in lines] == [False, False, True, False, False]


def test_a_bar_says_that_the_run_is_scoring() -> None:
    clock = Clock()
    state = ProgressState(clock=clock)
    scores = scored(clock, 1.0, 1)
    for event in (START, phase(1, 0, loss=0.5), next(scores)):
        state.update(event)
    assert "round 2/4, scoring" in state.fitted(200) and "loss 0.500" in state.fitted(200)
    state.update(next(scores))
    assert "scoring" not in state.fitted(200)


def test_warnings_are_printed_and_faults_left_to_the_error_that_follows() -> None:
    lines: list[str] = []
    watch = PlainLines(lines.append, ProgressState())
    watch({"event": "warning", "message": "momentum breaks the projection"})
    watch({"event": "fault", "message": "Diverged: not finite"})
    watch({"event": "checkpoint", "round": 3})
    assert lines == ["warning: momentum breaks the projection"]


def test_a_run_that_goes_on_shows_the_bytes_and_the_task_behind_it() -> None:
    state = ProgressState("x")
    state.update({**START, "round": 3, "bytes_up": 2000, "bytes_down": 5000})
    state.update({"event": "evaluation", "round": 3, "task": 1, "task_end": False, "accuracy": [0.5], "acc": 0.5})
    assert state.place().startswith("task 2/") and state.facts().endswith("2.0 kB up 5.0 kB down")


def test_json_lines_are_the_events_themselves() -> None:
    lines: list[str] = []
    watch = JsonLines(lines.append)
    events = list(whole_run())
    for event in events:
        watch(event)
    assert [json.loads(line) for line in lines] == events


def test_an_accuracy_that_is_not_known_is_left_out() -> None:
    state = ProgressState()
    state.update(START)
    state.update(evaluation(0, 0, None))
    assert "acc" not in state.line()


def watched(console: Console, as_json: bool = False) -> str:
    with watching(console, as_json) as observer:
        for event in whole_run():
            observer(event)
    return console.file.getvalue()


def test_a_file_gets_plain_lines_whatever_their_width() -> None:
    text = watched(Console(file=io.StringIO(), width=20))
    assert len(text.splitlines()) == 3
    assert "\x1b" not in text


def test_machines_get_json_even_on_a_terminal() -> None:
    text = watched(Console(file=io.StringIO(), force_terminal=True, width=20), as_json=True)
    assert json.loads(text.splitlines()[0]) == START
    assert len(text.splitlines()) == len(list(whole_run()))


def test_a_terminal_gets_a_bar_and_keeps_the_lines_of_tasks() -> None:
    text = watched(Console(file=io.StringIO(), force_terminal=True, width=120))
    assert "\x1b[" in text
    assert "task 2/2, round 4/4" in text
    assert "fedgp+der seed 3: 2 tasks, 4 rounds, 5 clients" in text


def test_a_long_phase_of_the_server_is_seen_to_move() -> None:
    state = ProgressState()
    state.update(START)
    state.update(phase(1, 0, loss=0.5))
    for repeat in (0, 1):
        state.update({"event": "measure", "round": 1, "task": 0, "part": "mfcl", "repeat": repeat, "content": 4.605})
        state.update(phase(1, 0, phase="generator", repeat=repeat, repeats=50, bytes_up=0, bytes_down=0))
    assert state.place() == "task 1/2, round 2/4, generator 2/50"
    assert state.facts().startswith("content 4.6")
    assert "loss" not in state.facts()
    state.update(evaluation(1, 0, 0.5))
    assert state.place() == "task 1/2, round 2/4"
    assert "loss 0.500" in state.facts()


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("title", ["", "[12/18] fedgp+coordinated-4 seed 11"])
def test_the_bar_fits_the_terminal(width: int, title: str) -> None:
    """Every line that is drawn over the last one: none is wrapped into a second."""
    several = Several(6, clock=(clock := Clock()))
    several.begin()
    state = ProgressState(title, clock=clock, several=several)
    for event in whole_run(clock):
        state.update({**event, "rounds": 5000, "tasks": 100} if event["event"] == "start" else event)
        assert len(state.fitted(width)) <= width
    assert "round 4/5000" in state.fitted(80) and "left" in state.fitted(80)


def test_before_the_first_event_no_task_is_named() -> None:
    state = ProgressState("fedavg seed 0")
    assert state.fitted(80) == "fedavg seed 0  starting" and "/0" not in state.line()
    text = watched(Console(file=io.StringIO(), force_terminal=True, width=80))
    assert "task 1/0" not in text and "round 0/0" not in text


def test_a_resumed_run_starts_in_its_own_task() -> None:
    state = ProgressState()
    state.update({**START, "rounds": 10, "tasks": 5, "round": 6})
    assert state.place() == "task 4/5, round 6/10"


def test_a_comparison_shows_the_time_left_in_all() -> None:
    """Of four runs one took 10 s; half of the second took 5 s: 15 s for 1.5 runs, so 25 s for the other 2.5."""
    clock = Clock()
    several = Several(4, clock=clock)
    several.begin()
    clock.now += 10
    several.finished += 1
    state = ProgressState("x", clock=clock, several=several)
    state.update(START)
    clock.now += 5
    state.update(phase(1, 0))
    assert state.left_in_all == pytest.approx(25) and "0:25 left in all" in state.facts()
    several.finished = 3
    assert state.left_in_all is None  # the last run has its own
