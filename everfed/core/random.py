"""Random numbers keyed by what they are for, never by when they are drawn.

Each draw comes from a generator named by (seed, round, phase, client, tag), so the order in which clients run, the
engine that runs them and the other parts of a method cannot change it. Dropout draws from a generator of its network.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

Key = int | str | None


def key(*parts: Key) -> int:
    """A stable 63-bit integer for a tuple of names and numbers, the same on every machine."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(*parts: Key) -> np.random.Generator:
    """A numpy generator for `parts`."""
    return np.random.Generator(np.random.Philox(key=key(*parts)))


# dropout --------------------------------------------------------------------------------------------------------------
class Dropout(nn.Dropout):
    """nn.Dropout that draws from `generator`, so that a run does not depend on the order of its clients.

    channels: zero whole channels, as nn.Dropout2d does. `generator` is set by the trainer of the network and reseeded
    per client; without one, training raises.
    """

    def __init__(self, p: float = 0.5, channels: bool = False) -> None:
        super().__init__(p)
        self.channels = channels
        self.generator: torch.Generator | None = None

    @property
    def drops(self) -> bool:
        """Does it leave out anything?"""
        return self.training and self.p > 0.0

    def forward(self, x: Tensor) -> Tensor:
        if not self.drops:
            return x
        if self.p == 1.0:
            return torch.zeros_like(x)
        shape = (*x.shape[:2], *([1] * (x.dim() - 2))) if self.channels else x.shape
        return self.kept(x, self.noise(shape, x.device), self.p)

    @staticmethod
    def kept(x: Tensor, noise: Tensor, p: float) -> Tensor:
        """x without what has a number below p."""
        return x * (noise >= p) / (1.0 - p)

    def noise(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Uniform numbers for `kept`."""
        if self.generator is None:
            raise RuntimeError("this Dropout has no generator; train the model through everfed")
        return torch.rand(shape, generator=self.generator, device=device)

    def extra_repr(self) -> str:
        return f"p={self.p}, channels={self.channels}"


def adopt_dropout(module: nn.Module, generator: torch.Generator) -> None:
    """Replace torch's dropout layers inside `module` by ours, and give them all `generator`."""
    for parent in list(module.modules()):
        for name, child in list(parent._modules.items()):  # unlike named_children: every name of a shared layer
            if isinstance(child, nn.Dropout1d | nn.Dropout2d | nn.Dropout3d):
                setattr(parent, name, Dropout(child.p, channels=True))
            elif type(child) is nn.Dropout:
                setattr(parent, name, Dropout(child.p))
    for layer in module.modules():
        if isinstance(layer, Dropout):
            layer.generator = generator


@contextmanager
def global_generators(device: torch.device) -> Iterator[None]:
    """Inside, torch's global generators may be seeded; afterwards they are where they were."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield


def seed_global(device: torch.device, seed: int, step: int = 0) -> None:
    """Seed torch's global generators for one step: layers that everfed does not replace (the dropout of attention,
    DropPath) draw from them."""
    mixed = (seed + step) % 2**63
    torch.default_generator.manual_seed(mixed)
    if device.type == "cuda":
        torch.cuda.default_generators[
            torch.cuda.current_device() if device.index is None else device.index
        ].manual_seed(mixed)
