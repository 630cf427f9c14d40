"""Triton kernels of `fused.py`. An activation (n, C, h, w), channels-last, is a matrix of M = n h w rows and C columns.

Small ones (few rows) are normalised by one kernel, whose programs hold some columns whole. Larger ones take two:
partial means and sums of squared deviations over blocks of rows, then every program combines the partials of its
columns, in a fixed order, and maps its rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_SMALL = 2048  # rows that one program holds for 16 columns
_PARTS = 64  # blocks of rows over which partial sums are taken, at most
_COLUMNS = 32
_MAP_TILES = 4
_ROWS = 64


@triton.jit
def _act(v, slope):
    return tl.where(v > 0, v, v * slope)


@triton.jit
def _track(rm_ptr, rv_ptr, count_ptr, cols, mean, var, M, momentum, program):
    """Move the running statistics; the first program counts the batch."""
    rm, rv = tl.load(rm_ptr + cols), tl.load(rv_ptr + cols)
    tl.store(rm_ptr + cols, rm + momentum * (mean - rm))
    tl.store(rv_ptr + cols, rv + momentum * (var * (M / (M - 1.0)) - rv))
    if program == 0:
        tl.store(count_ptr, tl.load(count_ptr) + 1)


@triton.jit
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
    _track(rm_ptr, rv_ptr, count_ptr, cols, mean, var, M, momentum, tl.program_id(0))


@triton.jit
def _partial_moments(
    x_ptr, mean_ptr, square_ptr, M, C, TILES: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    cols = tl.program_id(1) * K + tl.arange(0, K)
    count = 0.0
    mean = tl.zeros((K,), tl.float32)
    square = tl.zeros((K,), tl.float32)
    for tile in range(TILES):
        start = (part * TILES + tile) * R
        rows = start + tl.arange(0, R)
        inside = (rows < M)[:, None]
        x = tl.load(x_ptr + rows[:, None] * C + cols[None, :], inside, 0.0).to(tl.float32)
        new = tl.maximum(tl.minimum(M - start, R), 0).to(tl.float32)
        own = tl.sum(x, 0) / tl.maximum(new, 1.0)
        apart = tl.where(inside, x - own[None, :], 0.0)
        total = count + new
        step = own - mean
        square += tl.sum(apart * apart, 0) + step * step * (count * new / total)
        mean += step * (new / total)
        count = total
    tl.store(mean_ptr + part * C + cols, mean)
    tl.store(square_ptr + part * C + cols, square)


@triton.jit
def _combined(pm_ptr, ps_ptr, cols, M, C, per_part, parts, P: tl.constexpr):
    """(mean, biased variance) of some columns, from the partial moments of all blocks of rows."""
    part = tl.arange(0, P)
    there = (part < parts)[:, None]
    counts = tl.where(there, tl.minimum(per_part, M - part * per_part)[:, None].to(tl.float32), 0.0)
    means = tl.load(pm_ptr + part[:, None] * C + cols[None, :], there, 0.0)
    squares = tl.load(ps_ptr + part[:, None] * C + cols[None, :], there, 0.0)
    mean = tl.sum(means * counts, 0) / M
    away = means - mean[None, :]
    return mean, tl.sum(squares + counts * away * away, 0) / M


@triton.jit
def _normalise(
    x_ptr, r_ptr, w_ptr, b_ptr, rm_ptr, rv_ptr, count_ptr, y_ptr, mean_ptr, rstd_ptr, pm_ptr, ps_ptr,
    M, C, per_part, parts, momentum, eps, slope,
    RESIDUAL: tl.constexpr, P: tl.constexpr, TILES: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(1) * K + tl.arange(0, K)
    mean, var = _combined(pm_ptr, ps_ptr, cols, M, C, per_part, parts, P)
    rstd = 1.0 / tl.sqrt(var + eps)
    w = tl.load(w_ptr + cols).to(tl.float32) * rstd
    b = tl.load(b_ptr + cols).to(tl.float32)
    for tile in range(TILES):
        rows = (tl.program_id(0) * TILES + tile) * R + tl.arange(0, R)
        inside = (rows < M)[:, None]
        place = rows[:, None] * C + cols[None, :]
        y = (tl.load(x_ptr + place, inside, 0.0).to(tl.float32) - mean[None, :]) * w[None, :] + b[None, :]
        if RESIDUAL:
            y += tl.load(r_ptr + place, inside, 0.0).to(tl.float32)
        tl.store(y_ptr + place, _act(y, slope), inside)
    if tl.program_id(0) == 0:
        tl.store(mean_ptr + cols, mean)
        tl.store(rstd_ptr + cols, rstd)
        _track(rm_ptr, rv_ptr, count_ptr, cols, mean, var, M, momentum, tl.program_id(1))


@triton.jit
def _map(
    x_ptr, r_ptr, scale_ptr, shift_ptr, y_ptr, M, C, slope,
    RESIDUAL: tl.constexpr, TILES: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(1) * K + tl.arange(0, K)
    scale, shift = tl.load(scale_ptr + cols), tl.load(shift_ptr + cols)
    for tile in range(TILES):
        rows = (tl.program_id(0) * TILES + tile) * R + tl.arange(0, R)
        inside = (rows < M)[:, None]
        place = rows[:, None] * C + cols[None, :]
        y = tl.load(x_ptr + place, inside, 0.0).to(tl.float32) * scale[None, :] + shift[None, :]
        if RESIDUAL:
            y += tl.load(r_ptr + place, inside, 0.0).to(tl.float32)
        tl.store(y_ptr + place, _act(y, slope), inside)


@triton.jit
def _map_backward(
    dy_ptr, y_ptr, scale_ptr, dx_ptr, dr_ptr, M, C, slope,
    RESIDUAL: tl.constexpr, TILES: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(1) * K + tl.arange(0, K)
    scale = tl.load(scale_ptr + cols)
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
def _combine(pm_ptr, ps_ptr, mean_ptr, var_ptr, M, C, per_part, parts, P: tl.constexpr, K: tl.constexpr):
    cols = tl.program_id(0) * K + tl.arange(0, K)
    mean, var = _combined(pm_ptr, ps_ptr, cols, M, C, per_part, parts, P)
    tl.store(mean_ptr + cols, mean)
    tl.store(var_ptr + cols, var)


@triton.jit
def _moments_backward(
    x_ptr, mean_ptr, dmean_ptr, dvar_ptr, dx_ptr, M, C, TILES: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(1) * K + tl.arange(0, K)
    mean = tl.load(mean_ptr + cols)
    dmean, dvar = tl.load(dmean_ptr + cols) / M, tl.load(dvar_ptr + cols) * (2.0 / M)
    for tile in range(TILES):
        rows = (tl.program_id(0) * TILES + tile) * R + tl.arange(0, R)
        inside = (rows < M)[:, None]
        place = rows[:, None] * C + cols[None, :]
        x = tl.load(x_ptr + place, inside, 0.0).to(tl.float32)
        tl.store(dx_ptr + place, dmean[None, :] + (x - mean[None, :]) * dvar[None, :], inside)


@triton.jit
def _gradient_in(dy_ptr, y_ptr, place, inside, xhat, w, b, slope, RESIDUAL: tl.constexpr):
    """The gradient before the activation. With a residual the output says where it was positive."""
    dy = tl.load(dy_ptr + place, inside, 0.0).to(tl.float32)
    out = tl.load(y_ptr + place, inside, 0.0).to(tl.float32) if RESIDUAL else xhat * w[None, :] + b[None, :]
    return tl.where(out > 0, dy, dy * slope)


@triton.jit
def _small_backward(
    dy_ptr, x_ptr, y_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, dx_ptr, dr_ptr, dw_ptr, db_ptr,
    M, C, slope, RESIDUAL: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(0) * K + tl.arange(0, K)
    rows = tl.arange(0, R)
    inside = (rows < M)[:, None] & (cols < C)[None, :]
    place = rows[:, None] * C + cols[None, :]
    w, b = tl.load(w_ptr + cols).to(tl.float32), tl.load(b_ptr + cols).to(tl.float32)
    mean, rstd = tl.load(mean_ptr + cols), tl.load(rstd_ptr + cols)
    xhat = (tl.load(x_ptr + place, inside, 0.0).to(tl.float32) - mean[None, :]) * rstd[None, :]
    g = _gradient_in(dy_ptr, y_ptr, place, inside, xhat, w, b, slope, RESIDUAL)
    if RESIDUAL:
        tl.store(dr_ptr + place, g, inside)
    db = tl.sum(g, 0)
    dw = tl.sum(g * xhat, 0)
    dx = (g - (db[None, :] + xhat * dw[None, :]) / M) * (w * rstd)[None, :]
    tl.store(dx_ptr + place, dx, inside)
    tl.store(dw_ptr + cols, dw)
    tl.store(db_ptr + cols, db)


@triton.jit
def _partial_gradients(
    dy_ptr, x_ptr, y_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, dr_ptr, pw_ptr, pb_ptr,
    M, C, slope, RESIDUAL: tl.constexpr, TILES: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    cols = tl.program_id(1) * K + tl.arange(0, K)
    w, b = tl.load(w_ptr + cols).to(tl.float32), tl.load(b_ptr + cols).to(tl.float32)
    mean, rstd = tl.load(mean_ptr + cols), tl.load(rstd_ptr + cols)
    dw = tl.zeros((K,), tl.float32)
    db = tl.zeros((K,), tl.float32)
    for tile in range(TILES):
        rows = (part * TILES + tile) * R + tl.arange(0, R)
        inside = (rows < M)[:, None]
        place = rows[:, None] * C + cols[None, :]
        xhat = (tl.load(x_ptr + place, inside, 0.0).to(tl.float32) - mean[None, :]) * rstd[None, :]
        g = _gradient_in(dy_ptr, y_ptr, place, inside, xhat, w, b, slope, RESIDUAL)
        if RESIDUAL:
            tl.store(dr_ptr + place, g, inside)
        g = tl.where(inside, g, 0.0)
        db += tl.sum(g, 0)
        dw += tl.sum(g * xhat, 0)
    tl.store(pw_ptr + part * C + cols, dw)
    tl.store(pb_ptr + part * C + cols, db)


@triton.jit
def _gradient_out(
    dy_ptr, x_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, dx_ptr, dw_ptr, db_ptr, pw_ptr, pb_ptr,
    M, C, parts, slope,
    RESIDUAL: tl.constexpr, P: tl.constexpr, TILES: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """With a residual `dy_ptr` is its gradient: the activation is behind it already."""
    cols = tl.program_id(1) * K + tl.arange(0, K)
    part = tl.arange(0, P)
    there = (part < parts)[:, None]
    dw = tl.sum(tl.load(pw_ptr + part[:, None] * C + cols[None, :], there, 0.0), 0)
    db = tl.sum(tl.load(pb_ptr + part[:, None] * C + cols[None, :], there, 0.0), 0)
    w, b = tl.load(w_ptr + cols).to(tl.float32), tl.load(b_ptr + cols).to(tl.float32)
    mean, rstd = tl.load(mean_ptr + cols), tl.load(rstd_ptr + cols)
    for tile in range(TILES):
        rows = (tl.program_id(0) * TILES + tile) * R + tl.arange(0, R)
        inside = (rows < M)[:, None]
        place = rows[:, None] * C + cols[None, :]
        xhat = (tl.load(x_ptr + place, inside, 0.0).to(tl.float32) - mean[None, :]) * rstd[None, :]
        g = tl.load(dy_ptr + place, inside, 0.0).to(tl.float32)
        if not RESIDUAL:
            g = tl.where(xhat * w[None, :] + b[None, :] > 0, g, g * slope)
        dx = (g - (db[None, :] + xhat * dw[None, :]) / M) * (w * rstd)[None, :]
        tl.store(dx_ptr + place, dx, inside)
    if tl.program_id(0) == 0:
        tl.store(dw_ptr + cols, dw)
        tl.store(db_ptr + cols, db)


def forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    running: tuple[Tensor, Tensor, Tensor],
    momentum: float,
    eps: float,
    slope: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, 1 / standard deviation). running: BatchNorm's mean, variance and count of batches, moved in place."""
    rows, columns = x.numel() // x.shape[1], x.shape[1]
    y = torch.empty_like(x)  # keeps channels-last
    mean, rstd = torch.empty((2, columns), device=x.device).unbind()
    has = residual is not None
    common = (x, residual if has else x, weight, bias, *running, y, mean, rstd)
    if rows <= _SMALL:
        _small_forward[(columns // 16,)](
            *common, rows, columns, momentum, eps, slope, has, R=_power(rows), K=16, num_warps=_warps(rows)
        )
        return y, mean, rstd
    cut = _Cut(rows, columns)
    means, squares = torch.empty((2, cut.parts, columns), device=x.device).unbind()
    _partial_moments[cut.partial_grid](x, means, squares, rows, columns, **cut.partial)
    _normalise[cut.map_grid](
        *common, means, squares, rows, columns, cut.per_part, cut.parts, momentum, eps, slope, has, **cut.map
    )
    return y, mean, rstd


def backward(
    dy: Tensor, x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor, slope: float
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """(dx, dresidual, dweight, dbias); y is given where there was a residual."""
    rows, columns = x.numel() // x.shape[1], x.shape[1]
    dy = dy.contiguous(memory_format=torch.channels_last)
    dx = torch.empty_like(x)
    dr = None if y is None else torch.empty_like(x)
    dw, db = torch.empty((2, columns), device=x.device).unbind()
    has = y is not None
    inputs: tuple[Any, ...] = (dy, x, y if has else x, weight, bias, mean, rstd)
    if rows <= _SMALL:
        _small_backward[(columns // 16,)](
            *inputs, dx, dr if has else dx, dw, db, rows, columns, slope, has,
            R=_power(rows), K=16, num_warps=_warps(rows),
        )  # fmt: skip
        return dx, dr, dw.to(weight.dtype), db.to(bias.dtype)
    cut = _Cut(rows, columns)
    pw, pb = torch.empty((2, cut.parts, columns), device=x.device).unbind()
    _partial_gradients[cut.partial_grid](*inputs, dr if has else dx, pw, pb, rows, columns, slope, has, **cut.partial)
    _gradient_out[cut.map_grid](
        dr if has else dy, x, weight, bias, mean, rstd, dx, dw, db, pw, pb,
        rows, columns, cut.parts, slope, has, **cut.map,
    )  # fmt: skip
    return dx, dr, dw.to(weight.dtype), db.to(bias.dtype)


def mapped(x: Tensor, residual: Tensor | None, scale: Tensor, shift: Tensor, slope: float) -> Tensor:
    """act(scale x + shift + residual), scale and shift per channel, float32."""
    rows, columns = x.numel() // x.shape[1], x.shape[1]
    cut, y, has = _Cut(rows, columns), torch.empty_like(x), residual is not None
    _map[cut.map_grid](x, residual if has else x, scale, shift, y, rows, columns, slope, has, **cut.tiles)
    return y


def mapped_backward(dy: Tensor, y: Tensor, scale: Tensor, residual: bool, slope: float) -> tuple[Tensor, Tensor | None]:
    """(dx, dresidual)."""
    rows, columns = y.numel() // y.shape[1], y.shape[1]
    dy = dy.contiguous(memory_format=torch.channels_last)
    cut, dx = _Cut(rows, columns), torch.empty_like(y)
    dr = torch.empty_like(y) if residual else None
    _map_backward[cut.map_grid](dy, y, scale, dx, dr if residual else dx, rows, columns, slope, residual, **cut.tiles)
    return dx, dr


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """(mean, biased variance) per channel."""
    rows, columns = x.numel() // x.shape[1], x.shape[1]
    cut = _Cut(rows, columns)
    means, squares = torch.empty((2, cut.parts, columns), device=x.device).unbind()
    mean, variance = torch.empty((2, columns), device=x.device).unbind()
    _partial_moments[cut.partial_grid](x, means, squares, rows, columns, **cut.partial)
    _combine[(columns // 16,)](
        means, squares, mean, variance, rows, columns, cut.per_part, cut.parts, P=_power(cut.parts), K=16
    )
    return mean, variance


def moments_backward(x: Tensor, mean: Tensor, dmean: Tensor, dvariance: Tensor) -> Tensor:
    rows, columns = x.numel() // x.shape[1], x.shape[1]
    cut, dx = _Cut(rows, columns), torch.empty_like(x)
    _moments_backward[cut.map_grid](x, mean, dmean.contiguous(), dvariance.contiguous(), dx, rows, columns, **cut.tiles)
    return dx


class _Cut:
    """How a large matrix is cut into programs."""

    def __init__(self, rows: int, columns: int) -> None:
        width = _COLUMNS if columns % _COLUMNS == 0 else 16
        tiles = -(-rows // (_ROWS * _PARTS))
        self.per_part = tiles * _ROWS
        self.parts = -(-rows // self.per_part)
        mapped = min(tiles, _MAP_TILES)
        self.partial_grid = (self.parts, columns // width)
        self.map_grid = (-(-rows // (mapped * _ROWS)), columns // width)
        self.partial: dict[str, int] = {"TILES": tiles, "R": _ROWS, "K": width}
        self.tiles: dict[str, int] = {"TILES": mapped, "R": _ROWS, "K": width}
        self.map: dict[str, int] = {"P": _power(self.parts), **self.tiles}


def _power(number: int) -> int:
    return int(triton.next_power_of_2(max(number, 2)))


def _warps(rows: int) -> int:
    return 4 if rows <= 256 else 8 if rows <= 1024 else 16
