"""Images on their way into a network, one Triton kernel for each transform: random crop and flip, and scaling. With
PyTorch's operations the first are eleven kernels, the second eight for three channels, each far too small for a GPU."""

# Triton kernels have no types
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
MOST = 4  # channels with constants of their own


@triton.jit(do_not_specialize=["channels", "height", "width", "pad"])
def _crop_and_flip(x_ptr, draws_ptr, y_ptr, channels, height, width, pad, stride, BLOCK: tl.constexpr):
    image = tl.program_id(0)
    dy, dx = tl.load(draws_ptr + image * stride), tl.load(draws_ptr + image * stride + 1)
    flip = tl.load(draws_ptr + image * stride + 2) == 1
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    size = height * width
    inside = place < channels * size
    channel, row, column = place // size, (place % size) // width, place % width
    row = row + dy - pad
    column = tl.where(flip, width - 1 - column, column) + dx - pad
    there = inside & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    start = image.to(tl.int64) * channels * size
    value = tl.load(x_ptr + start + channel * size + row * width + column, there, 0)
    tl.store(y_ptr + start + place, value, inside)


@triton.jit(do_not_specialize=["size", "pixels"])
def _scale(x_ptr, y_ptr, size, pixels, means, stds, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    y = tl.load(x_ptr + place, inside, 0).to(tl.float32) / 255.0
    if CHANNELS:
        channel = (place // pixels) % CHANNELS
        mean, std = tl.zeros((BLOCK,), tl.float32) + means[0], tl.zeros((BLOCK,), tl.float32) + stds[0]
        for c in tl.static_range(1, CHANNELS):
            mean = tl.where(channel == c, means[c], mean)
            std = tl.where(channel == c, stds[c], std)
        y = (y - mean) / std
    tl.store(y_ptr + place, y, inside)


def fits(x: Tensor) -> bool:
    return (
        x.is_cuda
        and x.dtype == torch.uint8
        and x.dim() == 4
        and x.is_contiguous()
        and x.numel() > 0
        and not torch.compiler.is_compiling()
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
    )


def crop_and_flip(x: Tensor, draws: Tensor, pad: int) -> Tensor:
    """draws: (n, 3) integers (dy, dx, flip), rows of any stride."""
    images, channels, height, width = x.shape
    y = torch.empty_like(x)
    grid = (images, triton.cdiv(channels * height * width, BLOCK))
    _crop_and_flip[grid](x, draws, y, channels, height, width, pad, draws.stride(0), BLOCK=BLOCK)
    return y


def scale(x: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(x / 255 - mean) / std per channel, float32; without constants x / 255."""
    y = torch.empty_like(x, dtype=torch.float32)
    constants = (tuple(mean), tuple(std)) if mean else ((0.0,), (1.0,))
    _scale[(triton.cdiv(x.numel(), BLOCK),)](
        x, y, x.numel(), x.shape[2] * x.shape[3], *constants, CHANNELS=len(mean), BLOCK=BLOCK
    )
    return y
