"""Choosing replay samples whose gradients point in different directions, by a relaxed quadratic programme.

"Coordinated Replay Sample Selection for Continual Federated Learning", objectives (3) to (5): of n' candidates keep
the N whose unit gradients have the shortest sum, ||sum_R g_i / ||g_i|| ||. The choice is relaxed to weights x in
[0, 1] that sum to N, and the N largest weights win.

    convex          min x'Qx, Q the matrix of cosines (Eq. 5)
    zero-diagonal   min x'(Q - I)x: the same integer minima, but indefinite, so its solutions are almost integral

With a `target` h the sum is drawn to h instead of to zero (the client step of Algorithm 1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor


# x'Qx - 2c'x over the capped simplex {0 <= x <= 1, sum x = n}: two local methods, both descending and both in float64.
# Accelerated projected gradient where Q is positive semidefinite (or nearly), pairwise exchanges where the diagonal was
# removed and the minima are vertices.
def project(y: np.ndarray, n: int) -> np.ndarray:
    """The point of {0 <= x <= 1, sum x = n} nearest to `y`, exactly (no tolerance, O(m log m)).

    y: (m,) finite float64. n: whole number, 0 <= n <= m. |sum - n| stays at rounding level.
    """
    _check_projection(y, n)
    if n in (0, len(y)):
        return np.full(len(y), float(n > 0))
    # x = clip(y - tau, 0, 1), and tau lies within 1 below the n-th largest entry. Measured from there, entries
    # beyond +-1 are at a bound whatever tau is; cutting them keeps every breakpoint small and the sums exact.
    y = np.clip(y - np.partition(y, len(y) - n)[len(y) - n], -1.0, 1.0)
    return np.clip(y - _threshold(y, n), 0.0, 1.0)


def _threshold(y: np.ndarray, n: int) -> float:
    """tau with sum clip(y - tau, 0, 1) = n: the sum falls linearly between the breakpoints y - 1 and y."""
    breakpoints = np.concatenate([y - 1.0, y])
    order = np.argsort(breakpoints, kind="stable")
    breakpoints = breakpoints[order]
    inside = np.cumsum(np.where(order < len(y), 1, -1))  # entries strictly between 0 and 1 after each breakpoint
    sums = len(y) - np.concatenate([[0.0], np.cumsum(inside[:-1] * np.diff(breakpoints))])
    last = int(np.searchsorted(-sums, -n, side="right")) - 1  # the last breakpoint where the sum is still >= n
    free = max(int(inside[last]), 1)  # none free: the sum is flat at n, and tau is the breakpoint itself
    return float(breakpoints[last] + (sums[last] - n) / free)


def _check_projection(y: np.ndarray, n: int) -> None:
    if y.ndim != 1:
        raise ValueError(f"y must be a vector, got shape {y.shape}")
    if not 0 <= n <= len(y):
        raise ValueError(f"n must lie between 0 and the length of y ({len(y)}), got {n}")
    if not np.isfinite(y).all():
        raise ValueError("y must be finite")


def largest_eigenvalue(gram: np.ndarray) -> float:
    """The largest eigenvalue of a symmetric matrix; 1 for an empty one, so that it can divide a step."""
    return float(np.linalg.eigvalsh(gram)[-1]) if len(gram) else 1.0


def accelerated_projected_gradient(
    gram: np.ndarray,
    linear: np.ndarray,
    n: int,
    start: np.ndarray,
    curvature: float,
    tolerance: float = 1e-10,
    limit: int = 20_000,
) -> np.ndarray:
    """FISTA with restart for min x'Qx - 2c'x from a feasible `start`; the value never rises above the start's.

    gram: (m, m) Q. linear: (m,) c. curvature: an upper bound of Q's largest eigenvalue.
    Ends at an x that one plain projected-gradient step moves by less than `tolerance` in every entry (so that
    solving again from the result returns it unchanged), or after `limit` steps.
    """
    x, qx = start, gram @ start
    z, qz, momentum = x, qx, 1.0
    for _ in range(limit):
        new = project(z - (qz - linear) / curvature, n)  # step 1/L, L = 2 * curvature
        q_new = gram @ new
        moved, q_moved = new - x, q_new - qx
        rises = moved @ (qx + q_new - 2 * linear) >= 0  # f(new) - f(x), without the cancellation of two values
        still = np.abs(moved).max() < tolerance
        if momentum == 1.0 and (still or rises):
            return x
        if rises:  # momentum overshot: forget it and step from x itself
            z, qz, momentum = x, qx, 1.0
            continue
        following = 1.0 if still else (1 + np.sqrt(1 + 4 * momentum**2)) / 2  # still: a plain step must confirm it
        push = 0.0 if still else (momentum - 1) / following
        z, qz = new + push * moved, q_new + push * q_moved
        x, qx, momentum = new, q_new, following
    return x


def pairwise_descent(
    gram: np.ndarray, linear: np.ndarray, start: np.ndarray, tolerance: float = 1e-9, limit: int | None = None
) -> np.ndarray:
    """Descent by exchanges e_i - e_j with exact line search for min x'Qx - 2c'x, Q possibly indefinite, diagonal 0.

    Each step moves weight from the entry with the largest gradient to the one with the smallest; with a zero diagonal
    its curvature is -2 Q_ij, so a non-negative Q_ij sends one of the two to its bound. (Frank-Wolfe towards whole
    vertices stops far from any minimum when there are many more samples than dimensions.) The value never rises.
    A local method: the result depends on `start`, which must not be a stationary point that is no minimum.
    Ends when no exchange gains more than `tolerance` per unit of weight, or after `limit` (20 per entry) exchanges.
    """
    x, gradient = start.copy(), 2 * (gram @ start - linear)
    for _ in range(20 * len(x) if limit is None else limit):
        giver = int(np.argmax(np.where(x > 0, gradient, -np.inf)))
        taker = int(np.argmin(np.where(x < 1, gradient, np.inf)))
        slope = gradient[giver] - gradient[taker]
        if slope <= tolerance:
            break
        step = _exchange_step(slope, gram[giver, taker], min(x[giver], 1 - x[taker]))
        # what reaches a bound is put there exactly: rounding must not leave a crumb to be exchanged again
        x[giver], x[taker] = (
            0.0 if step >= x[giver] else x[giver] - step,
            1.0 if step >= 1 - x[taker] else x[taker] + step,
        )
        gradient += 2 * step * (gram[taker] - gram[giver])
    return x


def _exchange_step(slope: float, cosine: float, room: float) -> float:
    """The t in [0, room] that minimises -slope t - 2 cosine t^2."""
    return room if cosine >= 0 else min(room, slope / (-4 * cosine))


def noisy_uniform(m: int, n: int, rng: np.random.Generator) -> np.ndarray:
    """(m,) n/m everywhere, plus a little noise: the uniform point itself can be a saddle where descent never starts."""
    return project(n / m + 1e-3 * rng.standard_normal(m), n)


def largest(values: np.ndarray, n: int) -> np.ndarray:
    """The positions of the `n` largest values, ascending; among equals the earlier position wins."""
    return np.sort(np.argsort(-values, kind="stable")[:n])


def refine_by_swaps(gram: np.ndarray, linear: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Exchange one chosen sample for one other, best exchange first, until none lowers x'Qx - 2c'x.

    gram: (m, m) with any constant diagonal. chosen: positions. Returns positions, ascending.
    """
    inside = np.zeros(len(gram), dtype=bool)
    inside[chosen] = True
    off_diagonal = gram - np.diag(np.diag(gram))
    while not (inside.all() or not inside.any()):
        pull = off_diagonal[inside].sum(axis=0) - linear
        change = pull[~inside] - pull[inside][:, None] - off_diagonal[np.ix_(inside, ~inside)]
        out, into = np.unravel_index(np.argmin(change), change.shape)
        if change[out, into] >= -1e-12:
            break
        leaving, entering = np.flatnonzero(inside)[out], np.flatnonzero(~inside)[into]
        inside[leaving], inside[entering] = False, True
    return np.flatnonzero(inside)


