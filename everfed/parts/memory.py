"""Memory: the one replay buffer of a client, shared by every part that replays.

Filled by reservoir sampling over the client's whole life (Vitter, 1985; FedGP, Algorithm 4 corrected): after n offers
every offered sample is in the buffer with probability min(1, B/n). The counter n is never reset.

Which sample goes into which row is decided on the host before training (`plan`); the step only scatters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from everfed.core.context import Context
from everfed.core.data import Data
from everfed.core.fit import Fitted
from everfed.core.part import Part, State, Tables
from everfed.core.schedule import Schedule, Table
from everfed.core.step import Step
from everfed.core.tree import Tree

NAME = "memory"


@dataclass(frozen=True)
class Memory(Part):
    """size: B, samples per client. logits: also keep the outputs a sample had when it was stored (DER).
    offer: "first_visit" offers each sample once in the client's life, "every_visit" whenever it is trained on."""

    size: int = 200
    logits: bool = False
    offer: str = "first_visit"

    name: ClassVar[str] = NAME

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError(f"size must be at least 0; got {self.size}")
        if self.offer not in ("first_visit", "every_visit"):
            raise ValueError(f"offer must be 'first_visit' or 'every_visit'; got {self.offer!r}")

    def client_slots(self, ctx: Context) -> Tree:
        """x, y (and logits): (B + 1, ...) rows in storage form, the last one spare. host: n and the ids ever seen."""
        blank, device = ctx.facts.blank, ctx.train.device
        slots: Tree = {"host": {"n": 0, "seen": torch.zeros(0, dtype=torch.int64)}}
        slots["x"] = blank.x.new_zeros((self.size + 1, *blank.x.shape[1:]), device=device)
        slots["y"] = blank.y.new_zeros((self.size + 1, *blank.y.shape[1:]), device=device)
        if self.logits:
            slots["logits"] = torch.zeros((self.size + 1, ctx.facts.classes), device=device)
        return slots

    def plan(self, client: State, schedule: Schedule, plans: Mapping[str, Tables], ctx: Context) -> tuple[Tree, Tables]:
        own = client[NAME]
        offered, seen = self._offers(own["host"]["seen"].numpy(), schedule)
        rng, n = ctx.rng("reservoir"), int(own["host"]["n"])
        rows, fill = [], []
        for fresh in offered:
            fill.append(np.array([min(n, self.size)]))
            rows.append(reservoir_rows(fresh, n, self.size, rng))
            n += int(fresh.sum())
        slots = {**own, "host": {"n": n, "seen": torch.from_numpy(seen)}}
        return slots, {"rows": Table.of(rows), "fill": Table.of(fill)}

    def _offers(self, seen: np.ndarray, schedule: Schedule) -> tuple[list[np.ndarray], np.ndarray]:
        """Which samples of each minibatch are offered, and all ids seen afterwards."""
        batches = [schedule.ids_of(step) for step in range(schedule.steps)]
        if self.offer == "every_visit":
            return [np.ones(len(ids), dtype=bool) for ids in batches], seen
        visited = np.concatenate(batches) if batches else np.zeros(0, dtype=np.int64)
        first = np.zeros(len(visited), dtype=bool)
        ids, positions = np.unique(visited, return_index=True)
        new = ~np.isin(ids, seen, assume_unique=True)
        first[positions[new]] = True
        seen = np.union1d(seen, ids) if new.any() else seen
        cuts = np.cumsum([len(batch) for batch in batches])[:-1]
        return (np.split(first, cuts) if batches else []), seen

    def after(self, step: Step) -> None:
        own, rows = step.state[NAME], step.rows[NAME]["rows"]
        own["x"].index_copy_(0, rows, step.x)
        own["y"].index_copy_(0, rows, step.y)
        if self.logits:
            own["logits"].index_copy_(0, rows, step.outputs.detach())

    def reply(self, client: State, fitted: Fitted, data: Data, ctx: Context) -> tuple[Tree, Tree]:
        """Wipe the spare row: what was rejected is not kept. The slots are the ones that training just made."""
        own = client[NAME]
        for key in ("x", "y", "logits"):
            if key in own:
                own[key][self.size].zero_()
        return own, {}


def reservoir_rows(fresh: np.ndarray, n: int, size: int, rng: np.random.Generator) -> np.ndarray:
    """Buffer row for each sample of a minibatch; row `size` is the spare one that takes what is not kept.

    fresh: (b,) bool, the samples that are offered. n: offers before this minibatch. Of several samples that draw the
    same row the last one is kept, as if they had come one by one.
    """
    rows = np.full(len(fresh), size, dtype=np.int64)
    offered = np.flatnonzero(fresh)
    if size == 0 or len(offered) == 0:
        return rows
    count = n + np.arange(len(offered))  # offers before each sample
    drawn = np.where(count < size, count, rng.integers(0, count + 1))
    drawn = np.where(drawn < size, drawn, size)
    last = len(drawn) - 1 - np.unique(drawn[::-1], return_index=True)[1]
    rows[offered[last]] = drawn[last]
    return rows


def replay_rows(plans: Mapping[str, Tables], size: int, rng: np.random.Generator) -> Table:
    """For every step, min(size, filled) different rows of the buffer as it is before that step."""
    fill = plans[NAME]["fill"].values[:, 0]
    return Table.of([rng.permutation(filled)[:size] for filled in fill])


def filled(own: Tree, size: int) -> int:
    """How many rows of the buffer hold a sample."""
    return min(int(own["host"]["n"]), size)
