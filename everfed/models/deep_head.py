"""The networks of AF-FCL's released code, whose heads are several layers: `head` is all that follows the features."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from everfed.models.resnet import ResNet18


class SConvNet(nn.Module):
    """4x4 convolutions of stride 2 with 64, 128 and 256 channels, a linear layer to 512 features; head 512, classes.
    LeakyReLU follows every layer but the last; features are taken behind it.

    2,112,986 parameters on 1 x 28 x 28 images with 26 classes, 3,029,460 on 3 x 32 x 32 with 20. At 64 pixels one more
    convolution with 256 channels.
    """

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        if len(input_shape) != 3 or input_shape[1] != input_shape[2] or input_shape[1] < 8:
            raise ValueError(f"s-convnet needs square images of at least 8 pixels; got {input_shape}")
        side = input_shape[1]
        widths = [input_shape[0], 64, 128, 256, *([256] if side >= 64 else [])]
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Conv2d(inputs, outputs, 4, 2, 1), nn.LeakyReLU()]
            side //= 2
        self.features = nn.Sequential(*layers, nn.Flatten(), nn.Linear(widths[-1] * side**2, 512), nn.LeakyReLU())
        self.head = nn.Sequential(*_layers(512, 512, classes))

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.features(x))
        return outputs


class ResNet18Deep(ResNet18):
    """ResNet-18 with a head of three linear layers: 11,745,444 parameters with 100 classes. (The release has 139,124
    more in attention modules and a layer that it does not use.) Pooling is global, so that any size will do."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__(input_shape, classes)
        self.head = nn.Sequential(*_layers(512, 512, 512, classes))  # type: ignore[assignment]


def _layers(*widths: int) -> list[nn.Module]:
    """Linear layers with LeakyReLU between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.LeakyReLU()] if layers else []
        layers.append(nn.Linear(inputs, outputs))
    return layers
