"""Layers that follow each other as one operation, with Triton kernels on a GPU.

    batch_norm_act    act(BatchNorm(x) + residual), act(v) = v for v > 0, slope * v otherwise (0: ReLU, 1: none)
    conv_relu_pool    max_pool2d(relu(dropout(convolution(x))), 2)
    dense_relu_dense  second(dropout(relu(first(x)))) of two small dense layers

PyTorch reads and writes the activations once for each of them, forward and backward; in small networks that is a third
of a training step. The kernels are used for channels-last tensors on CUDA; everything else (CPUs, no Triton, gradients
of a BatchNorm's parameters in evaluation mode, `torch.compile`) takes PyTorch's own operations. Sums are taken in a
fixed order, so results repeat bit for bit; they differ from PyTorch's by rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from everfed.core.random import Dropout
from everfed.core.replica import minibatch_sizes
from everfed.kernels import load_kernels
from everfed.models.convolution import (
    TYPES,
    computes_in,
    gradients,
    has_hooks,
    is_plain_convolution,
    is_plain_linear,
    runs_as_written,
    unbiased,
)

batchnorm = load_kernels("everfed.kernels.batchnorm")
tiles = load_kernels("everfed.kernels.tiles")
moments = load_kernels("everfed.kernels.moments")
pooling = load_kernels("everfed.kernels.pooling")
dense = load_kernels("everfed.kernels.dense")


def batch_norm_act(x: Tensor, norm: nn.Module, residual: Tensor | None = None, slope: float = 0.0) -> Tensor:
    """act(norm(x) + residual)."""
    return batch_norm_act_twice(x, norm, residual, slope, twice=False)[0]


def batch_norm_act_twice(
    x: Tensor, norm: nn.Module, residual: Tensor | None = None, slope: float = 0.0, twice: bool = True
) -> tuple[Tensor, Tensor]:
    """act(norm(x) + residual) for two uses: a tensor for each, whose gradients the backward kernel adds up."""
    if not (isinstance(norm, nn.BatchNorm2d) and _fusable(x, norm, residual)):  # a frozen one is a layer of its own
        y = _composed(_normalised(x, norm), residual, slope)
        return y, y
    for hook in norm._forward_pre_hooks.values():  # as a call of the layer would
        changed = hook(norm, (x,))
        x = x if changed is None else changed[0] if isinstance(changed, tuple) else changed
    if norm.training:
        running = (norm.running_mean, norm.running_var, norm.num_batches_tracked)
        how = (norm.momentum, norm.eps, slope, twice, _counts(norm, x))
        made = _Trained.apply(x, residual, norm.weight, norm.bias, running, *how, minibatch_sizes(x))
        return made if twice else (made, made)
    stored = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
    y = _Mapped.apply(x, residual, stored, norm.eps, slope)
    return y, y


def _normalised(x: Tensor, norm: nn.Module) -> Tensor:
    """norm(x), of each minibatch by itself."""
    sizes = minibatch_sizes(x)
    if len(sizes) == 1 or not norm.training:
        y: Tensor = norm(x)
        return y
    return torch.cat([norm(own) for own in x.split(sizes)])


def _composed(x: Tensor, residual: Tensor | None, slope: float) -> Tensor:
    out = x if residual is None else x + residual
    if slope == 1.0:
        return out
    return functional.leaky_relu(out, slope) if slope else functional.relu(out)


def _fusable(x: Tensor, norm: nn.BatchNorm2d, residual: Tensor | None) -> bool:
    """Is this a case for the kernels? In evaluation they have no gradient for the layer's own parameters."""
    return (
        batchnorm is not None
        and x.is_cuda
        and norm.affine
        and norm.track_running_stats
        and norm.momentum is not None
        and x.shape[1] == norm.num_features
        and (not norm.training or _more_than_one_value(x))  # one value has no variance: PyTorch raises
        and (norm.training or not (torch.is_grad_enabled() and norm.weight.requires_grad))
        and not (norm._forward_hooks or norm._forward_pre_hooks_with_kwargs)
        and _plain(x)
        and (residual is None or (_plain(residual) and residual.shape == x.shape and residual.dtype == x.dtype))
    )


def _more_than_one_value(x: Tensor) -> bool:
    """Has every channel of every minibatch more than one?"""
    return min(minibatch_sizes(x)) * math.prod(x.shape[2:]) > 1


