"""Gradient matching (GM): the direction near the mean update that serves the worst-served update best.

STAMP (CFAgentic workshop, ICML 2025), Eq. 2, in the corrected form of CAGrad and FedOMG. For updates g_1..g_T with
mean gbar and kappa in [0, 1):

    primal   d* = argmax_d min_i <g_i, d>   subject to  ||d - gbar|| <= kappa ||gbar||
    dual     Gamma* = argmin over the simplex of  f(Gamma) = <g_Gamma, gbar> + kappa ||gbar|| ||g_Gamma||
    result   GM = (gbar + lam g_Gamma*) / rho,   lam = kappa ||gbar|| / ||g_Gamma*||,   g_Gamma = sum_i Gamma_i g_i

Only the inner products K_ij = <g_i, g_j> enter the dual, so it costs one pass over the updates for K, a solve of size
T (`matching_solvers.py`) and one weighted sum. Updates are theta_new - theta_old and the result is added to theta_old.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from everfed.methods.project.matching_solvers import RESOLUTION, Dual, SoftmaxSGD, Vector, exact, softmax_sgd

Scale = Literal["none", "1+k", "1+k2"]
Solver = Literal["exact", "softmax_sgd"]
# the options of the methods that match
KAPPA: dict[str, Any] = {
    "at_least": 0,
    "below": 1,
    "about": "radius of the search around the mean update, as a part of its norm; 0 is the mean itself",
}
SCALE: dict[str, Any] = {
    "one_of": get_args(Scale),
    "about": "what the result is divided by: 1, 1 + kappa, or 1 + kappa^2 (the released code)",
}
SOLVER: dict[str, Any] = {
    "one_of": get_args(Solver),
    "about": "of the matching: exact, or softmax_sgd as in the released code",
}

ZERO_MEAN = 1e-12  # ||gbar|| / max ||g_i|| at or below which the updates cancel out
SMALLEST = 1e-280  # squared norms below this underflow; such updates count as zero
BLOCK_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}  # float64 working block: within cache on a CPU
SERIAL_COPY = 32_704  # torch splits longer copies over threads, which then spend more on waiting than on copying


@dataclass(frozen=True)
class Matching:
    """A solved matching of T updates; GM = sum_i weights_i g_i.

    weights: (T,) float64, (p_i + lam Gamma_i) / rho. gamma: (T,) float64 in the simplex.
    gap: certified duality gap as a fraction of ||gbar|| max_i ||g_i||; min_i <g_i, rho GM> is at most this far from
    the best there is. Where g_Gamma vanishes the result is the mean, and the gap is that of the mean. For
    "softmax_sgd" it is the gap at gamma, before that solver's own damping of lam. It holds for K as rounded to
    float64: where the updates nearly cancel, add about 1e-16 (max_i ||g_i|| / ||gbar||)^2.
    iterations: faces visited ("exact") or gradient steps taken ("softmax_sgd").
    """

    weights: Tensor
    gamma: Tensor
    gap: float
    iterations: int


def match_gradients(
    updates: Sequence[Tensor] | Tensor,
    kappa: float = 0.25,
    scale: Scale = "none",
    *,
    weights: Sequence[float] | Tensor | None = None,
    solver: Solver = "exact",
    sgd: SoftmaxSGD | None = None,
    tol: float = 1e-8,
) -> Tensor:
    """GM of T `updates`: T vectors of length d, or the rows of a (T, d) tensor, on any one device; returns (d,).

    kappa: radius of the search ball around the mean, as a part of its norm; 0 gives the mean.
    scale: rho = 1 ("none"), 1 + kappa ("1+k", never longer than the mean) or 1 + kappa^2 ("1+k2", the released code).
    weights: shares of the updates in gbar (normalised to sum 1); equal by default, as in the paper.
    tol: largest acceptable `Matching.gap`; a larger one is warned about. Result in the updates' dtype and device.
    """
    rows = _rows(updates)
    _checked_rho(kappa, scale, solver)  # a bad option is refused before the pass over the updates
    matching = solve_gram(gram(rows), kappa, scale, weights=weights, solver=solver, sgd=sgd, tol=tol)
    return combine(rows, matching.weights)


def solve_gram(
    K: Tensor,
    kappa: float = 0.25,
    scale: Scale = "none",
    *,
    weights: Sequence[float] | Tensor | None = None,
    solver: Solver = "exact",
    sgd: SoftmaxSGD | None = None,
    tol: float = 1e-8,
) -> Matching:
    """Solve the matching from K = G G^T, (T, T), alone; options as in `match_gradients`.

    Degenerate inputs: all updates zero or no mean -> zero weights; g_Gamma* = 0, or a mean too small for K to
    resolve -> the mean, which is feasible and never worse than itself.
    """
    rho = _checked_rho(kappa, scale, solver)
    inner_products = _checked_gram(K)
    p = _shares(weights, len(inner_products))
    longest = max(float(inner_products.diagonal().max()), SMALLEST)
    dual = Dual(inner_products / longest, p, float(kappa))
    if longest == SMALLEST or dual.mean_norm <= ZERO_MEAN:
        return _matching(np.zeros_like(p), p, 0.0, 0)
    if dual.mean_norm <= RESOLUTION * float(p @ dual.norms):
        return _matching(p / rho, p, dual.gap(p, 0.0), 0)
    if solver == "softmax_sgd" and len(p) > 1:
        gamma, lam, iterations = softmax_sgd(inner_products, p, float(kappa), sgd or SoftmaxSGD())
        return _matching((p + lam * gamma) / rho, gamma, dual.gap(gamma, dual.lam(gamma)), iterations)
    gamma, lam, iterations = exact(dual, tol)
    gap = dual.gap(gamma, lam)
    if lam > 0 and gap > tol:
        _warn_of(gap, tol)
    return _matching((p + lam * gamma) / rho, gamma, gap, iterations)


@torch.no_grad()
def gram(updates: Sequence[Tensor] | Tensor) -> Tensor:
    """K = G G^T, (T, T) float64 on the CPU, accumulated in float64 over blocks of columns."""
    rows = _rows(updates)
    K = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows[0].device)
    for _, block in _blocks(rows):
        K += _inner_products(block)
    K = K.cpu()
    _refuse_non_finite(rows, K)
    return K


@torch.no_grad()
def combine(updates: Sequence[Tensor] | Tensor, weights: Tensor) -> Tensor:
    """sum_i weights_i g_i, (d,), summed in float64 because near-opposite updates get large weights that cancel."""
    rows = _rows(updates)
    total = torch.empty_like(rows[0], memory_format=torch.contiguous_format)
    factors = weights.to(rows[0].device, torch.float64)
    for columns, block in _blocks(rows):
        total[columns] = factors @ block
    return total


def pairwise_cosines(updates: Sequence[Tensor] | Tensor) -> float:
    """Mean cosine over the pairs i < j of updates (Fig. 3 in time, Fig. 4 in space).

    Zero updates have no direction and are left out; nan where no pair remains. The released code also counts i = j:
    for T updates its value is (1 + (T - 1) m) / T with m the value here.
    """
    K = gram(updates)
    directed = K.diagonal() > SMALLEST
    K = K[directed][:, directed]
    norms = K.diagonal().sqrt()
    i, j = torch.triu_indices(len(K), len(K), offset=1)
    return float((K[i, j] / (norms[i] * norms[j])).mean())


def _blocks(rows: Sequence[Tensor]) -> Iterator[tuple[slice, Tensor]]:
    """Consecutive columns of the updates as (T, width) float64, in one buffer that the next block overwrites."""
    count, length, device = len(rows), len(rows[0]), rows[0].device
    width = max(1, BLOCK_BYTES.get(device.type, BLOCK_BYTES["cpu"]) // (8 * count))
    width = min(width, SERIAL_COPY) if device.type == "cpu" else width
    buffer = torch.empty(count * min(width, length), dtype=torch.float64, device=device)
    for start in range(0, length, width):
        columns = slice(start, min(start + width, length))
        block = buffer[: count * (columns.stop - start)].view(count, -1)
        for target, row in zip(block, rows, strict=True):
            target.copy_(row[columns])
        yield columns, block


def _inner_products(block: Tensor) -> Tensor:
    """block block^T, (T, T).

    For few rows numpy's symmetric product does half the work, and on one thread: the bits do not depend on the number
    of threads, and no thread waits for another on a busy machine.
    """
    if block.device.type != "cpu" or len(block) >= 64:
        return block @ block.T
    rows = block.numpy()
    with np.errstate(over="ignore", invalid="ignore"):  # `gram` refuses what is not finite, by name
        return torch.from_numpy(rows @ rows.T)


def _rows(updates: Sequence[Tensor] | Tensor) -> Sequence[Tensor]:
    """The updates as vectors of one length, dtype and device."""
    if isinstance(updates, Tensor) and updates.dim() != 2:
        raise ValueError(f"updates must be (T, d) or a list of vectors, got shape {tuple(updates.shape)}")
    rows = updates.unbind(0) if isinstance(updates, Tensor) else updates
    if len(rows) == 0:
        raise ValueError("updates must hold at least one vector, got none")
    first = rows[0]
    for i, row in enumerate(rows):
        if row.dim() != 1 or not row.is_floating_point():
            raise ValueError(f"update {i} must be a real vector, got shape {tuple(row.shape)} of {row.dtype}")
        if (len(row), row.dtype, row.device) != (len(first), first.dtype, first.device):
            raise ValueError(
                f"update {i} has {len(row)} entries of {row.dtype} on {row.device}, "
                f"but update 0 has {len(first)} of {first.dtype} on {first.device}"
            )
    return rows


def _refuse_non_finite(rows: Sequence[Tensor], K: Tensor) -> None:
    """A NaN or Inf in an update reaches its squared norm, so checking the diagonal of K covers all entries."""
    for i in (~K.diagonal().isfinite()).nonzero().flatten().tolist():
        if rows[i].isfinite().all():
            raise ValueError(f"update {i} is too long: its squared norm overflows float64")
        raise ValueError(f"update {i} holds NaN or Inf; matching needs finite updates")


def _checked_gram(K: Tensor) -> Vector:
    """K as float64 on the host, refused unless it can be a matrix of inner products."""
    matrix = torch.as_tensor(K).detach().to("cpu", torch.float64).numpy()
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or len(matrix) == 0:
        raise ValueError(f"K must be a (T, T) matrix of inner products, got shape {matrix.shape}")
    for i in np.flatnonzero(~np.isfinite(matrix).all(axis=1)):
        raise ValueError(f"K holds NaN or Inf in the row of update {i}")
    diagonal = matrix.diagonal()
    if diagonal.min() < 0 or np.abs(matrix - matrix.T).max() > 1e-6 * diagonal.max():
        raise ValueError("K must be symmetric with squared norms on its diagonal")
    return np.asarray((matrix + matrix.T) / 2)


def _shares(weights: Sequence[float] | Tensor | None, count: int) -> Vector:
    """p: (T,), non-negative, sum 1."""
    if weights is None:
        return np.full(count, 1.0 / count)
    p = torch.as_tensor(weights).detach().to("cpu", torch.float64).numpy()
    if p.shape != (count,) or not np.isfinite(p).all() or p.min() < 0 or p.sum() == 0:
        raise ValueError(f"weights must be {count} non-negative numbers with a positive sum, got {p.tolist()}")
    return np.asarray(p / p.sum())


def _checked_rho(kappa: float, scale: str, solver: str) -> float:
    """The factor that the result is divided by; refuses options outside their range."""
    if not 0 <= kappa < 1:
        raise ValueError(f"kappa must lie in [0, 1), got {kappa}")
    if solver not in get_args(Solver):
        raise ValueError(f"solver must be one of {get_args(Solver)}, got {solver!r}")
    factors = {"none": 1.0, "1+k": 1 + kappa, "1+k2": 1 + kappa**2}
    if scale not in factors:
        raise ValueError(f"scale must be one of {get_args(Scale)}, got {scale!r}")
    return float(factors[scale])


def _warn_of(gap: float, tol: float) -> None:
    message = f"gradient matching stopped at a relative gap of {gap:.1e}, above tol={tol:.1e}"
    warnings.warn(message, RuntimeWarning, stacklevel=3)


def _matching(weights: Vector, gamma: Vector, gap: float, iterations: int) -> Matching:
    return Matching(torch.from_numpy(weights), torch.from_numpy(gamma), gap, iterations)
