"""The diagonal of the empirical Fisher information, with true labels, in eval mode."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from everfed import Context, Data, Model

FISHER_KINDS = ("sample", "batch")
_CHUNK_BYTES = 256 << 20  # of per-sample gradients held at once


def diagonal_fisher(ctx: Context, model: Model, data: Data, kind: str = "sample") -> Tensor:
    """(P,) u_i = (1/n) sum over samples of (d loss / d w_i)^2 at `model`.

    kind "batch" squares the mean gradient of each minibatch instead, as much public code does.
    """
    size = ctx.options.batch_size if kind == "batch" else _chunk(ctx)
    total = torch.zeros_like(model["params"], device=ctx.train.device)
    weight = 0
    for start in range(0, len(data), size):
        x, y = data.x[start : start + size], data.y[start : start + size]
        if kind == "batch":
            total += ctx.train.gradient(ctx, model, x, y, mode="eval", tag="fisher").square()
            weight += 1
        else:
            total += squared_gradients(ctx, model, x, y)
            weight += len(y)
    return total / max(weight, 1)


def squared_gradients(ctx: Context, model: Model, x: Tensor, y: Tensor) -> Tensor:
    """(P,) sum over samples of the squared gradient of each sample's task loss."""
    trainer = ctx.train
    replica = trainer.replica
    replica.load(model)
    replica.module.eval()
    named = replica.layout.named(replica.params)  # float32, whatever the module computes in
    fixed = {n: p.detach() for n, p in replica.module.named_parameters() if not p.requires_grad}
    buffers = dict(replica.module.named_buffers())
    loss = trainer.task_loss(ctx)

    def sample_loss(params: dict[str, Tensor], one: Tensor, label: Tensor) -> Tensor:
        outputs = functional_call(replica.module, (params, fixed, buffers), (one.unsqueeze(0),))
        return loss(outputs, label.unsqueeze(0))

    inputs = trainer.stream.inputs(x.to(trainer.device))
    grads = vmap(grad(sample_loss), in_dims=(None, 0, 0))(named, inputs, y.to(trainer.device))
    squares = tuple(grads[entry.name].square().sum(0) for entry in replica.layout.params)
    return replica.layout.flatten_gradient(squares)


def _chunk(ctx: Context) -> int:
    return max(1, min(256, _CHUNK_BYTES // (4 * ctx.facts.layout.size)))
