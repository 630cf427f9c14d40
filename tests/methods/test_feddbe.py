"""FedDBE: a vector of the client's own between base and head, and the consensus on mean features."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from everfed.core.context import TrainOptions
from everfed.core.message import Model
from everfed.core.optimizer import Optimizer
from everfed.methods import registry as methods
from everfed.methods.common.layers import features
from everfed.methods.personal.feddbe import DBE
from tests.support.toy import Bench, Norm, Toy

WIDTH = 8  # features of the toy's network


def with_vector(bench: Bench, vector: Tensor) -> Model:
    """The first model as a client with that vector has it."""
    model = bench.model()
    return {**model, "params": torch.cat([model["params"], vector])}


def test_a_zero_vector_is_fedavgs_prediction() -> None:
    bench, x = Bench("feddbe"), Toy().test(0).x
    ours = bench.trainer().outputs(with_vector(bench, torch.zeros(WIDTH)), x)
    assert torch.equal(ours, Bench().trainer().outputs(Bench().model(), x))


def test_the_vector_is_added_before_the_head() -> None:
    bench, x = Bench("feddbe"), Toy().test(0).x
    vector = torch.randn(WIDTH, generator=torch.Generator().manual_seed(0))
    trainer, model = bench.trainer(), with_vector(bench, vector)
    rows = features(trainer, model, x)
    head = bench.build_module().head
    assert torch.allclose(trainer.outputs(model, x), (rows + vector) @ head.weight.T + head.bias, atol=1e-5)


def test_the_first_step_is_fedavgs_for_the_shared_part() -> None:
    """With c_k = 0 the gradient of base and head is FedAvg's."""
    train, stream = TrainOptions(1, 100, Optimizer(lr=0.1)), Toy(tasks=1, rounds_per_task=1)
    ours, plain = (Bench(n, stream=stream, train=train).run().params for n in ("feddbe", "fedavg"))
    assert torch.allclose(ours, plain, atol=1e-6)


def test_vectors_are_personal_trained_and_never_sent() -> None:
    ours, plain = (Bench(n).run() for n in ("feddbe", "fedavg"))
    vectors = [client["client"]["personal"] for client in ours.clients.values()]
    assert all(v.shape == (WIDTH,) and v.abs().sum() > 0 for v in vectors)
    assert not torch.equal(vectors[0], vectors[1])
    assert ours.params.shape == plain.params.shape
    up = [Bench(n).run(rounds=1).state.traffic.as_dict()["bytes_up"] for n in ("feddbe", "fedavg")]
    assert up[0] == up[1]  # base and head only


@pytest.mark.parametrize(
    "optimizer",
    [Optimizer("adam", lr=0.01), Optimizer(lr=0.01, momentum=0.9), Optimizer("adam", lr=0.01, schedule="linear")],
)
def test_the_vector_is_trained_by_sgd_whatever_the_optimiser_is(optimizer: Optimizer) -> None:
    """The first step has the same gradient under any optimiser, so c_k ends where plain SGD takes it; the second round
    of a linear schedule has half the rate."""
    stream = Toy(tasks=1, rounds_per_task=1)
    one_step = [TrainOptions(1, 100, o) for o in (optimizer, Optimizer(lr=0.01))]
    ours, plain = (Bench("feddbe", stream=stream, train=train).run() for train in one_step)
    for client in range(3):
        vectors = [outcome.clients[client]["client"]["personal"] for outcome in (ours, plain)]
        assert vectors[0].abs().max() > 0 and torch.allclose(*vectors, atol=1e-8)
    assert torch.allclose(ours.params, plain.params) == (optimizer.kind == "sgd")  # momentum acts from the second on


def test_the_vector_follows_the_rounds_rate() -> None:
    train = TrainOptions(1, 100, Optimizer("adam", lr=0.01, schedule="linear"))
    bench = Bench("feddbe", stream=Toy(clients=1, tasks=1, rounds_per_task=2), train=train)
    assert [float(bench.run(rounds=r).clients[0]["dbe"]["rate"]) for r in (1, 2)] == pytest.approx([0.01, 0.005])


