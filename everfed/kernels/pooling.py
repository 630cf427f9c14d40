"""Triton kernels of `fused.conv_relu_pool`: bias, ReLU and 2x2 max-pooling of channels-last activations (n, C, h, w).

    y = relu(max(x) + bias)   over windows of 2 x 2; an odd last row or column is left out

The largest element of a window is found again in the backward pass, which reads the same values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from everfed.kernels.batchnorm import _is_last, _power, _total, _width

_WINDOWS = 64  # of one program, in the forward pass


@triton.jit
def _window(windows, height, width, C):
    """Where the first element of each window lies."""
    high, wide = height // 2, width // 2
    image, inner = windows // (high * wide), windows % (high * wide)
    return ((image * height + 2 * (inner // wide)) * width + 2 * (inner % wide)) * C


@triton.jit
def _pooled_place(windows, cols, size, C, FLAT: tl.constexpr):
    """Where the outputs of windows lie: channels-last, or each image's channels one after the other."""
    if FLAT:
        return ((windows // size) * C * size + windows % size)[:, None] + cols[None, :] * size
    return windows[:, None] * C + cols[None, :]


@triton.jit
def _elements(x_ptr, place, inside, width, C):
    a = tl.load(x_ptr + place, inside, 0.0).to(tl.float32)
    b = tl.load(x_ptr + place + C, inside, 0.0).to(tl.float32)
    c = tl.load(x_ptr + place + width * C, inside, 0.0).to(tl.float32)
    d = tl.load(x_ptr + place + width * C + C, inside, 0.0).to(tl.float32)
    top = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    low = tl.maximum(c, d, propagate_nan=tl.PropagateNan.ALL)
    return a, b, c, tl.maximum(top, low, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=["count", "parts"])
def _forward(
    x_ptr, b_ptr, y_ptr, count, height, width, C, FLAT: tl.constexpr, R: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    windows = tl.program_id(0) * R + tl.arange(0, R)
    cols = tl.program_id(1) * K + tl.arange(0, K)
    inside = (windows < count)[:, None]
    place = _window(windows, height, width, C)[:, None] + cols[None, :]
    _, _, _, top = _elements(x_ptr, place, inside, width, C)
    y = top + tl.load(b_ptr + cols).to(tl.float32)[None, :]
    y = tl.where(y <= 0, 0.0, y)  # not a number stays so
    tl.store(y_ptr + _pooled_place(windows, cols, (height // 2) * (width // 2), C, FLAT), y, inside)


@triton.jit(do_not_specialize=["count", "parts"])
def _backward(
    dy_ptr, x_ptr, b_ptr, dx_ptr, db_ptr, pb_ptr, count_ptr, count, height, width, C, parts,
    FLAT: tl.constexpr, P: tl.constexpr, TILES: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    part, group = tl.program_id(0), tl.program_id(1)
    cols = group * K + tl.arange(0, K)
    bias = tl.load(b_ptr + cols).to(tl.float32)[None, :]
    db = tl.zeros((R, K), tl.float32)
    for tile in range(TILES):
        windows = (part * TILES + tile) * R + tl.arange(0, R)
        inside = (windows < count)[:, None]
        place = _window(windows, height, width, C)[:, None] + cols[None, :]
        a, b, c, top = _elements(x_ptr, place, inside, width, C)
        dy = tl.load(dy_ptr + _pooled_place(windows, cols, (height // 2) * (width // 2), C, FLAT), inside, 0.0)
        g = tl.where(top + bias > 0, dy.to(tl.float32), 0.0)
        db += g
        first, second, third = a == top, b == top, c == top  # of equal elements the first, as PyTorch has it
        tl.store(dx_ptr + place, tl.where(first, g, 0.0), inside)
        tl.store(dx_ptr + place + C, tl.where(second & ~first, g, 0.0), inside)
        tl.store(dx_ptr + place + width * C, tl.where(third & ~(first | second), g, 0.0), inside)
        tl.store(dx_ptr + place + width * C + C, tl.where(first | second | third, 0.0, g), inside)
    tl.store(pb_ptr + part * C + cols, tl.sum(db, 0))
    if _is_last(count_ptr, group, parts):
        tl.store(db_ptr + cols, _total(pb_ptr, cols, C, parts, P))


def forward(x: Tensor, bias: Tensor, flat: bool) -> Tensor:
    """(n, C, h // 2, w // 2), channels-last; flat: (n, C * (h // 2) * (w // 2))."""
    images, columns, height, width = x.shape
    shape = (images, columns, height // 2, width // 2)
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=_order(flat))
    count, group = images * shape[2] * shape[3], _width(columns, 32)
    _forward[(-(-count // _WINDOWS), columns // group)](
        x, bias, y, count, height, width, columns, flat, R=_WINDOWS, K=group, num_warps=4
    )
    return y.flatten(1) if flat else y


def backward(dy: Tensor, x: Tensor, bias: Tensor, flat: bool, counts: Tensor) -> tuple[Tensor, Tensor]:
    """(dx, dbias). counts: as for BatchNorm."""
    images, columns, height, width = x.shape
    dy = dy.contiguous(memory_format=torch.contiguous_format if flat else torch.channels_last)
    dx = torch.zeros_like(x) if height % 2 or width % 2 else torch.empty_like(x)
    db = torch.empty_like(bias)
    count, group = images * (height // 2) * (width // 2), _width(columns, 32)
    rows = 32
    tiles = -(-count // (rows * 128))
    parts = -(-count // (rows * tiles))
    partial = torch.empty((parts, columns), device=x.device)
    _backward[(parts, columns // group)](
        dy, x, bias, dx, db, partial, counts, count, height, width, columns, parts,
        flat, P=_power(parts), TILES=tiles, R=rows, K=group, num_warps=4,
    )  # fmt: skip
    return dx, db


def _order(flat: bool) -> torch.memory_format:
    return torch.contiguous_format if flat else torch.channels_last
