"""The networks of FedCIL's released code: generators of an auxiliary-classifier GAN, and discriminators' trunks.

Generators normalise by batch statistics, in training and in use: so a generator is its parameters alone, and averaging
or sending it needs no running statistics.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from everfed.core.random import Dropout

KINDS = ("wide", "slim")
SMALLEST = 4  # side of the map that upsampling begins with


@dataclass(frozen=True)
class ACGANBlueprint:
    """shape: (channels, side, side) of the images, tanh's range. z_dim: noise, with the label in it. kind: "wide"
    (MNIST and EMNIST in the release) or "slim" (CIFAR-10). width: channels of the first map; 0 for the kind's own."""

    shape: tuple[int, ...]
    z_dim: int
    kind: str
    width: int = 0

    def build(self) -> nn.Module:
        made = WideGenerator if self.kind == "wide" else SlimGenerator
        return made(self.shape, self.z_dim, self.width or (512 if self.kind == "wide" else 384))


class WideGenerator(nn.Module):
    """FC to 512 x 4 x 4, a 4x4 transposed convolution per doubling, halving the channels, and a 3x3 one to colours.

    3,664,769 parameters for 1 x 32 x 32 images from 110 numbers; 64 pixels have one doubling more. A side that is no
    power of two is cut out of the next larger one (28 out of 32).
    """

    def __init__(self, shape: tuple[int, ...], z_dim: int, width: int) -> None:
        super().__init__()
        channels, self.side, doublings = _image(shape)
        widths = [max(width // 2**i, 1) for i in range(doublings + 1)]
        self.width = width
        self.dense = nn.Linear(z_dim, width * SMALLEST**2)
        self.norm = _norm(width)
        pairs = itertools.pairwise(widths)
        self.blocks = nn.Sequential(*(_doubling(inputs, outputs, bias=True) for inputs, outputs in pairs))
        self.colours = nn.ConvTranspose2d(widths[-1], channels, 3, 1, 1)

    def forward(self, z: Tensor) -> Tensor:
        """(n, z_dim) -> (n, channels, side, side) in [-1, 1]."""
        x = functional.relu(self.norm(self.dense(z).view(-1, self.width, SMALLEST, SMALLEST)))
        return _cut(torch.tanh(self.colours(self.blocks(x))), self.side)


class SlimGenerator(nn.Module):
    """FC to 384, a 4x4 transposed convolution to a 4 x 4 map and one per doubling, the last to colours.

    1,593,888 parameters for 3 x 32 x 32 images from 110 numbers.
    """

    def __init__(self, shape: tuple[int, ...], z_dim: int, width: int) -> None:
        super().__init__()
        channels, self.side, doublings = _image(shape)
        widths = [max(width // 2**i, 1) for i in range(doublings + 1)]
        self.dense = nn.Linear(z_dim, width)
        layers: list[nn.Module] = []
        for i, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
            layers += [_widening(inputs, outputs, i), _norm(outputs), nn.ReLU()]
        self.blocks = nn.Sequential(*layers, _widening(widths[-1], channels, doublings))

    def forward(self, z: Tensor) -> Tensor:
        """(n, z_dim) -> (n, channels, side, side) in [-1, 1]."""
        return _cut(torch.tanh(self.blocks(self.dense(z)[:, :, None, None])), self.side)


class ACGANCNN(nn.Module):
    """The discriminators of the release as classifiers; FedCIL adds the real-or-fake head.

    Grey images: 4x4 convolutions of stride 2 with 64, 128 and 256 channels. Colour: 3x3 convolutions with 16, 32, 64,
    128, 256 and 512, every other one of stride 2, BatchNorm from the second on, dropout. At 64 pixels, one more of
    stride 2.
    """

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        channels, side, _ = _image(input_shape)
        self.trunk = nn.Sequential(*(_grey(side) if channels == 1 else _colour(channels, side)), nn.Flatten())
        with torch.no_grad():
            wide = self.trunk.eval()(torch.zeros(1, *input_shape)).shape[1]
        self.trunk.train()
        self.head = nn.Linear(wide, classes)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.trunk(x))
        return outputs


def _grey(side: int) -> list[nn.Module]:
    widths = (1, 64, 128, 256) if side < 64 else (1, 64, 128, 256, 512)
    convs = [nn.Conv2d(inputs, outputs, 4, 2, 1) for inputs, outputs in itertools.pairwise(widths)]
    return [layer for conv in convs for layer in (conv, nn.LeakyReLU(0.01))]


def _colour(channels: int, side: int) -> list[nn.Module]:
    widths, strides = [channels, 16, 32, 64, 128, 256, 512], [2, 1, 2, 1, 2, 1]
    if side >= 64:
        widths, strides = [*widths, 512], [*strides, 2]
    layers: list[nn.Module] = []
    for i, ((inputs, outputs), stride) in enumerate(zip(itertools.pairwise(widths), strides, strict=True)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)]
        layers += [nn.BatchNorm2d(outputs)] if i else []
        layers += [nn.LeakyReLU(0.2), Dropout(0.5)]
    return layers


def _widening(inputs: int, outputs: int, index: int) -> nn.Module:
    """From 1 x 1 to 4 x 4 first, then a doubling."""
    stride, padding = (1, 0) if index == 0 else (2, 1)
    return nn.ConvTranspose2d(inputs, outputs, 4, stride, padding, bias=False)


def _doubling(inputs: int, outputs: int, bias: bool) -> nn.Module:
    return nn.Sequential(nn.ConvTranspose2d(inputs, outputs, 4, 2, 1, bias=bias), _norm(outputs), nn.ReLU())


def _norm(channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels, track_running_stats=False)


def _cut(images: Tensor, side: int) -> Tensor:
    """The middle of the images."""
    first = (images.shape[-1] - side) // 2
    return images[:, :, first : first + side, first : first + side]


def _image(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(channels, side, doublings from a 4 x 4 map); refuses what is no square image."""
    if len(shape) != 3 or shape[1] != shape[2]:
        raise ValueError(f"a GAN makes square images (channels, side, side); these samples are {shape}")
    return shape[0], shape[1], max(0, (shape[1] - 1).bit_length() - 2)
