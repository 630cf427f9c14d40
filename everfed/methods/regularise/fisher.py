"""The diagonal of the empirical Fisher information, with true labels, in eval mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from everfed.method import Client, Data, Model
from everfed.methods.common.per_sample import Named, Network, closed_forms, constants

# the option of the methods that use it
FISHER: dict[str, Any] = {
    "one_of": ("sample", "batch"),
    "about": "squares the gradient of each sample, or that of minibatch means (common in public code; smaller by about "
    "the batch size)",
}
_MEMORY = 256 << 20  # bytes of samples that are computed together
_MEMORY_OF_A_GPU = 2 << 30  # launches cost more there; less of a small one, for ten clients may do it at once
_MOST = 256  # samples of a chunk: more are no faster


def diagonal_fisher(client: Client, model: Model, data: Data, kind: str = "sample") -> Tensor:
    """(P,) u_i = (1/n) sum over samples of (d loss / d w_i)^2 at `model`.

    kind "batch" squares the mean gradient of each minibatch instead, as much public code does.
    """
    client.context.require_samples(len(data))
    trainer, size = client.trainer, client.options.batch_size
    if kind == "sample":
        return _of_samples(client, model, data) / max(len(data), 1)
    total = torch.zeros_like(model["params"], device=trainer.device)
    minibatches = list(zip(data.x.split(size), data.y.split(size), strict=True)) if len(data) else []
    for x, y in minibatches:
        total += trainer.gradient(client.context, model, x, y, mode="eval", tag="fisher").square()
    return total / max(len(minibatches), 1)


def _of_samples(client: Client, model: Model, data: Data) -> Tensor:
    """(P,) sum over samples of the squared gradient of each sample's task loss."""
    trainer = client.trainer
    replica = trainer.replica
    replica.load(model)
    params = replica.layout.named(replica.params)  # float32, whatever the module computes in
    network = Network(replica.module, params, constants(replica.module), trainer.task_loss(client.context))
    x, y = data.x.to(trainer.device), data.y.to(trainer.device)
    squares = squared_gradients(network, x, y, _memory(trainer.device), trainer.stream.inputs)
    return replica.layout.flatten_gradient(tuple(squares[entry.name] for entry in replica.layout.params))


def _memory(device: torch.device) -> int:
    """Nothing that changes from run to run: how samples are divided shows in the last bits."""
    if device.type != "cuda":
        return _MEMORY
    return min(_MEMORY_OF_A_GPU, int(torch.cuda.get_device_properties(device).total_memory) // 64)


def squared_gradients(
    network: Network, x: Tensor, y: Tensor, memory: int, inputs: Callable[[Tensor], Tensor] = lambda stored: stored
) -> Named:
    """By parameter, the sum over samples of their squared gradients, in chunks. x: (n, ...) samples, from which
    `inputs` makes what the network is fed with. memory: bytes that samples which are computed together may take, about.
    The module is left in eval mode."""
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
