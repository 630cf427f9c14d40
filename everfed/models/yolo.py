"""Tiny YOLO (Redmon and Farhadi, 2017; the v2-tiny network for COCO) and a smaller one for CPUs."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

STRIDES = (16, 32)
_RARE = -4.0  # most cells hold nothing: the first objectness says so


def _block(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.LeakyReLU(0.1)]


class TinyYOLO(nn.Module):
    """Convolutions of 16, 32, 64, 128, 256, 512, 1024 and 512 channels, halved by five pools (four with stride 16, for
    small objects), and a 1x1 head: 11,039,682 parameters with 5 classes. widths: other numbers of channels.

    Outputs (n, anchors, 5 + classes, rows, columns), as `everfed.data.detection` reads them.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        classes: int,
        anchors: int = 5,
        stride: int = 32,
        widths: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024, 512),
    ) -> None:
        super().__init__()
        if stride not in STRIDES:
            raise ValueError(f"stride must be one of {', '.join(map(str, STRIDES))}; got {stride}")
        pools = 5 if stride == 32 else 4
        if len(input_shape) != 3 or any(side % stride for side in input_shape[1:]):
            raise ValueError(
                f"sides of images must be multiples of stride = {stride}; got {input_shape}: set stream.size"
            )
        if len(widths) <= pools:
            raise ValueError(f"widths needs more than {pools} layers for stride {stride}; got {len(widths)}")
        layers: list[nn.Module] = []
        for index, (inputs, outputs) in enumerate(itertools.pairwise((input_shape[0], *widths))):
            layers += _block(inputs, outputs)
            if index < pools:
                layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.head = nn.Conv2d(widths[-1], anchors * (5 + classes), 1)
        self.anchors, self.classes = anchors, classes
        with torch.no_grad():
            self.head.bias.view(anchors, -1)[:, 4] = _RARE  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x)).unflatten(1, (self.anchors, 5 + self.classes))


class MicroYOLO(TinyYOLO):
    """The same with 8, 16, 32, 64 and 64 channels and stride 16: 64,890 parameters with 5 classes."""

    def __init__(self, input_shape: tuple[int, ...], classes: int, anchors: int = 5) -> None:
        super().__init__(input_shape, classes, anchors, stride=16, widths=(8, 16, 32, 64, 64))
