"""FedCurv (Shoham et al., 2019): the penalty against the paper's double sum; bytes are in the runner's tests."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from everfed.core.client import run_client
from everfed.core.context import TrainOptions
from everfed.core.optimizer import Optimizer
from everfed.methods.regularise.fedcurv import FedCurv
from everfed.methods.regularise.fisher import diagonal_fisher
from tests.support.phases import ruled
from tests.support.toy import Bench, Given, Linear, Norm, Toy

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def curved(weight: float = 1.0, **fields: Any) -> Bench:
    return Bench("fedcurv", {"fedcurv": {"weight": weight}}, **fields)


def gradient_with(part: FedCurv, own: dict[str, Tensor], params: Tensor) -> Tensor:
    return ruled(part, SimpleNamespace(state=own, params=params), torch.zeros_like(params))


def received(part: FedCurv, own: dict[str, Any], sums: dict[str, Any], bench: Bench | None = None) -> dict[str, Tensor]:
    """A client's state after it received the sums."""
    client = (bench or Bench()).client("fedcurv", {"fedcurv": own}, messages={"fedcurv": sums})
    part.receive(client)
    return client.state


def test_one_client_is_fedavg_bit_for_bit() -> None:
    alone = Toy(clients=1)
    assert torch.equal(curved(10.0, stream=alone).run().params, Bench(stream=alone).run().params)


def test_the_first_round_is_fedavg_bit_for_bit_and_the_second_is_not() -> None:
    assert torch.equal(curved().run(rounds=1).params, Bench().run(rounds=1).params)
    assert not torch.equal(curved().run(rounds=2).params, Bench().run(rounds=2).params)


def test_weight_zero_is_fedavg_bit_for_bit() -> None:
    assert torch.equal(curved(0.0, module=Norm).run().params, Bench(module=Norm).run().params)


@given(st.integers(0, 1000), st.integers(2, 5), st.floats(0.1, 5))
@settings(max_examples=40)
def test_the_gradient_is_that_of_the_double_sum(seed: int, clients: int, weight: float) -> None:
    """lambda * sum over the others of (w - w_s)^T diag(I_s) (w - w_s)."""
    generator = torch.Generator().manual_seed(seed)
    models = [torch.randn(6, generator=generator) for _ in range(clients)]
    fishers = [torch.rand(6, generator=generator) for _ in range(clients)]
    sums = {"u": sum(fishers), "v": sum(u * w for u, w in zip(fishers, models, strict=True))}
    w = torch.randn(6, generator=generator, requires_grad=True)
    for j in range(clients):
        penalty = sum((fishers[s] * (w - models[s]).square()).sum() for s in range(clients) if s != j)
        (expected,) = torch.autograd.grad(weight * penalty, w)
        own = received(FedCurv(weight), {"u": fishers[j], "v": fishers[j] * models[j]}, sums)
        assert torch.allclose(gradient_with(FedCurv(weight), own, w.detach()), expected, rtol=1e-3, atol=1e-4)


def test_where_all_others_agree_the_penalty_is_minimal() -> None:
    star = torch.tensor([0.5, -2.0, 4.0])
    fishers = [torch.tensor([1.0, 0.25, 2.0]), torch.tensor([0.5, 0.5, 0.5]), torch.tensor([4.0, 1.0, 0.125])]
    sums = {"u": sum(fishers), "v": sum(u * star for u in fishers)}
    own = received(FedCurv(), {"u": fishers[0], "v": fishers[0] * star}, sums)
    assert gradient_with(FedCurv(), own, star).tolist() == [0.0, 0.0, 0.0]
    away = gradient_with(FedCurv(), own, star + 1.0)
    assert away.tolist() == (2 * (fishers[1] + fishers[2])).tolist()


