"""The small network whose gradients encode GLFC's prototypes: a LeNet with sigmoids, as in gradient inversion."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class EncoderBlueprint:
    """shape: (channels, side, side) of the images."""

    shape: tuple[int, ...]
    classes: int

    def build(self) -> nn.Module:
        return GradientEncoder(self.shape, self.classes)


class GradientEncoder(nn.Module):
    """Three 5x5 convolutions with 12 channels, strides 2, 2 and 1, a linear layer; all weights uniform in [-0.5, 0.5].

    85,036 parameters on 3 x 32 x 32 images with 100 classes; the linear layer is fed with 588 numbers at 28 pixels, 768
    at 32 and 3,072 at 64. Sigmoids, because the gradient is differentiated once more to find the image again.
    """

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        if len(shape) != 3 or shape[1] != shape[2]:
            raise ValueError(f"gradients of prototypes need square images (channels, side, side); got {shape}")
        strides = (2, 2, 1)
        side = shape[1]
        self.convs = nn.ModuleList(
            nn.Conv2d(shape[0] if i == 0 else 12, 12, 5, stride, padding=2) for i, stride in enumerate(strides)
        )
        for stride in strides:
            side = (side - 1) // stride + 1
        self.head = nn.Linear(12 * side**2, classes)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = torch.sigmoid(conv(x))
        outputs: Tensor = self.head(x.flatten(1))
        return outputs
