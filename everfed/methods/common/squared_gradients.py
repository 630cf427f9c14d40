"""The sum over samples of their squared gradients, in chunks that fit a memory budget."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from everfed.methods.common.per_sample import Named, Network, closed_forms

_MOST = 256  # samples of a chunk: more are no faster


def squared_gradients(
    network: Network, x: Tensor, y: Tensor, memory: int, inputs: Callable[[Tensor], Tensor] = lambda stored: stored
) -> Named:
    """By parameter. x: (n, ...) samples, from which `inputs` makes what the network is fed with. memory: bytes that
    samples which are computed together may take, about. The module is left in eval mode."""
    network.module.eval()
    total = {name: torch.zeros_like(value) for name, value in network.params.items()}
    few = max(1, min(_MOST, memory // sum(value.nbytes for value in total.values())))  # with the gradients of each
    start, size = 0, few
    layers = closed_forms(network, inputs(x[: few + 1]), y[: few + 1])
    while start < len(x):
        part = inputs(x[start : start + size]), y[start : start + size]
        start += size
        found = layers.squares(*part) if layers else None
        if found:
            squares, kept = found
            size = max(1, min(_MOST, memory * len(part[0]) // kept))
        else:
            squares = {name: value.square().sum(0) for name, value in network.gradients(*part).items()}
            layers, size = None, few
        for name, value in squares.items():
            total[name] += value
    return total
