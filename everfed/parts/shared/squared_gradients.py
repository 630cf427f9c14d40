"""The sum over samples of their squared gradients, in chunks that fit a memory budget."""

from __future__ import annotations

import torch
from torch import Tensor

from everfed.parts.shared.per_sample import Layers, Named, Network

_FIRST = 8  # samples of the first chunk, which shows how much memory one takes


def squared_gradients(network: Network, x: Tensor, y: Tensor, memory: int) -> Named:
    """By parameter. x: (n, ...) network inputs. memory: bytes that samples which are computed together may take, about.
    The module is left in eval mode."""
    network.module.eval()
    total = {name: torch.zeros_like(value) for name, value in network.params.items()}
    layers, start, size = Layers.of(network), 0, _FIRST
    while start < len(x):
        part = x[start : start + size], y[start : start + size]
        found = layers and layers.squares(*part)
        if layers and found:
            used = layers.bytes_kept
        else:
            each = network.gradients(*part)
            layers, found = None, {name: value.square().sum(0) for name, value in each.items()}
            used = sum(value.nbytes for value in each.values())
        for name, value in found.items():
            total[name] += value
        start, size = start + size, max(1, memory * len(part[0]) // used)
    return total
