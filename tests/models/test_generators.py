"""MFCL's generators (Babakniya et al., NeurIPS 2023) in the architecture of the authors' code."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import nn

from everfed.methods.generative.inversion import batch_statistics
from everfed.models.generators import Generator, GeneratorBlueprint, doubled


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("side", "z_dim", "expected"),
    [(32, 1000, 8_423_939), (32, 200, 1_870_339), (64, 1000, 8_571_779), (224, 1000, 3_326_275)],
)
def test_sizes_are_those_of_the_authors_architecture(side: int, z_dim: int, expected: int) -> None:
    with torch.device("meta"):
        assert parameters(GeneratorBlueprint((3, side, side), z_dim).build()) == expected


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (3, 64, 64), (3, 224, 224), (1, 8, 8)])
def test_images_have_the_shape_asked_for_and_are_standardised(shape: tuple[int, int, int]) -> None:
    generator = Generator(shape, 10, light=True).train()
    with batch_statistics(generator.standard) as statistics:
        images = generator(torch.randn(6, 10, generator=torch.Generator().manual_seed(0)))
    (_, raw) = statistics.seen[0]
    assert images.shape == (6, *shape)
    assert torch.allclose(images.mean((0, 2, 3)), torch.zeros(shape[0]), atol=1e-4)
    assert torch.allclose(images.var((0, 2, 3), correction=0), raw / (raw + 1e-5), atol=1e-4)


def test_batchnorm_after_convolutions_has_the_authors_eps() -> None:
    generator = Generator((3, 32, 32), 10)
    assert [cast(nn.BatchNorm2d, block[2]).eps for block in generator.blocks] == [0.8, 0.8]  # type: ignore[index]
    assert (generator.norm.eps, generator.standard.eps) == (1e-5, 1e-5)
    assert not generator.standard.affine


def test_the_light_variant_has_the_widths_of_the_code() -> None:
    generator = Generator((1, 28, 28), 10, light=True)
    assert (generator.first, generator.side, generator.colours.in_channels) == (32, 7, 16)


@pytest.mark.parametrize("shape", [(3, 30, 30), (3, 32, 28), (784,), (3, 66, 66)])
def test_what_cannot_be_upsampled_to_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="square images whose side is a multiple"):
        Generator(shape, 10)


def test_doubling_by_copies_equals_upsampling_forward_and_backward() -> None:
    x = torch.randn(2, 5, 3, 4, dtype=torch.float64).to(memory_format=torch.channels_last).requires_grad_()
    ours, theirs = doubled(x), nn.Upsample(scale_factor=2)(x)
    assert torch.equal(ours, theirs) and ours.is_contiguous(memory_format=torch.channels_last)
    back = torch.randn_like(theirs)
    got, truth = (torch.autograd.grad(y, x, back)[0] for y in (ours, theirs))
    assert torch.allclose(got, truth, rtol=1e-14)
