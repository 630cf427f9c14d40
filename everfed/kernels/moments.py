"""Triton kernels for mean and variance of an activation's channels: BatchNorm's, and those that generators match."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from everfed.kernels import tiles
from everfed.kernels.tiles import is_last, kernel, power


@triton.jit
def track(rm_ptr, rv_ptr, count_ptr, cols, mean, var, M, momentum, program):
    """Move the running statistics; the first program counts the batch."""
    rm, rv = tl.load(rm_ptr + cols), tl.load(rv_ptr + cols)
    tl.store(rm_ptr + cols, rm + momentum * (mean - rm))
    tl.store(rv_ptr + cols, rv + momentum * (var * (M / (M - 1.0)) - rv))
    if program == 0:
        tl.store(count_ptr, tl.load(count_ptr) + 1)


@triton.jit
def _block_moments(x_ptr, part, cols, M, C, TILES: tl.constexpr, R: tl.constexpr):
    """(mean, sum of squared deviations) of a block of rows. Deviations are taken from the mean of its first tile."""
    start = part * TILES * R
    rows = start + tl.arange(0, R)
    inside = (rows < M)[:, None]
    x = tl.load(x_ptr + rows[:, None] * C + cols[None, :], inside, 0.0).to(tl.float32)
    shift = tl.sum(x, 0) / tl.minimum(M - start, R)
    total = tl.where(inside, x - shift[None, :], 0.0)
    square = total * total
    for _ in range(1, TILES):
        rows += R
        inside = (rows < M)[:, None]
        x = tl.load(x_ptr + rows[:, None] * C + cols[None, :], inside, 0.0).to(tl.float32)
        apart = tl.where(inside, x - shift[None, :], 0.0)
        total += apart
        square += apart * apart
    count = tl.minimum(M - start, TILES * R).to(tl.float32)
    step = tl.sum(total, 0) / count
    return shift + step, tl.sum(square, 0) - count * step * step


@triton.jit
def _combined(pm_ptr, ps_ptr, cols, M, C, per_part, parts, P: tl.constexpr):
    """(mean, biased variance) of some columns, from the moments of all blocks of rows."""
    part = tl.arange(0, P)
    there = (part < parts)[:, None]
    counts = tl.where(there, tl.minimum(per_part, M - part * per_part)[:, None].to(tl.float32), 0.0)
    means = tl.load(pm_ptr + part[:, None] * C + cols[None, :], there, 0.0, cache_modifier=".cg")
    squares = tl.load(ps_ptr + part[:, None] * C + cols[None, :], there, 0.0, cache_modifier=".cg")
    mean = tl.sum(means * counts, 0) / M
    away = means - mean[None, :]
    return mean, tl.sum(squares + counts * away * away, 0) / M


@kernel
def _moments(
    x_ptr, rm_ptr, rv_ptr, batches_ptr, mean_ptr, spread_ptr, pm_ptr, ps_ptr, count_ptr,
    M, C, per_part, parts, momentum, eps,
    TRAINED: tl.constexpr, P: tl.constexpr, TILES: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Mean and, in training, 1 / standard deviation, otherwise the variance."""
    part, group = tl.program_id(0), tl.program_id(1)
    cols = group * K + tl.arange(0, K)
    mean, square = _block_moments(x_ptr, part, cols, M, C, TILES, R)
    tl.store(pm_ptr + part * C + cols, mean)
    tl.store(ps_ptr + part * C + cols, square)
    if is_last(count_ptr, group, parts):
        mean, var = _combined(pm_ptr, ps_ptr, cols, M, C, per_part, parts, P)
        tl.store(mean_ptr + cols, mean)
        if TRAINED:
            tl.store(spread_ptr + cols, 1.0 / tl.sqrt(var + eps))
            track(rm_ptr, rv_ptr, batches_ptr, cols, mean, var, M, momentum, group)
        else:
            tl.store(spread_ptr + cols, var)


@kernel
def _moments_backward(
    x_ptr, dx_ptr, mean_ptr, dmean_ptr, dvar_ptr, out_ptr, M, C,
    TILES: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """What comes from mean and variance is added to the gradient dx that x has beside them."""
    cols = tl.program_id(1) * K + tl.arange(0, K)
    mean = tl.load(mean_ptr + cols)
    dmean, dvar = tl.load(dmean_ptr + cols) / M, tl.load(dvar_ptr + cols) * (2.0 / M)
    for tile in range(TILES):
        rows = (tl.program_id(0) * TILES + tile) * R + tl.arange(0, R)
        inside = (rows < M)[:, None]
        place = rows[:, None] * C + cols[None, :]
        x = tl.load(x_ptr + place, inside, 0.0).to(tl.float32)
        dx = tl.load(dx_ptr + place, inside, 0.0).to(tl.float32)
        tl.store(out_ptr + place, dx + dmean[None, :] + (x - mean[None, :]) * dvar[None, :], inside)


def launch(
    x: Tensor,
    running: tuple[Tensor, Tensor, Tensor] | None,
    mean: Tensor,
    spread: Tensor,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> None:
    """Into mean and spread, as `_moments` says; running: BatchNorm's mean, variance and count, moved in training."""
    rows, columns = x.numel() // x.shape[1], x.shape[1]
    cut = tiles.sum_tiling(rows, columns)
    grid = cut.grid(rows, columns)
    means, squares = torch.empty((2, grid[0], columns), device=x.device).unbind()
    _moments[grid](
        x, *(running or (x, x, x)), mean, spread, means, squares, counts,
        rows, columns, cut.rows, grid[0], momentum, eps, running is not None, P=power(grid[0]), **cut.options,
    )  # fmt: skip


def moments(x: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """(mean, biased variance) per channel. counts: of `tiles.new_counts`, zeros before and after."""
    mean, variance = torch.empty((2, x.shape[1]), device=x.device).unbind()
    launch(x, None, mean, variance, 0.0, 0.0, counts)
    return mean, variance


def moments_backward(x: Tensor, dx: Tensor, mean: Tensor, dmean: Tensor, dvariance: Tensor) -> Tensor:
    """dx, and what comes from mean and variance."""
    rows, columns = x.numel() // x.shape[1], x.shape[1]
    cut, total = tiles.map_tiling(rows, columns), torch.empty_like(x)
    dx = dx.contiguous(memory_format=torch.channels_last)
    _moments_backward[cut.grid(rows, columns)](
        x, dx, mean, dmean.contiguous(), dvariance.contiguous(), total, rows, columns, **cut.options
    )
    return total
