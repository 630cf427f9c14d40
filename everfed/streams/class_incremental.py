"""Class-incremental: every task has new classes, divided among the clients by a new draw."""

from __future__ import annotations

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
    have one more."""

    scenario = "class-incremental"
    about = "new classes in every task; a test sample may be of any class"

    def __init__(self, source: Source, options: Options, *, class_order: str = "natural", **settings: Any) -> None:
        require_choice("class_order", class_order, CLASS_ORDERS)
        if options.tasks > source.classes:
            raise OptionError("tasks", f"{options.tasks} is too many for {source.classes} classes; one each at least")
        self.class_order = class_order
        super().__init__(source, options, **settings)

    @cached_property
    def _blocks(self) -> list[tuple[int, ...]]:
        """The classes of every task."""
        order = np.arange(self.classes)
        if self.class_order == "shuffled":
            order = generator(self.seed, "class order").permutation(self.classes)
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
