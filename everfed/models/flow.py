"""A class-conditional normalising flow over feature vectors (AF-FCL, Wuerkaixi et al., 2024).

Layers of [permutation, affine coupling] map features to noise: one half passes unchanged and determines the scale and
shift of the other. Scales are at most 1.001, so the map to the noise contracts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

PERMUTED = ("reverse", "reverse", "random", "random")  # per layer


@dataclass(frozen=True)
class FlowBlueprint:
    """features: D. classes: C, the context is a one-hot label. hidden: width of the networks inside."""

    features: int
    classes: int
    hidden: int = 512

    def build(self) -> nn.Module:
        return ConditionalFlow(self.features, self.classes, self.hidden)


class ResidualBlock(nn.Module):
    """x + GLU(Linear(LReLU(Linear(LReLU(x)))), Linear(context)); the last linear layer begins near zero."""

    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.context = nn.Linear(classes, hidden)
        for parameter in self.second.parameters():
            nn.init.uniform_(parameter, -1e-3, 1e-3)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        inner = self.second(functional.leaky_relu(self.first(functional.leaky_relu(x))))
        return x + inner * torch.sigmoid(self.context(context))


class Coupling(nn.Module):
    """Scales and shifts the second half of a vector by a network's outputs for the first half and the label."""

    def __init__(self, features: int, classes: int, hidden: int, blocks: int = 2) -> None:
        super().__init__()
        self.same = features // 2
        self.dense = nn.Linear(self.same + classes, hidden)
        self.blocks = nn.ModuleList(ResidualBlock(hidden, classes) for _ in range(blocks))
        self.out = nn.Linear(hidden, 2 * (features - self.same))

    def forward(self, x: Tensor, context: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
        """(outputs, log-determinant (n,)) of the map, or of its inverse."""
        same, other = x[:, : self.same], x[:, self.same :]
        hidden = self.dense(torch.cat([same, context], dim=1))
        for block in self.blocks:
            hidden = block(hidden, context)
        shift, raw = self.out(hidden).chunk(2, dim=1)
        scale = torch.sigmoid(raw + 2.0) + 1e-3
        size = torch.log(scale).sum(1)
        if inverse:
            return torch.cat([same, (other - shift) / scale], dim=1), -size
        return torch.cat([same, other * scale + shift], dim=1), size


class ConditionalFlow(nn.Module):
    """Four couplings. With D = 512: 5,943,296 parameters for 26 classes, 6,397,952 for 100, 5,906,432 for 20."""

    def __init__(self, features: int, classes: int, hidden: int = 512) -> None:
        super().__init__()
        self.couplings = nn.ModuleList(Coupling(features, classes, hidden) for _ in PERMUTED)

    def forward(self, x: Tensor, context: Tensor, orders: Tensor, inverse: bool = False) -> tuple[Tensor, Tensor]:
        """Features to noise, or back: (n, D), and the log-determinant (n,). orders: (layers, D) of `permutations`."""
        total = torch.zeros_like(x[:, 0])
        layers = list(zip(self.couplings, orders, strict=True))
        for coupling, order in reversed(layers) if inverse else layers:
            x = x if inverse else x.index_select(1, order)
            x, size = coupling(x, context, inverse)
            x = torch.empty_like(x).index_copy(1, order, x) if inverse else x
            total = total + size
        return x, total


def permutations(features: int, seed: int) -> Tensor:
    """(layers, D): reversed, or drawn from the seed, which is the same on all clients."""
    drawn = torch.Generator().manual_seed(seed)
    orders: dict[str, Callable[[], Tensor]] = {
        "reverse": lambda: torch.arange(features - 1, -1, -1),
        "random": lambda: torch.randperm(features, generator=drawn),
    }
    return torch.stack([orders[kind]() for kind in PERMUTED])


def log_normal(z: Tensor) -> Tensor:
    """(n,) log-density of N(0, I)."""
    return -0.5 * z.square().sum(1) - 0.5 * z.shape[1] * math.log(2 * math.pi)
