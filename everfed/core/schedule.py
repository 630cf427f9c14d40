"""What a client will do, decided before it starts: which samples in which step, and every discrete draw of its parts.

Deciding ahead, on the host, keeps random draws equal on every engine and device, and leaves the training step with
nothing but gathers, arithmetic and scatters of known shapes, which is what a captured step needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Table:
    """One row of integers per step. values: (steps, width, ...) padded with zeros; lengths: (steps,)."""

    values: np.ndarray
    lengths: np.ndarray

    @staticmethod
    def of(rows: Sequence[np.ndarray]) -> Table:
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        tail = rows[0].shape[1:] if rows else ()
        values = np.zeros((len(rows), int(lengths.max(initial=0)), *tail), dtype=np.int64)
        for step, row in enumerate(rows):
            values[step, : len(row)] = row
        return Table(values, lengths)

    def row(self, step: int) -> np.ndarray:
        return np.asarray(self.values[step, : self.lengths[step]])


@dataclass(frozen=True)
class Schedule:
    """Minibatches of a local training. rows: positions into the data; ids: (n,) ids of the data's samples."""

    rows: Table
    ids: np.ndarray

    @property
    def steps(self) -> int:
        return len(self.rows.lengths)

    def ids_of(self, step: int) -> np.ndarray:
        """The sample ids of a step's minibatch."""
        return np.asarray(self.ids[self.rows.row(step)])


def minibatches(
    ids: np.ndarray, epochs: int, batch_size: int, rng: np.random.Generator, drop_last: bool = False
) -> Schedule:
    """`epochs` passes in random order. A last minibatch of one sample joins the one before (BatchNorm needs two)."""
    rows: list[np.ndarray] = []
    for _ in range(epochs):
        rows.extend(_cut(rng.permutation(len(ids)), batch_size, drop_last))
    return Schedule(Table.of(rows), ids)


def _cut(order: np.ndarray, size: int, drop_last: bool) -> list[np.ndarray]:
    rows = [order[i : i + size] for i in range(0, len(order), size)]
    if drop_last and len(rows) > 1 and len(rows[-1]) < size:
        return rows[:-1]
    if size > 1 and len(rows) > 1 and len(rows[-1]) == 1:
        rows[-2:] = [np.concatenate(rows[-2:])]
    return rows
