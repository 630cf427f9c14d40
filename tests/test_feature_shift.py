"""Feature shift: its closed forms, how often it errs, that it changes nothing, and what it finds on a stream."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import everfed
from everfed.core import tree
from everfed.core.method import Method
from everfed.errors import RecipeError
from everfed.methods import registry as methods
from everfed.methods.monitor import DriftMonitor, FeatureShift, Reference, last_layer, pooled
from everfed.reports.html import render
from everfed.reports.read import read_run
from tests.parity.test_processes import on_processes
from tests.support.toy import Bench, Norm, Outcome, Toy, comparable

N, WINDOW = 64, 5


# closed forms --------------------------------------------------------------------------------------------------------
def test_the_shift_by_hand() -> None:
    """Two features; two samples a round. Means (1, 0) and (4, 4), total variances 2 and 2: |m - r| = 5, and
    5 / sqrt(2 (1/2 + 1/2)) = 5 / sqrt(2)."""
    reference = Reference.first(torch.tensor([[0.0, 0.0], [2.0, 0.0]]))
    assert (reference.mean.tolist(), float(reference.variance), float(reference.error)) == ([1.0, 0.0], 2.0, 0.5)
    later = torch.tensor([[3.0, 4.0], [5.0, 4.0]])
    assert float(reference.moved(later)) == pytest.approx(5 / math.sqrt(2))
    near = torch.tensor([[1.0, 0.0], [3.0, 0.0]])  # within chance: means 1 and 2 become 1.5, errors 1/2 become 1/4
    after = reference.updated(near, WINDOW)
    assert (float(after.rounds), after.mean.tolist(), float(after.error)) == (2.0, [1.5, 0.0], 0.25)


def test_a_shift_beyond_chance_begins_anew() -> None:
    reference = Reference.first(torch.zeros(4, 2) + torch.tensor([[1.0], [-1.0], [1.0], [-1.0]]))
    later = reference.updated(torch.full((4, 2), 50.0), WINDOW)
    assert (float(later.rounds), later.mean.tolist(), float(later.error)) == (1.0, [50.0, 50.0], 0.25)


def test_the_reference_remembers_a_window() -> None:
    """Of constant errors 1/n, a mean over k rounds has 1/(k n), and a running one a / (2 - a) / n in the end."""
    rows = torch.tensor([[1.0], [-1.0]])
    reference = Reference.first(rows)
    for k in range(2, WINDOW + 1):
        reference = reference.updated(rows, WINDOW)
        assert float(reference.error) == pytest.approx(1 / (2 * k))
    for _ in range(100):
        reference = reference.updated(rows, WINDOW)
    a = 1 / WINDOW
    assert float(reference.error) == pytest.approx(a / (2 - a) / 2)


def shifts(rounds: list[Tensor]) -> list[float]:
    reference, found = Reference.first(rounds[0]), []
    for features in rounds[1:]:
        found.append(float(reference.moved(features)))
        reference = reference.updated(features, WINDOW)
    return found


def correlated(rng: np.random.Generator, rank: int, n: int = N, moved: float = 0.0) -> Tensor:
    """(n, 32) features that vary in `rank` directions; a mean that moved by so many roots of the total variance."""
    directions = np.random.default_rng(1).normal(size=(rank, 32))
    rows = rng.normal(size=(n, rank)) @ directions
    step = directions[0] / np.linalg.norm(directions[0]) * math.sqrt((directions**2).sum())
    return torch.from_numpy(rows + moved * step).float()


@pytest.mark.parametrize("rank", [2, 32])
def test_by_chance_its_square_is_1(rank: int) -> None:
    """Whatever features have to do with each other, and however many samples there are."""
    squares = []
    for seed in range(200):
        rng = np.random.default_rng(seed)
        squares += [s * s for s in shifts([correlated(rng, rank, int(rng.integers(16, 128))) for _ in range(10)])]
    assert np.mean(squares) == pytest.approx(1.0, abs=0.06)


@pytest.mark.parametrize("moved", [0.25, pytest.param(0.5, marks=pytest.mark.slow), 1.0])
def test_a_mean_that_moved_adds_what_it_must(moved: float) -> None:
    """d^2 / (1/n + q), with q = 1/(5 n) after five rounds."""
    squares = []
    for seed in range(300):
        rng = np.random.default_rng(seed)
        rounds = [correlated(rng, 32) for _ in range(WINDOW)]
        squares.append(shifts([*rounds, correlated(rng, 32, moved=moved)])[-1] ** 2)
    expected = 1 + moved**2 / (1 / N + 1 / (WINDOW * N))
    assert np.mean(squares) == pytest.approx(expected, rel=0.05)


# suspicions ----------------------------------------------------------------------------------------------------------
def suspected(values: list[float]) -> list[int]:
    monitor, memory = DriftMonitor(watched=("features",)), dict[str, Any]()
    for index, value in enumerate(values, start=1):
        monitor.observe(memory, index, {"features": {0: value}})
    return [one["round"] for one in memory["suspected"]]


@pytest.mark.parametrize(("rank", "rate"), [pytest.param(32, 0.0, marks=pytest.mark.slow), (8, 0.001), (2, 0.015)])
def test_false_alarms_are_rare(rank: int, rate: float) -> None:
    """Of the shifts of 100 clients over 40 rounds. The fewer directions features vary in, the farther chance goes."""
    lives = 100
    found = 0
    for seed in range(lives):
        rng = np.random.default_rng(seed)
        found += len(suspected(shifts([correlated(rng, rank) for _ in range(40)])))
    assert found <= rate * 39 * lives


def test_a_shift_of_half_a_deviation_is_found_at_once() -> None:
    for seed in range(30):
        rng = np.random.default_rng(seed)
        before, after = ([correlated(rng, 32, moved=moved) for _ in range(10)] for moved in (0.0, 0.5))
        assert suspected(shifts(before + after)) == [10]


# in a network --------------------------------------------------------------------------------------------------------
def test_the_last_layer_is_the_head_or_the_last_linear_one() -> None:
    mlp = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    assert last_layer(mlp) is mlp[2]
    assert last_layer(nn.Sequential(nn.Conv2d(1, 2, 3))) is None
    headed = nn.Sequential(nn.Linear(4, 3))
    headed.head = nn.Conv2d(1, 2, 3)
    assert last_layer(headed) is headed.head


def test_positions_are_averaged() -> None:
    assert pooled(torch.ones(5, 3)).shape == (5, 3)
    assert pooled(torch.arange(24.0).reshape(1, 2, 3, 4)).tolist() == [[5.5, 17.5]]
    assert pooled(torch.arange(6.0).reshape(1, 3, 2)).tolist() == [[2.0, 3.0]]
    assert pooled(torch.ones(5, 2, 3, 4, 5)).shape == (5, 120)


# in a run ------------------------------------------------------------------------------------------------------------
def looked_at(method: str, **changes: Any) -> tuple[Bench, Bench]:
    """The same run, without the monitor and with it."""
    stream = Toy(clients=4, sizes={(1, 0): 3, (2, 1): 30, (3, 0): 0}, augmented=True)
    plain = Bench(method, stream=stream, module=Norm).change(**changes)
    known: Method = plain.setup().method
    return plain, plain.change(method=lambda: Method(known.name, (*known.parts, FeatureShift(samples=8))))


def without_monitor(outcome: Outcome) -> tuple[Any, Any]:
    clients = {c: {k: v for k, v in state.items() if k != "monitor"} for c, state in outcome.clients.items()}
    return outcome.state.server, clients


BY_DEFAULT = ("fedavg", "er", "fedgp+der", "fedssi", "feddbe", "fedweit")
PRESETS = [*BY_DEFAULT, *(pytest.param(m, marks=pytest.mark.slow) for m in methods.names() if m not in BY_DEFAULT)]


@pytest.mark.parametrize("method", PRESETS)
def test_training_is_the_same_bit_for_bit(method: str) -> None:
    plain, looked = (case.run() for case in looked_at(method))
    (server, clients), (same_server, same_clients) = without_monitor(plain), without_monitor(looked)
    assert tree.equal(server, same_server)
    for client, state in clients.items():
        assert tree.equal(state, same_clients[client])
    assert "monitor" in looked.clients[0]


def test_a_shift_is_sent_once() -> None:
    """A client that has no samples of its own in a round trains on its buffer, and sends no shift of an earlier one."""
    plain = Bench("er", stream=Toy(tasks=2, sizes={(0, 1): 0}))
    known = plain.setup().method
    looked = plain.change(method=lambda: Method(known.name, (*known.parts, FeatureShift(samples=8))))
    assert "shift" in looked.run(rounds=2).clients[0]["monitor"]
    outcome = looked.run()
    assert "shift" not in outcome.clients[0]["monitor"] and outcome.clients[0]["memory"]
    assert outcome.state.traffic.up["monitor"] == 4 * (3 + 2 + 2)  # a first round compares with nothing


def test_engines_agree() -> None:
    _, looked = looked_at("fedavg")
    there = on_processes(looked)
    here = looked.run()
    assert tree.equal(comparable(there.state), comparable(here.state))
    for client, state in here.clients.items():
        assert tree.equal(there.clients[client], state)


def recipe(**monitor: Any) -> dict[str, Any]:
    """Rotated digits that drift: the loss hardly shows it, since the model gets better all the while."""
    return {
        "stream": {
            "dataset": "digits", "scenario": "domain-incremental", "tasks": 3, "clients": 3, "max_train": 450,
            "boundaries": False, "drift": 3, "seed": 3,
        },
        "model": {"kind": "mlp", "hidden": [16]},
        "train": {"rounds_per_task": 10, "optimizer": {"lr": 0.1}},
        "method": {"name": "fedavg"},
        "engine": {"kind": "eager"},
        "monitor": monitor,
    }  # fmt: skip


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> everfed.Result:
    return everfed.run(recipe(kind="page-hinkley", watch="both"), tmp_path_factory.mktemp("watched") / "run")


def test_it_finds_on_an_online_stream_what_the_loss_does_not(watched: everfed.Result) -> None:
    """Tasks change with rounds 10 and 20, and come in gradually over the three rounds before."""
    found = [
        (one["round"], client) for one in watched.data["drift_suspected"] for client in one["by"].get("features", [])
    ]
    for change in (10, 20):
        assert {client for index, client in found if change - 3 <= index <= change} == {0, 1, 2}
    assert all(any(change - 3 <= index <= change + 1 for change in (10, 20)) for index, _ in found)
    by_loss = [one for one in watched.data["drift_suspected"] if "loss" in one["by"]]
    assert len(by_loss) < len(found)


def test_a_number_leaves_a_client_and_nothing_else(watched: everfed.Result) -> None:
    """4 bytes in 29 of 30 rounds: in the first there is nothing to compare with."""
    assert watched.data["cost"]["bytes_by_part"]["monitor"] == {"up": 3 * 29 * 4, "down": 0}


def test_the_report_draws_it(watched: everfed.Result) -> None:
    run = read_run(watched.folder)
    page = render([run])
    assert "monitor: mean shift" in page and "monitor: largest shift" in page and "monitor: repeat" not in page
    assert "<h3>Suspected shifts</h3>" in page
    assert "coloured by signal" in page and "(by features: " in page
    first = watched.data["drift_suspected"][0]
    assert run.log.shifts_by[first["round"]] == {signal: tuple(clients) for signal, clients in first["by"].items()}


def test_numbers_are_the_same_without_it_and_a_resumed_run_suspects_the_same(
    watched: everfed.Result, tmp_path: Path
) -> None:
    plain = everfed.run(recipe(kind="none"), tmp_path / "plain")
    assert plain.data["accuracy_matrix"] == watched.data["accuracy_matrix"]

    class Stop(Exception):
        pass

    def stop(event: dict[str, Any]) -> None:
        if event["event"] == "phase" and event["round"] == 9:
            raise Stop

    with pytest.raises(Stop):
        everfed.run(recipe(kind="page-hinkley", watch="both"), tmp_path / "run", observers=[stop], checkpoint_every=0.0)
    resumed = everfed.resume(tmp_path / "run")
    assert resumed.data["drift_suspected"] == watched.data["drift_suspected"]


@pytest.mark.parametrize(
    ("privacy", "key"), [({"secure_aggregation": True}, "secure_aggregation"), ({"dp": {"noise": 1.0}}, "dp")]
)
def test_where_the_server_sees_no_client_a_monitor_is_refused(
    privacy: dict[str, Any], key: str, tmp_path: Path
) -> None:
    table = {**recipe(kind="page-hinkley"), "privacy": privacy}
    with pytest.raises(RecipeError, match=f"monitor.kind = 'page-hinkley' .* privacy.{key}"):
        everfed.run(table, tmp_path / "run")
