"""How near the relaxations come to the best possible choice: the experiment of Figures 1 and 4.

"Coordinated Replay Sample Selection for Continual Federated Learning", Sect. 5.1 and App. C.1: synthetic gradients of
one client, n samples of which 5 are kept; every policy's objective (3) is divided by the optimum over all subsets.

The generator is printed with a normalisation that can be read two ways. Read literally (per coordinate, across
samples) the gradients sum to zero, which makes the convex relaxation empty; read per vector it beats GSS-greedy and a
random choice as in the paper, but not GSS-clustering. Both are offered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb

import numpy as np

from everfed.methods.replay.diversity import select, unit_rows
from everfed.methods.replay.gss import cluster_select, greedy_select
from everfed.methods.replay.random_selection import naive_uniform

READINGS = ("per-vector", "per-coordinate")
Policy = Callable[[np.ndarray, int, np.random.Generator], np.ndarray]
"""(gradients (n', d), n, rng) -> n positions."""
_BLOCK = 2**20


@dataclass(frozen=True)
class Choice:
    """One policy's choice for one client; ratio >= 1 up to rounding."""

    reading: str
    samples: int
    repetition: int
    policy: str
    objective: float
    optimum: float

    @property
    def ratio(self) -> float:
        return self.objective / self.optimum


def near_optimality(
    sizes: Sequence[int] = (10, 30, 50),
    readings: Sequence[str] = READINGS,
    repetitions: int = 1000,
    *,
    keep: int = 5,
    dimension: int = 300,
    seed: int = 0,
    policies: Mapping[str, Policy] | None = None,
) -> Iterator[Choice]:
    """One row per reading, size, repetition and policy. A repetition is one client, fixed by (seed, its own number)."""
    policies = policies or POLICIES
    for reading in readings:
        for samples in sizes:
            for repetition in range(repetitions):
                entropy = (seed, READINGS.index(_known(reading)), samples, repetition)
                gradients = draw_gradients(np.random.default_rng(entropy), samples, dimension, reading)
                yield from _score(
                    gradients, keep, policies, entropy, Choice(reading, samples, repetition, "", 0.0, 0.0)
                )


def _score(
    gradients: np.ndarray, keep: int, policies: Mapping[str, Policy], entropy: tuple[int, ...], base: Choice
) -> Iterator[Choice]:
    units = unit_rows(gradients).numpy()
    cosines = units @ units.T
    optimum = brute_force(cosines, keep)[0]
    for number, (name, policy) in enumerate(policies.items()):
        chosen = policy(gradients, keep, np.random.default_rng((*entropy, number + 1)))
        value = float(cosines[np.ix_(chosen, chosen)].sum())
        yield Choice(base.reading, base.samples, base.repetition, name, value, optimum)


def mean_ratios(rows: Iterable[Choice]) -> dict[tuple[str, int, str], float]:
    """(reading, samples, policy) -> mean ratio to the optimum."""
    ratios: dict[tuple[str, int, str], list[float]] = {}
    for row in rows:
        ratios.setdefault((row.reading, row.samples, row.policy), []).append(row.ratio)
    return {key: float(np.mean(values)) for key, values in ratios.items()}


def draw_gradients(
    rng: np.random.Generator, samples: int, dimension: int = 300, reading: str = READINGS[0]
) -> np.ndarray:
    """(samples, dimension) gradients of one client: a mixture of 1 + Poisson(4) unit-variance Gaussians."""
    normalise = {"per-vector": _standardise_rows, "per-coordinate": _standardise_columns}[_known(reading)]
    count = 1 + rng.poisson(4)
    centres = normalise(rng.standard_normal((count, dimension)))
    cluster = rng.choice(count, size=samples, p=rng.dirichlet(np.ones(count)))
    return normalise(centres[cluster] + rng.standard_normal((samples, dimension)))


def _known(reading: str) -> str:
    if reading not in READINGS:
        raise ValueError(f"reading must be one of {', '.join(READINGS)}, got {reading!r}")
    return reading


def _standardise_columns(values: np.ndarray) -> np.ndarray:
    """Mean 0 and standard deviation 1 in every column; a constant column becomes 0."""
    centred = values - values.mean(axis=0)
    deviation = centred.std(axis=0)
    return np.divide(centred, deviation, out=np.zeros_like(centred), where=deviation > 0)


def _standardise_rows(values: np.ndarray) -> np.ndarray:
    return _standardise_columns(values.T).T


def brute_force(gram: np.ndarray, keep: int) -> tuple[float, np.ndarray]:
    """The least sum of gram[R, R] over all subsets R of `keep` positions, and that subset (ascending).

    Every subset is a left half whose largest member is `middle` and a right half beyond it; for each middle the
    values of all pairs of halves are one small table, so that millions of subsets take milliseconds.
    """
    n = len(gram)
    if not 1 <= keep <= n:
        raise ValueError(f"keep must lie between 1 and {n}, got {keep}")
    left_size = (keep + 1) // 2
    best, subset = np.inf, np.arange(keep)
    for middle in range(left_size - 1, n - (keep - left_size)):
        left = np.column_stack([_subsets(0, middle, left_size - 1), np.full(comb(middle, left_size - 1), middle)])
        right = _subsets(middle + 1, n, keep - left_size)
        for value, members in _tables(gram, left, right):
            if value < best:
                best, subset = value, members
    return float(best), subset


def _tables(gram: np.ndarray, left: np.ndarray, right: np.ndarray) -> Iterator[tuple[float, np.ndarray]]:
    """The best union of one row of `left` and one of `right`, for blocks of left rows."""
    inside_right = _inside(gram, right)
    rows = max(1, _BLOCK // len(right))
    for first in range(0, len(left), rows):
        block = left[first : first + rows]
        pull = gram[block].sum(axis=1)  # (block, n): what adding each position would cost, once
        values = _inside(gram, block)[:, None] + inside_right
        for column in right.T:
            values += 2 * pull[:, column]
        i, j = np.unravel_index(np.argmin(values), values.shape)
        yield values[i, j], np.concatenate([block[i], right[j]])


def _inside(gram: np.ndarray, subsets: np.ndarray) -> np.ndarray:
    """(number of subsets,) the sum of gram within each."""
    return gram[subsets[:, :, None], subsets[:, None, :]].sum(axis=(1, 2))


def _subsets(first: int, end: int, size: int) -> np.ndarray:
    """(count, size) all subsets of range(first, end), one empty row for size 0."""
    return np.array(list(combinations(range(first, end), size)), dtype=np.int64).reshape(comb(end - first, size), size)


def _relaxed(relaxation: str, swap_refine: bool = False) -> Policy:
    def policy(gradients: np.ndarray, n: int, rng: np.random.Generator) -> np.ndarray:
        return select(gradients, n, relaxation, seed=int(rng.integers(2**31)), swap_refine=swap_refine)

    return policy


def _greedy(gradients: np.ndarray, n: int, rng: np.random.Generator) -> np.ndarray:
    return greedy_select(gradients, n, rng=rng)


def _clustering(gradients: np.ndarray, n: int, rng: np.random.Generator) -> np.ndarray:
    """GSS-clustering may keep fewer than n; the rest is drawn at random so that objectives compare."""
    kept = cluster_select(gradients, n, rng=rng)
    others = np.setdiff1d(np.arange(len(gradients)), kept)
    return np.concatenate([kept, rng.choice(others, size=n - len(kept), replace=False)])


def _random(gradients: np.ndarray, n: int, rng: np.random.Generator) -> np.ndarray:
    return naive_uniform(len(gradients), 0, n, rng)


POLICIES: Mapping[str, Policy] = {
    "convex": _relaxed("convex"),
    "zero-diagonal": _relaxed("zero-diagonal"),
    "zero-diagonal+swap": _relaxed("zero-diagonal", swap_refine=True),
    "gss-greedy": _greedy,
    "gss-clustering": _clustering,
    "random": _random,
}
