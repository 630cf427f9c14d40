"""FL+EWC: the Fisher information and the penalty of Kirkpatrick et al. (2017), Eq. 3, against closed forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from everfed.core.context import TrainOptions
from everfed.core.optimizer import Optimizer
from everfed.core.tree import equal, tensor_bytes
from everfed.methods import registry as methods
from everfed.methods.regularise.ewc import EWC
from everfed.methods.regularise.fisher import diagonal_fisher
from tests.support.rehearsal_free import ClassToy
from tests.support.toy import Bench, Given, Linear, Norm, Toy


def ewc(**options: Any) -> dict[str, dict[str, Any]]:
    return {"ewc": options}


def logistic(outputs: Tensor, y: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(outputs.squeeze(1), y)


def unit(samples: int = 12, batch: int = 4) -> tuple[Bench, Tensor, Tensor, Tensor]:
    """One logistic unit, its inputs, labels and weights."""
    rng = torch.Generator().manual_seed(1)
    x, w = torch.randn(samples, 3, generator=rng), torch.randn(3, generator=rng)
    y = (torch.rand(samples, generator=rng) > 0.5).float()
    stream = Given(clients=1, rounds_per_task=1, classes=1, table={(0, 0): (x, y)}, objective=logistic)
    return Bench("fedavg", stream=stream, module=Linear, train=TrainOptions(1, batch, Optimizer())), x, y, w


# the Fisher information ----------------------------------------------------------------------------------------------
def test_the_fisher_information_of_a_logistic_unit() -> None:
    bench, x, y, w = unit()
    found = diagonal_fisher(bench.client("ewc"), {**bench.model(), "params": w}, bench.stream.data(0, 0))
    p = torch.sigmoid(x @ w)
    assert torch.allclose(found, ((p - y).square().unsqueeze(1) * x.square()).mean(0), atol=1e-6)


# per sample and per batch --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("batch", "same"), [(4, False), (1, True)])
def test_squared_batch_gradients_are_smaller_and_equal_only_at_batches_of_one(batch: int, same: bool) -> None:
    bench, _, _, w = unit(batch=batch)
    client, model, data = bench.client("ewc"), {**bench.model(), "params": w}, bench.stream.data(0, 0)
    by_sample, by_batch = (diagonal_fisher(client, model, data, kind) for kind in ("sample", "batch"))
    assert torch.all(by_batch <= by_sample + 1e-6)
    assert torch.allclose(by_batch, by_sample, atol=1e-6) is same


@pytest.mark.parametrize("module", [None, Norm])
def test_the_fisher_information_is_never_negative(module: Any) -> None:
    for client in Bench("ewc", module=module).run().clients.values():
        assert client["ewc"]["fisher"].min() >= 0 and client["ewc"]["fisher"].max() > 0


@pytest.mark.parametrize(("kind", "size"), [("sample", 1), ("batch", 5)])
def test_the_fisher_information_is_that_of_the_network_as_it_answers(kind: str, size: int) -> None:
    """In eval mode: BatchNorm uses its running statistics, which stay as they are, and dropout drops nothing."""
    bench = Bench(module=Norm)
    data, model = bench.stream.data(0, 0), bench.run().state.model
    found = diagonal_fisher(bench.client("ewc"), model, data, kind)
    module = bench.build_module()
    bench.layout().bind(module, model["params"], model["stats"], model["counters"])
    module.eval()
    squares = []
    for x, y in zip(data.x.split(size), data.y.split(size), strict=True):
        loss = nn.functional.cross_entropy(module(bench.stream.inputs(x)), y)
        gradients = torch.autograd.grad(loss, list(module.parameters()))
        squares.append(torch.cat([gradient.flatten() for gradient in gradients]).square())
    torch.testing.assert_close(found, torch.stack(squares).mean(0), rtol=1e-4, atol=1e-7)


# over tasks ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("gamma", "factor"), [(1.0, 2.0), (0.5, 1.5), (0.0, 1.0)])
def test_two_identical_tasks(gamma: float, factor: float) -> None:
    bench, _, _, w = unit()
    client = bench.client("ewc", model={**bench.model(), "params": w}, phase="fisher")
    EWC(gamma=gamma).consolidate(client)
    once = client.state["fisher"]
    EWC(gamma=gamma).consolidate(client)
    assert torch.allclose(client.state["fisher"], factor * once)


# what it reduces to --------------------------------------------------------------------------------------------------
def test_no_penalty_is_fedavg() -> None:
    bench = Bench("fedavg")
    assert equal(bench.run().state.model, bench.change(method="ewc", options=ewc(weight=0.0)).run().state.model)
    assert not torch.equal(bench.run().params, bench.change(method="ewc", options=ewc(weight=1.0)).run().params)


def test_the_first_task_is_fedavg() -> None:
    bench = Bench("fedavg")
    assert equal(bench.run(rounds=2).state.model, bench.change(method="ewc").run(rounds=2).state.model)


# the penalty ---------------------------------------------------------------------------------------------------------
def step_taken(weight: float, w: Tensor, fisher: Tensor, anchor: Tensor) -> Tensor:
    """How far one step of rate 1 moves the unit's weights from w."""
    bench, *_ = unit(batch=12)
    bench = bench.change(method="ewc", options=ewc(weight=weight), train=TrainOptions(1, 12, Optimizer(lr=1.0)))
    ctx, model = bench.context(), {**bench.model(), "params": w}
    state = {"client": {}, "ewc": {"fisher": fisher, "anchor": anchor}}
    fitted = ctx.train.fit(ctx, bench.build_method().parts, model, w, state, {}, bench.stream.data(0, 0))
    return w - fitted.model["params"]


