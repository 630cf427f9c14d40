"""Separate batches in one forward pass: BatchNorm keeps them apart, so everything is as with a pass for each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from everfed.core.context import TrainOptions
from everfed.core.layout import Layout
from everfed.core.method import Method, compose
from everfed.core.optimizer import Optimizer
from everfed.core.part import Part
from everfed.core.replica import Replica, minibatch_sizes, normalised_apart
from everfed.methods.aggregate.fedavg import FedAvg
from everfed.methods.replay.der import DER
from everfed.methods.replay.memory import Memory
from everfed.models.fused import batch_norm_act
from tests.support.toy import Bench, Normed, Toy

passes: list[int] = []  # samples of every forward pass in training


class Counted(Normed):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            passes.append(len(x))
        return super().forward(x)


class Mixing(Counted):
    mixes_samples = True  # by something else than BatchNorm


class Forwarding(Part):
    """Has a forward pass of its own, in which it may look at single batches."""

    name = "forwarding"

    def forward(self, module: nn.Module, x: Tensor, state: Any, message: Any) -> Tensor:
        outputs: Tensor = module(x)
        return outputs


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    built = Replica.__init__

    def on_gpu(self: Replica, module: nn.Module, layout: Layout, device: torch.device, *args: Any) -> None:
        built(self, module, layout, device, *args)
        own = not any(getattr(m, "mixes_samples", False) for m in module.modules())
        self.normalises_apart = own and getattr(module, "normalises_apart", False)

    monkeypatch.setattr(Replica, "__init__", on_gpu)
    passes.clear()


def bench(method: Any, module: type[nn.Module] = Counted) -> Bench:
    stream = Toy(clients=2, tasks=2, samples=10)
    return Bench(method, stream=stream, train=TrainOptions(2, 4, Optimizer(lr=0.1, momentum=0.9)), module=module)


def four_replayed(*more: Part) -> Method:
    """DER, whose separate batches are as large as the minibatches."""
    return compose(FedAvg(), Memory(size=8, logits=True), DER(batch=4), *more)


@pytest.mark.parametrize("method", ["der", "der++", "fedgp+der"])
def test_one_pass_trains_what_two_train(method: str, request: pytest.FixtureRequest) -> None:
    two = bench(method).run()
    request.getfixturevalue("as_on_a_gpu")
    one = bench(method).run()
    assert max(passes) > 8  # a minibatch and the whole buffer
    for vector in ("params", "stats"):
        assert torch.allclose(one.state.model[vector], two.state.model[vector], rtol=1e-4, atol=1e-5)
    assert torch.equal(one.state.model["counters"], two.state.model["counters"])


def test_a_network_that_mixes_samples_in_another_way_has_a_pass_for_each(as_on_a_gpu: None) -> None:
    bench(four_replayed, Mixing).run()
    assert max(passes) <= 5


def test_a_part_with_a_forward_pass_of_its_own_has_one_for_each(as_on_a_gpu: None) -> None:
    bench(lambda: four_replayed(Forwarding())).run()
    assert max(passes) <= 5


def test_only_a_gpu_changes_the_passes() -> None:
    module = Normed((1, 4, 4), 4)
    assert not Replica(module, Layout.of(module), torch.device("cpu")).normalises_apart


def test_statistics_are_those_of_each_minibatch_in_turn() -> None:
    """Two values of a channel, then three: closed forms of means, variances and what is tracked."""
    norm = nn.BatchNorm2d(1, momentum=0.5, eps=1e-12)
    x = torch.tensor([1.0, 3.0, 0.0, 3.0, 6.0]).view(5, 1, 1, 1)
    with normalised_apart([2, 3]):
        y = batch_norm_act(x, norm, slope=1.0)
    third = 1.5**0.5  # 3 / sqrt(6)
    assert torch.allclose(y.flatten(), torch.tensor([-1.0, 1.0, -third, 0.0, third]))
    # means 2 and 3 from 0; unbiased variances 2 and 9 from 1
    assert norm.running_mean.item() == pytest.approx(0.5 * (0.5 * 2) + 0.5 * 3)
    assert norm.running_var.item() == pytest.approx(0.5 * (0.5 * 1 + 0.5 * 2) + 0.5 * 9)
    assert norm.num_batches_tracked == 2


def test_in_evaluation_there_is_nothing_to_keep_apart() -> None:
    norm, x = nn.BatchNorm2d(1).eval(), torch.randn(5, 1, 2, 2)
    with normalised_apart([2, 3]):
        assert torch.equal(batch_norm_act(x, norm, slope=1.0), norm(x))
    assert norm.num_batches_tracked == 0


def test_sizes_that_do_not_add_up_are_refused_and_end_with_the_block() -> None:
    x = torch.zeros(4, 1, 1, 1)
    with normalised_apart([2, 3]), pytest.raises(ValueError, match="minibatches of 2, 3 samples.*activation of 4"):
        minibatch_sizes(x)
    assert minibatch_sizes(x) == (4,)
