"""Generators of TARGET and LANDER: sizes, shapes, and what noisy layers do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from everfed.models.generators import NoisyBlueprint, NoisyGenerator, PixelBlueprint


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("shape", "upsamplings", "count"),
    [((3, 32, 32), 0, 2_328_899), ((3, 64, 64), 2, 8_644_931), ((1, 28, 28), 0, 1_834_305)],
)
def test_parameters_of_targets_generator(shape: tuple[int, ...], upsamplings: int, count: int) -> None:
    assert parameters(PixelBlueprint(shape, 256, upsamplings).build()) == count


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (3, 64, 64), (1, 4, 4), (1, 8, 8)])
def test_images_have_the_shape_asked_for_and_values_between_0_and_1(shape: tuple[int, ...]) -> None:
    images = PixelBlueprint(shape, nz=4).build()(torch.randn(2, 4))
    assert images.shape == (2, *shape)
    assert 0 <= images.min() < images.max() <= 1


@pytest.mark.parametrize(("side", "smallest"), [(28, 7), (32, 8), (64, 8), (128, 8), (224, 14)])
def test_where_upsampling_begins(side: int, smallest: int) -> None:
    generator = PixelBlueprint((3, side, side), nz=2).build()
    assert generator.map[1:] == (smallest, smallest)


def test_images_that_no_doubling_reaches_are_refused() -> None:
    with pytest.raises(ValueError, match=r"height and width are multiples of 4; got \(3, 30, 30\)"):
        PixelBlueprint((3, 30, 30)).build()


# 5,795,651 in the paper's code, whose 100 x 512 anchors are a frozen parameter of the generator
@pytest.mark.parametrize(
    ("shape", "upsamplings", "count"),
    [((3, 32, 32), 0, 5_795_651 - 51_200), ((3, 64, 64), 2, 12_111_683 - 51_200)],
)
def test_parameters_of_landers_generator(shape: tuple[int, ...], upsamplings: int, count: int) -> None:
    generator = NoisyBlueprint(shape, upsamplings=upsamplings).build()
    assert parameters(generator) == count
    assert generator.weight.numel() + generator.bias.numel() == 3_414_528
    assert len(generator.weight) == 26  # 256 = 25 x 10 + 6


def small() -> NoisyGenerator:
    torch.manual_seed(0)
    generator = NoisyBlueprint((1, 4, 4), anchors=5, batch=8, group=3, nz=4).build()
    assert isinstance(generator, NoisyGenerator)
    return generator.eval()


def test_layer_g_serves_its_group_and_the_last_group_may_be_shorter() -> None:
    generator, anchors = small(), torch.randn(8, 5)
    rows = generator.standard(anchors)
    noisy = torch.stack([rows[i] @ generator.weight[i // 3] + generator.bias[i // 3, 0] for i in range(8)])
    torch.testing.assert_close(generator(anchors), generator.trunk(noisy))


def test_fixed_layers_are_deterministic_and_redrawn_ones_change_the_images() -> None:
    generator, anchors = small(), torch.randn(1, 5).expand(8, 5)
    before = generator(anchors)
    assert torch.equal(generator(anchors), before)
    assert not torch.allclose(before[0], before[3], atol=1e-5)  # the same anchor under another layer
    torch.testing.assert_close(before[0], before[1])
    with torch.no_grad():
        generator.weight.normal_()
    assert not torch.allclose(generator(anchors), before, atol=1e-5)
