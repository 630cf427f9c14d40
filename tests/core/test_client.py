"""run_client is a pure function: same arguments, same bits, nothing it was given is changed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch

from everfed.core import tree
from everfed.core.client import OWN, Reply, new_state, run_client
from everfed.core.context import Hidden, Place, TrainOptions
from everfed.core.engine import Replies
from everfed.core.evaluate import EvalSpec
from everfed.core.handle import Client, Server
from everfed.core.message import State, Values, unwrap
from everfed.core.method import compose
from everfed.core.optimizer import Optimizer
from everfed.core.part import Part
from everfed.core.phase import END, EVALUATE, Cohort, Mean, Phase, Reducer, Sum
from everfed.methods.aggregate.fedavg import FedAvg
from everfed.store.clients import ClientStore
from tests.support.presets import each_preset
from tests.support.toy import Bench, Norm, Toy

STEP = Optimizer(lr=0.1)


def called(bench: Bench, state: State | None = None, client: int = 0, round_index: int = 0) -> tuple[State, Reply]:
    """One `train` call with the bench's first model."""
    method, ctx = bench.build_method(), bench.context(client, round_index)
    data = bench.stream.data(client, bench.stream.round(round_index).tasks[client])
    start = state or new_state(method, ctx)
    return run_client(method, method.train_phase(), start, {"model": dict(bench.model())}, data, ctx)


def first_message(bench: Bench) -> dict[str, tree.Tree]:
    """What a client receives first of all."""
    method, ctx = bench.build_method(), bench.context().at(client=None)
    server: State = {"model": dict(bench.model())}
    for part in method.parts:
        handle = Server(part.name, server, ctx)
        part.init(handle)
        server = handle.states
    sent = {part.name: part.broadcast(Server(part.name, server, ctx)) for part in method.parts}
    return unwrap({"model": server["model"], **{name: values for name, values in sent.items() if values}})


@pytest.mark.parametrize("name", each_preset())
def test_the_same_call_twice_gives_the_same_bits_and_changes_nothing(name: str) -> None:
    bench = Bench(name, module=Norm, train=TrainOptions(1, 5, STEP))
    method, ctx = bench.build_method(), bench.context()
    state, message, data = new_state(method, ctx), first_message(bench), bench.stream.data(0, 0)
    before = tree.clone({"state": state, "message": message, "x": data.x, "y": data.y})
    results = [run_client(method, method.train_phase(), state, message, data, ctx) for _ in range(2)]
    assert tree.equal(before, {"state": state, "message": message, "x": data.x, "y": data.y})
    assert tree.equal(results[0][0], results[1][0])
    assert tree.equal(results[0][1].values, results[1][1].values)
    assert tree.equal({"loss": results[0][1].loss}, {"loss": results[1][1].loss})  # None where nothing is trained


@pytest.mark.parametrize("optimizer", [STEP, Optimizer("adam", lr=0.01)], ids=["sgd", "adam"])
@pytest.mark.parametrize("name", ["ogd", "si", "fedala", "fedssi", "ewc", "lwf", "er"])
def test_a_call_in_a_later_task_changes_nothing_that_it_was_given(name: str, optimizer: Optimizer) -> None:
    """When all of the state is in use."""
    bench = Bench(name, train=TrainOptions(1, 5, optimizer))
    state = bench.run(rounds=3).clients[0]
    before = tree.clone(state)
    after, _ = called(bench, state, round_index=3)
    assert tree.equal(before, state)
    assert tree.equal(after, called(bench, state, round_index=3)[0])


@pytest.mark.parametrize(
    ("name", "optimizer", "shared"),
    [("ogd", STEP, {"basis"}), ("ogd", Optimizer("adam", lr=0.01), {"basis"}), ("si", STEP, {"omega", "anchor"})],
)
def test_state_that_steps_do_not_change_is_not_copied(name: str, optimizer: Optimizer, shared: set[str]) -> None:
    bench = Bench(name, train=TrainOptions(1, 5, optimizer))
    state = bench.run(rounds=3).clients[0]
    after, _ = called(bench, state, round_index=3)
    places = {key: value.data_ptr() for key, value in state[name].items() if key != "lengths"}
    assert {key for key, place in places.items() if after[name][key].data_ptr() == place} == shared


