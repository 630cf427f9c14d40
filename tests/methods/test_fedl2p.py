"""FedL2P: the range of the meta-nets, how a client fine-tunes by them, and the hypergradient in closed form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from everfed.core.context import TrainOptions
from everfed.core.handle import Client
from everfed.core.layout import Layout
from everfed.core.optimizer import Optimizer
from everfed.methods import registry as methods
from everfed.methods.personal.fedl2p import (
    FedL2P,
    Look,
    MetaNets,
    Sites,
    clamped,
    input_moments,
    spread,
    symmetric_divergence,
)
from tests.support.toy import Bench, Given, Linear, Norm, Toy, mean_square

QUICK = {"fedl2p": {"epochs": 2, "hidden": 5}}


def norm_bench(**fields: Any) -> Bench:
    return Bench("fedl2p", QUICK, module=Norm, **fields)


def looked(bench: Bench) -> tuple[Look, Client]:
    client = bench.client("fedl2p")
    return Look.at(client, client.data), client


def first_nets(bench: Bench, part: FedL2P) -> Tensor:
    """The meta-nets before the first round."""
    server = bench.server("fedl2p", phase="init")
    part.init(server)
    meta: Tensor = server.state["meta"]
    return meta


# the meta-nets -------------------------------------------------------------------------------------------------------
def test_sites_of_a_network() -> None:
    sites = Sites.of(Layout.of(norm_bench().bare_module()))
    assert sites.layers == ("conv", "norm", "head") and sites.norms == ("norm",)
    assert sites.tensors == ("conv.weight", "conv.bias", "norm.weight", "norm.bias", "head.weight", "head.bias")


def test_without_batchnorm_there_is_no_bn_net() -> None:
    plain, normed = (FedL2P().nets(b.layout()) for b in (Bench("fedl2p", QUICK), norm_bench()))
    assert plain.bn_net is None and normed.bn_net is not None
    assert not any(name.startswith("bn_net") for name, _ in plain.named_parameters())
    assert plain(torch.zeros(4), torch.zeros(0))[1].shape == (0,)


def test_first_outputs() -> None:
    rates, betas = MetaNets(Sites(("a",), ("a.w", "a.b"), ("n",)), 100, 1e-3, 1000.0)(torch.ones(2), torch.ones(1))
    assert rates.tolist() == pytest.approx([1e-3, 1e-3]) and betas.tolist() == [0.5]


def test_three_layers_of_a_hundred() -> None:
    nets = FedL2P().nets(norm_bench().layout())
    assert [tuple(p.shape) for p in nets.lr_net.parameters()] == [(100, 6), (100,), (100, 100), (100,), (6, 100), (6,)]
    assert [tuple(p.shape) for p in nets.bn_net.parameters()] == [(100, 1), (100,), (100, 100), (100,), (1, 100), (1,)]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.1, 1e4))
def test_outputs_are_clamped(seed: int, size: float) -> None:
    nets = MetaNets(Sites(("a", "b"), ("a.w", "b.w", "b.b"), ("m", "n")), 4, 1.0, 1000.0)
    vector = size * torch.randn(nets.vector().numel(), generator=torch.Generator().manual_seed(seed))
    vector[:3] = 1.0  # the base rates come first
    factors, betas = nets.at(vector, torch.ones(4), torch.ones(2))
    assert factors.min() >= 0.0 and factors.max() <= 1000.0
    assert betas.min() >= 0.0 and betas.max() <= 1.0


def test_clamping_lets_the_gradient_through() -> None:
    x = torch.tensor([-2.0, 0.5, 7.0], requires_grad=True)
    y = clamped(x, 0.0, 1.0)
    assert y.tolist() == [0.0, 0.5, 1.0]
    assert torch.autograd.grad(y.sum(), x)[0].tolist() == [1.0, 1.0, 1.0]


def test_the_divergence_by_hand() -> None:
    """N(0, 1) against N(1, 4): KL = ln 2 + 2/8 - 1/2 one way, -ln 2 + 5/2 - 1/2 the other; half their sum is 0.875."""
    found = symmetric_divergence(torch.zeros(1), torch.ones(1), torch.ones(1), 4 * torch.ones(1), eps=0.0)
    assert float(found) == pytest.approx(0.875)
    assert float(symmetric_divergence(torch.ones(3), torch.ones(3), torch.ones(3), torch.ones(3))) == pytest.approx(0.0)


# statistics ----------------------------------------------------------------------------------------------------------
def test_beta_zero_keeps_the_stored_statistics_and_one_takes_the_clients() -> None:
    look, client = looked(norm_bench())
    model = client.model
    assert torch.equal(look.mixed(model, torch.zeros(1))["stats"], model["stats"])
    own = look.mixed(model, torch.ones(1))["stats"]
    assert torch.allclose(own, torch.cat(look.client["norm"]), atol=1e-6)
    half = look.mixed(model, torch.tensor([0.5]))["stats"]
    assert torch.allclose(half, (model["stats"] + own) / 2, atol=1e-6)


def test_client_statistics_are_those_of_the_layers_inputs() -> None:
    bench = norm_bench()
    look, client = looked(bench)
    module, x = bench.bare_module(), client.trainer.stream.inputs(client.data.x)
    inside = module.conv(x)
    mean, var = look.client["norm"]
    assert torch.allclose(mean, inside.mean((0, 2, 3)), atol=1e-5)
    assert torch.allclose(var, inside.var((0, 2, 3), unbiased=False), atol=1e-5)
    assert look.inputs.shape == (6,)
    assert look.inputs[:2].tolist() == pytest.approx([float(x.mean()), float(x.std(unbiased=False))], abs=1e-5)


def test_input_moments_are_taken_in_chunks_too() -> None:
    client = norm_bench().client("fedl2p")
    once = input_moments(client, client.data.x, ["conv"])["conv"].overall()
    many = input_moments(client, client.data.x.repeat(200, 1, 1, 1), ["conv"])["conv"].overall()  # 2400 samples
    assert torch.allclose(torch.stack(once), torch.stack(many), atol=1e-6)


class Plain(nn.Module):
    """A convolution, a BatchNorm and a head, without dropout."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(input_shape[0], 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.head = nn.Linear(48, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.conv(x))).flatten(1))  # type: ignore[no-any-return]


