"""Generators: noise in, images in the network's input space out (MFCL, Babakniya et al., 2023, after ABD, 2021).

A blueprint holds all that a generator's shape depends on, and builds it; trainers cache the built network under it. The
weights of a generator are kept apart from it, as vectors (`everfed.core.replica`).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from everfed.models.fused import batch_norm_act

EPS = 0.8  # of BatchNorm after a convolution: the authors pass 0.8 as the second argument, which is eps, not momentum
SLOPE = 0.2


@dataclass(frozen=True)
class GeneratorBlueprint:
    """shape: (channels, side, side) of the images. z_dim: length of the noise. light: a quarter of the width."""

    shape: tuple[int, ...]
    z_dim: int = 200
    light: bool = False

    def build(self) -> nn.Module:
        return Generator(self.shape, self.z_dim, self.light)


class Generator(nn.Module):
    """FC to a small map, upsampling blocks, one convolution to colours, tanh and a BatchNorm without weights: images
    have mean 0 and variance 1 per channel, as normalised data has.

    28 and 32 pixels: two blocks from a quarter of the side (8,423,939 parameters at z = 1000 and 1,870,339 at z = 200
    for 3 x 32 x 32); 64: three (8,571,779); 224: five, narrower (3,326,275).
    """

    def __init__(self, shape: tuple[int, ...], z_dim: int, light: bool = False) -> None:
        super().__init__()
        channels, side = image(shape)
        widths = _widths(side, light)
        self.first, self.side = widths[0], smallest_side(side)
        self.dense = nn.Linear(z_dim, self.first * self.side**2)
        self.norm = nn.BatchNorm2d(self.first)
        self.blocks = nn.Sequential(*(Upsampling(*pair) for pair in itertools.pairwise(widths)))
        self.colours = nn.Conv2d(widths[-1], channels, 3, padding=1)
        self.standard = nn.BatchNorm2d(channels, affine=False)

    def forward(self, z: Tensor) -> Tensor:
        """(n, z_dim) -> (n, channels, side, side)."""
        x = batch_norm_act(as_map(self.dense(z), self.first, self.side), self.norm, slope=1.0)
        standard: Tensor = self.standard(torch.tanh(self.colours(self.blocks(x))))
        return standard


class Upsampling(nn.Sequential):
    """Nearest x2, 3x3 convolution, BatchNorm, LeakyReLU."""

    def __init__(self, inputs: int, outputs: int, eps: float = EPS, slope: float = SLOPE, bias: bool = True) -> None:
        super().__init__(
            nn.Upsample(scale_factor=2),
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=bias),
            nn.BatchNorm2d(outputs, eps),
            nn.LeakyReLU(slope),
        )
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        larger, convolution, norm, _ = self
        x = doubled(x) if x.is_cuda else larger(x)
        return batch_norm_act(convolution(x), norm, slope=self.slope)


def doubled(x: Tensor) -> Tensor:
    """Every pixel twice in height and width, as nn.Upsample has it; channels stay last and in their type. PyTorch's
    own kernel makes float32 of bfloat16 under autocast."""
    images, channels, height, width = x.shape
    rows = x.permute(0, 2, 3, 1)[:, :, None, :, None].expand(images, height, 2, width, 2, channels)
    return rows.reshape(images, 2 * height, 2 * width, channels).permute(0, 3, 1, 2)


def as_map(rows: Tensor, channels: int, side: int) -> Tensor:
    """(n, channels * side^2) -> (n, channels, side, side); channels-last on a GPU, for fast convolutions."""
    x = rows.view(-1, channels, side, side)
    return x.contiguous(memory_format=torch.channels_last) if x.is_cuda else x


def image(shape: tuple[int, ...]) -> tuple[int, int]:
    """(channels, side) of images that a generator can make; refuses others."""
    factor = 2 ** upsamplings(shape[-1])
    if len(shape) != 3 or shape[1] != shape[2] or shape[1] % factor:
        raise ValueError(f"a generator makes square images whose side is a multiple of {factor}; got {shape}")
    return shape[0], shape[1]


def upsamplings(side: int) -> int:
    """How often the side is doubled."""
    return 2 if side < 64 else 3 if side < 128 else 5


def smallest_side(side: int) -> int:
    """The side of the map that upsampling begins with."""
    return side // int(2 ** upsamplings(side))


def _widths(side: int, light: bool) -> tuple[int, ...]:
    """Channels of the first map and after every block."""
    blocks = upsamplings(side)
    wide, narrow = (64, 64) if blocks == 5 else (128, 64)
    if light:
        wide, narrow = wide // 4, narrow // 4
    return (*[wide] * blocks, narrow)
