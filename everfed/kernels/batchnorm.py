"""Triton kernels for BatchNorm with a residual sum and an activation function, on matrices as in `tiles.py`.

Small ones (few rows) are normalised by one kernel, whose programs hold some columns whole. Larger ones take two. In the
first each program sums over a block of rows; the last program of a column group to finish combines all sums, in a
fixed order. The second maps every element. A tile is loaded whole before the first sum is taken: on tensors that lie in
the cache, waiting for loads one after the other is what takes time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from everfed.kernels import moments, tiles
from everfed.kernels.moments import track
from everfed.kernels.tiles import is_last, kernel, power, total

_SMALL = 1024  # rows that one program holds for 8 columns


@triton.jit
def _act(v, slope):
    return tl.where(v > 0, v, v * slope)


@kernel
def _small_forward(
    x_ptr, r_ptr, w_ptr, b_ptr, rm_ptr, rv_ptr, count_ptr, y_ptr, mean_ptr, rstd_ptr,
    M, C, momentum, eps, slope, RESIDUAL: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(0) * K + tl.arange(0, K)
    rows = tl.arange(0, R)
    mask = (rows < M)[:, None] & (cols < C)[None, :]
    place = rows[:, None] * C + cols[None, :]
    x = tl.load(x_ptr + place, mask, 0.0).to(tl.float32)
    mean = tl.sum(x, 0) / M
    apart = tl.where(mask, x - mean[None, :], 0.0)
    var = tl.sum(apart * apart, 0) / M
    rstd = 1.0 / tl.sqrt(var + eps)
    w = tl.load(w_ptr + cols).to(tl.float32)
    b = tl.load(b_ptr + cols).to(tl.float32)
    y = apart * (rstd * w)[None, :] + b[None, :]
    if RESIDUAL:
        y += tl.load(r_ptr + place, mask, 0.0).to(tl.float32)
    tl.store(y_ptr + place, _act(y, slope), mask)
    tl.store(mean_ptr + cols, mean)
    tl.store(rstd_ptr + cols, rstd)
    track(rm_ptr, rv_ptr, count_ptr, cols, mean, var, M, momentum, tl.program_id(0))


@kernel
def _normalise(
    x_ptr, r_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, y_ptr, M, C, slope,
    RESIDUAL: tl.constexpr, TILES: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(1) * K + tl.arange(0, K)
    mean = tl.load(mean_ptr + cols)
    w = tl.load(w_ptr + cols).to(tl.float32) * tl.load(rstd_ptr + cols)
    b = tl.load(b_ptr + cols).to(tl.float32)
    for tile in range(TILES):
        rows = (tl.program_id(0) * TILES + tile) * R + tl.arange(0, R)
        inside = (rows < M)[:, None]
        place = rows[:, None] * C + cols[None, :]
        y = (tl.load(x_ptr + place, inside, 0.0).to(tl.float32) - mean[None, :]) * w[None, :] + b[None, :]
        if RESIDUAL:
            y += tl.load(r_ptr + place, inside, 0.0).to(tl.float32)
        tl.store(y_ptr + place, _act(y, slope), inside)


@triton.jit
def _scale(w_ptr, rv_ptr, cols, eps):
    """What BatchNorm multiplies a channel by in evaluation mode."""
    return tl.load(w_ptr + cols).to(tl.float32) / tl.sqrt(tl.load(rv_ptr + cols) + eps)


@kernel
def _map(
    x_ptr, r_ptr, w_ptr, b_ptr, rm_ptr, rv_ptr, y_ptr, M, C, eps, slope,
    RESIDUAL: tl.constexpr, TILES: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(1) * K + tl.arange(0, K)
    scale, mean = _scale(w_ptr, rv_ptr, cols, eps), tl.load(rm_ptr + cols)
    b = tl.load(b_ptr + cols).to(tl.float32)
    for tile in range(TILES):
        rows = (tl.program_id(0) * TILES + tile) * R + tl.arange(0, R)
        inside = (rows < M)[:, None]
        place = rows[:, None] * C + cols[None, :]
        x = tl.load(x_ptr + place, inside, 0.0).to(tl.float32)
        y = (x - mean[None, :]) * scale[None, :] + b[None, :]
        if RESIDUAL:
            y += tl.load(r_ptr + place, inside, 0.0).to(tl.float32)
        tl.store(y_ptr + place, _act(y, slope), inside)


@kernel
def _map_backward(
    dy_ptr, y_ptr, w_ptr, rv_ptr, dx_ptr, dr_ptr, M, C, eps, slope,
    RESIDUAL: tl.constexpr, TILES: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(1) * K + tl.arange(0, K)
    scale = _scale(w_ptr, rv_ptr, cols, eps)
    for tile in range(TILES):
        rows = (tl.program_id(0) * TILES + tile) * R + tl.arange(0, R)
        inside = (rows < M)[:, None]
        place = rows[:, None] * C + cols[None, :]
        g = tl.load(dy_ptr + place, inside, 0.0).to(tl.float32)
        g = tl.where(tl.load(y_ptr + place, inside, 0.0).to(tl.float32) > 0, g, g * slope)
        tl.store(dx_ptr + place, g * scale[None, :], inside)
        if RESIDUAL:
            tl.store(dr_ptr + place, g, inside)


@triton.jit
def _incoming(dy_ptr, again_ptr, place, inside, TWICE: tl.constexpr):
    """The gradient of the output: the sum of its two uses', where there are two."""
    dy = tl.load(dy_ptr + place, inside, 0.0).to(tl.float32)
    if TWICE:
        dy += tl.load(again_ptr + place, inside, 0.0).to(tl.float32)
    return dy