def test_fine_tuning_mixes_the_minibatchs_statistics_with_the_stored_ones() -> None:
    """One step on all samples, written down: the loss sees (1 - beta) stored + beta minibatch, with the gradient of the
    minibatch's; afterwards the model has (1 - beta) stored + beta running, which began at mean 0 and variance 1."""
    bench = Bench("fedl2p", QUICK, module=Plain, train=TrainOptions(1, 12, Optimizer(lr=0.1)))
    look, client = looked(bench)
    data, beta, rate = client.data, 0.3, 0.1
    tuned, seen = FedL2P(epochs=1).tune(client, look, torch.full((6,), rate), torch.tensor([beta]), data)

    module, x = bench.bare_module(), client.trainer.stream.inputs(data.x)
    inside = module.conv(x)
    (mean, var), axes = (t.view(1, 3, 1, 1) for t in look.stored["norm"]), (0, 2, 3)
    mean = (1 - beta) * mean + beta * inside.mean(axes, keepdim=True)
    var = (1 - beta) * var + beta * inside.var(axes, unbiased=False, keepdim=True)
    normal = (inside - mean) / (var + module.norm.eps).sqrt()
    outputs = module.head(torch.relu(normal).flatten(1))  # the affine part is the identity at first
    loss = torch.nn.functional.cross_entropy(outputs, data.y)
    gradient = torch.autograd.grad(loss, [module.conv.weight, module.head.weight])
    for name, before, slope in zip(("conv", "head"), (module.conv, module.head), gradient, strict=True):
        found = client.layout.param(f"{name}.weight").view(tuned["params"])
        assert torch.allclose(found, before.weight - rate * slope, atol=1e-6)

    running = (0.1 * inside.mean(axes), 0.9 + 0.1 * inside.var(axes))  # torch's momentum; unbiased
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(seen.client["norm"], running, strict=True))
    expected = [(1 - beta) * old + beta * new for old, new in zip(look.stored["norm"], running, strict=True)]
    assert torch.allclose(tuned["stats"], torch.cat(expected), atol=1e-6)


