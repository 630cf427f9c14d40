"""Rows of several tensors read or written at the same places by one Triton kernel: a minibatch's samples and targets,
and what a replay buffer holds beside them. PyTorch's operations are one kernel for each tensor."""

# Triton kernels have no types
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST = 3  # tensors
BLOCK = 1024


@triton.jit
def _copy(source_ptr, target_ptr, source, target, size, BLOCK: tl.constexpr):
    for start in range(0, size, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < size
        tl.store(target_ptr + target * size + offsets, tl.load(source_ptr + source * size + offsets, inside), inside)


@triton.jit(do_not_specialize=["a_size", "b_size", "c_size"])
def _rows(
    index_ptr, a_ptr, b_ptr, c_ptr, a_out, b_out, c_out, a_size, b_size, c_size,
    SCATTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    here = tl.program_id(0).to(tl.int64)
    there = tl.load(index_ptr + here)
    source, target = (here, there) if SCATTER else (there, here)
    which = tl.program_id(1)
    if which == 0:
        _copy(a_ptr, a_out, source, target, a_size, BLOCK)
    if which == 1:
        _copy(b_ptr, b_out, source, target, b_size, BLOCK)
    if which == 2:
        _copy(c_ptr, c_out, source, target, c_size, BLOCK)


def fits(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.numel() > 0 and not tensor.requires_grad


def gather(tensors: Sequence[Tensor], index: Tensor) -> list[Tensor]:
    """tensor[index] of each, along the first axis."""
    made = [tensor.new_empty((len(index), *tensor.shape[1:])) for tensor in tensors]
    _launch(tensors, made, index, scatter=False)
    return made


def scatter(places: Sequence[Tensor], index: Tensor, values: Sequence[Tensor]) -> None:
    """place[index] = value of each, in place; of values for the same row one is kept."""
    _launch(values, places, index, scatter=True)


def _launch(sources: Sequence[Tensor], targets: Sequence[Tensor], index: Tensor, scatter: bool) -> None:
    given = [_words(source, target) for source, target in zip(sources, targets, strict=True)]
    given += [given[0]] * (MOST - len(given))  # the grid has no program for these
    arguments = (argument for kind in zip(*given, strict=True) for argument in kind)
    _rows[(len(index), len(sources))](index, *arguments, SCATTER=scatter, BLOCK=BLOCK, num_warps=4)


def _words(source: Tensor, target: Tensor) -> tuple[Tensor, Tensor, int]:
    """Both as vectors of 4-byte words, where their rows and addresses allow it, or of bytes; and the words of a row."""
    row = source.element_size() * (source.numel() // len(source))
    whole = row % 4 == 0 and source.data_ptr() % 4 == 0 and target.data_ptr() % 4 == 0
    kind = torch.int32 if whole else torch.uint8
    return source.view(-1).view(kind), target.view(-1).view(kind), row // (4 if whole else 1)
