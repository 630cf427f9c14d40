"""Reservoir sampling over a client's whole life (Vitter, 1985; FedGP, Algorithm 4 corrected).

After n offers every offered sample is in the buffer with probability min(1, B/n). The counter n is never reset. Which
sample goes into which row is decided on the host before training (`plan`); the step only scatters.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from everfed.core.data import put_rows
from everfed.method import Client, Schedule, Step, Table, Tables
from everfed.methods.replay.memory import Memory, Policy


@dataclass(frozen=True)
class Reservoir(Policy):
    kind = "reservoir"
    about = "every sample of the client's life with the same probability; needs no task boundaries"
    needs_model = False

    def phases(self, memory: Memory):
        return ()

    def plan(self, memory: Memory, client: Client, schedule: Schedule):
        host = client.state["host"]
        rng, n, size = client.rng("reservoir"), int(host["n"]), memory.size
        if memory.offer == "first_visit" and np.isin(schedule.ids, host["seen"].numpy()).all():
            return nothing_offered(schedule, min(n, size), size)
        offered, seen = offers(memory.offer, host["seen"].numpy(), schedule)
        ids = host["ids"].numpy().copy()
        rows, fill = [], []
        for step, fresh in enumerate(offered):
            fill.append(np.array([min(n, size)]))
            rows.append(reservoir_rows(fresh, n, size, rng))
            ids[rows[-1]] = schedule.ids_of(step)
            n += int(fresh.sum())
        ids[size] = -1
        host |= {"n": n, "seen": torch.from_numpy(seen), "ids": torch.from_numpy(ids), "stored": min(n, size)}
        return {"rows": Table.of(rows), "fill": Table.of(fill)}

    def after(self, memory: Memory, step: Step) -> None:
        values = {"x": step.x, "y": step.y}
        if memory.logits:
            values["logits"] = step.outputs.detach()
        put_rows([step.state[key] for key in values], step.rows["rows"], list(values.values()))


def nothing_offered(schedule: Schedule, stored: int, size: int) -> Tables:
    """The tables of rounds in which a client sees no new sample, most of a task's: every row is the spare one."""
    values, lengths = schedule.rows.values, schedule.rows.lengths
    inside = np.arange(values.shape[1]) < lengths[:, None]
    fill = Table(np.full((schedule.steps, 1), stored), np.ones_like(lengths))
    return {"rows": Table(np.where(inside, size, 0), lengths), "fill": fill}


def offers(offer: str, seen: np.ndarray, schedule: Schedule) -> tuple[list[np.ndarray], np.ndarray]:
    """Which samples of each minibatch are offered, and all ids seen afterwards."""
    batches = [schedule.ids_of(step) for step in range(schedule.steps)]
    if offer == "every_visit":
        return [np.ones(len(ids), dtype=bool) for ids in batches], seen
    visited = np.concatenate(batches) if batches else np.zeros(0, dtype=np.int64)
    first = np.zeros(len(visited), dtype=bool)
    ids, positions = np.unique(visited, return_index=True)
    new = ~np.isin(ids, seen, assume_unique=True)
    first[positions[new]] = True
    seen = np.union1d(seen, ids) if new.any() else seen
    cuts = np.cumsum([len(batch) for batch in batches])[:-1]
    return (np.split(first, cuts) if batches else []), seen


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