def test_with_beta_zero_fine_tuning_uses_and_keeps_the_stored_statistics() -> None:
    look, client = looked(norm_bench())
    tuned, _ = FedL2P(epochs=3).tune(client, look, torch.full((6,), 0.1), torch.zeros(1), client.data)
    model = client.model
    assert torch.equal(tuned["stats"], model["stats"]) and not torch.equal(tuned["params"], model["params"])


# rates ---------------------------------------------------------------------------------------------------------------
def test_a_factor_of_zero_freezes_a_tensor() -> None:
    look, client = looked(Bench("fedl2p", QUICK))
    rates, received = torch.tensor([0.0, 0.1, 0.1, 0.0]), client.model["params"]
    tuned = FedL2P(epochs=2).tune(client, look, rates, torch.zeros(0), client.data)[0]["params"]
    moved = [not torch.equal(e.view(tuned), e.view(received)) for e in client.layout.params]
    assert moved == [False, True, True, False]


def test_rates_are_spread_over_their_tensors() -> None:
    vector = spread(torch.tensor([1.0, 2.0, 3.0, 4.0]), Bench("fedl2p", QUICK).layout())
    assert vector.unique_consecutive(return_counts=True)[1].tolist() == [128, 8, 32, 4]


# the hypergradient ---------------------------------------------------------------------------------------------------
def scalar_bench(table: dict[tuple[int, int], tuple[Tensor, Tensor]]) -> Bench:
    stream = Given(clients=1, tasks=1, table=table, classes=1, objective=mean_square)
    return Bench("fedl2p", QUICK, stream, TrainOptions(1, 10, Optimizer(lr=0.1)), Linear)


@pytest.mark.parametrize("terms", [1, 3])
def test_the_hypergradient_of_a_rate_by_hand(terms: int) -> None:
    """L_T = (w - a)^2 / 2, L_V = (w - b)^2 / 2: u = r (w - a), du/dw = r, and Eq. 7 is a geometric sum."""
    a, b, w, rate, step = 2.0, -1.0, 0.7, 0.4, 0.1
    bench = scalar_bench({(0, 0): (torch.ones(1, 1), torch.tensor([a]))})
    part = FedL2P(hidden=5, terms=terms, base_rate=rate, step=step)
    client = bench.client("fedl2p", model={**bench.model(), "params": torch.tensor([w])})
    batch = client.data
    look, nets = Look.at(client, batch), part.nets(client.layout)
    held = type(batch)(batch.x, torch.tensor([b]), batch.ids)
    found = part.hypergradient(client, nets.vector(), nets, look, client.model, batch, held)
    series = sum((1 - step * rate) ** j for j in range(terms))
    expected = -step * series * (w - b) * (w - a)  # with respect to the rate; the factor is 1
    assert float(found[0]) == pytest.approx(expected, rel=1e-4)  # the base rate
    assert float(found[-1]) == pytest.approx(expected * rate, rel=1e-4)  # the last bias, which is the factor


def test_the_direct_gradient_reaches_the_bn_net() -> None:
    """With no indirect path (step 0) the gradient is that of the validation loss through beta, checked numerically."""
    part, (look, client) = FedL2P(hidden=3, step=0.0), looked(norm_bench())
    data, nets = client.data, part.nets(client.layout)
    found = part.hypergradient(client, nets.vector(), nets, look, client.model, data, data)
    tensors = {e.name: e.view(client.model["params"]) for e in client.layout.params}
    losses = [float(look.loss(client, tensors, torch.tensor([0.5 + h]), data)) for h in (1e-2, -1e-2)]
    assert float(found[-1]) == pytest.approx((losses[0] - losses[1]) / 2e-2, abs=2e-3)


def test_norms_by_hand_equal_torchs() -> None:
    look, client = looked(norm_bench())
    data, model = client.data, client.model
    tensors = {e.name: e.view(model["params"]) for e in client.layout.params}
    for beta in (0.0, 0.3, 1.0):
        ours = look.loss(client, tensors, torch.tensor([beta]), data)
        outputs = client.outputs(data.x, model=look.mixed(model, torch.tensor([beta])))
        assert float(ours) == pytest.approx(float(torch.nn.functional.cross_entropy(outputs, data.y)), abs=1e-5)


