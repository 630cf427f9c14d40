"""The drift monitor: what it suspects, that it suspects nothing without cause, and that it changes nothing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everfed
from everfed.core import tree
from everfed.methods.monitor import DriftMonitor, PageHinkley, Track
from everfed.reports.html import render
from everfed.reports.read import read_run


@pytest.mark.parametrize("warmup", [1, 2, 4])
def test_nothing_is_suspected_before_the_warm_up_is_over(warmup: int) -> None:
    """A jump of 10 with the second observation: the statistic is 5 at once, far above the threshold."""
    detector, track, found = PageHinkley(delta=0.0, threshold=0.1, warmup=warmup), Track(), []
    for x in (0.0, 10.0, 10.0, 10.0, 10.0):
        track, rises = detector.step(track, x)
        found.append(rises)
    assert found == [n > max(warmup, 1) for n in range(1, 6)]


def alarms(values: list[float], detector: PageHinkley) -> list[int]:
    track, found = Track(), []
    for index, value in enumerate(values):
        track, risen = detector.step(track, value)
        if risen:
            found.append(index)
            track = detector.step(Track(), value)[0]
    return found


def test_the_statistic_by_hand() -> None:
    detector = PageHinkley(delta=0.1, threshold=0.5, window=5, warmup=2)
    track, _ = detector.step(Track(), 0.0)
    assert (track.n, track.mean, track.sum, track.least) == (1, 0.0, -0.1, -0.1)
    track, risen = detector.step(track, 0.0)
    assert (track.sum, risen) == (pytest.approx(-0.2), False)
    track, risen = detector.step(track, 1.2)  # mean 0.4, sum -0.2 + 1.2 - 0.4 - 0.1 = 0.5
    assert (track.mean, track.sum, risen) == (pytest.approx(0.4), pytest.approx(0.5), True)


def test_a_jump_is_found_at_once_and_a_falling_loss_never() -> None:
    falling = [math.log(2.0 * 0.9**step) for step in range(30)]
    assert alarms(falling, PageHinkley()) == []
    assert alarms([*falling, 0.7, 0.6, 0.5], PageHinkley()) == [30]


def test_noise_within_its_tolerance_is_no_shift() -> None:
    noise = np.random.default_rng(0).normal(0.0, 0.1, 1000)
    assert alarms(noise.tolist(), PageHinkley(delta=0.1, threshold=0.6)) == []


def test_clients_are_followed_one_by_one_and_a_loss_of_zero_is_no_error() -> None:
    monitor, memory, emitted = DriftMonitor(), {}, []
    for index in range(8):
        losses = {0: 0.1, 1: 0.1 if index < 5 else 2.0, 2: 0.0}
        events = monitor.observe(memory, index, {"loss": losses, "features": {0: 9.0**index}})
        emitted += [(index, event["clients"], event["values"]) for event in events]
    assert emitted == [(5, [1], {"loss": [2.0]})]
    assert memory["suspected"] == [{"round": 5, "clients": [1], "by": {"loss": [1]}}]
    assert json.loads(json.dumps(memory)) == memory


def test_signals_are_followed_one_by_one() -> None:
    """Client 0 jumps in its loss, client 1 in its features, client 2 in both."""
    monitor, memory, emitted = DriftMonitor(watched=("loss", "features")), {}, []
    for index in range(6):
        jumps = 4.0 if index == 5 else 1.0
        signals = {"loss": {0: jumps, 1: 1.0, 2: jumps}, "features": {0: 0.2, 1: jumps, 2: jumps}}
        events = monitor.observe(memory, index, signals)
        emitted += events
    by = {"loss": [0, 2], "features": [1, 2]}
    assert emitted == [
        {"event": "drift", "clients": [0, 1, 2], "by": by, "values": {"loss": [4.0, 4.0], "features": [4.0, 4.0]}}
    ]
    assert json.loads(json.dumps(memory)) == memory


# in a run ------------------------------------------------------------------------------------------------------------
def recipe(**more: Any) -> dict[str, Any]:
    return {
        "stream": {
            "dataset": "digits", "scenario": "class-incremental", "tasks": 3, "clients": 3, "max_train": 300,
            "boundaries": False,
        },
        "model": {"kind": "mlp", "hidden": [16]},
        "train": {"rounds_per_task": 8, "local_epochs": 2, "optimizer": {"lr": 0.1}},
        "method": {"name": "fedavg"},
        "engine": {"kind": "eager"},
        **more,
    }  # fmt: skip


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> everfed.Result:
    return everfed.run(recipe(monitor={"kind": "page-hinkley"}), tmp_path_factory.mktemp("watched") / "run")


def test_every_client_is_suspected_when_its_classes_change_and_never_else(watched: everfed.Result) -> None:
    """At once or one round later: classes change with rounds 8 and 16."""
    found = [(one["round"], client) for one in watched.data["drift_suspected"] for client in one["clients"]]
    assert sorted((index // 8, client) for index, client in found) == [
        (t, client) for t in (1, 2) for client in range(3)
    ]
    assert all(index % 8 <= 1 for index, _ in found)


def test_the_report_shows_them(watched: everfed.Result) -> None:
    run = read_run(watched.folder)
    shifts = {one["round"]: tuple(one["clients"]) for one in watched.data["drift_suspected"]}
    assert run.log.shifts == shifts
    assert f"Suspected shifts: 6 in {len(shifts)} rounds" in render([run])


def test_a_run_has_the_same_numbers_without_it(watched: everfed.Result, tmp_path: Path) -> None:
    plain = everfed.run(recipe(), tmp_path / "run")
    assert plain.data["accuracy_matrix"] == watched.data["accuracy_matrix"]
    assert plain.data["metrics"] == watched.data["metrics"]
    assert "drift_suspected" not in plain.data


def test_a_resumed_run_suspects_the_same(watched: everfed.Result, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(event: dict[str, Any]) -> None:
        if event["event"] == "phase" and event["round"] == 11:
            raise Stop

    with pytest.raises(Stop):
        everfed.run(recipe(monitor={"kind": "page-hinkley"}), tmp_path / "run", observers=[stop], checkpoint_every=0.0)
    resumed = everfed.resume(tmp_path / "run")
    assert resumed.data["drift_suspected"] == watched.data["drift_suspected"]
    assert tree.equal({"m": resumed.data["metrics"]}, {"m": watched.data["metrics"]})
