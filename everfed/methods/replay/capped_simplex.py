"""Minimising x'Qx - 2c'x over the capped simplex {0 <= x <= 1, sum x = n}: the relaxed choice of n samples.

Two local methods, both descending and both in float64: accelerated projected gradient where Q is positive
semidefinite (or nearly), pairwise exchanges where the diagonal was removed and the minima are vertices.
"""

from __future__ import annotations

import numpy as np


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
