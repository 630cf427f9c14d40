"""Random replay selection: naive uniform, approximation of uniform, fixed proportion.

"Coordinated Replay Sample Selection for Continual Federated Learning", Appendix A. At the end of a period a client
keeps n of its `new` samples X_t and its `stored` ones R_t; they differ in how many come from each side. All draws are
without replacement. Positions count the new samples first: 0 ... new - 1, then new ... new + stored - 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from everfed.method import option
from everfed.methods.replay.memory import Policy, Pool


@dataclass(frozen=True)
class NaiveUniform(Policy):
    kind = "naive-uniform"
    about = "uniformly from the task's samples and the stored ones; old tasks fade geometrically"
    needs_model = False

    def choose(self, pool: Pool, size: int) -> np.ndarray:
        return naive_uniform(pool.new, pool.stored, size, pool.rng(self.kind))


@dataclass(frozen=True)
class ApproximateUniform(Policy):
    kind = "approximate-uniform"
    about = "the same expected share of every task's samples"
    needs_model = False

    def choose(self, pool: Pool, size: int) -> np.ndarray:
        return approximate_uniform(pool.new, pool.stored, pool.seen_before, size, pool.rng(self.kind))


@dataclass(frozen=True)
class FixedProportion(Policy):
    proportion: float = option(
        0.5, above=0, below=1, about="p, the share of the buffer that goes to the newest task (not in the paper)"
    )

    kind = "fixed-proportion"
    about = "a fixed share of the buffer for the newest task"
    needs_model = False

    def choose(self, pool: Pool, size: int) -> np.ndarray:
        return fixed_proportion(pool.new, pool.stored, size, self.proportion, pool.rng(self.kind))


def naive_uniform(new: int, stored: int, n: int, rng: np.random.Generator) -> np.ndarray:
    """n positions uniformly from X_t and R_t together: old periods fade geometrically."""
    return np.sort(rng.choice(new + stored, size=min(n, new + stored), replace=False))


def approximate_uniform(new: int, stored: int, seen_before: int, n: int, rng: np.random.Generator) -> np.ndarray:
    """n positions so that every period keeps the same expected share of its samples.

    seen_before: samples seen in all earlier periods, whether stored or not. The new side gives n * new / all seen.
    """
    if seen_before < stored:
        raise ValueError(f"seen_before ({seen_before}) must count at least the {stored} stored samples")
    seen = new + seen_before
    return _draw(new, stored, n, n * new / seen if seen else 0.0, rng)


def fixed_proportion(new: int, stored: int, n: int, proportion: float, rng: np.random.Generator) -> np.ndarray:
    """n positions, of which proportion * n are new."""
    return _draw(new, stored, n, proportion * n, rng)


def _draw(new: int, stored: int, n: int, share: float, rng: np.random.Generator) -> np.ndarray:
    """`share` positions from the new side and the rest from the stored one; a side too small is made up by the other.

    A fractional share is rounded at random, up with the probability of its fraction: its expectation is exact.
    """
    size = min(n, new + stored)
    wanted = int(share) + int(rng.random() < share - int(share))
    from_new = int(np.clip(wanted, max(0, size - stored), min(new, size)))
    fresh = rng.choice(new, size=from_new, replace=False)
    old = new + rng.choice(stored, size=size - from_new, replace=False)
    return np.sort(np.concatenate([fresh, old]))
