"""Generators of images in pixel space, values in (0, 1): TARGET's from noise, LANDER's from text anchors.

A blueprint holds all that a generator's shape depends on, and builds it (`everfed.core.replica`).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from everfed.models.generators import Upsampling

EPS, SLOPE = 1e-5, 0.2
WIDE, NARROW = 128, 64


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
        widths = _widths(upsamplings or usual_upsamplings(height))
        factor = 2 ** (len(widths) - 1)
        self.map = (widths[0], height // factor, width // factor)
        self.dense = nn.Linear(nz, widths[0] * self.map[1] * self.map[2])
        self.norm = nn.BatchNorm2d(widths[0])
        self.blocks = nn.Sequential(*(Upsampling(a, b, EPS, SLOPE, bias=False) for a, b in itertools.pairwise(widths)))
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


def _widths(upsamplings: int) -> tuple[int, ...]:
    """Channels of the first map and after every block."""
    wide = min(upsamplings, 3)
    return (*[WIDE] * wide, *[NARROW] * (upsamplings + 1 - wide))
