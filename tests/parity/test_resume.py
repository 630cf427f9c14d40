"""4 rounds = 2 + 2, for every preset: a run goes on from bytes as if it had never stopped."""

from __future__ import annotations

import pytest

from everfed.core import tree
from everfed.core.context import TrainOptions
from everfed.core.optimizer import Optimizer
from everfed.core.server import RunState
from everfed.store.clients import ClientStore
from tests.support.presets import each_kind
from tests.support.toy import Bench, Norm, Outcome, Toy, comparable
from tests.support.wire import crossed


def through_bytes(stopped: Outcome) -> tuple[RunState, ClientStore]:
    """What a new process finds on disk."""
    store = ClientStore()
    for client, state in stopped.clients.items():
        store.put(client, crossed(state))
    return RunState.from_tree(crossed(stopped.state.to_tree())), store


def assert_resumes(bench: Bench, rounds: int, whole: Outcome | None = None) -> None:
    """whole: the same run without a stop, where the test has made it already."""
    whole = whole or bench.run()
    state, store = through_bytes(bench.run(rounds=rounds))
    assert state.round == rounds
    resumed = bench.run(state=state, store=store)
    assert tree.equal(comparable(whole.state), comparable(resumed.state))
    assert whole.clients.keys() == resumed.clients.keys()
    assert all(tree.equal(whole.clients[c], resumed.clients[c]) for c in whole.clients)


@pytest.mark.parametrize("name", each_kind())
def test_four_rounds_are_two_and_two(name: str) -> None:
    assert_resumes(Bench(name, train=TrainOptions(1, 5, Optimizer(lr=0.1))), 2)


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize(
    "train",
    [
        TrainOptions(1, 5, Optimizer(lr=0.05, momentum=0.9, state="kept")),
        TrainOptions(1, 5, Optimizer("adam", lr=0.01, state="kept")),
        TrainOptions(1, 5, Optimizer(lr=0.05), sync_every=2),
        TrainOptions(1, 5, Optimizer(lr=0.05), batchnorm="local"),
    ],
    ids=["momentum kept", "adam kept", "equalised", "local statistics"],
)
def test_what_the_protocol_keeps_on_clients_survives(train: TrainOptions, rounds: int) -> None:
    assert_resumes(Bench("fedgp+der", stream=Toy(clients=2), module=Norm, train=train), rounds)


def test_a_stopped_run_has_not_gone_on() -> None:
    stopped = Bench("fedgp").run(rounds=2)
    assert (stopped.state.round, stopped.state.position, set(stopped.state.rows)) == (2, 0, {0})
