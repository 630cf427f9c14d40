"""Class-incremental: every task has new classes, divided among the clients by a new draw."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from everfed.data.source import Source
from everfed.streams.draws import generator
from everfed.streams.incremental import IncrementalStream
from everfed.streams.options import OptionError, Options, require_choice

CLASS_ORDERS = ("natural", "shuffled")


class ClassIncremental(IncrementalStream):
    """Tasks are blocks of consecutive classes of the class order; if classes do not divide evenly, the first blocks
    have one more. class_order: "natural", "shuffled", or a list of classes, which leaves all others out."""

    scenario = "class-incremental"
    about = "new classes in every task; a test sample may be of any class"

    def __init__(
        self, source: Source, options: Options, *, class_order: str | Sequence[int] = "natural", **settings: Any
    ) -> None:
        used = source.classes if isinstance(class_order, str) else len(_checked_order(class_order, source.classes))
        if isinstance(class_order, str):
            require_choice("class_order", class_order, CLASS_ORDERS)
        if options.tasks > used:
            raise OptionError("tasks", f"{options.tasks} is too many for {used} classes; one each at least")
        self.class_order = class_order if isinstance(class_order, str) else list(class_order)
        super().__init__(source, options, **settings)

    @cached_property
    def _blocks(self) -> list[tuple[int, ...]]:
        """The classes of every task."""
        order = np.arange(self.classes)
        if self.class_order == "shuffled":
            order = generator(self.seed, "class order").permutation(self.classes)
        elif not isinstance(self.class_order, str):
            order = np.array(self.class_order)
        return [tuple(sorted(block.tolist())) for block in np.array_split(order, self.options.tasks)]

    def classes_of(self, task: int) -> tuple[int, ...]:
        """The classes of `task`, ascending."""
        return self._blocks[task]

    def view(self, x: Tensor, task: int) -> Tensor:
        """The samples as they are."""
        return x

    def division_of(self, task: int) -> int:
        """A division of its own for every task."""
        return task

    def facts(self) -> dict[str, Any]:
        """The class order and the classes of every task."""
        return {"class_order": self.class_order, "labels": [list(block) for block in self._blocks]}


def _checked_order(order: Sequence[int], classes: int) -> Sequence[int]:
    """Raises OptionError for anything but different classes."""
    if len(set(order)) != len(order) or not all(type(c) is int and 0 <= c < classes for c in order):
        raise OptionError(
            "class_order",
            f"expected one of {', '.join(CLASS_ORDERS)}, or a list of different classes from 0 to {classes - 1}, "
            f"got {order!r}",
        )
    return order
