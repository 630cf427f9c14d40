"""What comes in during a phase: replies reduced one by one, with what they weighed and how their training went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from everfed.core.client import Reply
from everfed.core.engine import Absent
from everfed.core.message import Traffic
from everfed.core.reduce import Reducer, Reduction


@dataclass(frozen=True)
class Trained:
    """A client that trained: the sum of its step losses, its steps and its samples."""

    client: int
    loss: Tensor | float
    steps: int
    samples: int


class Intake:
    """The replies of one phase, as far as they are here."""

    def __init__(self, reducers: dict[str, dict[str, Reducer]]) -> None:
        self.reduction = Reduction(reducers)
        self.traffic = Traffic()
        self.trained: list[Trained] = []
        self.absent: dict[int, Absent] = {}

    def add(self, client: int, reply: Reply | Absent) -> None:
        if isinstance(reply, Absent):
            self.absent[client] = reply
            return
        self.reduction.add(client, reply.values, float(reply.samples))
        self.traffic.received(reply.values)
        if reply.steps:
            loss = 0.0 if reply.loss is None else reply.loss
            self.trained.append(Trained(client, loss, reply.steps, reply.samples))


@runtime_checkable
class Spread(Protocol):
    """An engine whose `exchange` yields only the replies of this process's clients; the others are elsewhere."""

    def merge(self, intake: Intake) -> None:
        """Make `intake` the same everywhere: what all processes took in together."""

    def total(self, value: int) -> int:
        """The sum of everybody's `value`."""
