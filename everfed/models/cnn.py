"""Small networks for small images: an MLP, the CNNs of the FedGP, FedAvg and STAMP papers, and Conv-4."""

from __future__ import annotations

import itertools
import math

from torch import Tensor, nn
from torch.nn import functional

from everfed.core.random import Dropout
from everfed.models.fused import conv_relu_pool, dense_relu_dense

SMALLEST_IMAGE = 16  # pixels a side from which convolutions pay


def automatic(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """A network that suits the form of the data."""
    square = len(input_shape) == 3 and input_shape[1] == input_shape[2] >= SMALLEST_IMAGE
    return McMahanCNN(input_shape, classes) if square else MLP(input_shape, classes)


class MLP(nn.Module):
    """Flatten, hidden layers with ReLU, one linear head."""

    def __init__(self, input_shape: tuple[int, ...], classes: int, hidden: tuple[int, ...] = (100, 100)) -> None:
        super().__init__()
        widths = [math.prod(input_shape), *hidden]
        layers: list[nn.Module] = [nn.Flatten()]
        for wide, narrow in itertools.pairwise(widths):
            layers += [nn.Linear(wide, narrow), nn.ReLU()]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class SmallCNN(nn.Module):
    """The network of FedGP's code: 5x5 conv 10, pool, 5x5 conv 20 with channel dropout, pool, dense 50, dropout, dense.

    21,840 parameters on 28x28 grey images with 10 classes. Smaller images are convolved with padding.
    """

    def __init__(self, input_shape: tuple[int, ...], classes: int, dropout: float = 0.5) -> None:
        super().__init__()
        channels, side, pad = _image(input_shape)
        self.conv1 = nn.Conv2d(channels, 10, 5, padding=pad)
        self.conv2 = nn.Conv2d(10, 20, 5, padding=pad)
        self.drop2 = Dropout(dropout, channels=True)
        self.dense = nn.Linear(20 * _after_two_pools(side, 5, pad) ** 2, 50)
        self.drop = Dropout(dropout)
        self.head = nn.Linear(50, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = conv_relu_pool(conv_relu_pool(x, self.conv1), self.conv2, flat=True, drop=self.drop2)
        return dense_relu_dense(x, self.dense, self.drop, self.head)


class McMahanCNN(nn.Module):
    """The CNN of the FedAvg paper: 5x5 conv 32, pool, 5x5 conv 64, pool, dense 512, dense.

    1,663,370 parameters on 28x28 grey images with 10 classes (convolutions keep the size).
    """

    padded = True

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        channels, side, least = _image(input_shape)
        pad = 2 if self.padded else least
        self.conv1 = nn.Conv2d(channels, 32, 5, padding=pad)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=pad)
        self.dense = nn.Linear(64 * _after_two_pools(side, 5, pad) ** 2, 512)
        self.head = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = conv_relu_pool(conv_relu_pool(x, self.conv1), self.conv2, flat=True)
        return self.head(functional.relu(self.dense(x)))


class TwoConvCNN(McMahanCNN):
    """The network of STAMP's released code: the same layers, and nothing is padded.

    924,708 parameters on 32x32 colour images with 100 classes. Images below 16 pixels are convolved with padding.
    """

    padded = False


class Conv4(nn.Module):
    """Conv-4 of few-shot learning (Vinyals et al., 2016): four times 3x3 conv, BatchNorm, ReLU, 2x2 pool; one head.

    138,788 parameters on 32x32 colour images with 100 classes.
    """

    def __init__(self, input_shape: tuple[int, ...], classes: int, width: int = 64) -> None:
        super().__init__()
        channels, side, _ = _image(input_shape)
        if side < 16:
            raise ValueError(f"conv-4 halves images four times; they need at least 16 pixels a side, not {side}")
        layers: list[nn.Module] = []
        for inputs in (channels, width, width, width):
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
        self.features = nn.Sequential(*layers, nn.Flatten())
        self.head = nn.Linear(width * (side // 16) ** 2, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


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
        for inputs, outputs in itertools.pairwise(widths):
            layers += [nn.Conv2d(inputs, outputs, 4, 2, 1), nn.LeakyReLU()]
            side //= 2
        self.features = nn.Sequential(*layers, nn.Flatten(), nn.Linear(widths[-1] * side**2, 512), nn.LeakyReLU())
        self.head = nn.Sequential(*dense_layers(512, 512, classes))

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.features(x))
        return outputs


def dense_layers(*widths: int) -> list[nn.Module]:
    """Linear layers with LeakyReLU between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.LeakyReLU()] if layers else []
        layers.append(nn.Linear(inputs, outputs))
    return layers


def _image(input_shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(channels, side, padding): square images only; below 16 pixels unpadded 5x5 convolutions would leave nothing."""
    if len(input_shape) != 3 or input_shape[1] != input_shape[2] or input_shape[1] < 4:
        raise ValueError(f"a CNN needs square images (channels, side, side) of at least 4 pixels; got {input_shape}")
    channels, side, _ = input_shape
    return channels, side, 0 if side >= 16 else 2


def _after_two_pools(side: int, kernel: int, pad: int) -> int:
    for _ in range(2):
        side = (side + 2 * pad - kernel + 1) // 2
    return side
