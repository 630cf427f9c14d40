"""Triton kernels of `fused.conv_relu_pool`: bias, ReLU, 2x2 max-pooling and dropout of channels of channels-last
activations (n, C, h, w).

    y = relu(max(x) + bias) keep / (1 - p)   over windows of 2 x 2; an odd last row or column is left out

keep: for every image and channel, is its uniform number at least p? The largest element of a window is found again in
the backward pass, which reads the same values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from everfed.kernels.tiles import is_last, power, total, width

_WINDOWS = 32  # of one program, in the forward pass


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


@triton.jit
def _dropped(value, noise_ptr, windows, cols, inside, p, size, C):
    """Zeros for the channels of an image that are left out."""
    noise = tl.load(noise_ptr + (windows // size)[:, None] * C + cols[None, :], inside, 0.0)
    return value * (noise >= p).to(tl.float32) / (1.0 - p)  # not a number stays so


@triton.jit(do_not_specialize=["count", "p"])
def _forward(
    x_ptr, b_ptr, noise_ptr, y_ptr, count, p, height, width, C,
    DROPS: tl.constexpr, FLAT: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    windows = tl.program_id(0) * R + tl.arange(0, R)
    cols = tl.program_id(1) * K + tl.arange(0, K)
    size = (height // 2) * (width // 2)
    inside = (windows < count)[:, None] & (cols < C)[None, :]
    place = _window(windows, height, width, C)[:, None] + cols[None, :]
    _, _, _, top = _elements(x_ptr, place, inside, width, C)
    y = top + tl.load(b_ptr + cols, cols < C, 0.0).to(tl.float32)[None, :]
    y = tl.where(y <= 0, 0.0, y)  # not a number stays so
    if DROPS:
        y = _dropped(y, noise_ptr, windows, cols, inside, p, size, C)
    tl.store(y_ptr + _pooled_place(windows, cols, size, C, FLAT), y, inside)


@triton.jit(do_not_specialize=["count", "parts", "p"])
def _backward(
    dy_ptr, x_ptr, b_ptr, noise_ptr, dx_ptr, db_ptr, pb_ptr, count_ptr, count, p, height, width, C, parts,
    DROPS: tl.constexpr, FLAT: tl.constexpr, P: tl.constexpr, TILES: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    part, group = tl.program_id(0), tl.program_id(1)
    cols = group * K + tl.arange(0, K)
    all_columns = tl.num_programs(1) * K
    size = (height // 2) * (width // 2)
    bias = tl.load(b_ptr + cols, cols < C, 0.0).to(tl.float32)[None, :]
    db = tl.zeros((R, K), tl.float32)
    for tile in range(TILES):
        windows = (part * TILES + tile) * R + tl.arange(0, R)
        inside = (windows < count)[:, None] & (cols < C)[None, :]
        place = _window(windows, height, width, C)[:, None] + cols[None, :]
        a, b, c, top = _elements(x_ptr, place, inside, width, C)
        dy = tl.load(dy_ptr + _pooled_place(windows, cols, size, C, FLAT), inside, 0.0).to(tl.float32)
        if DROPS:
            dy = _dropped(dy, noise_ptr, windows, cols, inside, p, size, C)
        g = tl.where(top + bias > 0, dy, 0.0)
        db += g
        first, second, third = a == top, b == top, c == top  # of equal elements the first, as PyTorch has it
        tl.store(dx_ptr + place, tl.where(first, g, 0.0), inside)
        tl.store(dx_ptr + place + C, tl.where(second & ~first, g, 0.0), inside)
        tl.store(dx_ptr + place + width * C, tl.where(third & ~(first | second), g, 0.0), inside)
        tl.store(dx_ptr + place + width * C + C, tl.where(first | second | third, 0.0, g), inside)
    tl.store(pb_ptr + part * all_columns + cols, tl.sum(db, 0))
    if is_last(count_ptr, group, parts):
        tl.store(db_ptr + cols, total(pb_ptr, cols, all_columns, parts, P), cols < C)


def forward(x: Tensor, bias: Tensor, flat: bool, noise: Tensor | None = None, p: float = 0.0) -> Tensor:
    """(n, C, h // 2, w // 2), channels-last; flat: (n, C * (h // 2) * (w // 2)). noise: (n, C) uniform numbers; where
    they are below p, a channel of an image is left out."""
    images, columns, height, width = x.shape
    shape = (images, columns, height // 2, width // 2)
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=_order(flat))
    count, group = images * shape[2] * shape[3], _group(columns)
    _forward[(-(-count // _WINDOWS), -(-columns // group))](
        x, bias, bias if noise is None else noise, y, count, p, height, width, columns,
        noise is not None, flat, R=_WINDOWS, K=group, num_warps=4,
    )  # fmt: skip
    return y.flatten(1) if flat else y


def backward(
    dy: Tensor, x: Tensor, bias: Tensor, flat: bool, counts: Tensor, noise: Tensor | None = None, p: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(dx, dbias). counts: as for BatchNorm."""
    images, columns, height, width = x.shape
    dy = dy.contiguous(memory_format=torch.contiguous_format if flat else torch.channels_last)
    dx = torch.zeros_like(x) if height % 2 or width % 2 else torch.empty_like(x)
    db = torch.empty_like(bias)
    count, group = images * (height // 2) * (width // 2), _group(columns)
    groups = -(-columns // group)
    rows = 32
    tiles = -(-count // (rows * 128))
    parts = -(-count // (rows * tiles))
    partial = torch.empty((parts, groups * group), device=x.device)
    _backward[(parts, groups)](
        dy, x, bias, bias if noise is None else noise, dx, db, partial, counts, count, p, height, width, columns, parts,
        noise is not None, flat, P=power(parts), TILES=tiles, R=rows, K=group, num_warps=4,
    )  # fmt: skip
    return dx, db


def _group(columns: int) -> int:
    """How many columns a program has; the last one's may be more than there are."""
    return width(columns, 32) if columns % 16 == 0 else min(32, power(columns))


def _order(flat: bool) -> torch.memory_format:
    return torch.contiguous_format if flat else torch.channels_last
