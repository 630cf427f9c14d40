"""The diagonal of the empirical Fisher information, with true labels, in eval mode."""

from __future__ import annotations

import torch
from torch import Tensor

from everfed.core.legacy import Context, Data, Model
from everfed.methods.common.per_sample import Network, constants
from everfed.methods.common.squared_gradients import squared_gradients

FISHER_KINDS = ("sample", "batch")
_MEMORY = 256 << 20  # bytes of samples that are computed together
_MEMORY_OF_A_GPU = 2 << 30  # launches cost more there; less of a small one, for ten clients may do it at once


def diagonal_fisher(ctx: Context, model: Model, data: Data, kind: str = "sample") -> Tensor:
    """(P,) u_i = (1/n) sum over samples of (d loss / d w_i)^2 at `model`.

    kind "batch" squares the mean gradient of each minibatch instead, as much public code does.
    """
    if kind == "sample":
        return _of_samples(ctx, model, data) / max(len(data), 1)
    total = torch.zeros_like(model["params"], device=ctx.train.device)
    size = ctx.options.batch_size
    minibatches = list(zip(data.x.split(size), data.y.split(size), strict=True)) if len(data) else []
    for x, y in minibatches:
        total += ctx.train.gradient(ctx, model, x, y, mode="eval", tag="fisher").square()
    return total / max(len(minibatches), 1)


def _of_samples(ctx: Context, model: Model, data: Data) -> Tensor:
    """(P,) sum over samples of the squared gradient of each sample's task loss."""
    trainer = ctx.train
    replica = trainer.replica
    replica.load(model)
    params = replica.layout.named(replica.params)  # float32, whatever the module computes in
    network = Network(replica.module, params, constants(replica.module), trainer.task_loss(ctx))
    x, y = data.x.to(trainer.device), data.y.to(trainer.device)
    squares = squared_gradients(network, x, y, _memory(trainer.device), trainer.stream.inputs)
    return replica.layout.flatten_gradient(tuple(squares[entry.name] for entry in replica.layout.params))


def _memory(device: torch.device) -> int:
    """Nothing that changes from run to run: how samples are divided shows in the last bits."""
    if device.type != "cuda":
        return _MEMORY
    return min(_MEMORY_OF_A_GPU, int(torch.cuda.get_device_properties(device).total_memory) // 64)
