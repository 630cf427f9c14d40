"""Clients that change tasks by clocks of their own: the clocks themselves, and every method on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everfed.core import tree
from everfed.core.context import TrainOptions
from everfed.core.optimizer import Optimizer
from everfed.core.part import TOGETHER
from everfed.errors import CompositionError
from everfed.methods import registry as methods
from everfed.streams import clocks
from everfed.streams.options import OptionError
from tests.parity.test_processes import on_processes
from tests.parity.test_resume import assert_resumes
from tests.support.presets import each_kind
from tests.support.small_stream import small_stream
from tests.support.toy import Bench, comparable
from tests.support.wire import run_over_wire

JITTER = {"kind": "jitter", "jitter": 2}


# the clocks ----------------------------------------------------------------------------------------------------------
@given(st.integers(1, 8), st.integers(1, 6), st.integers(1, 12), st.integers(0, 40), st.integers(0, 1000))
def test_with_any_jitter_everybody_visits_every_task_in_order(
    clients: int, tasks: int, rounds: int, jitter: int, seed: int
) -> None:
    made = clocks.make({"kind": "jitter", "jitter": jitter}, clients, tasks, rounds, seed)
    first = np.broadcast_to(made.first, (clients, tasks + 1))  # without jitter one row for all
    assert first.shape == (clients, tasks + 1)
    assert (first[:, 0] == 0).all()
    assert (first[:, -1] == tasks * rounds).all()
    assert (np.diff(first, axis=1) >= 1).all()
    if jitter <= rounds // 2:  # no two tasks can come in each other's way
        assert (abs(first - np.arange(tasks + 1) * rounds) <= jitter).all()


def test_jitter_is_half_a_task_by_default_and_uniform() -> None:
    first = clocks.make({"kind": "jitter"}, 3000, 3, 10, 0).first
    away, times = np.unique(first[:, 1:3] - [10, 20], return_counts=True)
    assert away.tolist() == list(range(-5, 6))
    assert ((times - 6000 / 11) ** 2 / (6000 / 11)).sum() < 29.6  # chi-square, 10 degrees of freedom, 0.001


@pytest.mark.parametrize("scenario", ["class-incremental", "domain-incremental", "task-incremental", "task-pool"])
def test_without_jitter_the_plans_are_the_synchronous_ones(scenario: str) -> None:
    still = small_stream(scenario, asynchronous={"kind": "jitter", "jitter": 0})
    usual = small_stream(scenario)
    assert not still.asynchronous
    assert [still.round(i) for i in range(12)] == [usual.round(i) for i in range(12)]


@pytest.mark.parametrize("name", ["fedgp+der", "lwf", "fot"])
def test_without_jitter_a_run_is_the_synchronous_one_bit_for_bit(name: str) -> None:
    rate = TrainOptions(1, 8, Optimizer(lr=0.05, schedule="linear"))
    still = Bench(name, stream=small_stream(asynchronous={"kind": "jitter", "jitter": 0}), train=rate).run()
    usual = Bench(name, stream=small_stream(), train=rate).run()
    assert tree.equal(comparable(still.state), comparable(usual.state))


def test_some_fall_behind_evenly_and_never_catch_up() -> None:
    first = clocks.make({"kind": "behind"}, 10, 5, 8, 3).first
    late = first[:, 4] == 40  # the fifth task would begin when the run is over
    assert late.sum() == 5
    assert (first[late] == [0, 10, 20, 30, 40, 40]).all() and (first[~late] == [0, 8, 16, 24, 32, 40]).all()
    assert clocks.make({"kind": "behind", "by": 0}, 10, 5, 8, 3).together
    further = clocks.make({"kind": "behind", "share": 1.0, "by": 3}, 2, 5, 8, 3).first
    assert (further == [0, 20, 40, 40, 40, 40]).all()
    assert not (clocks.make({"kind": "behind"}, 10, 5, 8, 4).first == first).all()


def test_those_behind_begin_a_task_in_the_nearest_round() -> None:
    """A task of five rounds takes 4 / 3 times as long: 6.67, 13.33 and 20."""
    assert clocks.make({"kind": "behind", "share": 1.0}, 1, 4, 5, 0).first.tolist() == [[0, 7, 13, 20, 20]]


def test_at_constant_speed_the_fast_stay_in_the_last_task_and_the_slow_do_not_reach_it() -> None:
    first = clocks.make({"kind": "speed", "low": 2.0, "high": 2.0}, 2, 4, 10, 0).first
    assert first.tolist() == [[0, 5, 10, 15, 40]] * 2
    slow = clocks.make({"kind": "speed", "low": 0.5, "high": 0.5}, 1, 4, 10, 0).first
    assert slow.tolist() == [[0, 20, 40, 40, 40]]
    drawn = clocks.make({"kind": "speed"}, 1000, 4, 100, 0).first[:, 1]
    assert (drawn.min(), drawn.max()) == (80, 133)


def test_a_schedule_is_read_from_csv_json_and_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "s.csv").write_text("client,task,round\n1,1,7\n1,2,9\n\n3,1,2\n")
    (tmp_path / "s.json").write_text(json.dumps({"1": [0, 7, 9], "3": [0, 2]}))
    table = {"kind": "table", "first": {"1": [0, 7, 9], "3": [0, 2]}}
    ways: list[dict[str, Any]] = [{"kind": "file", "path": str(tmp_path / f"s.{end}")} for end in ("csv", "json")]
    for way in [*ways, table]:
        first = clocks.make(way, 4, 3, 4, 0).first
        assert first.tolist() == [[0, 4, 8, 12], [0, 7, 9, 12], [0, 4, 8, 12], [0, 2, 8, 12]]


def test_another_file_is_another_run(tmp_path: Path) -> None:
    marks = set()
    for begin in (2, 3):
        (tmp_path / "s.csv").write_text(f"client,task,round\n1,1,{begin}\n")
        marks.add(small_stream(asynchronous={"kind": "file", "path": str(tmp_path / "s.csv")}).fingerprint)
    assert len(marks) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("client,round\n", "line 1: expected the columns client,task,round, got client,round"),
        ("client,task,round\n4,1,3\n", "line 2: client '4' is not one of 0 to 3"),
        ("client,task,round\n1,3,3\n", "line 2: task 3 is not one of 0 to 2"),
        ("client,task,round\n1,1,x\n", "line 2: expected a whole number of at least 0, got 'x'"),
        ("client,task,round\n1,0,3\n", "the first task must begin with round 0"),
        ("client,task,round\n1,1,9\n1,2,5\n", r"do not begin in order: \[0, 9, 5\]"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "s.csv").write_text(text)
    with pytest.raises(OptionError, match=message):
        small_stream(asynchronous={"kind": "file", "path": str(tmp_path / "s.csv")})


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"kind": "behind", "by": 5}, "stream.asynchronous.by: expected fewer than the stream's"),
        ({"kind": "behind", "share": 2}, "stream.asynchronous.share: "),
        (
            {"kind": "late"},
            "stream.asynchronous.kind: 'late' is not one of the allowed values: jitter, speed, behind, file",
        ),
        (
            {"kind": "jitter", "low": 1},
            "stream.asynchronous.low: is not an option of 'jitter'; allowed: kind, quorum, j",
        ),
        ({"kind": "jitter", "jitter": -1}, "stream.asynchronous.jitter: expected a whole number"),
        ({"kind": "jitter", "quorum": 0}, "stream.asynchronous.quorum: expected a number"),
        ({"kind": "file", "path": "nowhere.csv"}, "stream.asynchronous.path: nowhere.csv cannot be read"),
        (3, "stream.asynchronous: expected a table"),
    ],
)
def test_what_is_not_allowed_is_refused_with_its_key(option: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        small_stream(asynchronous=option)


# plans ---------------------------------------------------------------------------------------------------------------
FIRST = {"kind": "table", "first": {"0": [0, 2, 8], "1": [0, 3, 8], "2": [0, 5, 9], "3": [0, 6, 10]}}


def test_each_client_has_its_own_task_and_boundaries() -> None:
    stream = small_stream(asynchronous=FIRST)
    assert stream.asynchronous
    plans = [stream.round(index) for index in range(12)]
    assert dict(plans[4].tasks) == {0: 1, 1: 1, 2: 0, 3: 0}
    assert [plan.begins for plan in plans[:4]] == [(0, 1, 2, 3), (), (0,), (1,)]
    assert [plan.ends for plan in plans[:4]] == [(), (0,), (1,), ()]
    assert plans[7].ends == (0, 1)
    assert plans[11].ends == (0, 1, 2, 3)
    assert [index for index, plan in enumerate(plans) if plan.evaluate] == [3, 7, 11]
    assert stream.clock_of(3, 7) == (1, 4)
    assert stream.data(0, 1).y.unique().tolist() == [2, 3]


@pytest.mark.parametrize(
    ("quorum", "ends"), [(0.25, [1, 7, 11]), (0.5, [2, 7, 11]), (0.75, [4, 8, 11]), (1.0, [5, 9, 11])]
)
def test_the_server_ends_a_task_when_enough_clients_have(quorum: float, ends: list[int]) -> None:
    stream = small_stream(asynchronous={**FIRST, "quorum": quorum})
    plans = [stream.round(index) for index in range(12)]
    assert [index for index, plan in enumerate(plans) if plan.task_closes] == ends
    assert [index for index, plan in enumerate(plans) if plan.task_opens] == [0, *(index + 1 for index in ends[:2])]
    assert [plan.task_of_server for plan in plans] == [sum(index > end for end in ends) for index in range(12)]


def test_a_task_that_begins_with_the_next_one_is_skipped() -> None:
    stream = small_stream(asynchronous={"kind": "table", "first": {"0": [0, 4, 4]}})
    assert [stream.round(index).tasks[0] for index in (3, 4, 8)] == [0, 2, 2]


def test_hidden_boundaries_hide_the_server_s_task_too() -> None:
    told, hidden = (small_stream(asynchronous=FIRST, boundaries=shown) for shown in (True, False))
    assert [told.round(index).server_task for index in (0, 5, 11)] == [0, 1, 2]
    assert {hidden.round(index).server_task for index in range(12)} == {None}


@pytest.mark.parametrize(("quorum", "ends"), [(0.26, 2), (0.4, 2), (0.51, 4), (0.74, 4), (0.76, 5)])
def test_a_quorum_between_two_numbers_of_clients_is_the_larger_one(quorum: float, ends: int) -> None:
    """Of four clients, that leave the first task with rounds 1, 2, 4 and 5: "at least 0.4" of them are two."""
    stream = small_stream(asynchronous={**FIRST, "quorum": quorum})
    assert next(index for index in range(12) if stream.round(index).task_closes) == ends


def test_events_hold_the_task_of_every_client() -> None:
    outcome = Bench("fedavg", stream=small_stream(asynchronous=FIRST)).run()
    trained = [event for event in outcome.events if event.get("phase") == "train"]
    assert "tasks" not in trained[0]
    assert trained[4]["tasks"] == [1, 1, 0, 0]


# methods -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", each_kind())
def test_every_method_runs_or_is_refused_with_the_reason(name: str) -> None:
    bench = Bench(name, stream=small_stream(asynchronous=JITTER), train=TrainOptions(1, 12, Optimizer(lr=0.05)))
    if bench.build_method().needs(TOGETHER):
        with pytest.raises(CompositionError, match="needs all clients to end a task in the same round.*own clock"):
            bench.build_method().fit_stream(bench.stream)
        return
    bench.build_method().fit_stream(bench.stream)
    state = bench.run().state
    assert state.round == 12
    assert sorted(state.rows) == [0, 1, 2]


@pytest.mark.parametrize("name", ["fedgp+der", "fedssi", "lwf", "fedweit"])
def test_engines_agree_and_a_run_resumes_bit_for_bit(name: str) -> None:
    train = TrainOptions(1, 12, Optimizer(lr=0.05, schedule="linear"))
    bench = Bench(name, stream=small_stream(asynchronous=JITTER), train=train)
    eager = bench.run()
    for other in (run_over_wire(bench), on_processes(bench)):
        assert tree.equal(comparable(other.state), comparable(eager.state))
        assert all(tree.equal(other.clients[client], state) for client, state in eager.clients.items())
    assert_resumes(bench, 5, eager)


@pytest.mark.parametrize("scenario", ["domain-incremental", "task-incremental", "task-pool"])
def test_every_scenario_has_clocks(scenario: str) -> None:
    bench = Bench("fedgp+der", stream=small_stream(scenario, asynchronous=JITTER), train=TrainOptions(1, 12))
    state = bench.run().state
    assert sorted(state.rows) == [0, 1, 2]
    assert bench.stream.asynchronous


def test_equalised_traffic_and_asynchronous_boundaries_go_together() -> None:
    train = TrainOptions(1, 12, Optimizer(lr=0.05), sync_every=2)
    bench = Bench("fedgp+der", stream=small_stream(asynchronous=JITTER), train=train)
    whole = bench.run()
    assert whole.state.version == 6
    assert_resumes(bench, 3, whole)


def test_who_must_change_tasks_together() -> None:
    """A choice that all clients make together, a subspace that all must stay out of, a generator of the classes that
    all have behind them; nobody who needs no boundary, and nobody whose work at a task's end is each client's own."""
    for name in ("coordinated", "coordinated-4", "fot", "mfcl"):
        assert methods.build(name).needs(TOGETHER)
    for name in ("fedavg", "er", "der", "agem", "fedgp+der", "ewc", "si", "fedssi", "ogd", "lwf", "stamp", "herding"):
        assert not methods.build(name).needs(TOGETHER)
