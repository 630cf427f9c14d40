"""Solvers of the dual of gradient matching: T unknowns, and of the updates only their inner products K_ij = <g_i, g_j>.

    Gamma* = argmin over the simplex of  f(Gamma) = <g_Gamma, gbar> + kappa ||gbar|| ||g_Gamma||,
    g_Gamma = sum_i Gamma_i g_i,   lam = kappa ||gbar|| / ||g_Gamma*||

`exact` is an active-set method with a certified gap, `softmax_sgd` the released code's. `matching.py` has the operator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

ZERO_COMBINED = 1e-8  # ||g_Gamma|| / max ||g_i|| at or below which g_Gamma has no direction
RESOLUTION = 1e-7  # a sum shorter than this part of its terms is lost in the float64 rounding of K (squares: 1e-14)


@dataclass(frozen=True)
class Dual:
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


def exact(dual: Dual, tol: float) -> tuple[Vector, float, int]:
    """Gamma*, the lam to use with it, and the number of faces visited.

    Where 0 lies in the hull of few updates the walk can end in the rounding noise at the kink of f; a coarser floor
    then shows whether the optimum is the kink itself.
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


def _active_set(dual: Dual) -> tuple[Vector, float, int]:
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


def _descend(dual: Dual, gamma: Vector, face: list[int]) -> tuple[Vector, list[int]]:
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


def _toward_minimum(dual: Dual, here: Vector, face: list[int]) -> tuple[Vector, float]:
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


def softmax_sgd(K: Vector, p: Vector, kappa: float, options: SoftmaxSGD) -> tuple[Vector, float, int]:
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


def _norm(K: Vector, gamma: Vector) -> float:
    """||g_Gamma||; rounding may take its square below zero."""
    return math.sqrt(max(float(gamma @ K @ gamma), 0.0))
