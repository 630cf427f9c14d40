"""AdamW, groups, clipping and schedules by step: equal to torch.optim, and the same in every engine."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import everfed
from everfed.core.context import TrainOptions
from everfed.core.layout import Layout
from everfed.core.optimizer import Optimizer
from everfed.core.option import ParameterGroup
from everfed.recipe import from_table, to_toml
from everfed.session import assemble
from tests.parity.test_processes import on_processes
from tests.parity.test_resume import assert_resumes
from tests.parity.test_wire import assert_same
from tests.support.toy import Bench, Toy
from tests.support.wire import run_over_wire

TORCH = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))


def both(ours: Optimizer, rates: list[float] | None = None, steps: int = 15) -> tuple[Tensor, Tensor]:
    """Our vector and torch.optim's after the same float64 gradients."""
    torch.manual_seed(0)
    module = network()
    layout = Layout.of(module)
    module = module.double()
    params = torch.cat([p.detach().flatten() for p in module.parameters()])
    usual: dict[str, Any] = {"lr": ours.lr, "weight_decay": ours.weight_decay}
    usual |= {"momentum": ours.momentum} if ours.kind == "sgd" else {"betas": (ours.beta1, ours.beta2), "eps": ours.eps}
    groups = []
    for name, parameter in module.named_parameters():
        own = next((g for g in ours.groups if g.owns(name)), ParameterGroup(["*"]))
        given_here = {"lr": own.lr, "weight_decay": own.weight_decay}
        groups.append({"params": [parameter], **{k: v for k, v in given_here.items() if v is not None}})
    theirs = TORCH[ours.kind](groups, **usual)
    first = [group["lr"] for group in theirs.param_groups]
    state, scales = ours.init(params), ours.scales(layout, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        gradient = torch.randn(layout.size, generator=generator, dtype=torch.float64)
        rate = ours.lr if rates is None else rates[step]
        for parameter, entry in zip(module.parameters(), layout.params, strict=True):
            parameter.grad = entry.view(gradient).clone()
        if ours.clip:
            torch.nn.utils.clip_grad_norm_(module.parameters(), ours.clip)
        for group, lr in zip(theirs.param_groups, first, strict=True):
            group["lr"] = lr * rate / ours.lr
        theirs.step()
        ours.apply(params, gradient, state, torch.tensor(rate, dtype=torch.float64), scales)
    return params, torch.cat([p.detach().flatten() for p in module.parameters()])


GROUPS = [ParameterGroup(["1.*"], lr=0.05), ParameterGroup(["*.bias"], weight_decay=0.0)]


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("clip", [0.0, 1.5])
@pytest.mark.parametrize("groups", [[], GROUPS])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_equal_to_torch(kind: str, clip: float, groups: list[ParameterGroup], weight_decay: float) -> None:
    optimizer = Optimizer(kind, lr=0.01, weight_decay=weight_decay, clip=clip, groups=groups)
    ours, theirs = both(optimizer)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)


def test_momentum_with_groups_and_a_rate_that_moves() -> None:
    rates = [0.01 * (1 + step / 10) for step in range(15)]
    ours, theirs = both(Optimizer(lr=0.01, momentum=0.9, weight_decay=0.02, groups=GROUPS), rates)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)


def test_by_hand() -> None:
    """AdamW's decay by hand: 2 * (1 - 0.1 * 0.5) = 1.9, then a step of 0.1 against the gradient's sign."""
    params = torch.tensor([2.0])
    optimizer = Optimizer("adamw", lr=0.1, weight_decay=0.5)
    optimizer.apply(params, torch.tensor([3.0]), optimizer.init(params), torch.tensor(0.1))
    assert params.item() == pytest.approx(1.8)
    clipped = torch.zeros(2)
    Optimizer(lr=1.0, clip=1.0).apply(clipped, torch.tensor([3.0, 4.0]), {}, torch.tensor(1.0))
    assert clipped.tolist() == pytest.approx([-0.6, -0.8], abs=1e-6)
    untouched = torch.zeros(2)
    Optimizer(lr=1.0, clip=6.0).apply(untouched, torch.tensor([3.0, 4.0]), {}, torch.tensor(1.0))
    assert untouched.tolist() == [-3.0, -4.0]


def test_the_first_group_that_matches_counts() -> None:
    groups = [ParameterGroup(["0.bias"], lr=0.3), ParameterGroup(["0.*"], lr=0.2, weight_decay=0.7)]
    scales = Optimizer(lr=0.1, weight_decay=0.5, groups=groups).scales(Layout.of(network()), torch.device("cpu"))
    assert scales is not None
    expected = {"0.weight": (2.0, 0.7), "0.bias": (3.0, 0.5), "1.weight": (1.0, 0.5), "1.bias": (1.0, 0.5)}
    for entry in Layout.of(network()).params:
        rate, decay = (float(entry.view(vector).flatten()[0]) for vector in (scales.rate, scales.decay))
        assert (rate, decay) == pytest.approx(expected[entry.name])


