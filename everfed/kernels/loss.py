"""Cross-entropy of a minibatch and its gradient as one Triton kernel; PyTorch's operations are six short ones."""

# Triton kernels have no types
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from everfed.kernels.tiles import power

IGNORED = -100  # a target that does not count, as in PyTorch
MOST = 32768  # logits that one program holds


@triton.jit(do_not_specialize=["N", "C", "stride"])
def _cross_entropy(
    z_ptr, y_ptr, loss_ptr, dz_ptr, N, C, stride,
    IGNORED: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    rows, cols = tl.arange(0, R), tl.arange(0, K)
    there = (rows < N)[:, None] & (cols < C)[None, :]
    y = tl.load(y_ptr + rows, rows < N, IGNORED)
    own = y[:, None] == cols[None, :]
    z = tl.load(z_ptr + rows[:, None] * stride + cols[None, :], there, 0.0)
    z = tl.where((cols < C)[None, :], z, float("-inf"))
    largest = tl.max(z, 1)
    e = tl.exp(z - largest[:, None])
    total = tl.sum(e, 1)
    counts = y != IGNORED
    count = tl.sum(counts.to(tl.float32), 0)
    losses = largest + tl.log(total) - tl.sum(tl.where(own, z, 0.0), 1)
    # no such class: PyTorch raises, a kernel cannot
    losses = tl.where((y < 0) | (y >= C), float("nan"), losses)
    tl.store(loss_ptr, tl.sum(tl.where(counts, losses, 0.0), 0) / count)
    dz = (e / total[:, None] - own.to(tl.float32)) / count
    tl.store(dz_ptr + rows[:, None] * C + cols[None, :], tl.where(counts[:, None], dz, 0.0), there)


def fits(logits: Tensor) -> bool:
    return logits.dim() == 2 and logits.numel() > 0 and power(len(logits)) * power(logits.shape[1]) <= MOST


def cross_entropy(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """(mean loss, its gradient). logits: (n, C) float32."""
    count, classes = logits.shape
    loss, gradient = torch.empty((), device=logits.device), torch.empty((count, classes), device=logits.device)
    rows, columns = power(count), power(classes)
    _cross_entropy[(1,)](
        logits, y, loss, gradient, count, classes, logits.stride(0),
        IGNORED=IGNORED, R=rows, K=columns, num_warps=4 if rows * columns <= 4096 else 8,
    )  # fmt: skip
    return loss, gradient
