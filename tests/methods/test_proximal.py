"""FedProx (Li et al., 2020): the proximal term against closed forms."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everfed.core.context import TrainOptions
from everfed.core.method import compose
from everfed.core.optimizer import Optimizer
from everfed.methods.aggregate.fedavg import FedAvg
from everfed.methods.regularise.fedprox import FedProx
from tests.support.phases import ruled
from tests.support.toy import Bench, Given, Linear, Norm, mean_square

A, C = 4.0, 3.0  # F(w) = a/2 (w - c)^2


def quadratic(mu: float, rounds: int = 1) -> Bench:
    """One client with one weight and F(w) = a/2 (w - c)^2, solved to optimality in every round."""
    table = {(0, 0): (torch.full((2, 1), A**0.5), torch.full((2,), A**0.5 * C))}
    stream = Given(clients=1, tasks=1, rounds_per_task=rounds, classes=1, table=table, objective=mean_square)
    train = TrainOptions(200, 2, Optimizer(lr=0.1))
    return Bench("fedprox", {"fedprox": {"mu": mu}}, stream=stream, module=Linear, train=train)


def solved(mu: float, rounds: int = 1) -> float:
    return float(quadratic(mu, rounds).run().params)


def test_mu_zero_is_fedavg_bit_for_bit() -> None:
    assert torch.equal(
        Bench("fedprox", {"fedprox": {"mu": 0.0}}, module=Norm).run().params, Bench(module=Norm).run().params
    )


def test_rounds_of_one_step_are_fedavg_bit_for_bit() -> None:
    train = TrainOptions(1, 1000, Optimizer(lr=0.1))
    assert torch.equal(
        Bench("fedprox", {"fedprox": {"mu": 1.0}}, train=train).run().params, Bench(train=train).run().params
    )


def test_longer_rounds_are_not() -> None:
    assert not torch.equal(Bench("fedprox", {"fedprox": {"mu": 1.0}}).run().params, Bench().run().params)


@given(st.integers(0, 1000), st.floats(0, 5))
def test_the_gradient_is_that_of_the_term(seed: int, mu: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    g, w, received = (torch.randn(12, generator=generator) for _ in range(3))
    w.requires_grad_()
    (expected,) = torch.autograd.grad(mu / 2 * (w - received).square().sum(), w)
    step = SimpleNamespace(params=w.detach(), received=received)
    assert torch.allclose(ruled(FedProx(mu), step, g), g + expected, atol=1e-5)


@pytest.mark.parametrize("mu", [0.001, 0.01, 0.1, 0.5, 1.0])
def test_a_quadratic_is_solved_at_the_closed_form(mu: float) -> None:
    """w* = (a c + mu w_g) / (a + mu), in the first round from w_g = 0, in the second from the first's result."""
    first = A * C / (A + mu)
    assert solved(mu) == pytest.approx(first, rel=1e-5)
    assert solved(mu, rounds=2) == pytest.approx((A * C + mu * first) / (A + mu), rel=1e-5)


def test_the_distance_to_the_received_model_falls_with_mu() -> None:
    distances = [abs(solved(mu)) for mu in (0.0, 0.001, 0.01, 0.1, 0.5, 1.0, 1.9)]
    assert distances == sorted(distances, reverse=True)


@pytest.mark.parametrize("mu", [-1e-9, -1.0, float("nan")])
def test_a_negative_mu_is_rejected(mu: float) -> None:
    with pytest.raises(ValueError, match="mu must be at least 0"):
        FedProx(mu)


def test_a_mu_that_may_diverge_warns() -> None:
    """The condition is lr * mu >= 2."""
    assert compose(FedAvg(), FedProx(19.9), optimizer=Optimizer(lr=0.1)).warnings == ()
    assert "diverges" in compose(FedAvg(), FedProx(20.0), optimizer=Optimizer(lr=0.1)).warnings[0]


def test_the_anchor_is_the_received_model_also_between_synchronisations() -> None:
    """Without a server in between, two rounds still pull towards the model that was sent last."""
    bench = quadratic(1.0, rounds=2)
    once = bench.change(train=TrainOptions(200, 2, Optimizer(lr=0.1), sync_every=2))
    assert float(once.run().params) == pytest.approx(A * C / (A + 1.0), rel=1e-5)