# schedules ------------------------------------------------------------------------------------------------------------
def test_warm_up_then_cosine_by_hand() -> None:
    """Two rounds of warm-up of six: 1/2, 1, then a cosine over the other four: (1 + cos(pi i / 4)) / 2."""
    optimizer = Optimizer(lr=1.0, schedule="cosine", lr_end=1e-12, warmup=2)
    rest = [(1 + math.cos(math.pi * i / 4)) / 2 for i in range(4)]
    assert [optimizer.rate(i, 6) for i in range(6)] == pytest.approx([0.5, 1.0, *rest])


def test_by_step_the_rate_moves_inside_of_a_round() -> None:
    optimizer = Optimizer(lr=1.0, schedule="linear", warmup=0.5, by="step")
    assert optimizer.rates(0, 2, 4).tolist() == pytest.approx([0.0, 0.5, 1.0, 1 - 0.25 / 1.5])
    assert optimizer.rates(1, 2, 2).tolist() == pytest.approx([1 - 0.5 / 1.5, 1 - 1.0 / 1.5])
    assert Optimizer(lr=0.3).rates(3, 5, 2).tolist() == [0.3, 0.3]


@settings(deadline=None, max_examples=60)
@given(
    schedule=st.sampled_from(["constant", "linear", "exponential", "geometric", "cosine"]),
    warmup=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    by=st.sampled_from(["round", "step"]),
    rounds=st.integers(1, 9),
    steps=st.integers(1, 7),
)
def test_rates_stay_between_0_and_lr(schedule: str, warmup: float, by: str, rounds: int, steps: int) -> None:
    optimizer = Optimizer(lr=0.2, schedule=schedule, warmup=warmup, by=by)
    rates = np.concatenate([optimizer.rates(index, rounds, steps) for index in range(rounds)])
    assert (rates >= -1e-12).all() and (rates <= 0.2 + 1e-12).all()


# refused --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "lion"}, "kind"),
        ({"by": "epoch"}, "by"),
        ({"clip": -1.0}, "clip"),
        ({"warmup": -1.0}, "warmup"),
        ({"groups": [{"match": []}]}, "match"),
        ({"groups": [{"match": ["*"], "lr": -1.0}]}, "groups.lr"),
        ({"lr": 0.0, "groups": [{"match": ["*"], "lr": 0.1}]}, "lr = 0"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Optimizer(**options)


def table(**optimizer: Any) -> dict[str, Any]:
    stream = {"dataset": "digits", "tasks": 1, "clients": 2}
    return {"stream": stream, "method": {"name": "fedavg"}, "train": {"rounds_per_task": 1, "optimizer": optimizer}}


def test_a_pattern_without_a_parameter_is_refused_before_the_run() -> None:
    groups = [{"match": ["hed.*"], "lr": 0.1}]
    with pytest.raises(everfed.RecipeError, match=r"train.optimizer.groups: .hed.\*. matches .*head.weight"):
        assemble(from_table(table(groups=groups)))


def test_a_recipe_keeps_its_groups() -> None:
    groups = [{"match": ["head.*"], "lr": 0.5}, {"match": ["*.bias"], "weight_decay": 0.0}]
    recipe = from_table(table(kind="adamw", groups=groups, clip=1.0, warmup=0.5, by="step"))
    assert recipe.train.optimizer.lr == 0.001
    import tomllib

    assert from_table(tomllib.loads(to_toml(recipe))) == recipe
    made = assemble(recipe).setup.options.optimizer
    assert made.groups == (ParameterGroup(["head.*"], lr=0.5), ParameterGroup(["*.bias"], weight_decay=0.0))


# in every engine ------------------------------------------------------------------------------------------------------
def bench(method: str = "der") -> Bench:
    optimizer = Optimizer(
        "adamw", lr=0.01, weight_decay=0.1, clip=0.5, warmup=0.5, by="step", schedule="cosine", state="task",
        groups=[ParameterGroup(["*.bias"], lr=0.03, weight_decay=0.0)],
    )  # fmt: skip
    return Bench(method, stream=Toy(clients=3), train=TrainOptions(2, 5, optimizer))


def test_engines_agree_and_runs_resume() -> None:
    eager = bench().run()
    assert_same(eager, run_over_wire(bench()))
    assert_same(eager, on_processes(bench()))
    assert_resumes(bench(), 2, eager)
