"""Gradient-based sample selection: GSS-greedy, online, and GSS-clustering, as policies and as pure buffer updates.

Aljundi et al., "Gradient based sample selection for online continual learning", 2019. Both keep samples whose
gradients differ: greedy by a score per stored sample, clustering by a least distance between stored samples.
Gradients are those of single-sample losses at the current model; a zero gradient has cosine 0 with everything.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from everfed.method import EAGER, Client, Schedule, Step, Table, Tree, option
from everfed.methods.replay.diversity import unit_rows
from everfed.methods.replay.memory import Memory, Policy, Pool
from everfed.methods.replay.reservoir import offers
from everfed.methods.replay.sample_gradients import gradients_here

FIRST_SCORE = 0.1  # of the sample that meets an empty buffer
_SAME = 1e-12  # distances below are rounding: the two directions are one


def draw_references(stored: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Positions of `count` random stored samples (all, when fewer) to compare a new sample with."""
    return rng.choice(stored, size=min(stored, count), replace=False)


def greedy_score(gradient: Tensor | np.ndarray, references: Tensor | np.ndarray) -> float:
    """1 + the largest cosine between `gradient` (d,) and `references` (r, d), in [0, 2]; 0.1 when r = 0."""
    if not len(references):
        return FIRST_SCORE
    direction = unit_rows(torch.as_tensor(gradient)[None])[0]
    return float((unit_rows(references) @ direction).max().clamp(-1, 1) + 1)


def greedy_slot(scores: np.ndarray, score: float, capacity: int, rng: np.random.Generator) -> int | None:
    """Where a new sample of this score goes: the slot to write (len(scores) means append), or None to leave it out.

    scores: those of the stored samples. A full buffer takes only a sample opposed to every reference (score < 1): a
    slot is drawn in proportion to its score, and given up with probability C_i / (C_i + c).
    """
    if len(scores) < capacity:
        return len(scores)
    if score >= 1 or scores.sum() <= 0:  # all scores zero: every stored sample is already opposed to all others
        return None
    slot = int(rng.choice(len(scores), p=scores / scores.sum()))
    return slot if rng.random() < scores[slot] / (scores[slot] + score) else None


def greedy_select(
    gradients: Tensor | np.ndarray, n: int, references: int = 10, rng: np.random.Generator | None = None
) -> np.ndarray:
    """The positions in a buffer of n after offering the rows of `gradients` (n', d) in order, ascending."""
    rng = rng or np.random.default_rng(0)
    units = unit_rows(gradients)
    kept, scores = np.empty(0, dtype=np.int64), np.empty(0)
    for row, unit in enumerate(units):
        compared = units[kept[draw_references(len(kept), references, rng)]]
        score = greedy_score(unit, compared)
        slot = greedy_slot(scores, score, n, rng)
        if slot is not None:
            kept, scores = _write(kept, slot, row), _write(scores, slot, score)
    return np.sort(kept)


def _write(values: np.ndarray, slot: int, value: float) -> np.ndarray:
    written = np.append(values, value) if slot == len(values) else values.copy()
    written[slot] = value
    return written.astype(values.dtype)


def distances(gradients: Tensor | np.ndarray) -> np.ndarray:
    """(n, n) 1 - cosine, in [0, 2]; exactly 0 between equal directions."""
    units = unit_rows(gradients)
    cosines = units @ units.T
    apart = (1 - (cosines + cosines.T) / 2).clamp(0, 2).cpu().numpy()  # a product of matrices need not be symmetric
    apart[apart < _SAME] = 0.0
    return apart


def cluster_offer(
    gradients: Tensor | np.ndarray,
    threshold: float,
    capacity: int,
    rng: np.random.Generator,
    growth: float = 0.01,
) -> tuple[np.ndarray, float]:
    """Offer the last row of `gradients` to the centroids in the rows before it: (positions that stay, threshold).

    A sample becomes a centroid if its distance to every centroid exceeds the threshold (0 at the beginning). When
    that makes one too many, the threshold grows by factors 1 + growth to the smallest pairwise distance (the first
    time it is set to it) and centroids are thinned from a random one on. So at most `capacity` stay, all pairwise
    further apart than the threshold; it may be fewer.
    """
    _check_clustering(capacity, growth)
    apart = distances(gradients)
    centroids = np.arange(len(apart) - 1)
    if (apart[-1, :-1] <= threshold).any():
        return centroids, threshold
    if len(apart) <= capacity:
        return np.arange(len(apart)), threshold
    threshold = _grow(threshold, apart[np.triu_indices(len(apart), 1)].min(), growth)
    return _thin(apart, threshold, rng), threshold


def _grow(threshold: float, smallest: float, growth: float) -> float:
    if threshold == 0:
        return float(smallest)
    while threshold < smallest:
        threshold *= 1 + growth
    return threshold


def _thin(apart: np.ndarray, threshold: float, rng: np.random.Generator) -> np.ndarray:
    """Keep, in random order, every point further than `threshold` from all kept so far."""
    kept: list[int] = []
    for point in rng.permutation(len(apart)):
        if (apart[point, kept] > threshold).all():
            kept.append(int(point))
    return np.sort(np.array(kept, dtype=np.int64))


def _check_clustering(capacity: int, growth: float) -> None:
    if capacity < 1:
        raise ValueError(f"capacity must be at least 1, got {capacity}")
    if growth <= 0:
        raise ValueError(f"growth must be positive, got {growth}")


