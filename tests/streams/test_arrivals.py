"""Replies as they arrive: the virtual clock, FedBuff and FedAsync in closed form, runs that resume."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import everfed
from everfed import streams
from everfed.core import tree
from everfed.core.client import Reply
from everfed.core.phase import Phase
from everfed.core.server import Runner, RunState
from everfed.engines.eager import Eager
from everfed.errors import CompositionError, SettingError, UserError
from everfed.method import Client, Collect, Part, Server, compose
from everfed.methods import registry as methods
from everfed.methods.aggregate.asynchronous import FedAsync, FedBuff
from everfed.methods.aggregate.fedavg import FedAvg
from everfed.store.clients import ClientStore
from everfed.streams.arrivals import make
from tests.support.toy import Bench, comparable
from tests.support.wire import run_over_wire

STREAM = {"dataset": "digits", "scenario": "class-incremental", "tasks": 2, "clients": 6, "max_train": 120,
          "max_test": 60, "arrivals": {"buffer": 2, "concurrency": 4, "latency": 10.0, "spread": 1.0}}  # fmt: skip


def recipe(method: str = "fedavg+fedbuff", **changes: Any) -> dict[str, Any]:
    stream = {**STREAM, **changes.pop("stream", {})}
    return {"stream": stream, "model": {"kind": "mlp", "hidden": [8]}, "train": {"rounds_per_task": 4},
            "method": {"name": method, "defaults": {"memory": {"size": 8}}}, "engine": {"kind": "eager"},
            **changes}  # fmt: skip


# the clock ------------------------------------------------------------------------------------------------------------
def test_every_round_ends_with_its_kth_reply_and_time_goes_on() -> None:
    found = make({"buffer": 3, "concurrency": 5, "spread": 1.0}, 8, 40, 1)
    seconds = [one.seconds for one in found.rounds]
    assert seconds == sorted(seconds) and seconds[0] > 0
    assert all(len(one.began) == 3 for one in found.rounds)
    assert {since <= index for index, one in enumerate(found.rounds) for since in one.began.values()} == {True}


def test_as_many_train_as_may_and_nobody_twice() -> None:
    found = make({"buffer": 2, "concurrency": 4, "spread": 1.0}, 7, 60, 3)
    training: dict[int, int] = {}
    for index, one in enumerate(found.rounds):
        for client in one.starts:
            assert client not in training
            training[client] = index
        for client, since in one.began.items():
            assert training.pop(client) == since
        assert len(training) in (2, 3)  # 4 without the last reply, and one more where all others are in the buffer
        assert found.awaited[index] <= set(training.values())


def test_without_spread_or_noise_waves_arrive_in_the_order_in_which_they_began() -> None:
    """4 train, 2 a round, all take 1 s: rounds end at 1, 1, 2, 2 s; the second wave's models are a round old."""
    found = make({"buffer": 2, "concurrency": 4, "spread": 0.0, "noise": 0.0}, 8, 4, 0)
    assert [one.seconds for one in found.rounds] == [1.0, 1.0, 2.0, 2.0]
    assert set(found.rounds[0].began.values()) == {0} == set(found.rounds[1].began.values())


def test_a_buffer_of_all_is_a_synchronous_round() -> None:
    found = make({"buffer": 5, "concurrency": 5, "spread": 1.0}, 5, 6, 0)
    assert all(set(one.began.values()) == {index} for index, one in enumerate(found.rounds))
    assert all(not awaited for awaited in found.awaited)


# the methods ----------------------------------------------------------------------------------------------------------
def opened(part: Any, age: int, key: str = "params") -> torch.Tensor:
    """What is reduced of a client that went from 1 to 3 while the server went from 1 to 2."""
    server = type("S", (), {"model": {"params": torch.tensor([2.0])}})()
    sent = {"params": torch.tensor([3.0])} if key == "params" else {"update": torch.tensor([2.0])}
    phase, received = Phase("train", owner="fedavg"), {"params": torch.tensor([1.0])}
    reply = part.open(server, phase, Reply({"fedavg": sent}, age=age), received)
    assert reply.values[part.name] == {"staleness": age, "replies": 1}
    found: torch.Tensor = reply.values["fedavg"][key]
    return found


def test_fedbuff_adds_updates_by_their_age() -> None:
    """2 + lr (3 - 1) / sqrt(1 + 3)."""
    assert opened(FedBuff(), 3).item() == 3.0
    assert opened(FedBuff(lr=0.5), 3).item() == 2.5
    assert opened(FedBuff(decay=0.0), 3).item() == 4.0
    assert opened(FedBuff(), 3, "update").item() == 1.0


def test_fedasync_mixes_models_by_their_age() -> None:
    """2 + 0.6 / sqrt(1 + 3) (3 - 2)."""
    assert opened(FedAsync(), 3).item() == pytest.approx(2.3)
    assert opened(FedAsync(mixing=1.0, decay=0.0), 3).item() == 3.0
    assert opened(FedAsync(), 3, "update").item() == pytest.approx(0.3)


# runs -----------------------------------------------------------------------------------------------------------------
def test_a_buffer_of_all_gives_the_bits_of_synchronous_rounds(tmp_path: Any) -> None:
    every = {"arrivals": {"buffer": 6, "concurrency": 6, "spread": 1.0}}
    late = everfed.run(recipe(stream=every), tmp_path / "a", progress=False)
    plain = recipe("fedavg")
    del plain["stream"]["arrivals"]
    there = everfed.run(plain, tmp_path / "b", progress=False)
    assert late.data["accuracy_matrix"] == there.data["accuracy_matrix"]
    cost = [run.data["cost"] for run in (late, there)]
    assert cost[0]["bytes_up"] == cost[1]["bytes_up"] and cost[0]["bytes_down"] == cost[1]["bytes_down"]


