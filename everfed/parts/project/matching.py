"""Gradient matching (GM): the direction near the mean update that serves the worst-served update best.

STAMP (CFAgentic workshop, ICML 2025), Eq. 2, in the corrected form of CAGrad and FedOMG. For updates g_1..g_T with
mean gbar and kappa in [0, 1):

    primal   d* = argmax_d min_i <g_i, d>   subject to  ||d - gbar|| <= kappa ||gbar||
    dual     Gamma* = argmin over the simplex of  f(Gamma) = <g_Gamma, gbar> + kappa ||gbar|| ||g_Gamma||
    result   GM = (gbar + lam g_Gamma*) / rho,   lam = kappa ||gbar|| / ||g_Gamma*||,   g_Gamma = sum_i Gamma_i g_i

Only the inner products K_ij = <g_i, g_j> enter the dual, so it costs one pass over the updates for K, a solve of size
T and one weighted sum. Updates are theta_new - theta_old and the result is added to theta_old.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Scale = Literal["none", "1+k", "1+k2"]
Solver = Literal["exact", "softmax_sgd"]
Vector = NDArray[np.float64]

ZERO_MEAN = 1e-12  # ||gbar|| / max ||g_i|| at or below which the updates cancel out
ZERO_COMBINED = 1e-8  # ||g_Gamma|| / max ||g_i|| at or below which g_Gamma has no direction
RESOLUTION = 1e-7  # a sum shorter than this part of its terms is lost in the float64 rounding of K (squares: 1e-14)
SMALLEST = 1e-280  # squared norms below this underflow; such updates count as zero
BLOCK_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}  # float64 working block: within cache on a CPU
SERIAL_COPY = 32_704  # torch splits longer copies over threads, which then spend more on waiting than on copying


@dataclass(frozen=True)
class SoftmaxSGD:
    """The released code's inner solver: SGD on softmax logits, rate halved every `halve_every` steps, best iterate."""

    steps: int = 100
    lr: float = 25.0
    momentum: float = 0.5
    halve_every: int = 30

    def __post_init__(self) -> None:
        if self.steps < 1 or self.halve_every < 1:
            raise ValueError(f"steps and halve_every must be at least 1, got {self.steps} and {self.halve_every}")
        if not (0 < self.lr < math.inf and 0 <= self.momentum < 1):
            raise ValueError(f"lr must be positive and momentum in [0, 1), got {self.lr} and {self.momentum}")


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
    dual = _Dual(inner_products / longest, p, float(kappa))
    if longest == SMALLEST or dual.mean_norm <= ZERO_MEAN:
        return _matching(np.zeros_like(p), p, 0.0, 0)
    if dual.mean_norm <= RESOLUTION * float(p @ dual.norms):
        return _matching(p / rho, p, dual.gap(p, 0.0), 0)
    if solver == "softmax_sgd" and len(p) > 1:
        gamma, lam, iterations = _softmax_sgd(inner_products, p, float(kappa), sgd or SoftmaxSGD())
        return _matching((p + lam * gamma) / rho, gamma, dual.gap(gamma, dual.lam(gamma)), iterations)
    gamma, lam, iterations = _exact(dual, tol)
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


@dataclass(frozen=True)
class _Dual:
    """f(Gamma) over the simplex. K: (T, T), scaled so that the longest update has norm 1; p: (T,) shares of gbar.

    The norm in f is rounded off to a parabola where ||g_Gamma|| < floor, because f has a kink at g_Gamma = 0.
    """

    K: Vector
    p: Vector
    kappa: float
    floor: float = ZERO_COMBINED

    @cached_property
    def to_mean(self) -> Vector:
        """<g_i, gbar>, (T,)."""
        return np.asarray(self.K @ self.p)

    @cached_property
    def mean_norm(self) -> float:
        return _norm(self.K, self.p)

    @cached_property
    def radius(self) -> float:
        """kappa ||gbar||."""
        return self.kappa * self.mean_norm

    @cached_property
    def norms(self) -> Vector:
        return np.sqrt(self.K.diagonal())

    def lam(self, gamma: Vector) -> float:
        """kappa ||gbar|| / ||g_Gamma||; below the floor d = gbar + lam g_Gamma lies inside the ball."""
        return self.radius / max(_norm(self.K, gamma), self.floor)

    def slopes(self, gamma: Vector, lam: float) -> Vector:
        """<g_i, d> with d = gbar + lam g_Gamma, (T,); at lam = lam(gamma) this is the gradient of f."""
        return np.asarray(self.to_mean + lam * (self.K @ gamma))

    def gap(self, gamma: Vector, lam: float) -> float:
        """f(gamma) - min_i <g_i, d>, an upper bound on what d misses, over ||gbar|| max ||g_i||."""
        value = gamma @ self.to_mean + self.radius * _norm(self.K, gamma)
        return max(float(value - self.slopes(gamma, lam).min()), 0.0) / self.mean_norm

    def vanishes(self, gamma: Vector) -> bool:
        """Whether g_Gamma is zero as far as K can tell."""
        return _norm(self.K, gamma) <= max(self.floor, RESOLUTION * float(gamma @ self.norms))


def _exact(dual: _Dual, tol: float) -> tuple[Vector, float, int]:
    """Gamma*, the lam to use with it, and the number of faces visited.

    Where 0 lies in the hull of few updates the walk can end in the rounding noise at the kink of f; a coarser floor
    then tells whether the optimum is the kink itself.
    """
    visited = 0
    for floor in (ZERO_COMBINED, 1e-6, 1e-4):
        dual = replace(dual, floor=floor)
        gamma, slack, faces = _active_set(dual)
        visited += faces
        if slack <= tol:
            break
    lam = dual.lam(gamma)
    worse_than_mean = dual.slopes(gamma, lam).min() < dual.to_mean.min()
    return gamma, 0.0 if worse_than_mean or dual.vanishes(gamma) else lam, visited


