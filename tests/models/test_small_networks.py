"""The small networks: where dropout acts, and which part of a generated image is used."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from everfed.models.acgan import _cut
from everfed.models.cnn import SmallCNN


class Seen(nn.Module):
    """In place of a layer: remembers what reaches it, and passes zeros on."""

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        return torch.zeros_like(x)


def test_the_small_cnn_drops_channels_of_its_second_convolution_and_hidden_features() -> None:
    """28 pixels: 24 after the first convolution, 12 pooled, 8 after the second. Behind the last dropout there is the
    head alone: of zeros, its bias."""
    module = SmallCNN((1, 28, 28), 10)
    module.drop, module.drop2 = Seen(), Seen()  # type: ignore[assignment]
    outputs = module(torch.rand(3, 1, 28, 28, generator=torch.Generator().manual_seed(0)))
    assert module.drop2.x.shape == (3, 20, 8, 8) and module.drop.x.shape == (3, 50)
    assert torch.equal(outputs, module.head.bias.expand(3, 10))


def test_of_a_larger_image_the_middle_is_used() -> None:
    images = torch.arange(36.0).reshape(1, 1, 6, 6)
    assert _cut(images, 2)[0, 0].tolist() == [[14.0, 15.0], [20.0, 21.0]]
    assert torch.equal(_cut(images, 6), images)
