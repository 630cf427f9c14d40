"""Generators: noise in, images out. MFCL's (Babakniya et al., 2023, after ABD, 2021) are in the network's input space,
TARGET's from noise and LANDER's from text anchors in pixel space, with values in (0, 1).

A blueprint holds all that a generator's shape depends on, and builds it; trainers cache the built network under it. The
weights of a generator are kept apart from it, as vectors (`everfed.core.replica`).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

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


# in pixel space -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class PixelBlueprint:
    """shape: (channels, height, width) of the images. nz: length of the noise. upsamplings: how often the side is
    doubled; 0 chooses by the side (2 below 64 pixels, 3 below 128, 4 from there)."""

    shape: tuple[int, ...]
    nz: int = 256
    upsamplings: int = 0

    def build(self) -> nn.Module:
        return PixelGenerator(self.shape, self.nz, self.upsamplings)


@dataclass(frozen=True)
class NoisyBlueprint:
    """As `PixelBlueprint`; anchors: their length. batch: images made at once. group: how many of them share a noisy
    layer."""

    shape: tuple[int, ...]
    anchors: int = 512
    batch: int = 256
    group: int = 10
    nz: int = 256
    upsamplings: int = 0

    def build(self) -> nn.Module:
        trunk = PixelGenerator(self.shape, self.nz, self.upsamplings)
        return NoisyGenerator(trunk, self.anchors, self.nz, self.batch, self.group)


class PixelGenerator(nn.Module):
    """FC to a small map, BatchNorm, upsampling blocks, one convolution to colours, sigmoid.

    2,328,899 parameters for 3 x 32 x 32 at nz = 256; 8,644,931 for 3 x 64 x 64 with two upsamplings, as in the code.
    """

    def __init__(self, shape: tuple[int, ...], nz: int, upsamplings: int = 0) -> None:
        super().__init__()
        channels, height, width = checked(shape, upsamplings)
        widths = _pixel_widths(upsamplings or usual_upsamplings(height))
        factor = 2 ** (len(widths) - 1)
        self.map = (widths[0], height // factor, width // factor)
        self.dense = nn.Linear(nz, widths[0] * self.map[1] * self.map[2])
        self.norm = nn.BatchNorm2d(widths[0])
        self.blocks = nn.Sequential(*(Upsampling(a, b, 1e-5, SLOPE, bias=False) for a, b in itertools.pairwise(widths)))
        self.colours = nn.Conv2d(widths[-1], channels, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        """(n, nz) -> (n, channels, height, width)."""
        x = self.dense(z).view(-1, *self.map)
        return torch.sigmoid(self.colours(self.blocks(self.norm(x))))


class NoisyGenerator(nn.Module):
    """BatchNorm of the anchors, one linear layer for each group of samples, then the trunk. The linear layers are
    redrawn in every synthesis round; there is no other noise (NAYER, Tran et al., 2024).

    5,744,451 parameters for 3 x 32 x 32, 3,414,528 of them in 26 noisy layers.
    """

    def __init__(self, trunk: PixelGenerator, anchors: int, nz: int, batch: int, group: int) -> None:
        super().__init__()
        self.group, groups = group, -(-batch // group)
        self.standard = nn.BatchNorm1d(anchors)
        self.weight = nn.Parameter(torch.randn(groups, anchors, nz))
        self.bias = nn.Parameter(torch.zeros(groups, 1, nz))
        self.trunk = trunk

    def forward(self, anchors: Tensor) -> Tensor:
        """(n, d) anchors, sample i under layer i // group -> (n, channels, height, width); the last group may be
        shorter."""
        rows, groups = self.standard(anchors), len(self.weight)
        padded = functional.pad(rows, (0, 0, 0, groups * self.group - len(rows)))
        noisy = torch.baddbmm(self.bias, padded.view(groups, self.group, -1), self.weight)
        images: Tensor = self.trunk(noisy.flatten(0, 1)[: len(rows)])
        return images


def usual_upsamplings(side: int) -> int:
    """How often the side is doubled by default."""
    return 2 if side < 64 else 3 if side < 128 else 4


def checked(shape: tuple[int, ...], upsamplings: int = 0) -> tuple[int, int, int]:
    """(channels, height, width) of images that a generator can make; refuses others."""
    factor = 2 ** (upsamplings or usual_upsamplings(shape[-1]))
    if len(shape) != 3 or shape[1] % factor or shape[2] % factor:
        raise ValueError(f"a generator makes images whose height and width are multiples of {factor}; got {shape}")
    return shape[0], shape[1], shape[2]


def _pixel_widths(upsamplings: int) -> tuple[int, ...]:
    """Channels of the first map and after every block."""
    wide = min(upsamplings, 3)
    return (*[128] * wide, *[64] * (upsamplings + 1 - wide))
