"""EfficientNet-Lite0 (Google, 2020; after Tan and Le, 2019): inverted residual blocks with ReLU6.

Convolutions pad as TensorFlow does ("same"), with which the published weights were trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

# of every stage: blocks, kernel, stride, expansion, channels out
STAGES = ((1, 3, 1, 1, 16), (2, 3, 2, 6, 24), (2, 5, 2, 6, 40), (3, 3, 2, 6, 80), (3, 5, 1, 6, 112), (4, 5, 2, 6, 192),
          (1, 3, 1, 6, 320))  # fmt: skip
STEM, LAST = 32, 1280
# the names in the published file -> those here
_PUBLISHED = {
    "_conv_stem": "stem.conv",
    "_bn0": "stem.norm",
    "_conv_head": "last.conv",
    "_bn1": "last.norm",
    "_fc": "head",
}
_IN_BLOCK = {"_expand_conv": "expand.conv", "_bn0": "expand.norm", "_depthwise_conv": "depthwise.conv",
             "_bn1": "depthwise.norm", "_project_conv": "project.conv", "_bn2": "project.norm"}  # fmt: skip


class Same(nn.Conv2d):
    """A convolution without bias whose output has 1 / stride of the input's size, padded more at the end where the
    padding is odd."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, stride, groups=groups, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        (kernel, _), (stride, _) = self.kernel_size, self.stride
        edges = []
        for size in (x.shape[-1], x.shape[-2]):
            missing = max((-(-size // stride) - 1) * stride + kernel - size, 0)
            edges += [missing // 2, missing - missing // 2]
        return super().forward(functional.pad(x, edges) if any(edges) else x)


class Unit(nn.Module):
    """Convolution, BatchNorm and, unless it is a projection, ReLU6."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1, act: bool = True):
        super().__init__()
        self.conv = Same(inputs, outputs, kernel, stride, groups)
        self.norm = nn.BatchNorm2d(outputs, eps=1e-3, momentum=0.01)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x))
        return functional.relu6(x) if self.act else x


class Inverted(nn.Module):
    """Expand, convolve by channel, project; with a residual where the shape stays."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = inputs * expansion
        self.expand = Unit(inputs, inner, 1) if expansion > 1 else nn.Identity()
        self.depthwise = Unit(inner, inner, kernel, stride, groups=inner)
        self.project = Unit(inner, outputs, 1, act=False)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(self.depthwise(self.expand(x)))
        return x + y if self.residual else y


class EfficientNetLite0(nn.Module):
    """4,652,008 parameters with 1000 classes. image: pixels a side to which images are resized inside the network
    (bilinear), 0 for the size they have."""

    def __init__(self, input_shape: tuple[int, ...], classes: int, image: int = 0) -> None:
        super().__init__()
        if len(input_shape) != 3 or input_shape[0] != 3:
            raise ValueError(f"efficientnet-lite0 needs colour images (3, height, width); got {input_shape}")
        self.image = image
        self.stem = Unit(input_shape[0], STEM, 3, 2)
        widths = pairwise([STEM, *(stage[-1] for stage in STAGES)])
        self.blocks = nn.Sequential()
        for (inputs, outputs), (count, kernel, stride, expansion, _) in zip(widths, STAGES, strict=True):
            for index in range(count):
                first = (inputs, stride) if index == 0 else (outputs, 1)
                self.blocks.append(Inverted(first[0], outputs, kernel, first[1], expansion))
        self.last = Unit(STAGES[-1][-1], LAST, 1)
        self.head = nn.Linear(LAST, classes)

    def forward(self, x: Tensor) -> Tensor:
        if self.image and x.shape[-2:] != (self.image, self.image):
            x = functional.interpolate(x, size=(self.image, self.image), mode="bilinear")
        return self.head(self.last(self.blocks(self.stem(x))).mean((2, 3)))

    def converted(self, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
        """The published file's tensors under this network's names."""
        return {_own_name(name): tensor for name, tensor in tensors.items()}


def _own_name(name: str) -> str:
    layer, _, leaf = name.rpartition(".")
    if not layer.startswith("_blocks."):
        return f"{_PUBLISHED.get(layer, layer)}.{leaf}"
    _, index, inside = layer.split(".")
    return f"blocks.{index}.{_IN_BLOCK[inside]}.{leaf}"
