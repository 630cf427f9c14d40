"""Cross-entropy, the task loss of classification."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from everfed.kernels import load_kernels

kernel = load_kernels("everfed.kernels.loss")


def cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    """As functional.cross_entropy: the mean over all targets but -100. On a GPU one kernel for loss and gradient."""
    if not _has_kernel(outputs, y):
        return functional.cross_entropy(outputs, y)
    loss: Tensor = _CrossEntropy.apply(outputs, y)  # type: ignore[no-untyped-call]
    return loss


def _has_kernel(outputs: Tensor, y: Tensor) -> bool:
    return (
        kernel is not None
        and outputs.is_cuda
        and outputs.dtype == torch.float32
        and y.dtype == torch.int64
        and y.dim() == 1
        and y.is_contiguous()
        and kernel.fits(outputs)
        and outputs.stride(1) == 1
        and not torch.compiler.is_compiling()
        and not torch._C._functorch.is_functorch_wrapped_tensor(outputs)
    )


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, y: Tensor) -> Tensor:
        loss: Tensor
        loss, gradient = kernel.cross_entropy(outputs, y)
        ctx.save_for_backward(outputs, y, gradient)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        outputs, y, gradient = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: the gradient itself is differentiated
            (gradient,) = torch.autograd.grad(functional.cross_entropy(outputs, y), outputs, create_graph=True)
        return gradient * dloss, None
