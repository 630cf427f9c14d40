"""Class- and task-incremental: every task has new classes, divided among the clients by a new draw."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from everfed.data.source import Source
from everfed.streams.draws import generator
from everfed.streams.incremental import IncrementalStream
from everfed.streams.options import OptionError, Options, require_choice, require_whole

CLASS_ORDERS = ("natural", "shuffled")


class ClassIncremental(IncrementalStream):
    """Tasks are blocks of consecutive classes of the class order; if classes do not divide evenly, the first blocks
    have one more.

    class_order: "natural", "shuffled" by the stream's seed, a list of classes by number, which leaves all others out,
    or a list of such lists, one for every task. first_task: so many classes in the first task (50 of 100, say); the
    others share the rest.
    """

    scenario = "class-incremental"

    def __init__(
        self,
        source: Source,
        options: Options,
        *,
        class_order: str | Sequence[int] | Sequence[Sequence[int]] = "natural",
        first_task: int | None = None,
        **settings: Any,
    ) -> None:
        _check_order(class_order, source.classes)
        if _is_grouped(class_order) and (first_task is not None or len(class_order) != options.tasks):
            key, got = ("first_task", first_task) if first_task is not None else ("tasks", options.tasks)
            raise OptionError(
                key, f"class_order has {len(class_order)} groups, one for every task; got {got}: leave it out"
            )
        _check_first(first_task, options.tasks, source.classes if isinstance(class_order, str) else len(class_order))
        self.class_order, self.first_task = class_order, first_task
        super().__init__(source, options, **settings)

    @staticmethod
    def natural_tasks(source: Source, class_order: Any = "natural", **settings: Any) -> int | None:
        """As many as class_order has groups."""
        return len(class_order) if _is_grouped(class_order) else None

    @cached_property
    def _blocks(self) -> list[tuple[int, ...]]:
        """The classes of every task."""
        if _is_grouped(self.class_order):
            return [tuple(sorted(group)) for group in self.class_order]  # type: ignore[arg-type]
        order = np.arange(self.classes)
        if self.class_order == "shuffled":
            order = generator(self.seed, "class order").permutation(self.classes)
        elif not isinstance(self.class_order, str):
            order = np.array(self.class_order)
        first = [] if self.first_task is None else [order[: self.first_task]]
        rest, tasks = order[self.first_task or 0 :], self.options.tasks - len(first)
        blocks = [*first, *(np.array_split(rest, tasks) if tasks else [])]
        return [tuple(sorted(block.tolist())) for block in blocks]

    def classes_of(self, task: int) -> tuple[int, ...]:
        """The classes of `task`, ascending."""
        return self._blocks[task]

    def facts(self) -> dict[str, Any]:
        """The class order and the classes of every task."""
        order = self.class_order if isinstance(self.class_order, str) else list(self.class_order)
        first = {} if self.first_task is None else {"first_task": self.first_task}
        return {"class_order": order, **first, "labels": [list(block) for block in self._blocks]}


class TaskIncremental(ClassIncremental):
    """As class-incremental, but a test sample comes with its task, so that only that task's classes compete."""

    scenario = "task-incremental"
    task_ids = True


def _is_grouped(class_order: Any) -> bool:
    """Is it a list of the classes of every task?"""
    return isinstance(class_order, list | tuple) and any(isinstance(entry, list | tuple) for entry in class_order)


def _check_order(class_order: Any, classes: int) -> None:
    if _is_grouped(class_order):
        if not all(isinstance(group, list | tuple) and group for group in class_order):
            raise OptionError(
                "class_order", f"expected classes, or a list of classes for every task; got {class_order!r}"
            )
        class_order = [label for group in class_order for label in group]
    if not isinstance(class_order, list | tuple):
        require_choice("class_order", class_order, CLASS_ORDERS)
    elif len(set(class_order)) != len(class_order) or not all(type(c) is int and 0 <= c < classes for c in class_order):
        expected = f"expected different classes from 0 to {classes - 1}"
        raise OptionError("class_order", f"{expected}, got {list(class_order)}")


def _check_first(first_task: Any, tasks: int, classes: int) -> None:
    if tasks > classes:
        raise OptionError("tasks", f"{tasks} is too many for {classes} classes; one each at least")
    if first_task is None:
        return
    require_whole("first_task", first_task)
    left = classes - first_task
    if left < tasks - 1 or (tasks == 1 and left):
        raise OptionError(
            "first_task", f"{first_task} of {classes} classes leave {left} for the {tasks - 1} other tasks; one each"
        )