def test_what_a_reply_says() -> None:
    _, reply = called(Bench())
    assert (reply.samples, reply.steps) == (12, 2 * 3)  # 12 samples by 5 are 5, 5 and 2; two epochs
    assert set(reply.values) == {"fedavg"} and set(reply.values["fedavg"]) == {"params", "stats", "counters"}


@dataclass(frozen=True)
class Halving(Part):
    """Trains on the second half of the data alone, and says of itself what it saw."""

    name: ClassVar[str] = "halving"

    def receive(self, client: Client) -> None:
        client.state["first"] = len(client.own_data)
        client.data = client.data.take(np.arange(len(client.data) // 2, len(client.data)))

    def reply(self, client: Client) -> Values:
        return {"own": min(client.state["first"], len(client.own_data)), "left": len(client.data)}

    def reducers(self) -> dict[str, Reducer]:
        return {"own": Sum(), "left": Sum()}

    def phases(self) -> tuple[Phase, ...]:
        return (Phase("count", reduce={"n": Mean(weighted=True)}, run=lambda client: {"n": len(client.data)}),)


@dataclass(frozen=True)
class Second(Halving):
    """The same after it; the aggregated model is its own."""

    name: ClassVar[str] = "second"

    def phases(self) -> tuple[Phase, ...]:
        return ()


@dataclass(frozen=True)
class Zeros(FedAvg):
    def reply(self, client: Client) -> Values:
        return {"params": torch.zeros(2)}


def test_every_part_sees_the_clients_own_data_and_a_reply_weighs_what_was_trained_on() -> None:
    bench = Bench(lambda: compose(FedAvg(), Halving(), Second()))
    _, reply = called(bench)
    assert reply.values["halving"] == {"own": 12, "left": 3} and reply.values["second"] == {"own": 12, "left": 3}
    assert reply.samples == 3


def test_the_reply_of_a_phase_weighs_all_samples_of_the_client() -> None:
    bench = Bench(lambda: compose(FedAvg(), Halving()), stream=Toy(clients=2, sizes={(0, 0): 4, (1, 0): 12}))
    replies = Replies(bench.build_method().reducers(bench.build_method().own_phases[0]))
    for client, reply in bench.eager(bench.setup(), ClientStore()).exchange(
        bench.build_method().own_phases[0], (0, 1), {"model": dict(bench.model())}, Place(0, bench.stream.round(0))
    ):
        replies.add(client, reply)
    assert replies.reduction.result()["halving"]["n"] == (4 * 4 + 12 * 12) / 16


def test_what_the_aggregating_part_replies_counts_in_place_of_what_it_uploads() -> None:
    _, reply = called(Bench(lambda: compose(Zeros())))
    assert reply.values["fedavg"]["params"].tolist() == [0.0, 0.0] and "stats" in reply.values["fedavg"]


def test_personal_parameters_survive_a_round_that_was_not_sent() -> None:
    """A client that is asked again with a new message, before the synchronisation came."""
    bench = Bench("feddbe", train=TrainOptions(1, 5, STEP, sync_every=2))
    layout, (state, _) = bench.layout(), called(bench)
    trained = state[OWN]["model"]["params"][layout.shared :]
    assert trained.abs().sum() > 0
    assert torch.equal(state[OWN]["personal"], trained)


def test_the_loss_is_the_sum_over_steps() -> None:
    bench = Bench(train=TrainOptions(1, 100, STEP))
    _, reply = called(bench)
    data = bench.stream.data(0, 0)
    outputs = bench.trainer().outputs(bench.model(), data.x)
    assert reply.loss == pytest.approx(float(torch.nn.functional.cross_entropy(outputs, data.y)), rel=1e-6)


def test_one_step_of_one_batch_is_gradient_descent() -> None:
    bench = Bench(train=TrainOptions(1, 100, STEP))
    _, reply = called(bench)
    data, module = bench.stream.data(0, 0), bench.build_module()
    torch.nn.functional.cross_entropy(module(bench.stream.inputs(data.x)), data.y).backward()
    stepped = torch.cat([(p - 0.1 * p.grad).detach().reshape(-1) for p in module.parameters()])
    assert torch.allclose(reply.values["fedavg"]["params"], stepped, atol=1e-6)


def test_a_client_without_data_sends_nothing() -> None:
    state, reply = called(Bench("fedgp+der", stream=Toy(sizes={(0, 0): 0})))
    assert reply == Reply({})
    assert state["memory"]["host"]["n"] == 0


def test_a_new_client_has_empty_state() -> None:
    state = Bench("fedgp+der").new_client()
    assert set(state) == {OWN, "memory"} and state[OWN] == {}
    assert {k: tuple(state["memory"][k].shape) for k in ("x", "y", "logits")} == {
        "x": (9, 1, 4, 4), "y": (9,), "logits": (9, 4),
    }  # fmt: skip


def test_nothing_is_kept_unless_an_option_asks_for_it() -> None:
    assert called(Bench(module=Norm))[0][OWN] == {}


def test_moments_are_kept_when_asked() -> None:
    train = TrainOptions(1, 5, Optimizer(lr=0.1, momentum=0.9, state="kept"))
    bench = Bench(train=train)
    state, first = called(bench)
    assert state[OWN]["moments"]["momentum"].abs().sum() > 0
    _, fresh = called(bench, None)
    _, kept = called(bench, state)
    assert torch.equal(first.values["fedavg"]["params"], fresh.values["fedavg"]["params"])
    assert not torch.equal(first.values["fedavg"]["params"], kept.values["fedavg"]["params"])


def test_local_statistics_stay_and_are_used_again() -> None:
    bench = Bench(module=Norm, train=TrainOptions(1, 5, STEP, batchnorm="local"))
    state, reply = called(bench)
    assert set(reply.values["fedavg"]) == {"params"}
    assert state[OWN]["counters"].tolist() == [3]
    state, _ = called(bench, state)
    assert state[OWN]["counters"].tolist() == [6]


def test_mean_statistics_start_from_the_server_s() -> None:
    bench = Bench(module=Norm)
    state, reply = called(bench)
    assert reply.values["fedavg"]["counters"].tolist() == [6]
    _, again = called(bench, state)
    assert again.values["fedavg"]["counters"].tolist() == [6]
    assert again.values["fedavg"]["counters"].dtype == torch.int64


def test_between_synchronisations_the_weights_stay_on_the_client() -> None:
    bench = Bench(train=TrainOptions(1, 5, STEP, sync_every=2))
    state, reply = called(bench)
    assert reply.values == {} and reply.samples == 12
    assert set(state[OWN]) == {"model", "message"}
    method, ctx = bench.build_method(), bench.context(round_index=1)
    state, reply = run_client(method, method.train_phase(), state, None, bench.stream.data(0, 0), ctx)
    assert set(reply.values) == {"fedavg"} and state[OWN] == {}


@pytest.mark.parametrize(("every", "rounds"), [(1, [0, 1, 2, 3, 4, 5]), (2, [1, 3, 5]), (3, [2, 5])])
def test_which_rounds_synchronise(every: int, rounds: list[int]) -> None:
    ctx = Bench(train=TrainOptions(sync_every=every)).context()
    assert [r for r in range(6) if ctx.at(round=r).synchronises] == rounds


def test_a_client_scores_what_it_is_asked_for() -> None:
    bench = Bench()
    method, ctx = bench.build_method(), bench.context(phase=EVALUATE)
    asked = {"model": dict(bench.model()), EVALUATE: EvalSpec((0, 1), seen=2).to_tree()}
    empty = bench.stream.data(0, 0).take(np.zeros(0, dtype=np.int64))
    _, reply = run_client(method, Phase(EVALUATE), bench.new_client(), asked, empty, ctx)
    counts = reply.values[EVALUATE]["counts"]
    assert counts.shape == (2, 4) and counts[:, 0].tolist() == [40, 40]
    expected = (
        bench.trainer().outputs(bench.model(), bench.stream.test(1).x).argmax(1) == bench.stream.test(1).y
    ).sum()
    assert counts[1].tolist() == [40, int(expected), int(expected), int(expected)]


# what a hook may know ------------------------------------------------------------------------------------------------
def test_the_task_is_hidden_where_the_stream_hides_it() -> None:
    assert Bench().context(round_index=2).task == 1
    with pytest.raises(Hidden, match="which task"):
        _ = Bench(stream=Toy(task_ids=False)).context(round_index=2).task
    with pytest.raises(Hidden, match="which task"):
        _ = Bench(stream=Toy(task_ids=False, boundaries=False)).context(round_index=2).task


def test_the_past_is_gone_unless_a_part_declares_it() -> None:
    with pytest.raises(Hidden, match="needs HISTORY"):
        Bench().context(round_index=2).history()
    assert [len(data) for data in Bench("ideal").context(round_index=2).history()] == [12]
    assert Bench("ideal").context(round_index=0).history() == []


def test_there_is_no_training_on_the_server() -> None:
    with pytest.raises(Hidden, match="no local training"):
        _ = Bench().setup().server("train").train


def test_the_servers_own_phases_have_a_trainer_and_know_the_task() -> None:
    class Looks(Part):
        name: ClassVar[str] = "looks"

        def phases(self) -> tuple[Phase, ...]:
            return (Phase("look", cohort=Cohort.SERVER, rounds=END, update=self._look),)

        def _look(self, server: Server) -> None:
            outputs = server.trainer.outputs(server.model, server.facts.blank.x)
            server.state = {"task": server.context.task, "outputs": outputs}

    for stream, known in ((Toy(), True), (Toy(task_ids=False), False)):
        bench = Bench(lambda: compose(FedAvg(), Looks()), stream=stream)
        if known:
            assert bench.run().state.server["looks"]["task"] == stream.tasks - 1
        else:
            with pytest.raises(Hidden, match="which task"):
                bench.run()


def test_on_the_server_the_task_is_the_servers() -> None:
    """Clients with clocks of their own may be further, or not as far."""
    bench = Bench()
    plan = replace(bench.stream.round(0), server_task=1)
    assert (plan.task, bench.setup().server("train", Place(0, plan)).current_task) == (0, 1)


def test_the_learning_rate_follows_the_rounds_of_a_task() -> None:
    bench = Bench(train=TrainOptions(1, 5, Optimizer(lr=0.1, schedule="linear")))
    assert [bench.context(round_index=r).rate for r in range(4)] == pytest.approx([0.1, 0.05, 0.1, 0.05])


def test_the_learning_rate_follows_the_clock_of_the_client() -> None:
    """Where clients change tasks on their own, the rounds behind the server's task say nothing of theirs."""

    class Clocked(Toy):
        def clock_of(self, client: int, index: int) -> tuple[int, int]:
            return (3, 4) if client == 1 else (index % 2, 2)

    bench = Bench(stream=Clocked(), train=TrainOptions(1, 5, Optimizer(lr=0.1, schedule="linear")))
    assert [bench.context(client).progress for client in (0, 1)] == [(0, 2), (3, 4)]
    assert [bench.context(client).rate for client in (0, 1)] == pytest.approx([0.1, 0.025])
    hidden = bench.change(stream=Clocked(boundaries=False))
    assert hidden.context(1).progress == (0, 2)  # a clock tells when a task begins


@pytest.mark.parametrize(("logits", "allowed"), [("full", None), ("seen", (0, 1, 2, 3)), ("task", (2, 3))])
def test_which_logits_are_trained(logits: str, allowed: tuple[int, ...] | None) -> None:
    ctx = Bench(stream=Classes(), train=TrainOptions(1, 5, STEP, logits=logits)).context(round_index=2)
    assert ctx.allowed_labels == allowed


class Classes(Toy):
    """Two classes per task."""

    def labels(self, task: int) -> tuple[int, ...]:
        return (2 * task, 2 * task + 1)

    def _draw(self, rng, count, task, only):  # type: ignore[no-untyped-def]
        return super()._draw(rng, count, task, self.labels(task))


def test_masked_logits_get_no_gradient() -> None:
    bench = Bench(stream=Classes(), train=TrainOptions(1, 5, STEP, logits="task"))
    _, reply = called(bench, round_index=2)
    moved = reply.values["fedavg"]["params"] - bench.model()["params"]
    head = bench.layout().named(moved)["head.bias"]
    assert head[:2].tolist() == [0.0, 0.0] and head[2:].abs().min() > 0


@dataclass(frozen=True)
class Noting(Part):
    """Writes state where what it writes would be lost."""

    name: ClassVar[str] = "noting"

    def broadcast(self, server: Server) -> Values:
        server.state["sent"] = 1
        return {}


def test_a_hook_whose_state_would_be_lost_may_not_write_any() -> None:
    with pytest.raises(TypeError, match="does not support item assignment"):
        Bench(lambda: compose(FedAvg(), Noting())).run(rounds=1)
