"""MOON (Li et al., 2021): the contrastive term is Eq. 3, its gradient is autograd's, and mu = 0 is FedAvg."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional

from everfed.core import tree
from everfed.method import CompositionError, compose
from everfed.methods import registry as methods
from everfed.methods.regularise.moon import contrast
from everfed.privacy.secure_client import secured
from tests.support.spy import Seen, spied
from tests.support.toy import Bench, Norm, Toy


def formula(z: Tensor, z_glob: Tensor, z_prev: Tensor, tau: float) -> Tensor:
    """Eq. 3 as it is printed."""
    near, far = ((z * o).sum(1) / (z.norm(dim=1) * o.norm(dim=1)) for o in (z_glob, z_prev))
    return -((near / tau).exp() / ((near / tau).exp() + (far / tau).exp())).log().mean()


def test_literal_values() -> None:
    """At the global features and away from the last: - log(e^2 / (e^2 + 1)); equally near to both: log 2."""
    z, other = torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    assert float(contrast(z, z, other, 0.5)) == pytest.approx(math.log(1 + math.exp(-2)))
    assert float(contrast(z, other, z, 0.5)) == pytest.approx(math.log(1 + math.exp(2)))
    assert float(contrast(z, z, z, 0.5)) == pytest.approx(math.log(2))


@pytest.mark.parametrize("tau", [0.1, 0.5, 2.0])
def test_value_and_gradient_are_those_of_the_formula(tau: float) -> None:
    drawn = torch.randn(3, 7, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    ours, printed = (drawn[0].clone().requires_grad_(True) for _ in range(2))
    a, b = contrast(ours, drawn[1], drawn[2], tau), formula(printed, drawn[1], drawn[2], tau)
    assert float(a.detach()) == pytest.approx(float(b.detach()), abs=1e-12)
    assert torch.allclose(torch.autograd.grad(a, ours)[0], torch.autograd.grad(b, printed)[0], atol=1e-12)


def test_a_step_takes_the_gradient_of_the_whole_loss() -> None:
    """Second round: the received model is the first round's mean, the last model is the client's own end of it."""
    mu, tau, log = 2.0, 0.5, list[Seen]()
    options = {"moon": {"mu": mu, "temperature": tau}}
    bench = Bench("moon", options)
    after = bench.run(rounds=1)
    Bench(spied(methods.build("moon", options), log)).run(rounds=2)
    module, layout = bench.build_module(), bench.layout()

    def features(params: Tensor, x: Tensor) -> Tensor:
        named = {name.removeprefix("features."): value for name, value in layout.named(params).items()}
        return functional_call(module.features, {k: v for k, v in named.items() if "head" not in k}, (x,))

    def loss(params: Tensor, seen: Seen) -> Tensor:
        named, x = layout.named(params), bench.stream.inputs(seen.x)
        z = features(params, x)
        outputs = functional.linear(z, named["head.weight"], named["head.bias"])
        models = (after.state.model, after.clients[seen.client]["moon"]["previous"])
        z_glob, z_prev = (features(model["params"], x).detach() for model in models)
        return functional.cross_entropy(outputs, seen.y) + mu * formula(z, z_glob, z_prev, tau)

    second = [seen for seen in log if seen.round == 1]
    assert len(second) == 3 * 2 * 3  # clients, epochs, minibatches
    for seen in second:
        params = seen.params.clone().requires_grad_(True)
        expected = torch.autograd.grad(loss(params, seen), params)[0]
        assert torch.allclose(seen.gradient, expected, atol=1e-6)


def test_without_weight_it_is_fedavg_to_the_bit() -> None:
    ours, plain = Bench("moon", {"moon": {"mu": 0.0}}, module=Norm).run(), Bench("fedavg", module=Norm).run()
    assert tree.equal(dict(ours.state.model), dict(plain.state.model))
    assert all("moon" not in state for state in ours.clients.values())


def test_the_first_round_of_a_client_has_no_term() -> None:
    stream = Toy(cohorts={0: (0, 1), 1: (2,)}, tasks=1)
    ours, plain = (Bench(name, stream=stream).run() for name in ("moon", "fedavg"))
    assert torch.equal(ours.params, plain.params)
    assert not torch.equal(Bench("moon").run(rounds=2).params, Bench("fedavg").run(rounds=2).params)


def test_replay_joins_the_minibatch_after_its_own_samples() -> None:
    """Features of the real minibatch alone count, also where replayed samples share its forward pass."""
    parts = [*methods.build("er", {"memory": {"size": 8}}).parts, methods.build("moon").part("moon")]
    Bench(lambda: compose(*parts)).run()


def test_composition() -> None:
    assert secured(methods.build("moon")).reveals() == {}
    with pytest.raises(CompositionError, match="'moon' sends all parameters"):
        compose(*methods.build("feddbe").parts, methods.build("moon").part("moon"))
    with pytest.raises(CompositionError, match="'moon' compares features of the network itself; 'mfcl' changes"):
        compose(*methods.build("mfcl").parts, methods.build("moon").part("moon"))


@pytest.mark.parametrize("options", [{"mu": -1.0}, {"temperature": 0.0}])
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(methods.MethodError, match=rf"method\.moon\.{next(iter(options))} must be"):
        methods.build("moon", {"moon": options})
