"""The two meta-nets of FedL2P, and the statistics of a client's data that they read: from mean and spread of the inputs
of a network's layers to how the model is personalised."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from everfed.method import Client, Layout
from everfed.methods.common.layers import CHUNK, in_precision, network

MEAN, VARIANCE = "running_mean", "running_var"


@dataclass(frozen=True)
class Sites:
    """What of a network is personalised. layers: those with parameters. tensors: its parameters. norms: BatchNorms."""

    layers: tuple[str, ...]
    tensors: tuple[str, ...]
    norms: tuple[str, ...]

    @staticmethod
    def of(layout: Layout) -> Sites:
        tensors = tuple(entry.name for entry in network(layout))
        layers = tuple(dict.fromkeys(name.rpartition(".")[0] for name in tensors))
        norms = tuple(e.name.rpartition(".")[0] for e in layout.stats if e.name.endswith(MEAN))
        return Sites(layers, tensors, norms)


class MetaNets(nn.Module):
    """LR-Net: (mean, deviation) of every layer's input -> a factor per parameter tensor, times a learned base rate.
    BN-Net: one divergence per BatchNorm layer -> beta per layer; absent where there is no BatchNorm.

    Both have three layers. At first every factor is 1 and every beta 1/2, whatever the input.
    """

    def __init__(self, sites: Sites, hidden: int, base_rate: float, limit: float) -> None:
        super().__init__()
        self.limit = limit
        self.lr_net = _three_layers(2 * len(sites.layers), hidden, len(sites.tensors), 1.0)
        self.base_rates = nn.Parameter(torch.full((len(sites.tensors),), base_rate))
        self.bn_net = _three_layers(len(sites.norms), hidden, len(sites.norms), 0.5) if sites.norms else None

    def forward(self, inputs: Tensor, divergences: Tensor) -> tuple[Tensor, Tensor]:
        """(rates (tensors,), betas (norms,)); factors lie in [0, limit] and betas in [0, 1]."""
        factors = clamped(self.lr_net(inputs), 0.0, self.limit)
        betas = divergences.new_zeros(0) if self.bn_net is None else clamped(self.bn_net(divergences), 0.0, 1.0)
        return factors * self.base_rates, betas

    def vector(self) -> Tensor:
        """All its parameters, in order."""
        return torch.cat([p.detach().reshape(-1) for p in self.parameters()])

    def at(self, vector: Tensor, inputs: Tensor, divergences: Tensor) -> tuple[Tensor, Tensor]:
        """`forward` with the parameters of `vector`, which may require gradients."""
        named = dict(self.named_parameters())
        pieces = vector.split([p.numel() for p in named.values()])
        tensors = {name: piece.view_as(p) for (name, p), piece in zip(named.items(), pieces, strict=True)}
        result: tuple[Tensor, Tensor] = functional_call(self, tensors, (inputs, divergences))
        return result


def _three_layers(inputs: int, hidden: int, outputs: int, first: float) -> nn.Sequential:
    last = nn.Linear(hidden, outputs)
    nn.init.zeros_(last.weight)
    nn.init.constant_(last.bias, first)
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), last)


def clamped(x: Tensor, low: float, high: float) -> Tensor:
    """x within bounds, with the gradient of x itself (straight-through)."""
    return x.detach().clamp(low, high) + (x - x.detach())  # the second term is exactly 0


def symmetric_divergence(mean: Tensor, var: Tensor, other_mean: Tensor, other_var: Tensor, eps: float = 1e-5) -> Tensor:
    """0-d: mean over channels of (KL(p || q) + KL(q || p)) / 2 of normal distributions; the logarithms cancel."""
    a, b = var + eps, other_var + eps
    gap = (mean - other_mean).square()
    return (((a + gap) / b + (b + gap) / a) / 4.0 - 0.5).mean()


# the statistics ------------------------------------------------------------------------------------------------------
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


def input_moments(client: Client, x: Tensor, layers: Iterable[str]) -> dict[str, InputMoments]:
    """Moments of the inputs of `layers` when the client's model runs on samples x (storage form), in eval mode."""
    trainer = client.trainer
    trainer.replica.load(client.model)
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