def cluster_select(
    gradients: Tensor | np.ndarray, n: int, growth: float = 0.01, rng: np.random.Generator | None = None
) -> np.ndarray:
    """The positions of the centroids (at most n) after offering the rows of `gradients` (n', d) in order, ascending."""
    rng = rng or np.random.default_rng(0)
    units = unit_rows(gradients)
    kept, threshold = np.empty(0, dtype=np.int64), 0.0
    for row in range(len(units)):
        offered = np.append(kept, row)
        stay, threshold = cluster_offer(units[offered], threshold, n, rng, growth)
        kept = offered[stay]
    return np.sort(kept)


# as policies ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class GSSGreedy(Policy):
    """Online: decides after every training step, at the current weights; scores of stored samples are never
    refreshed."""

    references: int = option(10, at_least=1, about="n_ref, random stored samples that a new one is compared with")

    kind = "gss-greedy"
    about = "GSS-greedy: replaces stored samples by ones whose gradients oppose them, step by step"
    needs_model = False

    def needs(self):
        return {EAGER}  # where a sample goes depends on its gradient

    def init(self, size: int) -> Tree:
        return {"scores": torch.zeros(size, dtype=torch.float64)}

    def phases(self, memory: Memory):
        return ()

    def plan(self, memory: Memory, client: Client, schedule: Schedule):
        """The buffer takes every sample until it is full, so its fill is known ahead."""
        host, size = client.state["host"], memory.size
        offered, seen = offers(memory.offer, host["seen"].numpy(), schedule)
        places = [np.flatnonzero(fresh) for fresh in offered]
        before = int(host["n"]) + np.cumsum([0, *map(len, places)])
        ids = [schedule.ids_of(step)[rows] for step, rows in enumerate(places)]
        draws = client.rng(self.kind).integers(2**62, size=(schedule.steps, 1))
        n = int(before[-1])
        host |= {"n": n, "seen": torch.from_numpy(seen), "stored": min(n, size)}
        tables = {"fill": [np.array([min(int(k), size)]) for k in before[:-1]], "offered": places, "ids": ids}
        return {**{name: Table.of(rows) for name, rows in tables.items()}, "draws": Table.of(list(draws))}

    def after(self, memory: Memory, step: Step) -> None:
        own, rows = step.state, step.rows
        offered = rows["offered"]
        if memory.size == 0 or len(offered) == 0:
            return
        x, y = step.x.index_select(0, offered), step.y.index_select(0, offered)
        buffer = _Buffer(self, memory, step, int(rows["fill"][0]), len(offered))
        rng = np.random.default_rng(int(rows["draws"][0]))
        gradients = gradients_here(step.context, x, y, memory.gradient_options)
        for row, gradient in enumerate(gradients):
            slot = buffer.offer(gradient, rng)
            if slot is not None:
                own["x"][slot], own["y"][slot] = x[row], y[row]
                own["host"]["ids"][slot] = rows["ids"][row].cpu()
                if memory.logits:
                    own["logits"][slot] = step.outputs.detach()[offered[row]]


class _Buffer:
    """The stored samples' gradients at the current weights, computed on first use: those of all at once, where as many
    samples are offered as will need most of them."""

    def __init__(self, policy: GSSGreedy, memory: Memory, step: Step, filled: int, offers: int) -> None:
        self.references, self.memory, self.filled = policy.references, memory, filled
        self.own, self.context = step.state, step.context
        self.all_at_once = offers * policy.references >= filled
        self.gradients: dict[int, Tensor] = {}

    def offer(self, gradient: Tensor, rng: np.random.Generator) -> int | None:
        """The row that a sample with this gradient takes, or None."""
        scores = self.own["host"]["scores"]
        score = greedy_score(gradient, self._rows(draw_references(self.filled, self.references, rng), gradient))
        slot = greedy_slot(scores[: self.filled].numpy(), score, self.memory.size, rng)
        if slot is not None:
            self.filled = max(self.filled, slot + 1)
            scores[slot], self.gradients[slot] = score, gradient
        return slot

    def _rows(self, rows: np.ndarray, like: Tensor) -> Tensor:
        missing = [int(row) for row in rows if int(row) not in self.gradients]
        if missing and self.all_at_once:
            missing = [row for row in range(self.filled) if row not in self.gradients]
        if missing:
            index = torch.tensor(missing, device=self.own["x"].device)
            x, y = (self.own[key].index_select(0, index) for key in ("x", "y"))
            self.gradients.update(
                zip(missing, gradients_here(self.context, x, y, self.memory.gradient_options), strict=True)
            )
        return torch.stack([self.gradients[int(row)] for row in rows]) if len(rows) else like.new_zeros(0, len(like))


@dataclass(frozen=True)
class GSSCluster(Policy):
    """At the end of a task its samples are offered in random order to the stored ones; it may keep fewer than the
    buffer holds."""

    growth: float = option(
        0.01, above=0, about="beta, by which the least distance between stored samples grows when there are too many"
    )

    kind = "gss-cluster"
    about = "GSS-clustering: samples whose gradients are further apart than a growing distance"

    def init(self, size: int) -> Tree:
        return {"threshold": 0.0}

    def choose(self, pool: Pool, size: int) -> np.ndarray:
        kept = np.arange(pool.new, len(pool))
        if size == 0 or pool.new == 0:
            return kept[:size]
        gradients, rng, threshold = pool.gradients(), pool.rng(self.kind), float(pool.state["threshold"])
        for row in rng.permutation(pool.new):
            offered = np.append(kept, row)
            stay, threshold = cluster_offer(gradients[torch.from_numpy(offered)], threshold, size, rng, self.growth)
            kept = offered[stay]
        pool.state["threshold"] = threshold
        return kept
