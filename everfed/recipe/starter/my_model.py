"""A network of your own. everfed calls it with the shape of one input, the number of classes, and [model]'s options."""

from __future__ import annotations

import math

from torch import Tensor, nn


class Net(nn.Module):
    """Two linear layers; hidden: units between them."""

    def __init__(self, input_shape: tuple[int, ...], classes: int, hidden: int = 64) -> None:
        super().__init__()
        inputs = math.prod(input_shape)
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, classes))

    def forward(self, x: Tensor) -> Tensor:
        """Inputs (n, *input_shape) to logits (n, classes)."""
        outputs: Tensor = self.layers(x)
        return outputs
