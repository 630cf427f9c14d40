"""Dropout that draws from everfed's own generator, so that a run does not depend on the order of its clients."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Dropout(nn.Module):
    """Zero each element with probability `rate` (per channel when `channels`), scaling the rest by 1 / (1 - rate).

    `generator` is set by whoever trains the model and reseeded per client; without one, training raises.
    """

    def __init__(self, rate: float = 0.5, channels: bool = False) -> None:
        super().__init__()
        if not 0.0 <= rate < 1.0:
            raise ValueError(f"dropout rate must be in [0, 1), got {rate}")
        self.rate = rate
        self.channels = channels
        self.generator: torch.Generator | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0.0:
            return x
        if self.generator is None:
            raise RuntimeError("this Dropout has no generator; train the model through everfed")
        shape = (*x.shape[:2], *([1] * (x.dim() - 2))) if self.channels else x.shape
        keep = torch.rand(shape, generator=self.generator, device=x.device) >= self.rate
        return x * keep / (1.0 - self.rate)

    def extra_repr(self) -> str:
        return f"rate={self.rate}, channels={self.channels}"


def adopt(module: nn.Module, generator: torch.Generator) -> None:
    """Replace torch's dropout layers inside `module` by ours, and give them all `generator`."""
    for parent in list(module.modules()):
        for name, child in list(parent._modules.items()):  # unlike named_children: every name of a shared layer
            if isinstance(child, nn.AlphaDropout | nn.FeatureAlphaDropout):
                raise ValueError(f"{type(child).__name__} draws from torch's global generator; use everfed's Dropout")
            if isinstance(child, nn.Dropout1d | nn.Dropout2d | nn.Dropout3d):
                setattr(parent, name, Dropout(child.p, channels=True))
            elif isinstance(child, nn.Dropout):
                setattr(parent, name, Dropout(child.p))
    for layer in module.modules():
        if isinstance(layer, Dropout):
            layer.generator = generator
