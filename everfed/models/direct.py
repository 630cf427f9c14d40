"""What every layer that is computed by a kernel asks first: may it be, without a call of the layer?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn

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
