"""Triton kernels of `fused.dense_relu_dense`: two small dense layers with ReLU and dropout between them.

    a = relu(x W1^T + b1),   z = (a keep / (1 - p)) W2^T + b2      keep: is a unit's uniform number at least p?

One kernel forward and one backward. PyTorch takes about twenty short ones.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from everfed.kernels.tiles import power_for_products

MOST_HIDDEN = MOST_OUTPUTS = 64  # more would not fit into the shared memory of smaller GPUs
MOST_ROWS = 256  # samples: in the backward pass every program goes through all of them
_ROWS, _CHUNK = 16, 64  # forward: samples of a program, inputs at a time
_TILE, _INPUTS = 32, 32  # backward: samples at a time, inputs of a program
_PRECISION = tl.constexpr("tf32x3")  # three products of matrix units for one in float32, as exact as it


@triton.jit
def _dropped(value, noise_ptr, rows, hidden, inside, p, H: tl.constexpr):
    noise = tl.load(noise_ptr + rows[:, None] * H + hidden[None, :], inside, 0.0)
    return value * (noise >= p).to(tl.float32) / (1.0 - p)  # not a number stays so


@triton.jit(do_not_specialize=["N", "p"])
def _forward(
    x_ptr, w_ptr, b_ptr, noise_ptr, v_ptr, c_ptr, a_ptr, z_ptr, N, p,
    I: tl.constexpr, H: tl.constexpr, O: tl.constexpr, DROPS: tl.constexpr,
    R: tl.constexpr, K: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    rows, hidden, column = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, HIDDEN), tl.arange(0, WIDTH)
    inside = (rows < N)[:, None] & (hidden < H)[None, :]
    a = tl.zeros((R, HIDDEN), tl.float32)
    for start in range(0, I, K):
        at = start + tl.arange(0, K)
        x = tl.load(x_ptr + rows[:, None] * I + at[None, :], (rows < N)[:, None] & (at < I)[None, :], 0.0)
        w = tl.load(w_ptr + hidden[None, :] * I + at[:, None], (hidden < H)[None, :] & (at < I)[:, None], 0.0)
        a = tl.dot(x.to(w.dtype), w, a, input_precision=_PRECISION)
    a += tl.load(b_ptr + hidden, hidden < H, 0.0).to(tl.float32)[None, :]
    a = tl.where(a <= 0, 0.0, a)  # not a number stays so
    tl.store(a_ptr + rows[:, None] * H + hidden[None, :], a, inside)
    if DROPS:
        a = _dropped(a, noise_ptr, rows, hidden, inside, p, H)
    v = tl.load(v_ptr + column[None, :] * H + hidden[:, None], (column < O)[None, :] & (hidden < H)[:, None], 0.0)
    z = tl.dot(a.to(v.dtype), v, input_precision=_PRECISION)
    z += tl.load(c_ptr + column, column < O, 0.0).to(tl.float32)[None, :]
    tl.store(z_ptr + rows[:, None] * O + column[None, :], z, (rows < N)[:, None] & (column < O)[None, :])


@triton.jit(do_not_specialize=["N", "p"])
def _backward(
    dz_ptr, x_ptr, w_ptr, noise_ptr, v_ptr, a_ptr, dx_ptr, dw_ptr, db_ptr, dv_ptr, dc_ptr, N, p,
    I: tl.constexpr, H: tl.constexpr, O: tl.constexpr, DROPS: tl.constexpr,
    R: tl.constexpr, K: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Each program has some inputs; the gradients that do not depend on them are stored by the first."""
    at, hidden, column = tl.program_id(0) * K + tl.arange(0, K), tl.arange(0, HIDDEN), tl.arange(0, WIDTH)
    of_first = (hidden < H)[:, None] & (at < I)[None, :]
    of_second = (column < O)[:, None] & (hidden < H)[None, :]
    w = tl.load(w_ptr + hidden[:, None] * I + at[None, :], of_first, 0.0)
    v = tl.load(v_ptr + column[:, None] * H + hidden[None, :], of_second, 0.0)
    dw, db = tl.zeros((HIDDEN, K), tl.float32), tl.zeros((HIDDEN,), tl.float32)
    dv, dc = tl.zeros((WIDTH, HIDDEN), tl.float32), tl.zeros((WIDTH,), tl.float32)
    for start in range(0, N, R):
        rows = start + tl.arange(0, R)
        inside = (rows < N)[:, None] & (hidden < H)[None, :]
        a = tl.load(a_ptr + rows[:, None] * H + hidden[None, :], inside, 0.0).to(tl.float32)
        out = (rows < N)[:, None] & (column < O)[None, :]
        dz = tl.load(dz_ptr + rows[:, None] * O + column[None, :], out, 0.0).to(v.dtype)
        da, kept = tl.dot(dz, v, input_precision="ieee"), a
        if DROPS:
            da = _dropped(da, noise_ptr, rows, hidden, inside, p, H)
            kept = _dropped(a, noise_ptr, rows, hidden, inside, p, H)
        da = tl.where(a > 0, da, 0.0)
        db += tl.sum(da, 0)
        dc += tl.sum(dz.to(tl.float32), 0)
        dv = tl.dot(tl.trans(dz), kept.to(v.dtype), dv, input_precision="ieee")
        low = da.to(w.dtype)
        place = (rows < N)[:, None] & (at < I)[None, :]
        x = tl.load(x_ptr + rows[:, None] * I + at[None, :], place, 0.0)
        dw = tl.dot(tl.trans(low), x.to(w.dtype), dw, input_precision="ieee")
        dx = tl.dot(low, w, input_precision="ieee")
        tl.store(dx_ptr + rows[:, None] * I + at[None, :], dx, place)
    tl.store(dw_ptr + hidden[:, None] * I + at[None, :], dw, of_first)
    if tl.program_id(0) == 0:
        tl.store(db_ptr + hidden, db, hidden < H)
        tl.store(dv_ptr + column[:, None] * H + hidden[None, :], dv, of_second)
        tl.store(dc_ptr + column, dc, column < O)


