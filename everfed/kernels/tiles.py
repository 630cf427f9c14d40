"""What kernels share: how a matrix is cut into tiles, and how sums over tiles are combined.

An activation (n, C, h, w), channels-last, is a matrix of M = n h w rows and C columns. Sums over rows are taken by
several programs, the last of which combines them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_PARTS = 128  # blocks of rows over which partial sums are taken, at most

# one compiled kernel for batches of all sizes
kernel = triton.jit(do_not_specialize=["M", "per_part", "parts"])


@triton.jit
def is_last(count_ptr, group, programs):
    """Is this the last of a group's programs? It then sees what the others stored, and sets the count back to 0."""
    tl.debug_barrier()  # all threads of this program have stored
    last = tl.atomic_add(count_ptr + group, 1) == programs - 1
    if last:
        tl.store(count_ptr + group, 0)
    return last


@triton.jit
def total(partial_ptr, cols, C, parts, P: tl.constexpr):
    """The sum of all parts, each a row of C numbers, for some columns."""
    part = tl.arange(0, P)[:, None]
    return tl.sum(tl.load(partial_ptr + part * C + cols[None, :], part < parts, 0.0, cache_modifier=".cg"), 0)


def new_counts(x: Tensor) -> Tensor:
    """Zeros, one for each group of columns: how many programs have finished with it."""
    return torch.zeros(-(-x.shape[1] // 16), dtype=torch.int32, device=x.device)


class Tiling(NamedTuple):
    """How a matrix is cut into programs: each has `tiles` tiles of `height` rows and `width` columns."""

    tiles: int
    height: int
    width: int
    warps: int

    @property
    def rows(self) -> int:
        return self.tiles * self.height

    def grid(self, rows: int, columns: int) -> tuple[int, int]:
        return -(-rows // self.rows), columns // self.width

    @property
    def options(self) -> dict[str, int]:
        return {"TILES": self.tiles, "R": self.height, "K": self.width, "num_warps": self.warps}


# Measured on an H200 for the layers of ResNet-18 and of MFCL's generator at batches of 32 and 128.
def sum_tiling(rows: int, columns: int) -> Tiling:
    return Tiling(-(-rows // (256 * _PARTS)), 256, width(columns, 32), 4)


def map_tiling(rows: int, columns: int) -> Tiling:
    return Tiling(1, 32, width(columns, 64), 4 if rows * columns > 2**22 else 2)


def width(columns: int, most: int) -> int:
    """Of the tiles that a number of columns is cut into."""
    return next(width for width in (64, 32, 16) if width <= most and columns % width == 0)


def power(number: int, least: int = 2) -> int:
    """The least power of two that is not below it."""
    return int(triton.next_power_of_2(max(number, least)))


def power_for_products(number: int) -> int:
    """One that matrix units take."""
    return power(number, 16)