RELAXATIONS = ("zero-diagonal", "convex")
Seed = int | Sequence[int]
NO_DIRECTION = 1e-12  # a gradient this short is rounding noise, not a direction
_BLOCK_BYTES = 2**26


@dataclass(frozen=True)
class Candidates:
    """The samples a client chooses from, seen through their unit gradients G (columns g_i / ||g_i||).

    gradients: (n', d) as given; never copied. norms: (n',) float64.
    directed: positions of the k samples whose gradient has a direction; only they take part in the programme.
    gram: (k, k) float64 Q = G'G, the cosines.
    """

    gradients: Tensor
    norms: np.ndarray
    directed: np.ndarray
    gram: np.ndarray

    @classmethod
    def of(cls, gradients: Tensor | np.ndarray) -> Candidates:
        rows = as_rows(gradients)
        norms = row_norms(rows).cpu().numpy()
        directed = np.flatnonzero(norms > NO_DIRECTION)
        products = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device)
        for block in column_blocks(rows):
            products += block @ block.T
        lengths = norms[directed]
        gram = products.cpu().numpy()[np.ix_(directed, directed)] / lengths[:, None] / lengths
        np.fill_diagonal(gram, 1.0)
        return cls(rows, norms, directed, gram)

    @cached_property
    def curvature(self) -> float:
        """The largest eigenvalue of Q."""
        return largest_eigenvalue(self.gram)

    def weighted_sum(self, weights: np.ndarray) -> Tensor:
        """(d,) float64 y = G x, for x of shape (k,)."""
        scale = np.zeros(len(self.norms))
        scale[self.directed] = weights / self.norms[self.directed]
        factors = torch.from_numpy(scale).to(self.gradients.device)
        parts = [factors @ block for block in column_blocks(self.gradients)]
        return torch.cat(parts) if parts else factors.new_zeros(0)

    def along(self, target: Tensor | np.ndarray | None) -> np.ndarray:
        """(k,) c = G' h; zeros without a target."""
        if target is None:
            return np.zeros(len(self.directed))
        h = torch.as_tensor(target, device=self.gradients.device).detach().double()
        if h.shape != self.gradients.shape[1:]:
            raise ValueError(f"target must have shape {tuple(self.gradients.shape[1:])}, got {tuple(h.shape)}")
        products, first = torch.zeros(len(self.norms), dtype=torch.float64, device=h.device), 0
        for block in column_blocks(self.gradients):
            products += block @ h[first : first + block.shape[1]]
            first += block.shape[1]
        return products.cpu().numpy()[self.directed] / self.norms[self.directed]

    def pick(self, chosen: np.ndarray, n: int, seed: Seed) -> np.ndarray:
        """`chosen` (positions among the directed) as positions among all, filled up to n by samples without direction.

        The fill is drawn at random: nothing distinguishes these samples. Ascending.
        """
        missing = min(n, len(self.norms)) - len(chosen)
        aimless = np.setdiff1d(np.arange(len(self.norms)), self.directed)
        fill = np.random.default_rng(seed).choice(aimless, size=missing, replace=False) if missing > 0 else aimless[:0]
        return np.sort(np.concatenate([self.directed[chosen], fill]))


