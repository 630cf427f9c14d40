"""ResNet-18 (He et al., 2016), for large images, and with a 3x3 stem and no max-pool for small ones."""

from __future__ import annotations

import itertools

from torch import Tensor, nn
from torch.nn import functional

from everfed.models.cnn import dense_layers
from everfed.models.convolution import convolve
from everfed.models.fused import batch_norm_act, batch_norm_act_twice

# an activation for its two uses, the convolution and the shortcut, as `batch_norm_act_twice` returns it: on a GPU its
# backward kernel adds their gradients
Twice = tuple[Tensor, Tensor]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = Projection(inputs, outputs, stride)

    def forward(self, both: Twice) -> Twice:
        x, again = both
        out = convolve(batch_norm_act(convolve(x, self.conv1), self.bn1), self.conv2)
        return batch_norm_act_twice(out, self.bn2, self.shortcut(again))


class Projection(nn.Sequential):
    """A 1x1 convolution and BatchNorm: the shortcut where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        convolution, norm = self
        return batch_norm_act(convolve(x, convolution), norm, slope=1.0)


class ResNet18(nn.Module):
    """The CIFAR variant: 11,173,962 parameters with 10 classes, 11,220,132 with 100; 9,600 BatchNorm statistics."""

    normalises_apart = True  # all BatchNorm layers are computed by `batch_norm_act`

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        if len(input_shape) != 3:
            raise ValueError(f"resnet18 needs images (channels, height, width); got {input_shape}")
        self.conv1 = self.first_convolution(input_shape[0])
        self.bn1 = nn.BatchNorm2d(64)
        widths = (64, 64, 128, 256, 512)
        self.blocks = nn.Sequential(
            *(
                block
                for i, (inputs, outputs) in enumerate(itertools.pairwise(widths))
                for block in (BasicBlock(inputs, outputs, 1 if i == 0 else 2), BasicBlock(outputs, outputs, 1))
            )
        )
        self.head = nn.Linear(512, classes)

    @staticmethod
    def first_convolution(channels: int) -> nn.Conv2d:
        """3x3, as large as its input."""
        return nn.Conv2d(channels, 64, 3, 1, 1, bias=False)

    def stem(self, x: Tensor) -> Twice:
        """(n, 64, height, width) before the blocks, twice."""
        return batch_norm_act_twice(convolve(x, self.conv1), self.bn1)

    def features(self, x: Tensor) -> Tensor:
        """(n, 512) before the head."""
        last, _ = self.blocks(self.stem(x))
        return functional.adaptive_avg_pool2d(last, 1).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class ResNet18ImageNet(ResNet18):
    """The network of the paper, for images of 100 pixels and more: 11,689,512 parameters with 1,000 classes."""

    @staticmethod
    def first_convolution(channels: int) -> nn.Conv2d:
        """7x7, half as large as its input."""
        return nn.Conv2d(channels, 64, 7, 2, 3, bias=False)

    def stem(self, x: Tensor) -> Twice:
        """(n, 64, height / 4, width / 4) before the blocks, twice."""
        pooled = functional.max_pool2d(super().stem(x)[0], 3, 2, 1)
        return pooled, pooled


class ResNet18Deep(ResNet18):
    """ResNet-18 with a head of three linear layers: 11,745,444 parameters with 100 classes. (The release has 139,124
    more in attention modules and a layer that it does not use.) Pooling is global, so that any size will do."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__(input_shape, classes)
        self.head = nn.Sequential(*dense_layers(512, 512, 512, classes))  # type: ignore[assignment]
