"""Convolutions by Triton kernels: of few channels (`kernels/thin.py`), which the libraries' kernels are not made for,
and of many in half precision (`kernels/convolution.py`), which leave room on the GPU for those of other clients."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

from everfed.kernels import load_kernels

thin = load_kernels("everfed.kernels.thin")
many = load_kernels("everfed.kernels.convolution")
_MOST = 2**31  # elements of a tensor: kernels count in 32 bits


def convolve(x: Tensor, convolution: nn.Module) -> Tensor:
    """convolution(x); kernels are for those without a bias."""
    if is_plain_convolution(convolution) and convolution.bias is None:
        return unbiased(x, convolution)
    y: Tensor = convolution(x)
    return y


def unbiased(x: Tensor, convolution: nn.Conv2d) -> Tensor:
    """convolution(x) without its bias, of a layer that needs no call."""
    kernels = _kernels(x, convolution)
    if kernels is None:
        return convolution._conv_forward(x, convolution.weight, None)
    y: Tensor = _Convolved.apply(x, convolution.weight, kernels, convolution.stride, convolution.padding)
    return y


def _kernels(x: Tensor, convolution: nn.Conv2d) -> Any:
    """The module of kernels for it, or None."""
    weight = convolution.weight
    if (
        weight.dtype not in TYPES
        or not computes_in(weight.dtype, x)
        or x.dim() != 4
        or x.device != weight.device
        or not x.shape[1] == weight.shape[1] == convolution.in_channels
        or len(weight) != convolution.out_channels
        or not runs_as_written()
        or max(x.numel(), weight.numel()) >= _MOST
    ):
        return None
    chosen = thin if _has_few_channels(x, convolution) else many if _has_many_channels(x, convolution) else None
    return chosen if chosen is not None and 0 < _outputs(x, convolution) < _MOST else None


def _has_few_channels(x: Tensor, convolution: nn.Conv2d) -> bool:
    """Those of more than 31 outputs were measured in bfloat16 only, and have no gradient of their input."""
    if thin is None:
        return False
    first = thin.fits(convolution) and convolution.weight.dtype == torch.bfloat16 and not x.requires_grad
    return first or thin.fits_narrow(convolution)


def _has_many_channels(x: Tensor, convolution: nn.Conv2d) -> bool:
    return (
        many is not None
        and many.fits(convolution)
        and x.dtype == convolution.weight.dtype != torch.float32
        and x.is_contiguous(memory_format=torch.channels_last)
        and convolution.weight.is_contiguous(memory_format=torch.channels_last)
        and _is_hopper(x.device)
    )


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    """Kernels for many channels were measured on Hopper only."""
    return torch.cuda.get_device_capability(device)[0] == 9


def _outputs(x: Tensor, convolution: nn.Conv2d) -> int:
    """How many elements the output has; 0 where the image is smaller than the window. padding: numbers."""
    positions = 1
    for i, size in enumerate(x.shape[2:]):
        around = 2 * int(convolution.padding[i]) - convolution.kernel_size[i]
        positions *= max(0, (size + around) // convolution.stride[i] + 1)
    return len(x) * convolution.out_channels * positions


class _Convolved(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, kernels: Any, stride: tuple[int, int], padding: tuple[int, int]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.kernels, ctx.stride, ctx.padding = kernels, stride, padding
        y: Tensor = kernels.forward(x, weight, *_how(stride, padding))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), wanted, how = ctx.saved_tensors, ctx.needs_input_grad, _how(ctx.stride, ctx.padding)
        if torch.is_grad_enabled():  # create_graph: the gradient itself is differentiated
            y = functional.conv2d(x.to(weight.dtype), weight, None, ctx.stride, ctx.padding)
            return (*gradients(y, (x, weight), wanted, dy), None, None, None)
        dy = dy.contiguous(memory_format=torch.channels_last)
        dx = ctx.kernels.input_gradient(dy, x, weight, *how) if wanted[0] else None
        dw = ctx.kernels.weights_gradient(dy, x, weight, *how) if wanted[1] else None
        return dx, dw, None, None, None


def _how(stride: tuple[int, int], padding: tuple[int, int]) -> tuple[Any, ...]:
    """The last arguments of kernels: a padding, and a stride where there is one, which `thin` does not know."""
    return (padding,) if stride == (1, 1) else (padding, stride)


# which layers a kernel may compute -----------------------------------------------------------------------------------
TYPES = (torch.bfloat16, torch.float16, torch.float32)  # that kernels compute in


def has_hooks(layer: nn.Module) -> bool:
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return any(hooks)


def is_plain_convolution(layer: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Is this a convolution on a CUDA device that may be computed without a call of the layer?"""
    return type(layer) is nn.Conv2d and layer.weight.is_cuda and not has_hooks(layer)


def is_plain_linear(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Is this a dense layer on a CUDA device that may be computed without a call of the layer?"""
    return type(layer) is nn.Linear and layer.bias is not None and layer.weight.is_cuda and not has_hooks(layer)


def computes_in(dtype: torch.dtype, x: Tensor) -> bool:
    """Would a layer with weights of this type compute in it?"""
    return (torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype) == dtype


def runs_as_written() -> bool:
    """Is neither `torch.compile` nor torch.func at work? Both have tensors without memory that a kernel could read, and
    functions of their own in place of autograd's."""
    return not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active()


def gradients(
    y: Tensor, inputs: Sequence[Tensor | None], wanted: Sequence[bool], dy: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients of the inputs that are `wanted`, None for the others, as parts of a graph: for a backward pass that
    is differentiated itself, which kernels are not made for."""
    chosen = [t for t, want in zip(inputs, wanted, strict=False) if want and t is not None]
    found = iter(torch.autograd.grad(y, chosen, dy, create_graph=True))
    return tuple(next(found) if want and t is not None else None for t, want in zip(inputs, wanted, strict=False))