# Fisher information --------------------------------------------------------------------------------------------------
def binary(outputs: Tensor, y: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(outputs.squeeze(1), y)


def test_logistic_regression_with_one_weight_by_hand() -> None:
    """u = mean((p - y)^2 x^2), with p = sigmoid(w x)."""
    x, y = torch.tensor([[1.0], [2.0], [-3.0], [0.5]]), torch.tensor([1.0, 0.0, 1.0, 1.0])
    bench = Bench(stream=Given(clients=1, classes=1, table={(0, 0): (x, y)}, objective=binary), module=Linear)
    w = torch.tensor([0.7])
    model = {"params": w, "stats": torch.zeros(0), "counters": torch.zeros(0, dtype=torch.int64)}
    p = torch.sigmoid(w * x[:, 0])
    expected = ((p - y).square() * x[:, 0].square()).mean()
    u = diagonal_fisher(bench.client("fedcurv"), model, bench.stream.data(0, 0))
    assert float(u) == pytest.approx(float(expected), rel=1e-5)
    zero = {**model, "params": torch.zeros(1)}  # p = 1/2: u = mean(x^2) / 4
    u = diagonal_fisher(bench.client("fedcurv"), zero, bench.stream.data(0, 0))
    assert float(u) == pytest.approx((1 + 4 + 9 + 0.25) / 4 / 4, rel=1e-6)


@pytest.mark.parametrize("module", [None, Norm])
def test_it_is_the_mean_of_each_sample_s_squared_gradient(module: Any) -> None:
    bench = Bench(module=module)
    client, model, data = bench.client("fedcurv"), bench.model(), bench.stream.data(0, 0)
    each = [client.gradient(x[None], y[None], mode="eval") for x, y in zip(data.x, data.y, strict=True)]
    u = diagonal_fisher(client, model, data)
    assert torch.allclose(u, torch.stack(each).square().mean(0), **CLOSE)
    assert (u >= 0).all() and u.sum() > 0


def test_batches_accumulate() -> None:
    """Two minibatches give the mean of both squares, not that of the last one."""
    bench = Bench(train=TrainOptions(1, 6, Optimizer(lr=0.1)))
    client, model, data = bench.client("fedcurv"), bench.model(), bench.stream.data(0, 0)
    halves = [client.gradient(data.x[s], data.y[s], mode="eval") for s in (slice(6), slice(6, 12))]
    u = diagonal_fisher(client, model, data, "batch")
    assert torch.allclose(u, (halves[0].square() + halves[1].square()) / 2, **CLOSE)
    assert not torch.allclose(u, halves[1].square(), rtol=1e-2)
    assert u.sum() < diagonal_fisher(client, model, data, "sample").sum()


def test_dropout_and_running_statistics_are_left_out_of_it() -> None:
    bench = Bench(module=Norm)
    client, model, data = bench.client("fedcurv"), bench.model(), bench.stream.data(0, 0)
    first = diagonal_fisher(client, model, data)
    assert torch.equal(first, diagonal_fisher(client, model, data))
    assert torch.equal(client.trainer.replica.stats, model["stats"])


def test_at_most_so_many_samples_are_used() -> None:
    bench = Bench("fedcurv", {"fedcurv": {"fisher_samples": 1}})
    all_samples = Bench("fedcurv").run(rounds=1).clients[0]["fedcurv"]["u"]
    one = bench.run(rounds=1).clients[0]["fedcurv"]["u"]
    assert not torch.allclose(one, all_samples, rtol=1e-2)


# protocol ------------------------------------------------------------------------------------------------------------
def test_the_server_holds_the_sums_of_what_clients_sent() -> None:
    outcome = curved().run(rounds=1)
    server = outcome.state.server["fedcurv"]
    for key in ("u", "v"):
        total = sum(state["fedcurv"][key].double() for state in outcome.clients.values())
        assert torch.equal(server[key], total.float())


def test_v_is_taken_at_the_uploaded_local_model() -> None:
    bench = curved()
    method, ctx, data = bench.build_method(), bench.context(1), bench.stream.data(1, 0)
    _, reply = run_client(method, method.train_phase(), bench.new_client(1), {"model": dict(bench.model())}, data, ctx)
    local = {key: reply.values["fedavg"][key] for key in ("params", "stats", "counters")}
    assert torch.equal(reply.values["fedcurv"]["v"], reply.values["fedcurv"]["u"] * local["params"])
    assert torch.allclose(
        reply.values["fedcurv"]["u"], diagonal_fisher(bench.client("fedcurv", number=1), local, data), **CLOSE
    )


def test_computing_what_the_others_sent_does_not_change_the_sums() -> None:
    """The sums are shared by all clients of a round: subtracting in place would give later clients wrong ones."""
    own = [{"u": torch.rand(4), "v": torch.rand(4)} for _ in range(3)]
    sums = {key: sum(o[key] for o in own) for key in ("u", "v")}
    before = {key: value.clone() for key, value in sums.items()}
    for o in own:
        assert torch.allclose(received(FedCurv(), o, sums)["u_others"], sums["u"] - o["u"])
    assert all(torch.equal(sums[key], before[key]) for key in sums)


def others(stopped: Any, client: int) -> Tensor:
    """What `client` makes of the sums that the server would send it now."""
    own, sums = stopped.clients[client]["fedcurv"], stopped.state.server["fedcurv"]
    return received(FedCurv(), own, sums)["u_others"]


def test_a_client_that_was_away_subtracts_nothing() -> None:
    """Round 0: clients 0, 1, 2; round 1: clients 1, 2 only. The sums of round 1 hold nothing of client 0."""
    bench = curved(stream=Toy(cohorts={1: (1, 2), 2: (0, 1, 2)}))
    stopped = bench.run(rounds=2)
    assert torch.equal(others(stopped, 0), stopped.state.server["fedcurv"]["u"])


def test_in_unsynchronised_rounds_a_client_subtracts_what_it_sent() -> None:
    bench = curved(train=TrainOptions(1, 5, Optimizer(lr=0.1), sync_every=2))
    sent = bench.run(rounds=2)
    unsynchronised = bench.run(rounds=3)
    expected = sent.state.server["fedcurv"]["u"] - sent.clients[0]["fedcurv"]["u"]
    assert torch.allclose(others(unsynchronised, 0), expected, **CLOSE)


def test_others_are_never_negative_under_full_participation() -> None:
    stopped = curved().run(rounds=2)
    for client in range(3):
        assert others(stopped, client).min() >= -1e-6


@pytest.mark.parametrize(("largest", "warned"), [(4.99, False), (5.0, True)])
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_a_penalty_too_stiff_for_sgd_is_warned_about(largest: float, warned: bool, kind: str) -> None:
    """At a rate of 0.05 and a weight of 2, 2 lr lambda max U is 1 where the largest U of the others is 5."""
    bench = curved(2.0, train=TrainOptions(1, 5, Optimizer(kind, lr=0.05)))
    own = {"u": torch.tensor([9.0, 1.0]), "v": torch.zeros(2), "sent": 3}
    sums = {"u": torch.tensor([9.5, 1.0 + largest]), "v": torch.zeros(2), "round": 3}  # the others': 0.5 and `largest`
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        received(FedCurv(weight=2.0), own, sums, bench)
    assert [str(w.message).split(":")[0] for w in caught] == (["fedcurv"] if warned and kind == "sgd" else [])