def test_without_weight_there_is_no_consensus() -> None:
    assert DBE().phases() == () and len(DBE(weight=0.1).phases()) == 1
    outcome = Bench("feddbe").run()
    assert "dbe" not in outcome.state.server
    assert [e["phase"] for e in outcome.events if e["event"] == "phase"] == ["train"] * 4


def weighted(**fields: Any) -> Bench:
    options = {"dbe": {"weight": 5.0, **fields.pop("dbe", {})}}
    return Bench("feddbe", options, **fields)


def test_the_consensus_is_the_data_weighted_mean_of_features() -> None:
    """One batch and momentum 1: a client's running mean is the mean feature of its samples under the first model."""
    stream = Toy(clients=2, sizes={(0, 0): 6, (1, 0): 18})
    bench = weighted(dbe={"momentum": 1.0}, stream=stream, train=TrainOptions(1, 100, Optimizer(lr=0.0)))
    found = bench.run(rounds=1).state.server["dbe"]["mean"]
    model = with_vector(bench, torch.zeros(WIDTH))
    rows = torch.cat([features(bench.trainer(), model, stream.data(c, 0).x) for c in range(2)])
    assert torch.allclose(found, rows.mean(0), atol=1e-5)


def test_the_consensus_costs_one_message_of_feature_size() -> None:
    ours, plain = (b.run().state.traffic.as_dict() for b in (weighted(), Bench("feddbe")))
    assert ours["bytes_up"] - plain["bytes_up"] == 3 * WIDTH * 4
    assert ours["bytes_down"] - plain["bytes_down"] == 3 * WIDTH * 4


def test_the_consensus_is_formed_without_the_vector_and_leaves_no_trace() -> None:
    outcome = weighted().run(rounds=1)
    assert outcome.events[0]["phase"] == "features"
    assert "batch" not in outcome.clients[0]["dbe"]
    assert "alone" not in outcome.clients[0]["dbe"]


def test_the_running_mean_is_reset_at_each_local_training() -> None:
    bench = weighted()
    state = {**bench.new_client(), "dbe": {"mean": torch.ones(WIDTH)}}
    client = bench.client("dbe", state)
    DBE(weight=5.0).receive(client)
    assert torch.equal(client.state["mean"], torch.zeros(WIDTH))
    still = weighted(train=TrainOptions(1, 100, Optimizer(lr=0.0)))  # nothing moves: every round sees the same features
    one, two = still.run(rounds=1).clients[0]["dbe"]["mean"], still.run(rounds=2).clients[0]["dbe"]["mean"]
    assert torch.allclose(one, two, atol=1e-6) and one.abs().sum() > 0


def test_the_term_by_hand() -> None:
    """momentum 1 and no task loss to speak of: one step of SGD on weight * mean((mean feature - m)^2) / 2."""
    bench = weighted(dbe={"momentum": 0.25}, stream=Toy(clients=1))
    ctx, data = bench.context(), bench.stream.data(0, 0)
    part, model = DBE(5.0, 0.25), with_vector(bench, torch.zeros(WIDTH))
    message = {"dbe": {"mean": torch.full((WIDTH,), 2.0)}}
    state = {"dbe": {"mean": torch.zeros(WIDTH)}}
    args = (part,), model, model["params"], state
    plain = ctx.train.fit(ctx, *args, {}, data, epochs=1, batch_size=100)
    drawn = ctx.train.fit(ctx, *args, message, data, epochs=1, batch_size=100)
    mean = features(ctx.train, model, data.x).mean(0)
    term = 5.0 * 0.5 * (0.25 * mean - 2.0).square().mean()
    assert float(drawn.loss - plain.loss) == pytest.approx(float(term), abs=1e-4)
    assert torch.allclose(drawn.state["dbe"]["mean"], 0.25 * mean, atol=1e-5)


def test_it_is_scored_with_the_vector() -> None:
    assert Bench("feddbe").setup().personal
    outcome = Bench("feddbe", module=Norm).run()
    assert set(outcome.state.rows) == {0, 1} and outcome.state.rows[1][0][0] == 3 * 40


@pytest.mark.parametrize("options", [{"weight": -1.0}, {"momentum": 0.0}, {"momentum": 1.5}])
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(methods.MethodError, match=next(iter(options))):
        methods.build("feddbe", {"dbe": options})
