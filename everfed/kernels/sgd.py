"""A plain SGD step after the backward pass, as one Triton kernel: the gradients of the single parameters are read where
they lie, the vector of parameters moves, and its bfloat16 copy is written. Gradients of two backward passes are added
up and what conflicts with a reference gradient is removed on the way; a kernel before takes the scalar product.

One after the other (a float32 vector of all gradients, the update, the cast) the same takes twice the memory traffic.
"""

# Triton kernels have no types
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
SUMS = 1024  # blocks: their scalar products are added up by every program of the update; of more, once before
MOST = 128  # gradients: their addresses are arguments of the kernel


@triton.jit
def _own_block(table_ptr, addresses, COUNT: tl.constexpr, PASSES: tl.constexpr):
    """The block of this program: its parameter's gradients of both passes, where the parameter starts in the vector,
    which of its blocks this is, its size, and whether its gradients are bfloat16."""
    row = table_ptr + tl.program_id(0) * 5
    which, start, place, size = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    address, other = addresses[0], addresses[COUNT * (PASSES - 1)]
    for i in tl.static_range(1, COUNT):
        address = tl.where(which == i, addresses[i], address)
        other = tl.where(which == i, addresses[COUNT * (PASSES - 1) + i], other)
    return address, other, start, place, size, tl.load(row + 4)