def _active_set(dual: _Dual) -> tuple[Vector, float, int]:
    """Minimise f as in Wolfe's minimum-norm-point method: Gamma, what f can still fall by, number of faces visited.

    A face is a set of updates with positive Gamma. f has a closed-form minimum over the plane of a face, so each step
    adds the worst-served update and walks to that minimum, leaving out updates whose Gamma reaches zero. It needs no
    step size; projected gradients stall where the norms of the updates differ by orders of magnitude.
    """
    start = int(np.argmin(dual.to_mean + dual.radius * dual.norms))
    face, gamma = [start], np.eye(len(dual.p))[start]
    best, least = gamma, math.inf
    limit = 10 * len(gamma) + 10  # about T faces are enough; the limit ends a cycle that rounding makes
    for visited in range(1, limit):
        slopes = dual.slopes(gamma, dual.lam(gamma))
        slack = float(gamma @ slopes - slopes.min()) / dual.mean_norm  # Frank-Wolfe gap
        if slack < least:
            best, least = gamma, slack
        worst = int(slopes.argmin())
        if slack <= 1e-14 * _norm(dual.K, gamma) or worst in face:
            return best, least, visited
        try:
            gamma, face = _descend(dual, gamma, [*face, worst])
        except np.linalg.LinAlgError:  # only rounding can bring dependent updates into one face
            return best, least, visited
    return best, least, limit


def _descend(dual: _Dual, gamma: Vector, face: list[int]) -> tuple[Vector, list[int]]:
    """Walk from gamma to the minimum of f over `face`, dropping each update that the walk brings to zero."""
    while True:
        direction, reached = _toward_minimum(dual, gamma[face], face)
        steps = np.full(len(face), np.inf)
        np.divide(gamma[face], -direction, out=steps, where=direction < 0)
        first = int(steps.argmin())
        step = float(min(steps[first], reached))
        gamma = _place(gamma[face] + step * direction, face, len(gamma))
        if steps[first] >= reached:
            return gamma, face
        gamma[face.pop(first)] = 0.0
        gamma = gamma / gamma.sum()


def _toward_minimum(dual: _Dual, here: Vector, face: list[int]) -> tuple[Vector, float]:
    """Direction, and step length, from `here` to the minimum of f over the plane of `face` (length inf: unbounded).

    With tau = ||g_Gamma|| and s = tau / radius, stationarity K Gamma + s K p = const, sum Gamma = 1 is linear in s:
    Gamma = nearest + s drift. Their images are orthogonal, so tau^2 = |g_nearest|^2 + s^2 |g_drift|^2 gives s.
    """
    K = dual.K[np.ix_(face, face)]
    unit = float(K.trace()) / len(face) or 1.0  # a lone zero update has no size of its own
    system = np.ones((len(face) + 1, len(face) + 1))
    system[:-1, :-1], system[-1, -1] = K / unit, 0.0
    sides = np.zeros((len(face) + 1, 2))
    sides[-1, 0], sides[:-1, 1] = 1.0, -dual.to_mean[face] / unit
    nearest, drift = np.linalg.solve(system, sides)[:-1].T
    room = dual.radius**2 - drift @ K @ drift
    if room <= 0:  # the linear term wins over the norm: f falls for ever along drift
        return drift, math.inf
    s = max(_norm(K, nearest) / math.sqrt(room), dual.floor / dual.radius)
    return nearest + s * drift - here, 1.0


def _place(values: Vector, face: list[int], count: int) -> Vector:
    """The simplex point with `values` on `face`; rounding below zero is cut off."""
    gamma = np.zeros(count)
    gamma[face] = np.maximum(values, 0.0)
    return np.asarray(gamma / gamma.sum())


def _softmax_sgd(K: Vector, p: Vector, kappa: float, options: SoftmaxSGD) -> tuple[Vector, float, int]:
    """Gamma, lam and steps as in the released code, whose 1e-4 under the roots makes the result depend on scale."""
    K = K / np.sqrt(K.diagonal() + 1e-4).mean() ** 2
    to_mean = K @ p
    radius = kappa * math.sqrt(p @ to_mean + 1e-4)
    logits, velocity = np.zeros(len(p)), np.zeros(len(p))
    best, best_value, best_norm = p, math.inf, 1.0
    for step in range(options.steps + 1):
        odds = np.exp(logits - logits.max())
        gamma = odds / odds.sum()
        norm = math.sqrt(gamma @ K @ gamma + 1e-4)
        value = gamma @ to_mean + radius * norm
        if value < best_value:
            best, best_value, best_norm = gamma, value, norm
        slopes = to_mean + radius / norm * (K @ gamma)
        velocity = options.momentum * velocity + gamma * (slopes - gamma @ slopes)
        logits = logits - options.lr * 0.5 ** (step // options.halve_every) * velocity
    return best, radius / (best_norm + 1e-4), options.steps


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
    """A NaN or Inf in an update reaches its squared norm, so one look at the diagonal of K covers all entries."""
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


def _norm(K: Vector, gamma: Vector) -> float:
    """||g_Gamma||; rounding may take its square below zero."""
    return math.sqrt(max(float(gamma @ K @ gamma), 0.0))


def _matching(weights: Vector, gamma: Vector, gap: float, iterations: int) -> Matching:
    return Matching(torch.from_numpy(weights), torch.from_numpy(gamma), gap, iterations)
