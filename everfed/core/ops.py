"""Operations of a training step that have kernels on a GPU beside torch's own way, or that several layers agree on:
cross-entropy, rows of several tensors at the same places, minibatches that BatchNorm keeps apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from everfed.kernels import load_kernels

loss_kernel = load_kernels("everfed.kernels.loss")
rows_kernel = load_kernels("everfed.kernels.rows")


# cross-entropy, the task loss of classification -----------------------------------------------------------------------
def cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    """As functional.cross_entropy: the mean over all targets but -100. On a GPU one kernel for loss and gradient."""
    if not _has_loss_kernel(outputs, y):
        return functional.cross_entropy(outputs, y)
    loss: Tensor = _CrossEntropy.apply(outputs, y)  # type: ignore[no-untyped-call]
    return loss


def _has_loss_kernel(outputs: Tensor, y: Tensor) -> bool:
    return (
        loss_kernel is not None
        and outputs.is_cuda
        and outputs.dtype == torch.float32
        and y.dtype == torch.int64
        and y.dim() == 1
        and y.is_contiguous()
        and loss_kernel.fits(outputs)
        and outputs.stride(1) == 1
        and not torch.compiler.is_compiling()
        and not torch._C._functorch.is_functorch_wrapped_tensor(outputs)
    )


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, y: Tensor) -> Tensor:
        loss: Tensor
        loss, gradient = loss_kernel.cross_entropy(outputs, y)
        ctx.save_for_backward(outputs, y, gradient)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        outputs, y, gradient = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: the gradient itself is differentiated
            (gradient,) = torch.autograd.grad(functional.cross_entropy(outputs, y), outputs, create_graph=True)
        return gradient * dloss, None


# rows of several tensors at the same places -----------------------------------------------------------------------
def take_rows(tensors: Sequence[Tensor], index: Tensor) -> list[Tensor]:
    """The rows `index` of each tensor, as index_select along the first axis. On a GPU one kernel for all."""
    if _has_rows_kernel(index, tensors):
        made: list[Tensor] = rows_kernel.gather(tensors, index)
        return made
    return [tensor.index_select(0, index) for tensor in tensors]


def put_rows(places: Sequence[Tensor], index: Tensor, values: Sequence[Tensor]) -> None:
    """Write values[i] into the rows `index` of places[i], in place, as index_copy_ along the first axis."""
    same = all(place.dtype == value.dtype for place, value in zip(places, values, strict=True))
    if same and _has_rows_kernel(index, [*places, *values], len(places)):
        rows_kernel.scatter(places, index, values)
        return
    for place, value in zip(places, values, strict=True):
        place.index_copy_(0, index, value)


def _has_rows_kernel(index: Tensor, tensors: Sequence[Tensor], count: int | None = None) -> bool:
    return (
        rows_kernel is not None
        and all(tensor.is_cuda for tensor in (index, *tensors))
        and index.dtype == torch.int64
        and index.is_contiguous()
        and len(index) > 0
        and (count or len(tensors)) <= rows_kernel.MOST
        and all(rows_kernel.fits(tensor) for tensor in tensors)
        and not torch.compiler.is_compiling()
    )


# minibatches in one forward pass, each with BatchNorm statistics of its own ------------------------------------------
# Convolutions treat every sample by itself, and on a GPU one call for two minibatches takes less time than two calls.
# BatchNorm would mix them: it has to be given their sizes. `core/step.py` sets them around a forward pass, and the
# BatchNorm layers of networks that say so (an attribute `normalises_apart`) read them in `models/fused.py`.
_sizes: ContextVar[tuple[int, ...] | None] = ContextVar("sizes", default=None)


@contextmanager
def normalised_apart(sizes: Sequence[int]) -> Iterator[None]:
    """Inside, the first sizes[0] samples of a forward pass are one minibatch, the next sizes[1] another, and so on."""
    token = _sizes.set(tuple(sizes))
    try:
        yield
    finally:
        _sizes.reset(token)


def minibatch_sizes(x: Tensor) -> tuple[int, ...]:
    """The sizes of the minibatches in an activation (n, ...). Raises ValueError where they do not add up to n."""
    sizes = _sizes.get()
    if sizes is None:
        return (len(x),)
    if sum(sizes) != len(x):
        raise ValueError(f"minibatches of {', '.join(map(str, sizes))} samples, but an activation of {len(x)}")
    return sizes