def conv_relu_pool(x: Tensor, convolution: nn.Module, flat: bool = False, drop: Dropout | None = None) -> Tensor:
    """max_pool2d(relu(drop(convolution(x))), 2); flat: with one row for each image. drop: of whole channels."""
    if not (pooling is not None and is_plain_convolution(convolution) and convolution.bias is not None):
        return _pooled(_dropped(convolution(x), drop), flat)
    out = unbiased(x, convolution)
    if not (_plain(out, 1) and min(out.shape[2:]) > 1 and _is_plain_dropout(drop) and (drop is None or drop.channels)):
        return _pooled(_dropped(out + convolution.bias.to(out.dtype).view(1, -1, 1, 1), drop), flat)
    y: Tensor = _Pooled.apply(out, convolution.bias, flat, _counts(convolution, out), *_noise(drop, out.shape[:2], out))
    return y


def dense_relu_dense(x: Tensor, first: nn.Module, drop: Dropout, second: nn.Module) -> Tensor:
    """second(drop(relu(first(x))))."""
    if not (
        dense is not None
        and is_plain_linear(first)
        and is_plain_linear(second)
        and _is_plain_dropout(drop)
        and dense.fits(x, first, second)
        and x.dtype in TYPES
        and x.dtype == first.weight.dtype == second.weight.dtype
        and computes_in(x.dtype, x)
        and all(t.is_contiguous() for t in (x, first.weight, second.weight))
        and runs_as_written()
    ):
        out: Tensor = second(drop(functional.relu(first(x))))
        return out
    layers = (first.weight, first.bias, second.weight, second.bias)
    y: Tensor = _Dense.apply(x, *layers, *_noise(drop, (len(x), first.out_features), x))
    return y


def _is_plain_dropout(drop: Dropout | None) -> bool:
    """May it be computed without a call of the layer?"""
    return drop is None or (type(drop) is Dropout and drop.p < 1.0 and not has_hooks(drop))


def _noise(drop: Dropout | None, shape: Sequence[int], x: Tensor) -> tuple[Tensor | None, float]:
    """(uniform numbers, the probability below which what has one is left out)."""
    if drop is None or not drop.drops:
        return None, 0.0
    return drop.noise(shape, x.device), drop.p


def _dropped(x: Tensor, drop: Dropout | None) -> Tensor:
    return x if drop is None else drop(x)


def _pooled(x: Tensor, flat: bool) -> Tensor:
    y = functional.relu(functional.max_pool2d(x, 2))  # the same as the other way round, on a quarter of the elements
    return y.flatten(1) if flat else y


def _counts(layer: nn.Module, x: Tensor) -> Tensor:
    """Zeros that the layer's kernels count with and leave as zeros. They stay with the layer, which is computed by one
    stream at a time, as its running statistics and gradients are."""
    kept: Tensor | None = layer.__dict__.get("_counts")
    if kept is None or kept.device != x.device:
        kept = layer.__dict__["_counts"] = tiles.new_counts(x)
    return kept


