"""Dropout draws from the generator it was given, scales by 1 / (1 - p), and replaces torch's own everywhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from everfed.core.context import TrainOptions
from everfed.core.random import Dropout, adopt_dropout
from tests.support.toy import Bench, Norm


def layer(rate: float, channels: bool = False, seed: int = 0) -> Dropout:
    drop = Dropout(rate, channels)
    drop.generator = torch.Generator().manual_seed(seed)
    return drop


def test_values_are_zero_or_scaled() -> None:
    out = layer(0.25)(torch.ones(4000))
    assert out.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert out.mean() == pytest.approx(1.0, abs=5 * (0.25 / 0.75 / 4000) ** 0.5)  # five standard errors


def test_channels_are_dropped_whole() -> None:
    out = layer(0.5, channels=True)(torch.ones(30, 20, 3, 3))
    sums = out.sum((2, 3))
    assert set(sums.unique().tolist()) == {0.0, 18.0}
    assert 200 < int((sums == 0).sum()) < 400


def test_eval_mode_and_rate_zero_do_nothing() -> None:
    x = torch.randn(5)
    assert layer(0.0)(x) is x
    assert layer(0.9).eval()(x) is x
    assert Dropout(0.5).eval()(x) is x


def test_the_seed_decides_and_the_global_generator_does_not() -> None:
    x = torch.ones(100)
    torch.manual_seed(1)
    a = layer(0.5, seed=3)(x)
    torch.manual_seed(2)
    torch.rand(10)
    assert torch.equal(a, layer(0.5, seed=3)(x))
    assert not torch.equal(a, layer(0.5, seed=4)(x))


def test_training_without_a_generator_is_refused() -> None:
    with pytest.raises(RuntimeError, match="no generator"):
        Dropout(0.5)(torch.ones(2))


@pytest.mark.parametrize("rate", [-0.1, 1.5])
def test_rates_outside_the_range_are_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        Dropout(rate)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Sequential(nn.Dropout2d(0.4)))
        self.last = nn.Dropout1d(0.2)


def test_torch_s_layers_are_replaced_at_any_depth() -> None:
    module, generator = Nested(), torch.Generator()
    adopt_dropout(module, generator)
    found = [m for m in module.modules() if isinstance(m, Dropout)]
    assert sorted((m.p, m.channels) for m in found) == [(0.2, True), (0.3, False), (0.4, True)]
    assert all(m.generator is generator for m in found)
    assert not [m for m in module.modules() if isinstance(m, nn.Dropout1d | nn.Dropout2d) or type(m) is nn.Dropout]
    assert all(isinstance(m, nn.Dropout) for m in found)  # networks read its p


class Shared(nn.Module):
    """One dropout layer under two names, as people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))  # type: ignore[no-any-return]


def test_a_layer_with_two_names_is_replaced_under_both() -> None:
    module = Shared()
    adopt_dropout(module, torch.Generator())
    assert isinstance(module.first, Dropout) and isinstance(module.second, Dropout)


def test_a_run_with_dropout_depends_on_its_seed_alone() -> None:
    bench = Bench("fedgp+der", module=Norm)
    torch.manual_seed(1)
    first = bench.run().params
    torch.manual_seed(2)
    assert torch.equal(first, bench.run().params)


class Drawing(nn.Module):
    """A linear layer, and a draw from torch's own generator in every forward pass of training."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.map = nn.Linear(16, classes)
        self.drawn: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.drawn.append(torch.rand(8))
        outputs: Tensor = self.map(x.flatten(1))
        return outputs


def test_layers_of_torch_draw_anew_in_every_step() -> None:
    client = Bench(module=Drawing, train=TrainOptions(1, 4)).client("fedavg")
    module = client.trainer.replica.module
    assert isinstance(module, Drawing)
    client.fit((), tag="drawing")
    once = torch.stack(module.drawn)
    assert len(once) == 3 and len(once.unique(dim=0)) == 3
    client.fit((), tag="drawing")
    assert torch.equal(torch.stack(module.drawn[3:]), once)
