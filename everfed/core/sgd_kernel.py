"""One Triton kernel for what follows the backward pass of a plain SGD step: gradients of the single parameters, of mixed
types, are read where they lie, the vector of parameters moves, and its bfloat16 copy is written.

Done one after the other (one float32 vector of all gradients, the optimiser's update, the cast) the same takes twice the
memory traffic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _block(
    address, params_ptr, low_ptr, velocity_ptr, rate_ptr, start, place, size, decay, momentum,
    NARROW: tl.constexpr, WHOLE: tl.constexpr, ALIGN: tl.constexpr, DECAY: tl.constexpr, MOMENTUM: tl.constexpr,
    LOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offsets = place * BLOCK + tl.arange(0, BLOCK)
    inside = None if WHOLE else offsets < size  # a mask would keep whole blocks from being read 16 bytes at a time
    kind: tl.constexpr = tl.bfloat16 if NARROW else tl.float32
    g = tl.load((address * 16).to(tl.pointer_type(kind)) + offsets, inside).to(tl.float32)
    own = start * ALIGN + offsets
    p = tl.load(params_ptr + own, inside)
    if DECAY:
        g += decay * p
    if MOMENTUM:
        g += momentum * tl.load(velocity_ptr + own, inside)
        tl.store(velocity_ptr + own, g, inside)
    p -= tl.load(rate_ptr) * g
    tl.store(params_ptr + own, p, inside)
    if LOW:
        tl.store(low_ptr + own, p.to(tl.bfloat16), inside)


@triton.jit
def _descend(
    params_ptr, low_ptr, velocity_ptr, rate_ptr, table_ptr, addresses, decay, momentum,
    COUNT: tl.constexpr, ALIGN: tl.constexpr, DECAY: tl.constexpr, MOMENTUM: tl.constexpr, LOW: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = table_ptr + tl.program_id(0) * 5
    which, start, place, size = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    address = addresses[0]
    for i in tl.static_range(1, COUNT):
        address = tl.where(which == i, addresses[i], address)
    whole = size >= (place + 1) * BLOCK
    if tl.load(row + 4) == 1:
        if whole:
            _block(address, params_ptr, low_ptr, velocity_ptr, rate_ptr, start, place, size, decay, momentum,
                   True, True, ALIGN, DECAY, MOMENTUM, LOW, BLOCK)  # fmt: skip
        else:
            _block(address, params_ptr, low_ptr, velocity_ptr, rate_ptr, start, place, size, decay, momentum,
                   True, False, ALIGN, DECAY, MOMENTUM, LOW, BLOCK)  # fmt: skip
    else:
        _block(address, params_ptr, low_ptr, velocity_ptr, rate_ptr, start, place, size, decay, momentum,
               False, False, ALIGN, DECAY, MOMENTUM, LOW, BLOCK)  # fmt: skip


def table(starts: Sequence[int], sizes: Sequence[int], narrow: Sequence[bool]) -> tuple[Tensor, int]:
    """(blocks, 5) int32: which parameter, where it starts in the vector, in units of the second result, which block of
    it, its size, is its gradient bfloat16?"""
    unit = math.gcd(8, *starts)
    rows = [
        (which, start // unit, place, size, int(low))
        for which, (start, size, low) in enumerate(zip(starts, sizes, narrow, strict=True))
        for place in range(-(-size // BLOCK))
    ]
    return torch.tensor(rows, dtype=torch.int32), unit


def descend(
    params: Tensor, low: Tensor | None, velocity: Tensor | None, rate: Tensor, blocks: Tensor, gradients: Sequence[Tensor],
    decay: float, momentum: float, unit: int,
) -> None:  # fmt: skip
    """params, its copy `low` and `velocity` are moved in place. gradients: each as its flat slice of the vector."""
    _descend[(len(blocks),)](
        params, params if low is None else low, params if velocity is None else velocity, rate, blocks,
        tuple(gradient.data_ptr() // 16 for gradient in gradients), decay, momentum,
        COUNT=len(gradients), ALIGN=unit, DECAY=decay != 0, MOMENTUM=velocity is not None,
        LOW=low is not None, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