def select(
    gradients: Tensor | np.ndarray,
    n: int,
    relaxation: str = "zero-diagonal",
    target: Tensor | np.ndarray | None = None,
    seed: Seed = 0,
    *,
    swap_refine: bool = False,
) -> np.ndarray:
    """The positions of the `n` samples to keep: unique, ascending, int64; all of them when there are n or fewer.

    gradients: (n', d), one row per sample, any length (only directions count); array or tensor on any device.
    relaxation: "zero-diagonal" or "convex". With n = 1 both mean the convex one: without its diagonal the programme
        then ties all samples, and follows a target too eagerly.
    target: (d,) what the sum of the chosen unit gradients should come near; None means zero.
    seed: fixes the start of the zero-diagonal descent and the draw among samples without direction.
    swap_refine: improve the choice by single exchanges (not in the paper).

    Samples with a zero gradient are taken only when fewer than n others exist. A gradient that is not finite is an
    error. The same arguments give the same positions.
    """
    if relaxation not in RELAXATIONS:
        raise ValueError(f"relaxation must be one of {', '.join(RELAXATIONS)}, got {relaxation!r}")
    if n < 0:
        raise ValueError(f"n must not be negative, got {n}")
    candidates = Candidates.of(gradients)
    linear = candidates.along(target)
    weights = (
        convex_weights(candidates, n, linear)
        if relaxation == "convex"
        else zero_diagonal_weights(candidates, n, linear, seed)
    )
    chosen = largest(weights, n)
    return candidates.pick(refine_by_swaps(candidates.gram, linear, chosen) if swap_refine else chosen, n, seed)


