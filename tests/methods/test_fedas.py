"""FedAS: alignment of the received base, personal heads, and aggregation by Fisher information."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from everfed.core.client import run_client
from everfed.core.context import TrainOptions
from everfed.core.handle import Server
from everfed.core.message import MODEL
from everfed.core.optimizer import Optimizer
from everfed.core.phase import TRAIN, Phase
from everfed.errors import CompositionError
from everfed.methods import registry as methods
from everfed.methods.common.layers import class_means, features
from everfed.methods.personal.fedas import FedAS, alignment_loss, fisher_trace, shares
from tests.support.toy import Bench, Linear, Norm, Toy

BASE = 16 * 8 + 8  # of the toy's network; the head has 36


def whole(bench: Bench) -> dict[str, Any]:
    layout, module = bench.layout(), bench.build_module()
    return layout.read(module)


# aggregation ---------------------------------------------------------------------------------------------------------
def aggregated(bases: list[list[float]], traces: list[float]) -> Tensor:
    reduced = {
        "params": {client: torch.tensor(base) for client, base in enumerate(bases)},
        "trace": {client: torch.tensor(trace) for client, trace in enumerate(traces)},
    }
    return aggregate(torch.zeros(2), reduced)


def aggregate(params: Tensor, reduced: dict[str, Any]) -> Tensor:
    """The new parameters, without statistics."""
    model = {"params": params, "stats": torch.zeros(0), "counters": torch.zeros(0)}
    server: Server = Bench("fedas").server("fedas", {MODEL: model}, reduced=reduced)
    return FedAS().aggregate(server)["params"]


def test_equal_traces_give_the_plain_mean() -> None:
    assert torch.allclose(aggregated([[1.0, 2.0], [3.0, 6.0]], [0.7, 0.7]), torch.tensor([2.0, 4.0]))


def test_traces_weigh_the_bases() -> None:
    assert torch.allclose(aggregated([[1.0, 2.0], [3.0, 6.0]], [3.0, 1.0]), torch.tensor([1.5, 3.0]))


def test_no_information_at_all_falls_back_to_the_uniform_mean() -> None:
    assert torch.allclose(aggregated([[1.0, 2.0], [3.0, 6.0]], [0.0, 0.0]), torch.tensor([2.0, 4.0]))
    assert shares(torch.zeros(4)).tolist() == [0.25] * 4


def test_no_reply_leaves_the_model() -> None:
    assert torch.equal(aggregate(torch.ones(2), {"params": None}), torch.ones(2))


def test_the_trace_is_positive_and_sums_squared_gradients() -> None:
    bench = Bench("fedas")
    client = bench.client("fedas", model=whole(bench))
    trace, data = float(fisher_trace(client)), client.data  # minibatches of 5, 5 and 2 samples
    parts = [(data.x[a:b], data.y[a:b]) for a, b in ((0, 5), (5, 10), (10, 12))]
    gradients = [client.gradient(x, y, mode="eval", tag="t") for x, y in parts]
    assert trace > 0
    assert trace == pytest.approx(sum(float(g.square().sum()) for g in gradients), rel=1e-5)


# the head ------------------------------------------------------------------------------------------------------------
def test_the_head_never_leaves_and_is_not_downloaded() -> None:
    outcome = Bench("fedas").run()
    assert outcome.params.numel() == BASE
    heads = [client["client"]["personal"] for client in outcome.clients.values()]
    assert all(head.numel() == 36 for head in heads) and not torch.equal(heads[0], heads[1])
    up = outcome.state.traffic.as_dict()["bytes_by_part"]["fedas"]["up"]
    assert up == 4 * 3 * (BASE * 4 + 4)  # base and one scalar, from 3 clients in 4 rounds


def test_a_download_leaves_the_clients_head() -> None:
    bench = Bench("fedas", train=TrainOptions(1, 5, Optimizer(lr=0.0)))
    state, head = bench.new_client(), torch.arange(36.0)
    state = {**state, "client": {"personal": head}}
    message = {MODEL: bench.model()}
    after, _ = run_client(
        bench.build_method(), Phase(TRAIN, owner="fedas"), state, message, bench.stream.data(0, 0), bench.context()
    )
    assert torch.equal(after["client"]["personal"], head)  # nothing moves at rate 0


def test_a_model_without_that_head_is_refused() -> None:
    with pytest.raises(CompositionError, match="fedas.head = 'head' must name some layers of the model.*it has map"):
        Bench("fedas", module=Linear).run()


# alignment -----------------------------------------------------------------------------------------------------------
def test_the_alignment_loss_by_hand() -> None:
    found, y = torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 0, 1])
    means = torch.tensor([[2.0, 0.0], [0.0, 0.0], [9.0, 9.0]])
    # class 0: mean of ((1, 0), (1, 0)) squared = 1/2; class 1: (0, 4) = 2
    assert float(alignment_loss(found, y, means)) == pytest.approx(0.5 + 2.0)


def test_identical_bases_lose_nothing_only_where_features_are_their_class_means() -> None:
    spread, y = torch.tensor([[1.0, 0.0], [3.0, 0.0]]), torch.tensor([0, 0])
    assert float(alignment_loss(spread, y, class_means(spread, y, 3))) > 0
    same = torch.tensor([[2.0, 5.0], [2.0, 5.0]])
    assert float(alignment_loss(same, y, class_means(same, y, 3))) == 0.0


def test_class_means_by_hand() -> None:
    rows, y = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 5.0]]), torch.tensor([1, 1, 0])
    assert class_means(rows, y, 3).tolist() == [[5.0, 5.0], [2.0, 3.0], [0.0, 0.0]]


def aligned(model: dict[str, Any], previous: dict[str, Any], bench: Bench, **options: Any) -> dict[str, Any]:
    client = bench.client("fedas", {"fedas": previous}, model=model)
    FedAS(**options).start(client)
    return client.model


def test_alignment_draws_the_base_to_the_previous_one_and_spares_the_head() -> None:
    bench = Bench("fedas")
    previous, received = whole(bench), whole(bench)
    received["params"] = received["params"] + 0.3 * torch.randn(172, generator=torch.Generator().manual_seed(1))
    after = aligned(received, previous, bench, align_lr=0.05, align_epochs=3)
    assert torch.equal(after["params"][BASE:], received["params"][BASE:])
    assert not torch.equal(after["params"][:BASE], received["params"][:BASE])
    loss = [distance(bench, model, previous) for model in (received, after)]
    assert loss[1] < loss[0]


def distance(bench: Bench, model: dict[str, Any], previous: dict[str, Any]) -> float:
    trainer, data = bench.trainer(), bench.stream.data(0, 0)
    means = class_means(features(trainer, previous, data.x), data.y, 4)
    return float(alignment_loss(features(trainer, model, data.x), data.y, means))


def test_the_first_round_and_zero_epochs_do_not_align() -> None:
    bench = Bench("fedas")
    model = whole(bench)
    client = bench.client("fedas", {}, model=model)
    FedAS().start(client)
    assert client.model is model
    assert aligned(model, whole(bench), bench, align_epochs=0) is model


def test_statistics_are_averaged_as_under_fedavg() -> None:
    stream = Toy(clients=2, tasks=1, rounds_per_task=1)
    ours, plain = (Bench(n, stream=stream, module=Norm).run() for n in ("fedas", "fedavg"))
    assert torch.equal(ours.state.model["stats"], plain.state.model["stats"])


def test_clients_are_scored_with_their_own_last_model() -> None:
    bench = Bench("fedas", stream=Toy(clients=2))
    outcome = bench.run()
    assert methods.build("fedas").personal
    right = 0
    for client in range(2):
        own = outcome.clients[client]["fedas"]
        test = bench.stream.test(0)
        right += int((bench.trainer().outputs(own, test.x).argmax(1) == test.y).sum())
    assert outcome.state.rows[1][0][:2] == [80, right]


@pytest.mark.parametrize("options", [{"align_epochs": -1}, {"align_batch": 0}, {"align_lr": -0.1}])
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(methods.MethodError, match=next(iter(options))):
        methods.build("fedas", {"fedas": options})
