"""Gradient-based sample selection (Aljundi et al., 2019) as policies of a client's memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from everfed.core.legacy import Context, Phase, Schedule, Step, Table, Tables, Tree
from everfed.methods.common.checks import at_least, positive
from everfed.methods.replay.gradient_rows import gradients_here
from everfed.methods.replay.gss import cluster_offer, draw_references, greedy_score, greedy_slot
from everfed.methods.replay.policy import Policy, Pool
from everfed.methods.replay.reservoir import offers

if TYPE_CHECKING:
    from everfed.methods.replay.memory import Memory


@dataclass(frozen=True)
class GSSGreedy(Policy):
    """references: n_ref, random stored samples that a new one is compared with. Online: decides after every training
    step, at the current weights; scores of stored samples are never refreshed."""

    references: int = 10

    kind = "gss-greedy"
    about = "GSS-greedy: replaces stored samples by ones whose gradients oppose them, step by step"
    needs_model = False
    capturable = False  # where a sample goes depends on its gradient

    def __post_init__(self) -> None:
        at_least(self, 1, "references")

    def host(self, size: int) -> Tree:
        return {"scores": torch.zeros(size, dtype=torch.float64)}

    def phases(self, memory: Memory) -> tuple[Phase, ...]:
        return ()

    def plan(self, memory: Memory, own: Tree, schedule: Schedule, ctx: Context) -> tuple[Tree, Tables]:
        """The buffer takes every sample until it is full, so its fill is known ahead."""
        host, size = own["host"], memory.size
        offered, seen = offers(memory.offer, host["seen"].numpy(), schedule)
        places = [np.flatnonzero(fresh) for fresh in offered]
        before = int(host["n"]) + np.cumsum([0, *map(len, places)])
        ids = [schedule.ids_of(step)[rows] for step, rows in enumerate(places)]
        draws = ctx.rng(self.kind).integers(2**62, size=(schedule.steps, 1))
        n = int(before[-1])
        host = {**host, "n": n, "seen": torch.from_numpy(seen), "stored": min(n, size)}
        tables = {"fill": [np.array([min(int(k), size)]) for k in before[:-1]], "offered": places, "ids": ids}
        return host, {**{name: Table.of(rows) for name, rows in tables.items()}, "draws": Table.of(list(draws))}

    def after(self, memory: Memory, step: Step) -> None:
        own, rows = step.state[memory.name], step.rows[memory.name]
        offered = rows["offered"]
        if memory.size == 0 or len(offered) == 0:
            return
        x, y = step.x.index_select(0, offered), step.y.index_select(0, offered)
        buffer = _Buffer(self, memory, own, step.ctx, int(rows["fill"][0]), len(offered))
        rng = np.random.default_rng(int(rows["draws"][0]))
        gradients = gradients_here(step.ctx, x, y, memory.gradient_options)
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

    def __init__(self, policy: GSSGreedy, memory: Memory, own: Tree, ctx: Context, filled: int, offers: int) -> None:
        self.references, self.memory, self.own, self.ctx, self.filled = policy.references, memory, own, ctx, filled
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
                zip(missing, gradients_here(self.ctx, x, y, self.memory.gradient_options), strict=True)
            )
        return torch.stack([self.gradients[int(row)] for row in rows]) if len(rows) else like.new_zeros(0, len(like))


@dataclass(frozen=True)
class GSSCluster(Policy):
    """growth: beta, by which the least distance between stored samples grows when there are too many. At the end of a
    task its samples are offered in random order to the stored ones; it may keep fewer than the buffer holds."""

    growth: float = 0.01

    kind = "gss-cluster"
    about = "GSS-clustering: samples whose gradients are further apart than a growing distance"

    def __post_init__(self) -> None:
        positive(self, "growth")

    def host(self, size: int) -> Tree:
        return {"threshold": 0.0}

    def choose(self, pool: Pool, size: int, host: Tree, message: Tree) -> tuple[np.ndarray, Tree]:
        if size == 0 or pool.new == 0:
            return np.arange(pool.new, len(pool))[:size], host
        gradients = pool.gradients()
        rng, threshold = pool.ctx.rng(self.kind), float(host["threshold"])
        kept = np.arange(pool.new, len(pool))
        for row in rng.permutation(pool.new):
            offered = np.append(kept, row)
            stay, threshold = cluster_offer(gradients[torch.from_numpy(offered)], threshold, size, rng, self.growth)
            kept = offered[stay]
        return kept, {**host, "threshold": threshold}