def channel_moments(x: Tensor, layer: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """(x, mean, biased variance) of a layer's input (n, C, ...), per channel, in float32, with gradients. Who goes on
    with the x that is returned has all its gradients added up by one kernel."""
    if batchnorm is not None and x.is_cuda and _plain(x):
        found: tuple[Tensor, Tensor, Tensor] = _Moments.apply(x, _counts(layer, x))
        return found
    variance, mean = torch.var_mean(x.float(), dim=[0, *range(2, x.dim())], correction=0)
    return x, mean, variance


def _plain(x: Tensor, channels: int = 16) -> bool:
    """channels: their number has to be a multiple of this."""
    return (
        x.dim() == 4
        and x.dtype in TYPES
        and x.shape[1] % channels == 0
        and 0 < x.numel() < 2**31
        and x.is_contiguous(memory_format=torch.channels_last)
        and runs_as_written()
    )


class _Trained(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        running: tuple[Tensor, Tensor, Tensor],
        momentum: float,
        eps: float,
        slope: float,
        twice: bool,
        counts: Tensor,
        sizes: tuple[int, ...],
    ) -> Tensor | tuple[Tensor, Tensor]:
        y, means, rstds = batchnorm.forward(x, residual, weight, bias, running, momentum, eps, slope, counts, sizes)
        ctx.save_for_backward(x, residual, y if residual is not None else None, weight, bias, means, rstds)
        ctx.eps, ctx.slope, ctx.counts, ctx.sizes = eps, slope, counts, sizes
        ctx.set_materialize_grads(False)  # no zeros for a use that has no gradient
        return (y, y.detach()) if twice else y

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        x, residual, y, weight, bias, means, rstds = ctx.saved_tensors
        dy, again = ([d for d in incoming if d is not None] + [None, None])[:2]
        if dy is None:
            return (None,) * 11
        if torch.is_grad_enabled():  # create_graph: the gradient itself is differentiated
            dy = dy if again is None else dy + again
            inputs = (x, residual, weight, bias)
            grads = _differentiable(dy, inputs, ctx.needs_input_grad, ctx.eps, ctx.slope, ctx.sizes)
        else:
            grads = batchnorm.backward(dy, again, x, y, weight, bias, means, rstds, ctx.slope, ctx.counts, ctx.sizes)
        return (*grads, *[None] * 7)


def _differentiable(
    dy: Tensor,
    inputs: tuple[Tensor, Tensor | None, Tensor, Tensor],
    wanted: Sequence[bool],
    eps: float,
    slope: float,
    sizes: tuple[int, ...],
) -> tuple[Tensor | None, ...]:
    """(dx, dresidual, dweight, dbias), those that are `wanted`, by PyTorch's operations, which can be differentiated
    again."""
    x, residual, weight, bias = inputs
    normed = torch.cat([functional.batch_norm(own, None, None, weight, bias, True, 0.0, eps) for own in x.split(sizes)])
    return gradients(_composed(normed, residual, slope), inputs, wanted, dy)


class _Mapped(torch.autograd.Function):
    """act(BatchNorm(x) + residual) in evaluation mode, what is stored in the layer being constant."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, stored: tuple[Tensor, ...], eps: float, slope: float
    ) -> Tensor:
        y = batchnorm.mapped(x, residual, stored, eps, slope)
        weight, _, _, variance = stored
        ctx.save_for_backward(y, weight, variance)
        ctx.residual, ctx.eps, ctx.slope = residual is not None, eps, slope
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx, dresidual = batchnorm.mapped_backward(dy, *ctx.saved_tensors, ctx.residual, ctx.eps, ctx.slope)
        return dx, dresidual, None, None, None


class _Pooled(torch.autograd.Function):
    """max_pool2d(relu(x + bias), 2), without the channels of an image whose noise is below p."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor, flat: bool, counts: Tensor, noise: Tensor | None, p: float
    ) -> Tensor:
        ctx.save_for_backward(x, bias, noise)
        ctx.flat, ctx.counts, ctx.p = flat, counts, p
        return pooling.forward(x, bias, flat, noise, p)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, bias, noise = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: the gradient itself is differentiated
            shifted = x + bias.to(x.dtype).view(1, -1, 1, 1)
            y = _pooled(_kept(shifted, None if noise is None else noise[..., None, None], ctx.p), ctx.flat)
            grads = gradients(y, (x, bias), ctx.needs_input_grad, dy)
        else:
            grads = pooling.backward(dy, x, bias, ctx.flat, ctx.counts, noise, ctx.p)
        return (*grads, None, None, None, None)


class _Dense(torch.autograd.Function):
    """second(dropout(relu(first(x)))); noise: of the dropout, None where nothing is left out."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, b: Tensor, v: Tensor, c: Tensor, noise: Tensor | None, p: float
    ) -> Tensor:
        hidden, y = dense.forward(x, w, b, v, c, noise, p)
        ctx.save_for_backward(x, w, b, v, c, noise, hidden)
        ctx.p = p
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, w, b, v, c, noise, hidden = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: the gradient itself is differentiated
            units = _kept(functional.relu(functional.linear(x, w, b)), noise, ctx.p)
            grads = gradients(functional.linear(units, v, c), (x, w, b, v, c), ctx.needs_input_grad, dy)
        else:
            grads = dense.backward(dy, x, hidden, w, v, noise, ctx.p)
        return (*grads, None, None)


def _kept(x: Tensor, noise: Tensor | None, p: float) -> Tensor:
    """Dropout with these uniform numbers."""
    return x if noise is None else Dropout.kept(x, noise, p)


class _Moments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, variance = moments.moments(x, counts)
        ctx.save_for_backward(x, mean)
        return x.detach(), mean, variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor, dmean: Tensor, dvariance: Tensor) -> tuple[Tensor | None, ...]:
        x, mean = ctx.saved_tensors
        return moments.moments_backward(x, dx, mean, dmean, dvariance), None
