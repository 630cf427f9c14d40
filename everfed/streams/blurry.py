"""Blurry tasks: some classes belong to one task, of the others a share of the samples comes in any task.

i-Blurry (Koh et al., 2022): N % of the classes are disjoint, as many in every task; the others are blurry, as many in
every task, too. M % of each blurry class's samples go into a pool, which is shuffled and shared out equally among the
tasks. Si-Blurry (Moon et al., 2023) is stochastic: the disjoint classes are cut at random places, so that tasks have
different numbers of them, and every task takes a random number of samples out of the pool.

Si-Blurry's released sampler draws the tasks' places before it shuffles the pool, so that no sample moves. Here they do:
that is how we read the definition. A task is scored on the test samples of its own classes, disjoint and blurry.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from everfed.data.source import Source
from everfed.streams.draws import generator
from everfed.streams.incremental import IncrementalStream
from everfed.streams.options import OptionError, Options, require_number


class Blurry(IncrementalStream):
    """disjoint: N / 100, the share of disjoint classes. blur: M / 100, the share of a blurry class's samples that may
    come in any task. stochastic: Si-Blurry."""

    scenario = "blurry"
    unused = ("order", "drift")

    def __init__(
        self,
        source: Source,
        options: Options,
        *,
        disjoint: float = 0.5,
        blur: float = 0.1,
        stochastic: bool = False,
        **settings: Any,
    ) -> None:
        require_number("disjoint", disjoint, least=0.0, to=1.0)
        require_number("blur", blur, least=0.0, to=1.0)
        if options.boundaries:
            raise OptionError("boundaries", "blurry tasks have none; set boundaries = false")
        count = round(disjoint * source.classes)
        whole = {"blurry": source.classes - count} | ({} if stochastic else {"disjoint": count})
        for kind, classes in whole.items():
            if classes % options.tasks:
                raise OptionError(
                    "disjoint", f"{classes} {kind} classes cannot be shared equally among {options.tasks} tasks"
                )
        self.disjoint, self.blur, self.stochastic = disjoint, blur, stochastic
        super().__init__(source, options, **settings)

    @cached_property
    def _own(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """(disjoint, blurry) classes of every task."""
        rng, tasks = generator(self.seed, "blurry classes"), self.options.tasks
        order, count = rng.permutation(self.classes), round(self.disjoint * self.classes)
        if self.stochastic:
            cuts = np.sort(rng.integers(0, count, tasks - 1)) if count else np.zeros(tasks - 1, dtype=np.int64)
            fixed = np.split(order[:count], cuts)
        else:
            fixed = np.split(order[:count], tasks)
        return fixed, np.split(order[count:], tasks)

    @cached_property
    def _rows_of(self) -> list[np.ndarray]:
        """The training rows of every task, ascending."""
        rng, rows, labels = generator(self.seed, "blurry samples"), self._rows.train, self._y_train[self._rows.train]
        kept, pool = [], []
        for fixed, blurry in zip(*self._own, strict=True):
            own = [rows[np.isin(labels, fixed)]]
            for label in blurry:
                found = rng.permutation(rows[labels == label])
                cut = round(self.blur * len(found))
                pool.append(found[:cut])
                own.append(found[cut:])
            kept.append(np.concatenate(own))
        moving = rng.permutation(np.concatenate([np.zeros(0, dtype=np.int64), *pool]))
        tasks = self.options.tasks
        if self.stochastic:
            cuts = np.sort(rng.integers(0, len(moving) + 1, tasks - 1))
        else:
            cuts = np.arange(1, tasks) * len(moving) // tasks
        return [np.sort(np.concatenate(pair)) for pair in zip(kept, np.split(moving, cuts), strict=True)]

    def classes_of(self, task: int) -> tuple[int, ...]:
        """The task's own classes, ascending; samples of other blurry classes come in it, too."""
        fixed, blurry = self._own
        return tuple(sorted([*fixed[task].tolist(), *blurry[task].tolist()]))

    def _pool(self, rows: np.ndarray, y: np.ndarray, task: int) -> np.ndarray:
        return self._rows_of[task] if rows is self._rows.train else super()._pool(rows, y, task)

    def facts(self) -> dict[str, Any]:
        """The options, and the classes of every task."""
        fixed, blurry = ([sorted(one.tolist()) for one in classes] for classes in self._own)
        options = {"disjoint": self.disjoint, "blur": self.blur, "stochastic": self.stochastic}
        return {**options, "disjoint_classes": fixed, "blurry_classes": blurry}