@pytest.mark.parametrize(
    "method", ["fedgp+der+fedbuff", "fedomg+fedasync", "fedavg+fedbuff+compress", "fedssi+fedbuff"]
)
def test_methods_compose_and_staleness_is_reported(method: str, tmp_path: Any) -> None:
    events: list[dict[str, Any]] = []
    everfed.run(recipe(method), tmp_path / "run", progress=False, observers=[events.append])
    trained = [event for event in events if event["event"] == "phase" and event["phase"] == "train"]
    assert any(event.get("staleness") for event in trained)
    assert [event["seconds_simulated"] for event in trained] == sorted(e["seconds_simulated"] for e in trained)
    plan = streams.build(STREAM, 0, 4).round(5)
    mean = sum(5 - since for since in plan.began.values()) / 2
    said = [event for event in events if event["event"] == "measure" and event["round"] == 5]
    assert [event["staleness"] for event in said if "staleness" in event] == [mean]


def test_a_run_resumes_to_the_same_bits_with_replies_on_their_way() -> None:
    stream = streams.build(STREAM, 0, 4)
    assert any(stream.round(index).awaited for index in range(stream.rounds))
    bench = Bench("fedgp+der+fedbuff", {"memory": {"size": 8}}, stream=stream)  # type: ignore[arg-type]

    def runner(state: RunState | None, store: ClientStore) -> Runner:
        setup = bench.setup()
        return Runner(setup, Eager(setup, store, bench.build_module), bench.model(), bench.evaluation, state=state)

    whole = runner(None, ClientStore()).run()
    store, stopped = ClientStore(), None
    for _ in range(stream.rounds):  # stopped after every round
        one = runner(stopped, store)
        one.round()
        stopped = RunState.from_tree(tree.from_bytes(tree.to_bytes(one.state.to_tree())))
    assert stopped is not None
    assert tree.equal(whole.model, stopped.model)


@dataclass(frozen=True)
class Sees(Part):
    """Clients reply which round's message they were sent, and in which round they draw."""

    seen: dict[int, dict[int, tuple[int, int]]] = field(default_factory=dict, compare=False)
    name = "sees"

    def broadcast(self, server: Server) -> Any:
        return {"round": server.round}

    def reply(self, client: Client) -> Any:
        return {"sent": client.message["round"], "own": client.round}

    def reducers(self) -> Any:
        return {"sent": Collect(), "own": Collect()}

    def update(self, server: Server) -> None:
        sent, own = server.reduced["sent"], server.reduced["own"]
        self.seen[server.round] = {client: (sent[client], own[client]) for client in sent}


def test_a_client_trains_with_what_it_was_sent_when_it_began() -> None:
    stream, part = streams.build(STREAM, 0, 4), Sees()
    bench = Bench(lambda: compose(FedAvg(), part, FedBuff()), stream=stream)  # type: ignore[arg-type]
    bench.run()
    for index in range(stream.rounds):
        began = stream.round(index).began
        assert part.seen[index] == {client: (since, since) for client, since in began.items()}


def test_over_bytes_it_is_the_same() -> None:
    bench = Bench("fedgp+der+fedbuff+compress", {"memory": {"size": 8}}, stream=streams.build(STREAM, 0, 4))  # type: ignore[arg-type]
    eager, wire = bench.run(), run_over_wire(bench)
    assert tree.equal(comparable(eager.state), comparable(wire.state))


def test_what_does_not_belong_together_is_refused() -> None:
    stream = streams.build(STREAM, 0, 4)
    with pytest.raises(CompositionError, match=r"stream.arrivals.*\+fedbuff"):
        methods.build("fedavg").fit_stream(stream)
    with pytest.raises(CompositionError, match="set stream.arrivals"):
        methods.build("fedavg+fedbuff").fit_stream(streams.build({**STREAM, "arrivals": None}, 0, 4))
    with pytest.raises(CompositionError, match="'lora' trains other pieces|'pilora'"):
        methods.build("pilora+fedbuff")
    with pytest.raises(CompositionError, match="put 'fedbuff' before 'compress'"):
        methods.build("fedavg+compress+fedbuff")
    with pytest.raises(UserError, match="secure_aggregation.*'fedbuff' sends others"):
        everfed.check(recipe(privacy={"secure_aggregation": True}))


@pytest.mark.parametrize(
    ("arrivals", "said"),
    [
        ({"buffer": 3, "concurrency": 2}, "arrivals.buffer: is more than concurrency"),
        ({"buffer": 1, "concurrency": 9}, "arrivals.concurrency: 9 is more than there are clients"),
        ({"buffer": 1, "concurrency": 2, "wait": 1}, "arrivals.wait: is not an option"),
        ({"concurrency": 2}, "arrivals.buffer: expected a whole number"),
    ],
)
def test_options_are_checked(arrivals: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        streams.build({**STREAM, "arrivals": arrivals}, 0, 4)


def test_real_clients_are_not_asked_for_it() -> None:
    from everfed.federation.serving import refuse_arrivals

    refuse_arrivals(streams.build({**STREAM, "arrivals": None}, 0, 4))
    with pytest.raises(UserError, match=r"stream.arrivals is a simulation's.*federation.deadline"):
        refuse_arrivals(streams.build(STREAM, 0, 4))