# the whole -----------------------------------------------------------------------------------------------------------
def test_the_base_is_fedavgs_and_the_meta_nets_move() -> None:
    outcome = Bench("fedl2p", QUICK).run()
    assert torch.allclose(outcome.params, Bench("fedavg").run().params, atol=1e-6)
    first = first_nets(Bench("fedl2p", QUICK), FedL2P(hidden=5))
    meta = outcome.state.server["fedl2p"]["meta"]
    assert meta.shape == first.shape and not torch.equal(meta, first)
    assert (meta - first).abs().max() <= 4 * 3 * 1e-3 + 1e-6  # 4 rounds of 3 clamped steps at 1e-3, averaged


@pytest.mark.parametrize(("retune", "times"), [(True, 6), (False, 1)])
def test_the_model_is_tuned_anew_for_every_outer_batch(retune: bool, times: int, monkeypatch: Any) -> None:
    """Ten held-out samples in minibatches of five, three epochs: six outer steps, each by the meta-nets as they are."""
    rates: list[float] = []
    tune = FedL2P.tune

    def spy(self: FedL2P, client: Client, look: Look, given: Tensor, *rest: Any) -> Any:
        rates.append(float(given[0]))
        return tune(self, client, look, given, *rest)

    monkeypatch.setattr(FedL2P, "tune", spy)
    options = {"fedl2p": {"epochs": 1, "hidden": 5, "base_rate": 0.1, "meta_lr": 0.5, "retune": retune}}
    Bench("fedl2p", options, Toy(clients=1, tasks=1, rounds_per_task=1, samples=50)).run()
    assert len(rates) == times and len(set(rates)) == times


def test_the_base_rates_have_a_learning_rate_of_their_own() -> None:
    """1e-4 in the authors' code, against 1e-3 of the meta-nets; every step is clamped to 1."""
    bench = Bench("fedl2p", {"fedl2p": {"epochs": 2, "hidden": 5, "base_rate": 0.1}}, Toy(tasks=1, rounds_per_task=1))
    part = FedL2P(hidden=5, base_rate=0.1)
    moved = (bench.run().state.server["fedl2p"]["meta"] - first_nets(bench, part)).abs()
    base, nets = moved[:4], moved[4:]
    assert 0 < base.max() <= 3 * 1e-4 + 1e-7
    assert part._steps(part.nets(bench.layout()))[:5].tolist() == pytest.approx([1e-4] * 4 + [1e-3])
    assert nets.max() <= 3 * 1e-3 + 1e-6


def test_it_is_scored_with_the_fine_tuned_models() -> None:
    bench = Bench("fedl2p", {"fedl2p": {"epochs": 5, "hidden": 5, "base_rate": 0.2}}, Toy(clients=2))
    outcome, test = bench.run(), bench.stream.test(1)
    assert methods.build("fedl2p").personal
    own = [outcome.clients[c]["fedl2p"] for c in range(2)]
    right = sum(int((bench.trainer().outputs(model, test.x).argmax(1) == test.y).sum()) for model in own)
    assert outcome.state.rows[1][1][:2] == [80, right]
    assert not torch.equal(own[0]["params"], own[1]["params"])


def test_traffic_is_the_meta_nets_on_top_of_the_model() -> None:
    stream = Toy(tasks=1, rounds_per_task=1)
    ours, plain = (b.run().state for b in (Bench("fedl2p", QUICK, stream), Bench("fedala", stream=stream)))
    size = ours.server["fedl2p"]["meta"].numel() * 4
    assert ours.traffic.as_dict()["bytes_up"] - plain.traffic.as_dict()["bytes_up"] == 3 * size
    assert ours.traffic.as_dict()["bytes_down"] - plain.traffic.as_dict()["bytes_down"] == 3 * size


def test_a_client_with_one_sample_sits_out() -> None:
    outcome = Bench("fedl2p", QUICK, Toy(clients=2, tasks=1, sizes={(0, 0): 1})).run()
    assert "fedl2p" not in outcome.clients[0] and "params" in outcome.clients[1]["fedl2p"]


@pytest.mark.parametrize(
    "options",
    [{"epochs": -1}, {"terms": 0}, {"hidden": 0}, {"validation": 0.0}, {"validation": 1.0}, {"meta_lr": -1.0}],
)
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(methods.MethodError, match=next(iter(options))):
        methods.build("fedl2p", {"fedl2p": options})
