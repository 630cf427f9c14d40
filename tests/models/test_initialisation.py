"""`model.init`, and ResNet-18 with the stem of its paper."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from everfed import models
from everfed.core.layout import Layout

SHAPE = (3, 32, 32)


def test_he_draws_convolutions_with_the_fan_out_and_nothing_else() -> None:
    """The authors' lines: n = k k outputs, weight ~ N(0, sqrt(2 / n)); the same draws in the same order."""
    ours = models.build("resnet18", SHAPE, 100, seed=3, options={"init": "he-fan-out"})
    plain = models.build("resnet18", SHAPE, 100, seed=3)
    for (name, layer), (_, other) in zip(ours.named_modules(), plain.named_modules(), strict=True):
        if isinstance(layer, nn.Conv2d):
            deviation = math.sqrt(2.0 / (layer.kernel_size[0] * layer.kernel_size[1] * layer.out_channels))
            assert layer.weight.std().item() == pytest.approx(deviation, rel=0.1), name
            assert not torch.equal(layer.weight, other.weight)
        elif isinstance(layer, (nn.Linear, nn.BatchNorm2d)):
            assert torch.equal(layer.weight, other.weight) and torch.equal(layer.bias, other.bias)


def test_a_normal_and_not_a_uniform_one_and_from_the_seed_alone() -> None:
    def weights(seed: int) -> torch.Tensor:
        module = models.build("resnet18", SHAPE, 10, seed, {"init": "he-fan-out"})
        return module.get_parameter("blocks.7.conv2.weight").detach().flatten()

    drawn = weights(0)
    kurtosis = ((drawn - drawn.mean()) ** 4).mean() / drawn.var() ** 2
    assert kurtosis.item() == pytest.approx(3.0, abs=0.02)  # of a uniform distribution: 1.8
    assert torch.equal(drawn, weights(0)) and not torch.equal(drawn, weights(1))


@pytest.mark.parametrize("kind", ["resnet18", "resnet18-deep", "small-cnn", "mlp"])
def test_the_default_leaves_every_bit_as_it_was(kind: str) -> None:
    built = [models.build(kind, SHAPE, 10, 0, given) for given in ({}, {"init": "torch"})]
    first, second = (Layout.of(module).read(module)["params"] for module in built)
    assert torch.equal(first, second)


def test_building_a_network_leaves_the_generators_of_all_devices_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.manual_seed would seed those of GPUs, too, and nothing would set them back."""
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    before = torch.get_rng_state()
    models.build("mlp", SHAPE, 10, seed=0)
    assert torch.equal(torch.get_rng_state(), before) and not seeded


class Own(nn.Module):
    """A user's network whose option `init` means something else."""

    def __init__(self, input_shape: tuple[int, ...], classes: int, init: float = 0.0) -> None:
        super().__init__()
        self.head = nn.Linear(math.prod(input_shape), classes)
        nn.init.constant_(self.head.weight, init)


def any_options(input_shape: tuple[int, ...], classes: int, **options: float) -> nn.Module:
    return Own(input_shape, classes, **options)


@pytest.mark.parametrize("own", [Own, any_options])
def test_an_option_of_the_model_s_own_comes_first(own: Callable[..., nn.Module]) -> None:
    module = models.build(f"{__name__}:{own.__name__}", SHAPE, 2, 0, {"init": 0.5})
    assert module.get_parameter("head.weight").unique().tolist() == [0.5]


def test_options_that_are_not_there_are_refused() -> None:
    with pytest.raises(models.ModelError, match=r"model.init must be one of torch, he-fan-out; got 'xavier'"):
        models.build("resnet18", SHAPE, 10, 0, {"init": "xavier"})
    with pytest.raises(models.ModelError, match=r"model.depth is not an option of 'resnet18'; its options are: init"):
        models.build("resnet18", SHAPE, 10, 0, {"depth": 3})


def test_the_stem_of_the_paper() -> None:
    """He et al.: 11,689,512 parameters with 1000 classes; at 224 pixels the blocks begin at 56 pixels and end at 7."""
    with torch.device("meta"):
        module = models.build("resnet18-imagenet", (3, 224, 224), 1000, 0)
    assert sum(p.numel() for p in module.parameters()) == 11_689_512
    sides: list[int] = []
    module.blocks.register_forward_hook(
        lambda _, given, out: sides.extend(activations[0].shape[-1] for activations in (given[0], out))
    )
    assert module(torch.zeros(2, 3, 224, 224, device="meta")).shape == (2, 1000)
    assert sides == [56, 7]