def test_the_penalty_vanishes_at_the_anchor() -> None:
    _, _, _, w = unit()
    fisher = torch.tensor([1.0, 2.0, 3.0])
    assert torch.equal(step_taken(10.0, w, fisher, w), step_taken(0.0, w, fisher, w))


def test_its_gradient_is_that_of_half_the_weighted_square() -> None:
    _, _, _, w = unit()
    fisher, anchor, beta, h = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.1, -0.2, 0.3]), 0.7, 1e-3

    def penalty(at: Tensor) -> Tensor:
        return beta / 2 * (fisher.double() * (at - anchor.double()).square()).sum()

    numeric = torch.stack([(penalty(w + h * e) - penalty(w - h * e)) / (2 * h) for e in torch.eye(3).double()])
    found = step_taken(beta, w, fisher, anchor) - step_taken(0.0, w, fisher, anchor)
    assert torch.allclose(found.double(), numeric, atol=1e-5)
    assert torch.allclose(found, beta * fisher * (w - anchor), atol=1e-5)


# state and options ---------------------------------------------------------------------------------------------------
def test_a_client_keeps_two_vectors_and_the_anchor_is_the_previous_tasks_model() -> None:
    bench = Bench("ewc", stream=Toy(tasks=3))
    outcome, end = bench.run(rounds=5), bench.run(rounds=4).params
    for client in outcome.clients.values():
        assert tensor_bytes(client) == 2 * 4 * len(end)
        assert torch.equal(client["ewc"]["anchor"], end)


def test_a_client_without_data_keeps_its_fisher_information() -> None:
    stream = Toy(tasks=3, sizes={(1, 1): 0})
    first, second = (Bench("ewc", stream=stream).run(rounds=r).clients[1]["ewc"] for r in (2, 4))
    assert torch.equal(first["fisher"], second["fisher"]) and not torch.equal(first["anchor"], second["anchor"])


def test_a_subset_of_the_samples_can_do() -> None:
    whole, few = (Bench("ewc", ewc(fisher_samples=n)).run(rounds=2).clients[0]["ewc"]["fisher"] for n in (0, 3))
    assert not torch.equal(whole, few)
    everything = Bench("ewc", ewc(fisher_samples=10_000)).run(rounds=2).clients[0]["ewc"]["fisher"]
    assert torch.equal(whole, everything)


def test_unseen_classes_have_no_information_when_only_seen_ones_are_trained() -> None:
    bench = Bench("ewc", stream=ClassToy(), train=TrainOptions(2, 5, Optimizer(lr=0.1), logits="seen"))
    fisher = bench.run(rounds=2).clients[0]["ewc"]["fisher"]
    assert bench.layout().param("head.weight").view(fisher)[2:].abs().max() == 0


@pytest.mark.parametrize(
    ("option", "value"), [("weight", -1.0), ("gamma", 1.5), ("fisher", "x"), ("fisher_samples", -1)]
)
def test_options_are_checked(option: str, value: Any) -> None:
    with pytest.raises(methods.MethodError, match=rf"method\.ewc\.{option} must be"):
        methods.build("ewc", ewc(**{option: value}))
