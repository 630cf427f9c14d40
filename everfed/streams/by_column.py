"""By column: a task is a value of a column of the data, or a stretch of its values in order, such as years."""

from __future__ import annotations

from typing import Any

import numpy as np

from everfed.data.source import Source
from everfed.streams.incremental import IncrementalStream
from everfed.streams.options import OptionError, Options


class ByColumn(IncrementalStream):
    """column: what says when a sample came; its values in order are tasks 1, 2, ... With fewer `tasks` than values a
    task is a stretch of neighbouring values, with about as many training samples as the others."""

    scenario = "by-column"
    any_targets = True

    def __init__(self, source: Source, options: Options, *, column: str | None = None, **settings: Any) -> None:
        if column is None or column not in source.columns:
            known = ", ".join(source.columns) or "none"
            raise OptionError(
                "column", f"expected the column that says when a sample came, got {column!r}; it has {known}"
            )
        self.column = column
        train, test = source.columns[column]
        values, counts = np.unique(train, return_counts=True)
        if options.tasks > len(values):
            raise OptionError("tasks", f"{options.tasks} is too many; column {column!r} has {len(values)} values")
        self._first = _stretches(counts, options.tasks)  # of every task, by number of its value
        self._values = values
        self._tasks_of = {"train": self._task_of(train), "test": self._task_of(test)}
        super().__init__(source, options, **settings)

    @staticmethod
    def natural_tasks(source: Source, column: str | None = None, **settings: Any) -> int | None:
        """How many tasks there are where the recipe does not say."""
        return len(np.unique(source.columns[column][0])) if column and column in source.columns else None

    def _task_of(self, values: np.ndarray) -> np.ndarray:
        """(n,) the task of every sample; a value that training lacks belongs to the stretch that it falls into."""
        place = np.searchsorted(self._values, values, side="right") - 1
        found: np.ndarray = np.maximum(np.searchsorted(self._first, place, side="right") - 1, 0)
        return found

    def _pool(self, rows: np.ndarray, y: np.ndarray, task: int) -> np.ndarray:
        """The rows of the task's stretch."""
        of = self._tasks_of["train" if y is self._y_train else "test"]
        return rows[of[rows] == task]

    def facts(self) -> dict[str, Any]:
        """The column, and the values of every task."""
        ends = [*self._first[1:], len(self._values)]
        spans = [self._values[first:end] for first, end in zip(self._first, ends, strict=True)]
        named = [{"first": span[0].item(), "last": span[-1].item(), "values": len(span)} for span in spans]
        return {"column": self.column, "tasks_by_column": named}


def _stretches(counts: np.ndarray, tasks: int) -> np.ndarray:
    """(tasks,) the first value of every stretch: each has at least one value, and they have about as many samples."""
    ends, total, first = np.cumsum(counts), counts.sum(), [0]
    for task in range(1, tasks):
        wanted = int(np.abs(ends - total * task / tasks).argmin()) + 1
        first.append(min(max(wanted, first[-1] + 1), len(counts) - (tasks - task)))
    return np.array(first)
