"""A-GEM (Chaudhry et al., 2019): the rule in single steps and in runs; the projection has tests of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from everfed.core.context import TrainOptions
from everfed.core.optimizer import Optimizer
from everfed.core.replica import Gradient, project
from everfed.methods.project.agem import AGEM
from tests.support.spy import Seen, spied
from tests.support.toy import Bench, Given, Linear, Norm, Toy, mean_square


def agem(size: int = 8, batch: int = 32, **fields: Any) -> Bench:
    return Bench("agem", {"memory": {"size": size}, "agem": {"batch": batch}}, **fields)


def with_replay(g: Tensor, g_b: Tensor | None) -> Tensor:
    """A-GEM's rule with the replayed gradient given; None: the buffer is empty."""
    rows = torch.zeros(0 if g_b is None else 1, dtype=torch.int64)
    stored = {"x": torch.zeros(2, 1), "y": torch.zeros(2, dtype=torch.int64)}
    memory = SimpleNamespace(state=stored)
    step = SimpleNamespace(rows={"rows": rows}, of=lambda part: memory, task_gradient=lambda x, y: g_b)
    return AGEM().gradient(step, Gradient.of(None, g)).vector  # type: ignore[arg-type]


def test_an_empty_buffer_is_fedavg_bit_for_bit() -> None:
    train = TrainOptions(1, 1000, Optimizer(lr=0.1))
    assert torch.equal(agem(train=train).run(rounds=1).params, Bench(train=train).run(rounds=1).params)
    g = torch.tensor([1.0, 2.0])
    assert with_replay(g, None) is g


def test_a_buffer_of_no_rows_is_fedavg_bit_for_bit() -> None:
    assert torch.equal(agem(size=0, module=Norm).run().params, Bench(module=Norm).run().params)


def test_a_replayed_batch_equal_to_the_current_one_changes_nothing() -> None:
    g = torch.tensor([1.0, -2.0, 3.0])
    assert torch.equal(with_replay(g, g.clone()), g)


def regression(x: list[list[float]], y: list[float]) -> Bench:
    """One client, one linear map; task t is the single sample (x[t], y[t]), trained in one step of size 0.1."""
    table = {(0, t): (torch.tensor([x[t]]), torch.tensor([y[t]])) for t in range(len(x))}
    stream = Given(clients=1, tasks=len(x), rounds_per_task=1, classes=1, table=table, objective=mean_square)
    return agem(stream=stream, module=Linear, train=TrainOptions(1, 1, Optimizer(lr=0.1)))


def test_two_samples_with_opposite_gradients() -> None:
    """Task 1 pulls w from 0 to 0.1. Task 2 pulls back with 1.1, the buffer with -0.9: the step vanishes."""
    bench = regression([[1.0], [1.0]], [1.0, -1.0])
    assert bench.run().params.tolist() == pytest.approx([0.1])
    assert bench.change(method="fedavg", options={}).run().params.tolist() == pytest.approx([0.1 - 0.11])


def test_only_the_conflict_is_removed() -> None:
    """w = (0.1, 0); g = (1.1, 1.1), g_b = (-0.9, 0): the first coordinate stays, the second moves by -0.11."""
    bench = regression([[1.0, 0.0], [1.0, 1.0]], [1.0, -1.0])
    assert bench.run().params.tolist() == pytest.approx([0.1, -0.11])


def test_without_a_conflict_the_current_gradient_is_used() -> None:
    """Code that lets the second backward overwrite the first would step along the replayed gradient."""
    bench = regression([[1.0, 0.0], [1.0, 1.0]], [1.0, 1.0])
    # w = (0.1, 0); g = -0.9 (1, 1) and g_b = -0.9 (1, 0) agree
    assert bench.run().params.tolist() == pytest.approx([0.19, 0.09])
    g = torch.tensor([1.0, -2.0])
    assert torch.equal(with_replay(g, torch.tensor([1.0, 0.0])), g)


class Unused(nn.Module):
    """A parameter that no output depends on."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.used = nn.Linear(16, classes)
        self.unused = nn.Parameter(torch.full((3,), 2.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x.flatten(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["agem", "fedgp", "fedgp+agem"])
def test_parameters_without_a_gradient_stay_untouched(name: str) -> None:
    bench = Bench(name, module=Unused)
    outcome = bench.run()
    assert bench.layout().named(outcome.params)["unused"].tolist() == [2.5, 2.5, 2.5]
    assert not torch.equal(outcome.params, bench.model()["params"])


def test_a_perfectly_fitted_buffer_gives_no_nan() -> None:
    g = torch.tensor([1.0, -2.0])
    assert torch.equal(with_replay(g, torch.zeros(2)), g)
    # the first task's sample is fitted exactly at w = 0, so its replayed gradient is zero
    assert regression([[1.0], [1.0]], [0.0, -1.0]).run().params.tolist() == pytest.approx([-0.1])


def test_the_replayed_gradient_is_taken_at_the_current_weights() -> None:
    """Every step of a run is Project(g, g_b), both at the weights before that step."""
    bench = agem(size=12, batch=12)
    before: list[Seen] = []
    after: list[Seen] = []
    bench.change(method=spied(bench.build_method(), before, before="agem"), stream=Toy(clients=1)).run()
    bench.change(method=spied(bench.build_method(), after), stream=Toy(clients=1)).run()
    changed = [not torch.equal(a.gradient, b.gradient) for a, b in zip(before, after, strict=True)]
    assert all(torch.equal(a.params, b.params) for a, b in zip(before, after, strict=True))
    assert any(changed) and not changed[0]  # the first step has an empty buffer


def test_two_forwards_per_step() -> None:
    """BatchNorm's statistics move in both, as in the papers' code: 6 steps, replay in all but the first."""
    model = agem(module=Norm, stream=Toy(clients=1)).run(rounds=1).state.model
    assert model["counters"].tolist() == [6 + 5]


def test_projection_is_the_shared_one() -> None:
    g, g_b = torch.tensor([1.0, -1.0]), torch.tensor([0.0, 1.0])
    assert torch.equal(with_replay(g, g_b), project(g, g_b))
    assert with_replay(g, g_b).tolist() == [1.0, 0.0]