@triton.jit
def _gradient_in(
    dy_ptr, again_ptr, y_ptr, place, inside, xhat, w, b, slope, TWICE: tl.constexpr, RESIDUAL: tl.constexpr
):  # fmt: skip
    """The gradient before the activation. With a residual the output says where it was positive."""
    dy = _incoming(dy_ptr, again_ptr, place, inside, TWICE)
    out = tl.load(y_ptr + place, inside, 0.0).to(tl.float32) if RESIDUAL else xhat * w[None, :] + b[None, :]
    return tl.where(out > 0, dy, dy * slope)


@kernel
def _small_backward(
    dy_ptr, again_ptr, x_ptr, y_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, dx_ptr, dr_ptr, dw_ptr, db_ptr,
    M, C, slope, TWICE: tl.constexpr, RESIDUAL: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(0) * K + tl.arange(0, K)
    rows = tl.arange(0, R)
    inside = (rows < M)[:, None] & (cols < C)[None, :]
    place = rows[:, None] * C + cols[None, :]
    w, b = tl.load(w_ptr + cols).to(tl.float32), tl.load(b_ptr + cols).to(tl.float32)
    mean, rstd = tl.load(mean_ptr + cols), tl.load(rstd_ptr + cols)
    xhat = (tl.load(x_ptr + place, inside, 0.0).to(tl.float32) - mean[None, :]) * rstd[None, :]
    g = _gradient_in(dy_ptr, again_ptr, y_ptr, place, inside, xhat, w, b, slope, TWICE, RESIDUAL)
    if RESIDUAL:
        tl.store(dr_ptr + place, g, inside)
    db = tl.sum(g, 0)
    dw = tl.sum(g * xhat, 0)
    dx = (g - (db[None, :] + xhat * dw[None, :]) / M) * (w * rstd)[None, :]
    tl.store(dx_ptr + place, dx, inside)
    tl.store(dw_ptr + cols, dw)
    tl.store(db_ptr + cols, db)


@kernel
def _gradient_sums(
    dy_ptr, again_ptr, x_ptr, y_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, dr_ptr, dw_ptr, db_ptr,
    pw_ptr, pb_ptr, count_ptr,
    M, C, parts, slope,
    TWICE: tl.constexpr, RESIDUAL: tl.constexpr, P: tl.constexpr, TILES: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The gradients of weight and bias, and of the residual."""
    part, group = tl.program_id(0), tl.program_id(1)
    cols = group * K + tl.arange(0, K)
    w, b = tl.load(w_ptr + cols).to(tl.float32), tl.load(b_ptr + cols).to(tl.float32)
    mean, rstd = tl.load(mean_ptr + cols), tl.load(rstd_ptr + cols)
    dw = tl.zeros((R, K), tl.float32)
    db = tl.zeros((R, K), tl.float32)
    for tile in range(TILES):
        rows = (part * TILES + tile) * R + tl.arange(0, R)
        inside = (rows < M)[:, None]
        place = rows[:, None] * C + cols[None, :]
        xhat = (tl.load(x_ptr + place, inside, 0.0).to(tl.float32) - mean[None, :]) * rstd[None, :]
        g = _gradient_in(dy_ptr, again_ptr, y_ptr, place, inside, xhat, w, b, slope, TWICE, RESIDUAL)
        if RESIDUAL:
            tl.store(dr_ptr + place, g, inside)
        db += g  # 0 outside, as dy is
        dw += g * xhat
    tl.store(pw_ptr + part * C + cols, tl.sum(dw, 0))
    tl.store(pb_ptr + part * C + cols, tl.sum(db, 0))
    if is_last(count_ptr, group, parts):
        tl.store(dw_ptr + cols, total(pw_ptr, cols, C, parts, P))
        tl.store(db_ptr + cols, total(pb_ptr, cols, C, parts, P))


@kernel
def _gradient_out(
    dy_ptr, again_ptr, x_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, dw_ptr, db_ptr, dx_ptr, M, C, slope,
    TWICE: tl.constexpr, RESIDUAL: tl.constexpr, TILES: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """With a residual `dy_ptr` is its gradient: the activation is behind it already."""
    cols = tl.program_id(1) * K + tl.arange(0, K)
    w, b = tl.load(w_ptr + cols).to(tl.float32), tl.load(b_ptr + cols).to(tl.float32)
    mean, rstd = tl.load(mean_ptr + cols), tl.load(rstd_ptr + cols)
    dw, db = tl.load(dw_ptr + cols), tl.load(db_ptr + cols)
    for tile in range(TILES):
        rows = (tl.program_id(0) * TILES + tile) * R + tl.arange(0, R)
        inside = (rows < M)[:, None]
        place = rows[:, None] * C + cols[None, :]
        xhat = (tl.load(x_ptr + place, inside, 0.0).to(tl.float32) - mean[None, :]) * rstd[None, :]
        g = _incoming(dy_ptr, again_ptr, place, inside, TWICE)
        if not RESIDUAL:
            g = tl.where(xhat * w[None, :] + b[None, :] > 0, g, g * slope)
        dx = (g - (db[None, :] + xhat * dw[None, :]) / M) * (w * rstd)[None, :]
        tl.store(dx_ptr + place, dx, inside)


def forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    running: tuple[Tensor, Tensor, Tensor],
    momentum: float,
    eps: float,
    slope: float,
    counts: Tensor,
    sizes: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, means, 1 / standard deviations), the latter two with a row for each minibatch. running: BatchNorm's mean,
    variance and count of batches, moved in place by one minibatch after the other. counts: (C / 16,) int32, zeros
    before and after; no other kernel may use them at the same time. sizes: samples of each minibatch in x."""
    y = torch.empty_like(x)  # keeps channels-last
    means, rstds = torch.empty((2, len(sizes), x.shape[1]), device=x.device).unbind()
    added = _split(residual, sizes)
    for own, r, out, mean, rstd in zip(x.split(sizes), added, y.split(sizes), means, rstds, strict=True):
        _forward(own, r, weight, bias, running, momentum, eps, slope, counts, out, mean, rstd)
    return y, means, rstds


def _split(x: Tensor | None, sizes: Sequence[int]) -> Sequence[Tensor | None]:
    return [None] * len(sizes) if x is None else x.split(sizes)


def _forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    running: tuple[Tensor, Tensor, Tensor],
    momentum: float,
    eps: float,
    slope: float,
    counts: Tensor,
    y: Tensor,
    mean: Tensor,
    rstd: Tensor,
) -> None:
    """One minibatch, into y, mean and rstd."""
    rows, columns = x.numel() // x.shape[1], x.shape[1]
    has = residual is not None
    if rows <= _SMALL:
        _small_forward[(columns // 8,)](
            x, residual if has else x, weight, bias, *running, y, mean, rstd,
            rows, columns, momentum, eps, slope, has, R=power(rows), K=8, num_warps=_warps(rows),
        )  # fmt: skip
        return
    moments.launch(x, running, mean, rstd, momentum, eps, counts)
    cut = tiles.map_tiling(rows, columns)
    _normalise[cut.grid(rows, columns)](
        x, residual if has else x, weight, bias, mean, rstd, y, rows, columns, slope, has, **cut.options
    )


def backward(
    dy: Tensor,
    again: Tensor | None,
    x: Tensor,
    y: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    means: Tensor,
    rstds: Tensor,
    slope: float,
    counts: Tensor,
    sizes: Sequence[int],
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """(dx, dresidual, dweight, dbias). again: a second gradient of the output, to be added. y: given where there was a
    residual. means, rstds, sizes: as in `forward`."""
    dy = dy.contiguous(memory_format=torch.channels_last)
    again = None if again is None else again.contiguous(memory_format=torch.channels_last)
    dx = torch.empty_like(x)
    dr = None if y is None else torch.empty_like(x)
    sums = torch.empty((len(sizes), 2, x.shape[1]), device=x.device)  # dweight, dbias
    tensors = (_split(tensor, sizes) for tensor in (dy, again, x, y, dx, dr))
    for *own, mean, rstd, (dw, db) in zip(*tensors, means, rstds, sums, strict=True):
        _backward(own, weight, bias, mean, rstd, dw, db, slope, counts)
    dw, db = sums[0] if len(sizes) == 1 else sums.sum(0)
    return dx, dr, dw.to(weight.dtype), db.to(bias.dtype)


def _backward(
    own: Sequence[Any],
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    rstd: Tensor,
    dw: Tensor,
    db: Tensor,
    slope: float,
    counts: Tensor,
) -> None:
    """One minibatch, into dw and db and the last two of its `own` tensors: dy, again, x, y, dx, dr of `backward`."""
    dy, again, x, y, dx, dr = own
    rows, columns = x.numel() // x.shape[1], x.shape[1]
    has, two = y is not None, again is not None
    inputs: tuple[Any, ...] = (dy, again if two else dy, x, y if has else x, weight, bias, mean, rstd)
    if rows <= _SMALL:
        _small_backward[(columns // 8,)](
            *inputs, dx, dr if has else dx, dw, db, rows, columns, slope, two, has,
            R=power(rows), K=8, num_warps=_warps(rows),
        )  # fmt: skip
        return
    cut = tiles.sum_tiling(rows, columns)
    grid = cut.grid(rows, columns)
    pw, pb = torch.empty((2, grid[0], columns), device=x.device).unbind()
    _gradient_sums[grid](
        *inputs, dr if has else dx, dw, db, pw, pb, counts,
        rows, columns, grid[0], slope, two, has, P=power(grid[0]), **cut.options,
    )  # fmt: skip
    cut = tiles.map_tiling(rows, columns)
    _gradient_out[cut.grid(rows, columns)](
        dr if has else dy, again if two else dy, x, weight, bias, mean, rstd, dw, db, dx,
        rows, columns, slope, two and not has, has, **cut.options,
    )  # fmt: skip


Stored = tuple[Tensor, Tensor, Tensor, Tensor]  # weight, bias, running mean and variance of a BatchNorm layer


def mapped(x: Tensor, residual: Tensor | None, stored: Stored, eps: float, slope: float) -> Tensor:
    """act(BatchNorm(x) + residual) in evaluation mode."""
    rows, columns = x.numel() // x.shape[1], x.shape[1]
    cut, y, has = tiles.map_tiling(rows, columns), torch.empty_like(x), residual is not None
    _map[cut.grid(rows, columns)](x, residual if has else x, *stored, y, rows, columns, eps, slope, has, **cut.options)
    return y


def mapped_backward(
    dy: Tensor, y: Tensor, weight: Tensor, variance: Tensor, residual: bool, eps: float, slope: float
) -> tuple[Tensor, Tensor | None]:
    """(dx, dresidual)."""
    rows, columns = y.numel() // y.shape[1], y.shape[1]
    dy = dy.contiguous(memory_format=torch.channels_last)
    cut, dx = tiles.map_tiling(rows, columns), torch.empty_like(y)
    dr = torch.empty_like(y) if residual else None
    _map_backward[cut.grid(rows, columns)](
        dy, y, weight, variance, dx, dr if residual else dx, rows, columns, eps, slope, residual, **cut.options
    )
    return dx, dr


def _warps(rows: int) -> int:
    return 4 if rows <= 512 else 8
