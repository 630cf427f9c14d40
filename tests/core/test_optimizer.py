"""Our optimisers on one vector are torch.optim's on the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from everfed.core.optimizer import Optimizer


def ours(optimizer: Optimizer, start: Tensor, gradients: list[Tensor], rate: float | None = None) -> Tensor:
    params, state = start.clone(), optimizer.init(start)
    for gradient in gradients:
        optimizer.apply(params, gradient, state, torch.tensor(optimizer.lr if rate is None else rate))
    return params


def theirs(optimizer: torch.optim.Optimizer, gradients: list[Tensor]) -> Tensor:
    parameter = optimizer.param_groups[0]["params"][0]
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


@pytest.fixture
def start() -> Tensor:
    return torch.randn(200, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def gradients() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(200, generator=generator) for _ in range(12)]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_sgd(start: Tensor, gradients: list[Tensor], momentum: float, weight_decay: float) -> None:
    mine = ours(Optimizer(lr=0.05, momentum=momentum, weight_decay=weight_decay), start, gradients)
    reference = torch.optim.SGD([start.clone().requires_grad_()], 0.05, momentum, weight_decay=weight_decay)
    assert torch.allclose(mine, theirs(reference, gradients), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_adam(start: Tensor, gradients: list[Tensor], weight_decay: float) -> None:
    mine = ours(Optimizer("adam", lr=0.01, weight_decay=weight_decay), start, gradients)
    reference = torch.optim.Adam([start.clone().requires_grad_()], 0.01, weight_decay=weight_decay)
    assert torch.allclose(mine, theirs(reference, gradients), rtol=1e-4, atol=1e-6)


def test_plain_sgd_by_hand() -> None:
    params = ours(Optimizer(lr=0.5), torch.tensor([1.0, -2.0]), [torch.tensor([2.0, 4.0])])
    assert params.tolist() == [0.0, -4.0]


def test_momentum_by_hand() -> None:
    optimizer = Optimizer(lr=1.0, momentum=0.5)
    params = ours(optimizer, torch.tensor([0.0]), [torch.tensor([1.0])] * 3)
    assert params.tolist() == [-(1.0 + 1.5 + 1.75)]


def test_the_first_step_of_adam_is_the_rate_in_the_direction_of_the_gradient() -> None:
    params = ours(Optimizer("adam", lr=0.1), torch.zeros(3), [torch.tensor([5.0, -0.01, 1e4])])
    assert torch.allclose(params, torch.tensor([-0.1, 0.1, -0.1]), rtol=1e-4)


def test_adams_eps_is_added_to_the_root() -> None:
    """First step: m_hat = g, v_hat = g^2, so the step is lr g / (|g| + eps); with g = eps that is lr / 2."""
    params = ours(Optimizer("adam", lr=1.0, eps=0.25), torch.zeros(2), [torch.tensor([0.25, -0.75])])
    torch.testing.assert_close(params, torch.tensor([-0.5, 0.75]))


@pytest.mark.parametrize(("beta1", "beta2", "eps"), [(0.5, 0.99, 1e-8), (0.9, 0.9, 0.1), (0.0, 0.5, 1e-3)])
def test_adam_with_other_constants(
    start: Tensor, gradients: list[Tensor], beta1: float, beta2: float, eps: float
) -> None:
    mine = ours(Optimizer("adam", lr=0.01, beta1=beta1, beta2=beta2, eps=eps), start, gradients)
    reference = torch.optim.Adam([start.clone().requires_grad_()], 0.01, (beta1, beta2), eps)
    assert torch.allclose(mine, theirs(reference, gradients), rtol=1e-4, atol=1e-6)


def test_lr_zero_changes_nothing(start: Tensor, gradients: list[Tensor]) -> None:
    for optimizer in (Optimizer(lr=0.0), Optimizer(lr=0.0, momentum=0.9), Optimizer("adam", lr=0.0)):
        assert torch.equal(ours(optimizer, start, gradients), start)


def test_state_is_the_caller_s(start: Tensor) -> None:
    assert Optimizer().init(start) == {}
    assert set(Optimizer(momentum=0.9).init(start)) == {"momentum"}
    adam = Optimizer("adam").init(start)
    assert set(adam) == {"m", "v", "t"} and adam["m"].data_ptr() != adam["v"].data_ptr()


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.1, 0.1, 0.1, 0.1, 0.1]),
        ("linear", [0.1, 0.08, 0.06, 0.04, 0.02]),
        ("exponential", [0.1, 0.1 * 10**-0.5, 0.01, 0.01 * 10**-0.5, 0.001]),
        ("cosine", [0.1, 0.09054634, 0.06579634, 0.03520366, 0.01045366]),
    ],
)
def test_learning_rate_schedules(schedule: str, rates: list[float]) -> None:
    optimizer = Optimizer(lr=0.1, schedule=schedule, lr_end=0.001)
    assert [optimizer.rate(index, 5) for index in range(5)] == pytest.approx(rates)
    assert optimizer.rate(0, 1) == 0.1


@pytest.mark.parametrize(("index", "rate"), [(0, 0.1), (1, 0.0977237), (50, 0.0316228), (99, 0.0102329)])
def test_the_geometric_schedule_is_mfcls(index: int, rate: float) -> None:
    assert Optimizer(lr=0.1, schedule="geometric", lr_end=0.01).rate(index, 100) == pytest.approx(rate, abs=5e-8)


def test_a_table_is_that_of_glfc_s_code() -> None:
    """Ten rounds of 20 epochs a task at 2.0, with drops where (epoch + 20 round) mod 200 is 100, 150 or 180, each until
    the end of its round. What falls into the middle of a round (150) cannot be expressed by rounds and is left out."""
    drops = {100: 5, 180: 125}
    by_code = [2.0 / drops.get(20 * index % 200, 1) for index in range(10)]
    table = Optimizer(lr=2.0, schedule="table", factors=[1, 1, 1, 1, 1, 0.2, 1, 1, 1, 0.008])
    assert [table.rate(index, 10) for index in range(10)] == pytest.approx(by_code)
    assert by_code[5] == 0.4 and by_code[9] == 0.016


def test_a_table_is_stretched_over_a_task_and_ends_with_its_last_factor() -> None:
    table = Optimizer(lr=1.0, schedule="table", factors=(1.0, 0.5, 0.25))
    assert [table.rate(index, 6) for index in range(6)] == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    assert [table.rate(index, 2) for index in range(2)] == [0.5, 0.25]
    assert table.rate(0, 1) == 0.25
    assert hash(table) == hash(Optimizer(lr=1.0, schedule="table", factors=[1.0, 0.5, 0.25]))


@pytest.mark.parametrize("schedule", ["exponential", "geometric"])
def test_a_schedule_of_factors_from_zero_stays_at_zero(schedule: str) -> None:
    assert Optimizer(lr=0.0, schedule=schedule).rate(1, 5) == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "lion"}, "optimizer.kind must be one of sgd, adam"),
        ({"schedule": "step"}, "optimizer.schedule must be one of constant, linear, exponential, geometric, cosine"),
        ({"state": "lost"}, "optimizer.state must be one of fresh, kept, task"),
        ({"lr": -0.1}, "optimizer.lr must be at least 0"),
        ({"lr": float("nan")}, "optimizer.lr must be at least 0"),
        ({"momentum": -1.0}, "optimizer.momentum must be at least 0"),
        ({"weight_decay": -1.0}, "optimizer.weight_decay must be at least 0"),
        ({"schedule": "table"}, "optimizer.factors must be numbers of at least 0, some with schedule = 'table'"),
        ({"factors": [1.0]}, "optimizer.factors .* none otherwise; got .1.0. with schedule = 'constant'"),
        ({"schedule": "table", "factors": [1.0, -1.0]}, "optimizer.factors must be numbers of at least 0"),
    ],
)
def test_options_outside_their_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Optimizer(**options)