@triton.jit
def _gradient(
    address, other, place, size,
    NARROW: tl.constexpr, WHOLE: tl.constexpr, PASSES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of a parameter's gradient, the sum over backward passes, in float32."""
    offsets = place * BLOCK + tl.arange(0, BLOCK)
    inside = None if WHOLE else offsets < size  # a mask would keep whole blocks from being read 16 bytes at a time
    kind: tl.constexpr = tl.bfloat16 if NARROW else tl.float32
    g = tl.load((address * 16).to(tl.pointer_type(kind)) + offsets, inside).to(tl.float32)
    if PASSES == 2:
        g += tl.load((other * 16).to(tl.pointer_type(kind)) + offsets, inside).to(tl.float32)
    return g


@triton.jit
def _block(
    address, other, params_ptr, low_ptr, velocity_ptr, rate_ptr, reference_ptr, product_ptr, norm_ptr, start, place,
    size, decay, momentum, count,
    NARROW: tl.constexpr, WHOLE: tl.constexpr, PASSES: tl.constexpr, ALIGN: tl.constexpr, PROJECT: tl.constexpr,
    DECAY: tl.constexpr, MOMENTUM: tl.constexpr, LOW: tl.constexpr, SUMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    g = _gradient(address, other, place, size, NARROW, WHOLE, PASSES, BLOCK)
    offsets = place * BLOCK + tl.arange(0, BLOCK)
    inside = None if WHOLE else offsets < size
    own = start * ALIGN + offsets
    if PROJECT:
        sums = tl.arange(0, SUMS)
        product = tl.sum(tl.load(product_ptr + sums, sums < count, 0.0), 0)
        conflict = tl.where(product > 0, 0.0, product) / tl.load(norm_ptr).to(tl.float64)
        g -= conflict.to(tl.float32) * tl.load(reference_ptr + own, inside)
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
    params_ptr, low_ptr, velocity_ptr, rate_ptr, reference_ptr, product_ptr, norm_ptr, table_ptr, addresses, decay,
    momentum, count,
    COUNT: tl.constexpr, PASSES: tl.constexpr, ALIGN: tl.constexpr, PROJECT: tl.constexpr, DECAY: tl.constexpr,
    MOMENTUM: tl.constexpr, LOW: tl.constexpr, SUMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    address, other, start, place, size, narrow = _own_block(table_ptr, addresses, COUNT, PASSES)
    whole = size >= (place + 1) * BLOCK
    if narrow == 1:
        if whole:
            _block(address, other, params_ptr, low_ptr, velocity_ptr, rate_ptr, reference_ptr, product_ptr, norm_ptr,
                   start, place, size, decay, momentum, count,
                   True, True, PASSES, ALIGN, PROJECT, DECAY, MOMENTUM, LOW, SUMS, BLOCK)  # fmt: skip
        else:
            _block(address, other, params_ptr, low_ptr, velocity_ptr, rate_ptr, reference_ptr, product_ptr, norm_ptr,
                   start, place, size, decay, momentum, count,
                   True, False, PASSES, ALIGN, PROJECT, DECAY, MOMENTUM, LOW, SUMS, BLOCK)  # fmt: skip
    else:
        _block(address, other, params_ptr, low_ptr, velocity_ptr, rate_ptr, reference_ptr, product_ptr, norm_ptr,
               start, place, size, decay, momentum, count,
               False, False, PASSES, ALIGN, PROJECT, DECAY, MOMENTUM, LOW, SUMS, BLOCK)  # fmt: skip


@triton.jit
def _product(
    address, other, reference_ptr, start, place, size,
    NARROW: tl.constexpr, WHOLE: tl.constexpr, PASSES: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    g = _gradient(address, other, place, size, NARROW, WHOLE, PASSES, BLOCK)
    offsets = place * BLOCK + tl.arange(0, BLOCK)
    inside = None if WHOLE else offsets < size
    product = g * tl.load(reference_ptr + start * ALIGN + offsets, inside)
    if not WHOLE:
        product = tl.where(offsets < size, product, 0.0)
    return tl.sum(product.to(tl.float64), 0)


@triton.jit
def _products(
    reference_ptr, sums_ptr, table_ptr, addresses,
    COUNT: tl.constexpr, PASSES: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """<gradient, reference> of every block, in float64."""
    address, other, start, place, size, narrow = _own_block(table_ptr, addresses, COUNT, PASSES)
    whole = size >= (place + 1) * BLOCK
    if narrow == 1:
        if whole:
            product = _product(address, other, reference_ptr, start, place, size, True, True, PASSES, ALIGN, BLOCK)
        else:
            product = _product(address, other, reference_ptr, start, place, size, True, False, PASSES, ALIGN, BLOCK)
    else:
        product = _product(address, other, reference_ptr, start, place, size, False, False, PASSES, ALIGN, BLOCK)
    tl.store(sums_ptr + tl.program_id(0), product)


class Update:
    """params -= rate (gradient + decay params), with momentum where there is a velocity. Made once for a model."""

    def __init__(self, layout: Any, device: torch.device) -> None:
        """layout: the model's everfed.core.layout.Layout."""
        self.entries = layout.params
        self.unit = math.gcd(8, *(entry.start for entry in self.entries))
        self.device = device
        self.tables: dict[tuple[bool, ...], Tensor] = {}

    def __call__(
        self,
        passes: Sequence[Sequence[Tensor]],
        params: Tensor,
        low: Tensor | None,
        velocity: Tensor | None,
        rate: Tensor,
        decay: float,
        momentum: float,
        conflict: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """passes: of one or two backward passes, the gradients of all parameters, float32 or bfloat16; they are added
        up. low: the parameters' bfloat16 copy. conflict: (r, |r|^2); where <g, r> < 0, g - <g, r> / |r|^2 r is taken
        for the gradient g."""
        flat = [
            _readable(entry.flat(gradient))
            for gradients in passes
            for entry, gradient in zip(self.entries, gradients, strict=True)
        ]
        table = self._table(tuple(gradient.dtype == torch.bfloat16 for gradient in flat[: len(self.entries)]))
        addresses = tuple(gradient.data_ptr() // 16 for gradient in flat)
        how = {"COUNT": len(self.entries), "PASSES": len(passes), "ALIGN": self.unit, "BLOCK": BLOCK, "num_warps": 8}
        reference, norm = (params, params) if conflict is None else conflict
        sums = params
        if conflict is not None:
            sums = torch.empty(len(table), dtype=torch.float64, device=params.device)
            _products[(len(table),)](reference, sums, table, addresses, **how)
            sums = sums if len(table) <= SUMS else sums.sum(0, keepdim=True)
        _descend[(len(table),)](
            params, params if low is None else low, params if velocity is None else velocity, rate,
            reference, sums, norm, table, addresses, decay, momentum, len(sums) if conflict else 1,
            PROJECT=conflict is not None, DECAY=decay != 0, MOMENTUM=velocity is not None, LOW=low is not None,
            SUMS=SUMS if 1 < len(sums) <= SUMS else 1, **how,
        )  # fmt: skip

    def _table(self, narrow: tuple[bool, ...]) -> Tensor:
        """(blocks, 5) int32: which parameter, where it starts in the vector (in units), which block of it, its size, is
        its gradient bfloat16?"""
        if narrow not in self.tables:
            rows = [
                (which, entry.start // self.unit, block, entry.size, int(low))
                for which, (entry, low) in enumerate(zip(self.entries, narrow, strict=True))
                for block in range(-(-entry.size // BLOCK))
            ]
            self.tables[narrow] = torch.tensor(rows, dtype=torch.int32).to(self.device)
        return self.tables[narrow]


def _readable(gradient: Tensor) -> Tensor:
    """As a type and at an address that the kernel can read."""
    gradient = gradient if gradient.dtype in (torch.bfloat16, torch.float32) else gradient.float()
    return gradient if gradient.data_ptr() % 16 == 0 else gradient.clone()