def convex_weights(
    candidates: Candidates, n: int, linear: np.ndarray, start: np.ndarray | None = None, delta: float = 0.0
) -> np.ndarray:
    """(k,) x minimising x'(Q - delta I)x - 2c'x, from `start` or the uniform point; ones when k <= n."""
    count = len(candidates.directed)
    if count <= n or n == 0:
        return np.full(count, float(n > 0))
    start = np.full(count, n / count) if start is None else start
    gram = candidates.gram - delta * np.eye(count) if delta else candidates.gram
    return accelerated_projected_gradient(gram, linear, n, start, candidates.curvature)


def zero_diagonal_weights(candidates: Candidates, n: int, linear: np.ndarray, seed: Seed) -> np.ndarray:
    """(k,) a local minimiser of x'(Q - I)x - 2c'x, from a seeded start; the convex weights for n = 1."""
    count = len(candidates.directed)
    if count <= n or n <= 1:
        return convex_weights(candidates, n, linear)
    start = noisy_uniform(count, n, np.random.default_rng(seed))
    return pairwise_descent(candidates.gram - np.eye(count), linear, start)


def objective(gradients: Tensor | np.ndarray, chosen: np.ndarray) -> float:
    """Eq. 3: the sum of all cosines within `chosen`, equal to the squared length of the sum of unit gradients."""
    candidates = Candidates.of(as_rows(gradients)[torch.as_tensor(chosen)])
    return float((candidates.weighted_sum(np.ones(len(candidates.directed))) ** 2).sum())


# gradients as directions ----------------------------------------------------------------------------------------------
def as_rows(vectors: Tensor | np.ndarray) -> Tensor:
    """`vectors` as a floating (n, d) tensor, one row per sample, without a copy where possible."""
    rows = torch.as_tensor(vectors).detach()
    if rows.ndim != 2:
        raise ValueError(f"one row per sample is needed, shape (samples, d), got {tuple(rows.shape)}")
    return rows if rows.is_floating_point() else rows.double()


def row_norms(rows: Tensor) -> Tensor:
    """(n,) float64 lengths of the rows; refuses a row that is not finite."""
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    broken = torch.nonzero(~torch.isfinite(norms)).flatten().tolist()
    if broken:
        raise ValueError(f"the gradient of sample {broken[0]} is not finite ({len(broken)} of {len(rows)} samples)")
    return norms


def unit_rows(vectors: Tensor | np.ndarray) -> Tensor:
    """(n, d) float64 rows of length 1; a row without direction becomes zero, so its cosine with anything is 0."""
    rows = as_rows(vectors)
    norms = row_norms(rows)
    return rows.double() * inverse(norms)[:, None]


def inverse(norms: Tensor) -> Tensor:
    """1 / norm, and 0 where there is no direction."""
    return torch.where(norms > NO_DIRECTION, 1.0 / norms.clamp_min(NO_DIRECTION), torch.zeros_like(norms))


def column_blocks(rows: Tensor) -> Iterator[Tensor]:
    """The columns of `rows` in float64, in blocks, so that a long matrix is never copied whole."""
    width = max(1, _BLOCK_BYTES // (8 * max(1, len(rows))))
    for first in range(0, rows.shape[1], width):
        yield rows[:, first : first + width].double()
