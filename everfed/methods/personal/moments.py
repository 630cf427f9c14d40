"""Mean and spread of the inputs of a network's layers, over a client's data."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn

from everfed.core.legacy import Model, Trainer
from everfed.methods.common.features import CHUNK
from everfed.methods.common.layers import in_precision


class InputMoments:
    """Running sums over the samples of one layer's input, by channel, in float64."""

    def __init__(self) -> None:
        self.count = 0
        self.total: Tensor | float = 0.0
        self.squares: Tensor | float = 0.0

    def add(self, x: Tensor) -> None:
        """x: (n, channels, ...), or (n, channels)."""
        rows = x.detach().double().transpose(0, 1).flatten(1)
        self.count += rows.shape[1]
        self.total = self.total + rows.sum(1)
        self.squares = self.squares + rows.square().sum(1)

    def by_channel(self) -> tuple[Tensor, Tensor]:
        """(mean, variance), each (channels,) float32."""
        mean = torch.as_tensor(self.total / self.count)
        variance = (self.squares / self.count - mean.square()).clamp(min=0.0)
        return mean.float(), variance.float()

    def overall(self) -> tuple[Tensor, Tensor]:
        """(mean, deviation) over all channels together, 0-d float32."""
        means = torch.as_tensor(self.total / self.count)
        mean = means.mean()
        variance = (torch.as_tensor(self.squares / self.count).mean() - mean.square()).clamp(min=0.0)
        return mean.float(), variance.sqrt().float()


def input_moments(trainer: Trainer, model: Model, x: Tensor, layers: Iterable[str]) -> dict[str, InputMoments]:
    """Moments of the inputs of `layers` when `model` runs on samples x (storage form): eval mode, no gradients."""
    trainer.replica.load(model)
    module = trainer.replica.module.eval()
    seen = {name: InputMoments() for name in layers}
    handles = [module.get_submodule(n).register_forward_pre_hook(partial(_record, s)) for n, s in seen.items()]
    try:
        with torch.no_grad(), in_precision(trainer):
            for part in x.split(CHUNK):
                module(trainer.stream.inputs(part.to(trainer.device)))
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _record(seen: InputMoments, layer: nn.Module, args: tuple[Tensor, ...]) -> None:
    seen.add(args[0])