def fits(x: Tensor, first: nn.Linear, second: nn.Linear) -> bool:
    """Are the layers and the minibatch small enough? x: (n, inputs)."""
    return (
        x.dim() == 2
        and 0 < len(x) <= MOST_ROWS
        and x.shape[1] == first.in_features
        and first.out_features == second.in_features <= MOST_HIDDEN
        and second.out_features <= MOST_OUTPUTS
    )


def forward(
    x: Tensor, w: Tensor, b: Tensor, v: Tensor, c: Tensor, noise: Tensor | None, p: float
) -> tuple[Tensor, Tensor]:
    """(a, z), both of the weights' type. All tensors are contiguous. noise: (n, hidden)."""
    a, z = x.new_empty((len(x), len(w)), dtype=w.dtype), x.new_empty((len(x), len(v)), dtype=w.dtype)
    _forward[(-(-len(x) // _ROWS),)](
        x, w, b, b if noise is None else noise, v, c, a, z, len(x), p,
        **_sizes(w, v, noise), R=_ROWS, K=_CHUNK, num_warps=4,
    )  # fmt: skip
    return a, z


def backward(
    dz: Tensor, x: Tensor, a: Tensor, w: Tensor, v: Tensor, noise: Tensor | None, p: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dx, dw, db, dv, dc). a: as `forward` gave it."""
    dx, dw, dv = torch.empty_like(x), torch.empty_like(w), torch.empty_like(v)
    db, dc = w.new_empty(len(w)), v.new_empty(len(v))
    _backward[(-(-w.shape[1] // _INPUTS),)](
        dz.contiguous(), x, w, a if noise is None else noise, v, a, dx, dw, db, dv, dc, len(x), p,
        **_sizes(w, v, noise), R=_TILE, K=_INPUTS, num_warps=8,
    )  # fmt: skip
    return dx, dw, db, dv, dc


def _sizes(w: Tensor, v: Tensor, noise: Tensor | None) -> dict[str, int | bool]:
    hidden, width = (power_for_products(len(t)) for t in (w, v))
    sizes = {"I": w.shape[1], "H": len(w), "O": len(v), "HIDDEN": hidden, "WIDTH": width}
    return {**sizes, "DROPS": noise is not None}
