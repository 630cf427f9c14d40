"""Reading and writing rows of several tensors at the same places."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from everfed.kernels import load_kernels

kernel = load_kernels("everfed.kernels.rows")


def take_rows(tensors: Sequence[Tensor], index: Tensor) -> list[Tensor]:
    """The rows `index` of each tensor, as index_select along the first axis. On a GPU one kernel for all."""
    if _has_kernel(index, tensors):
        made: list[Tensor] = kernel.gather(tensors, index)
        return made
    return [tensor.index_select(0, index) for tensor in tensors]


def put_rows(places: Sequence[Tensor], index: Tensor, values: Sequence[Tensor]) -> None:
    """Write values[i] into the rows `index` of places[i], in place, as index_copy_ along the first axis."""
    same = all(place.dtype == value.dtype for place, value in zip(places, values, strict=True))
    if same and _has_kernel(index, [*places, *values], len(places)):
        kernel.scatter(places, index, values)
        return
    for place, value in zip(places, values, strict=True):
        place.index_copy_(0, index, value)


def _has_kernel(index: Tensor, tensors: Sequence[Tensor], count: int | None = None) -> bool:
    return (
        kernel is not None
        and all(tensor.is_cuda for tensor in (index, *tensors))
        and index.dtype == torch.int64
        and index.is_contiguous()
        and len(index) > 0
        and (count or len(tensors)) <= kernel.MOST
        and all(kernel.fits(tensor) for tensor in tensors)
        and not torch.compiler.is_compiling()
    )
