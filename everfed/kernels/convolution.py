"""Triton kernels for convolutions of many channels in half precision, channels-last.

    y[p, o] = sum over taps t and channels c of x[p at t, c] w[o, t, c]

with p a position of the output and "p at t" what it sees of the input through tap t of the window: a matrix product
whose rows are gathered. The input's gradient is such a convolution too, of dy with the window turned around.

The libraries' kernels for Hopper take a multiprocessor for themselves and rarely fill all of them. These take half of
one or less, so that kernels of several clients share the GPU (benchmarks/README.md). Images' sizes are constants of a
compiled kernel: dividing by variables costs a tenth of the time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor, nn

from everfed.kernels.tiles import kernel, power, total

_INNER = 64  # input channels at a time; inputs and outputs come in multiples of it
_ROWS = 64  # positions at a time, of the weights' gradient
_MANY = 128 * 128 * 128  # elements of the output from which on there are enough large tiles for the GPU


@kernel
def _convolve(
    x_ptr, w_ptr, y_ptr, M,
    C: tl.constexpr, O: tl.constexpr, SIDE: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, OUT_HIGH: tl.constexpr, OUT_WIDE: tl.constexpr,
    TURNED: tl.constexpr, R: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """TURNED: the weights are (C, SIDE, SIDE, O), and the window is turned around; else they are (O, SIDE, SIDE, C)."""
    at, inner = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, K)
    channel = tl.program_id(1) * N + tl.arange(0, N)
    top, left = ((at // OUT_WIDE) % OUT_HIGH) * STRIDE - PAD, (at % OUT_WIDE) * STRIDE - PAD
    pixel = (at // (OUT_HIGH * OUT_WIDE) * HIGH + top) * WIDE + left
    x_ptrs = x_ptr + pixel[:, None] * C + inner[None, :]
    y = tl.zeros((R, N), tl.float32)
    for step in range(SIDE * SIDE * (C // K)):
        tap, first = step // (C // K), (step % (C // K)) * K
        i, j = tap // SIDE, tap % SIDE
        inside = (at < M) & (top + i >= 0) & (top + i < HIGH) & (left + j >= 0) & (left + j < WIDE)
        x = tl.load(x_ptrs + (i * WIDE + j) * C + first, inside[:, None], 0.0)
        if TURNED:
            rows = (first + inner)[:, None] * (SIDE * SIDE) + (SIDE * SIDE - 1 - tap)
            w = tl.load(w_ptr + rows * O + channel[None, :])
        else:
            w = tl.load(w_ptr + (channel[None, :] * (SIDE * SIDE) + tap) * C + (first + inner)[:, None])
        y = tl.dot(x, w, y)
    tl.store(y_ptr + at[:, None] * O + channel[None, :], y, (at < M)[:, None])


@kernel
def _input_gradient_of_stride_2(
    dy_ptr, w_ptr, dx_ptr, M,
    C: tl.constexpr, O: tl.constexpr, SIDE: tl.constexpr, PAD: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, OUT_HIGH: tl.constexpr, OUT_WIDE: tl.constexpr,
    R: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Of the input's pixels (2a + u, 2b + v), for one u and v: each sees every other tap of the window. M: how many a
    and b there are in all images."""
    at, inner = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, K)
    channel = tl.program_id(1) * N + tl.arange(0, N)
    u, v = tl.program_id(2) // 2, tl.program_id(2) % 2
    half_high, half_wide = (HIGH + 1) // 2, (WIDE + 1) // 2
    image, a, b = at // (half_high * half_wide), (at // half_wide) % half_high, at % half_wide
    i, j = (u + PAD) % 2, (v + PAD) % 2  # the first taps
    below, beside = (SIDE - i + 1) // 2, (SIDE - j + 1) // 2  # how many there are
    top, left = a + (u + PAD - i) // 2, b + (v + PAD - j) // 2
    dx = tl.zeros((R, N), tl.float32)
    for step in range(below * beside * (O // K)):
        tap, first = step // (O // K), (step % (O // K)) * K
        down, over = tap // tl.maximum(beside, 1), tap % tl.maximum(beside, 1)  # 1: where the loop has no steps
        row, column = top - down, left - over
        inside = (at < M) & (row >= 0) & (row < OUT_HIGH) & (column >= 0) & (column < OUT_WIDE)
        pixel = (image * OUT_HIGH + row) * OUT_WIDE + column
        dy = tl.load(dy_ptr + pixel[:, None] * O + (first + inner)[None, :], inside[:, None], 0.0)
        place = (first + inner)[:, None] * (SIDE * SIDE) + (i + 2 * down) * SIDE + j + 2 * over
        dx = tl.dot(dy, tl.load(w_ptr + place * C + channel[None, :]), dx)
    row, column = 2 * a + u, 2 * b + v
    place = ((image * HIGH + row) * WIDE + column)[:, None] * C + channel[None, :]
    tl.store(dx_ptr + place, dx, ((at < M) & (row < HIGH) & (column < WIDE))[:, None])


@kernel
def _weights_gradient(
    dy_ptr, x_ptr, out_ptr, M, per_part,
    C: tl.constexpr, O: tl.constexpr, SIDE: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, OUT_HIGH: tl.constexpr, OUT_WIDE: tl.constexpr,
    R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The sum over one part of the positions, for K outputs, K inputs and a row of the window (1 or 3 taps)."""
    tap, block = tl.program_id(0) % SIDE, tl.program_id(0) // SIDE
    outputs = (block % (O // K)) * K + tl.arange(0, K)
    inputs = (block // (O // K)) * K + tl.arange(0, K)
    first = tl.program_id(1) * per_part
    dw = tl.zeros((K, K), tl.float32)
    middle, right = dw, dw
    for start in range(0, per_part, R):
        at = first + start + tl.arange(0, R)
        row, column = ((at // OUT_WIDE) % OUT_HIGH) * STRIDE + tap - PAD, (at % OUT_WIDE) * STRIDE - PAD
        dy = tl.trans(tl.load(dy_ptr + at[:, None] * O + outputs[None, :], (at < M)[:, None], 0.0))
        x_ptrs = x_ptr + ((at // (OUT_HIGH * OUT_WIDE) * HIGH + row) * WIDE + column)[:, None] * C + inputs[None, :]
        there = (at < M) & (row >= 0) & (row < HIGH)
        dw = tl.dot(dy, tl.load(x_ptrs, (there & (column >= 0) & (column < WIDE))[:, None], 0.0), dw)
        if SIDE == 3:
            middle = tl.dot(dy, tl.load(x_ptrs + C, there[:, None], 0.0), middle)  # never beyond an edge
            right = tl.dot(dy, tl.load(x_ptrs + 2 * C, (there & (column + 2 < WIDE))[:, None], 0.0), right)
    place = (outputs[:, None] * (SIDE * SIDE) + tap * SIDE) * C + inputs[None, :]
    out_ptrs = out_ptr + tl.program_id(1) * (O * SIDE * SIDE * C) + place
    tl.store(out_ptrs, dw)
    if SIDE == 3:
        tl.store(out_ptrs + C, middle)
        tl.store(out_ptrs + 2 * C, right)


@kernel
def _sum_parts(partial_ptr, out_ptr, parts, SIZE: tl.constexpr, P: tl.constexpr, K: tl.constexpr):
    at = tl.program_id(0) * K + tl.arange(0, K)
    tl.store(out_ptr + at, total(partial_ptr, at, SIZE, parts, P))


class ProductTiling(NamedTuple):
    """How a product is cut into programs: tiles of `height` positions and `width` channels."""

    height: int
    width: int
    stages: int
    warps: int

    def grid(self, positions: int, channels: int) -> tuple[int, int]:
        return -(-positions // self.height), channels // self.width

    @property
    def options(self) -> dict[str, int]:
        return {"R": self.height, "N": self.width, "K": _INNER, "num_stages": self.stages, "num_warps": self.warps}


def fits(convolution: nn.Conv2d) -> bool:
    """Is it one for these kernels?"""
    return (
        convolution.kernel_size in ((1, 1), (3, 3))
        and convolution.padding in ((0, 0), (1, 1))
        and convolution.padding[0] < convolution.kernel_size[0]
        and convolution.stride in ((1, 1), (2, 2))
        and convolution.dilation == (1, 1)
        and convolution.groups == 1
        and convolution.padding_mode == "zeros"
        and convolution.in_channels % _INNER == 0
        and convolution.out_channels % _INNER == 0
    )


def forward(x: Tensor, weight: Tensor, padding: tuple[int, int], stride: tuple[int, int] = (1, 1)) -> Tensor:
    """(n, O, h', w'). It, and all arguments and results here, are channels-last."""
    (outputs, _, side, _), pad, step = weight.shape, padding[0], stride[0]
    high, wide = ((size + 2 * pad - side) // step + 1 for size in x.shape[2:])
    return _convolved(x, weight, (len(x), outputs, high, wide), pad, step, False)


def input_gradient(
    dy: Tensor, x: Tensor, weight: Tensor, padding: tuple[int, int], stride: tuple[int, int] = (1, 1)
) -> Tensor:
    (outputs, inputs, side, _), pad = weight.shape, padding[0]
    if stride == (1, 1):
        return _convolved(dy, weight, tuple(x.shape), side - 1 - pad, 1, True)
    dx = torch.empty_like(x)
    rows = len(x) * -(-x.shape[2] // 2) * -(-x.shape[3] // 2)
    cut = product_tiling(rows, inputs)
    _input_gradient_of_stride_2[(*cut.grid(rows, inputs), 4)](
        dy, weight, dx, rows, inputs, outputs, side, pad, *x.shape[2:], *dy.shape[2:], **cut.options
    )
    return dx


def _convolved(x: Tensor, weight: Tensor, shape: tuple[int, ...], pad: int, step: int, turned: bool) -> Tensor:
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    (images, outputs, *size), (_, inputs, *image) = shape, x.shape
    rows = images * size[0] * size[1]
    cut = product_tiling(rows, outputs)
    _convolve[cut.grid(rows, outputs)](
        x, weight, y, rows, inputs, outputs, weight.shape[2], step, pad, *image, *size, turned, **cut.options
    )
    return y


def weights_gradient(
    dy: Tensor, x: Tensor, weight: Tensor, padding: tuple[int, int], stride: tuple[int, int] = (1, 1)
) -> Tensor:
    outputs, inputs, side, _ = weight.shape
    size, rows = weight.numel(), dy.numel() // outputs
    blocks = (outputs // _INNER) * (inputs // _INNER) * side
    per_part = -(-rows // (parts_of(rows, blocks) * _ROWS)) * _ROWS
    parts = -(-rows // per_part)
    dw = torch.empty_like(weight)
    sums = dw if parts == 1 else torch.empty((parts, size), dtype=torch.float32, device=x.device)
    _weights_gradient[(blocks, parts)](
        dy, x, sums, rows, per_part, inputs, outputs, side, stride[0], padding[0], *x.shape[2:], *dy.shape[2:],
        R=_ROWS, K=_INNER, num_stages=3, num_warps=4,
    )  # fmt: skip
    if parts > 1:
        _sum_parts[(size // 128,)](sums, dw, parts, size, P=power(parts), K=128, num_warps=4)
    return dw


# Measured on an H200 for the layers of ResNet-18 at batches of 32 and 128, alone and with ten streams at it.
def product_tiling(rows: int, outputs: int) -> ProductTiling:
    if outputs % 128:
        return ProductTiling(128, 64, 3, 8)
    return ProductTiling(128, 128, 3, 8) if rows * outputs >= _MANY else ProductTiling(64, 128, 3, 4)


def parts_of(rows: int, blocks: int) -> int:
    """Into how many parts the positions of the weights' gradient are cut: half of the multiprocessors get a block."""
    return max(1, min(66 // blocks, rows // _ROWS))
