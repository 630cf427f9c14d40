"""Clients that come and go, and that answer late: who is asked, what they keep, and that methods go on working."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everfed
from everfed.core import tree
from everfed.core.context import TrainOptions
from everfed.core.optimizer import Optimizer
from everfed.reports.html import records, render
from everfed.reports.read import read_run
from everfed.streams.attendance import Attendance, by_chance, make
from everfed.streams.options import OptionError
from tests.parity.test_processes import on_processes
from tests.parity.test_resume import assert_resumes
from tests.support.presets import each_kind
from tests.support.small_stream import small_stream
from tests.support.toy import Bench, comparable

TRAIN = TrainOptions(1, 12, Optimizer(lr=0.05))
# of 12 rounds in 3 tasks: 0 always there, 1 away for the whole second task, 2 leaves, 3 joins in the last task
ROUNDS = {"1": [[0, 4], [8, None]], "2": [[0, 6]], "3": [[9, None]]}
COMING_AND_GOING = {"kind": "table", "rounds": ROUNDS}


def there(stream: Any) -> list[tuple[int, ...]]:
    return [stream.round(index).participants for index in range(stream.rounds)]


# who is there --------------------------------------------------------------------------------------------------------
def test_who_is_away_is_in_no_plan() -> None:
    stream = small_stream(availability=COMING_AND_GOING)
    assert there(stream) == [(0, 1, 2)] * 4 + [(0, 2)] * 2 + [(0,)] * 2 + [(0, 1)] + [(0, 1, 3)] * 3
    plans = [stream.round(index) for index in range(12)]
    assert all(set(plan.tasks) == set(plan.participants) for plan in plans)
    assert (plans[3].ends, plans[7].ends, plans[11].ends) == ((0, 1, 2), (0,), (0, 1, 3))
    assert (plans[8].begins, plans[9].begins) == ((0, 1), (3,))  # a task begins when a client first sees it
    assert [index for index, plan in enumerate(plans) if plan.task_opens] == [0, 4, 8]
    assert [index for index, plan in enumerate(plans) if plan.task_closes] == [3, 7, 11]


def test_availability_is_read_from_csv_and_json(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("client,from,to\n1,0,4\n1,8,\n2,0,6\n3,9,\n")
    (tmp_path / "a.json").write_text(json.dumps(ROUNDS))
    for name in ("a.csv", "a.json"):
        stream = small_stream(availability={"kind": "file", "path": str(tmp_path / name)})
        assert there(stream) == there(small_stream(availability=COMING_AND_GOING))
        assert stream.fingerprint


def test_a_table_that_a_spreadsheet_saved_begins_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "away.csv"
    path.write_text("client,from,to\n1,2,\n", encoding="utf-8-sig")
    there = make(1.0, {"kind": "file", "path": str(path)}, None, 2, 4, seed=0).there
    assert there is not None and there.tolist() == [[True] * 4, [False, False, True, True]]


def test_a_share_is_chosen_of_those_who_are_there() -> None:
    stream = small_stream(availability=COMING_AND_GOING, participation=0.5)
    assert [len(found) for found in there(stream)] == [2] * 4 + [1] * 5 + [2] * 3
    assert all(
        set(a) <= set(b) for a, b in zip(there(stream), there(small_stream(availability=COMING_AND_GOING)), strict=True)
    )


def test_by_chance_the_share_that_is_there_is_what_the_rates_lead_to() -> None:
    found = by_chance(2000, 60, leave=0.1, come=0.3, rng=np.random.default_rng(0))
    assert abs(found.mean() - 0.75) < 0.01
    left = (found[:, :-1] & ~found[:, 1:]).sum() / found[:, :-1].sum()
    assert abs(left - 0.1) < 0.01


def test_a_round_in_which_nobody_is_there_changes_nothing() -> None:
    nobody = {"kind": "table", "rounds": {str(client): [[0, 4], [8, 12]] for client in range(4)}}
    for name in ("fedgp+der", "fedala", "fedssi"):
        outcome = Bench(name, stream=small_stream(availability=nobody), train=TRAIN).run()
        assert sorted(outcome.state.rows) == [0, 1, 2]
    short = Bench("fedavg", stream=small_stream(availability=nobody), train=TRAIN)
    assert tree.equal(dict(short.run(rounds=4).state.model), dict(short.run(rounds=8).state.model))


@pytest.mark.parametrize("name", each_kind())
def test_every_method_goes_on_when_clients_come_and_go(name: str) -> None:
    stream = small_stream(availability=COMING_AND_GOING, without={"0": [1]})
    outcome = Bench(name, stream=stream, train=TRAIN).run()
    assert outcome.state.round == 12
    assert sorted(outcome.clients) == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["fedgp+der", "fedssi", "fedala"])
def test_who_leaves_between_two_synchronisations_sends_nothing(name: str) -> None:
    away = {"kind": "table", "rounds": {"1": [[0, 3], [5, 12]], "2": [[1, 9]]}}
    train = TrainOptions(1, 12, Optimizer(lr=0.05), sync_every=2)
    bench = Bench(name, stream=small_stream(availability=away), train=train)
    whole = bench.run()
    assert whole.state.round == 12
    assert_resumes(bench, 3, whole)


def test_who_holds_no_data_of_a_task_is_asked_and_sends_nothing() -> None:
    stream = small_stream(without={"2": [1, 2]})
    assert [len(stream.data(2, task)) > 0 for task in range(3)] == [True, False, False]
    events = Bench("fedavg", stream=stream, train=TRAIN).run().events
    trained = [event["trained"] for event in events if event.get("phase") == "train"]
    assert trained == [4] * 4 + [3] * 8


@pytest.mark.parametrize("name", ["fedgp+der", "fedssi"])
def test_engines_agree_and_runs_resume(name: str) -> None:
    stream = small_stream(availability={"kind": "chance", "leave": 0.3, "come": 0.5}, asynchronous={"kind": "jitter"})
    bench = Bench(name, stream=stream, train=TRAIN)
    eager, other = bench.run(), on_processes(bench)
    assert tree.equal(comparable(other.state), comparable(eager.state))
    assert_resumes(bench, 7, eager)


# who answers in time -------------------------------------------------------------------------------------------------
def test_the_first_that_are_needed_count_and_the_others_are_late() -> None:
    deadline = {"seconds": 100.0, "latency": 10.0, "spread": 0.0, "noise": 0.3, "oversample": 2.0}
    attendance = make(0.25, None, deadline, 20, 10, seed=0)
    for index in range(10):
        chosen, late = attendance.chosen(index)
        assert (len(chosen), len(late)) == (5, 5)
        assert not set(chosen) & set(late)
        assert attendance.chosen(index) == (chosen, late)


def test_half_a_client_more_is_a_whole_one() -> None:
    """Three of ten are needed, 1.5 times as many are asked: five."""
    found = make(0.3, None, {"seconds": 1e9, "oversample": 1.5}, 10, 1, 0).chosen(0)
    assert list(map(len, found)) == [3, 2]


def test_who_misses_the_deadline_is_late_even_when_needed(tmp_path: Path) -> None:
    (tmp_path / "l.csv").write_text("client,seconds\n0,5\n1,20\n2,6\n3,7\n")
    deadline = {"seconds": 10.0, "latency": str(tmp_path / "l.csv"), "noise": 0.0}
    stream = small_stream(deadline=deadline)
    plan = stream.round(0)
    assert plan.participants == (0, 2, 3)
    assert plan.notes == {"late": [1]}
    events = Bench("fedavg", stream=stream, train=TRAIN).run().events
    assert all(event["late"] == [1] for event in events if event.get("phase") == "train")


def test_without_a_deadline_nothing_changes() -> None:
    assert Attendance(10, 0.3, 5).chosen(3)[1] == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"availability": {"kind": "sometimes"}}, "stream.availability.kind: 'sometimes' is not one of"),
        ({"availability": {"kind": "chance", "leave": 0}}, "stream.availability.leave"),
        ({"availability": {"kind": "chance", "path": "x"}}, "stream.availability.path: is not an option here; allowed"),
        (
            {"availability": {"kind": "table", "rounds": {"1": [[4, 2]]}}},
            r"client 1: the end \(round 2\) must be after the beginning \(round 4\)",
        ),
        ({"availability": {"kind": "table", "rounds": {"4": [[0, 2]]}}}, "client '4' is not one of 0 to 3"),
        ({"availability": {"kind": "table", "rounds": {"1": 3}}}, r"expected an entry such as \[\[0, 10\], \[60, null"),
        ({"deadline": {"seconds": 0}}, "stream.deadline.seconds"),
        ({"deadline": {"latency": 3}}, "stream.deadline: expected a table"),
        ({"deadline": {"seconds": 1, "oversample": 0.5}}, "stream.deadline.oversample"),
        ({"deadline": {"seconds": 1, "latency": "no.csv"}}, "stream.deadline.latency: no.csv cannot be read"),
    ],
)
def test_what_is_not_allowed_is_refused_with_its_key(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        small_stream(**options)


# from end to end -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["fedgp+der", "er", "fedssi"])
def test_one_returns_after_fifty_rounds_and_one_joins_in_the_last_task(tmp_path: Path, method: str) -> None:
    """Of 60 rounds: client 1 is there in 1 to 5 and again from 56 on, client 3 from 45 on, in the last of 3 tasks."""
    rounds = {"1": [[0, 5], [55, 60]], "3": [[44, 60]]}
    recipe = {
        "stream": {
            "dataset": "digits", "scenario": "class-incremental", "tasks": 3, "clients": 4, "max_train": 150,
            "availability": {"kind": "table", "rounds": rounds},
        },
        "model": {"kind": "mlp", "hidden": [16]},
        "train": {"rounds_per_task": 20, "batch_size": 16, "optimizer": {"lr": 0.05}},
        "method": {"name": method},
        "engine": {"kind": "eager"},
    }  # fmt: skip
    result = everfed.run(recipe, tmp_path / "run", checkpoint_every=1e9)
    assert all(value is not None for value in result.data["accuracy_matrix"][-1])
    run = read_run(tmp_path / "run")
    found = records(run)
    assert (found[1].rounds, found[1].longest_absence) == ([*range(1, 6), *range(56, 61)], 50)
    assert found[3].rounds == list(range(45, 61))
    assert len(found[0].rounds) == 60
    page = render([run])
    assert "Who took part" in page


FAR_APART = {"kind": "table", "rounds": {"1": [[0, 5], [55, 60]], "3": [[44, 60]]}}


@pytest.mark.parametrize("name", ["fedgp+der", "er", "fedssi"])
def test_what_a_client_knew_is_there_when_it_returns(name: str) -> None:
    stream = small_stream(rounds_per_task=20, availability=FAR_APART)
    bench = Bench(name, stream=stream, train=TRAIN)
    left, returning, end = (outcome.clients for outcome in bench.after(5, 55, 60))
    assert tree.equal(left[1], returning[1])
    assert 3 not in left
    if name != "fedssi":  # whose clients learn at a task's end: this one saw none before the run was over
        held = [{task: len(stream.data(client, task)) for task in range(3)} for client in range(4)]
        assert end[1]["memory"]["host"]["n"] == held[1][0] + held[1][2]  # the second task went by without it
        assert end[3]["memory"]["host"]["n"] == held[3][2]


def test_who_joins_late_is_anchored_at_the_model_that_it_first_gets() -> None:
    bench = Bench("fedssi", stream=small_stream(rounds_per_task=20, availability=FAR_APART), train=TRAIN)
    before, after = bench.after(44, 45)
    joined = after.clients[3]
    assert tree.equal({"w": joined["fedssi"]["anchor"]}, {"w": before.params})
    assert "omega" not in joined["fedssi"]
