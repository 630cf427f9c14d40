"""What the runner asks of an engine. Thin on purpose: a simulator, a process pool and a network all fit behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from everfed.core.client import Reply
from everfed.core.message import Message
from everfed.core.part import Model
from everfed.core.phase import Phase
from everfed.core.score import Exam
from everfed.core.trainer import Trainer
from everfed.core.tree import Tree
from everfed.core.world import Moment


class ClientError(RuntimeError):
    """A call on a client failed; says which client, in which phase, and why."""

    def __init__(self, client: int, phase: str, round_index: int, cause: BaseException | str) -> None:
        super().__init__(f"client {client} failed in phase {phase!r} of round {round_index}: {cause}")
        self.client, self.phase, self.round, self.cause = client, phase, round_index, cause


@dataclass(frozen=True)
class Absent:
    """A client that does not count in a phase. kind: "failed" (it said so, or it is gone), "late" (the phase ended
    without it) or "rejected" (what it sent may not be used). A round goes on with the others."""

    kind: str
    reason: str


class Engine(Protocol):
    """Runs clients. Keeps their state (through a store), never the server's."""

    name: str

    def exchange(
        self, phase: Phase, clients: Sequence[int], message: Message | None, moment: Moment
    ) -> Iterator[tuple[int, Reply | Absent]]:
        """Run `phase` on `clients` and yield their replies in ascending client order. A simulation raises ClientError
        where one fails; an engine of real clients may say that a client is absent, and why."""

    def workbench(self) -> Trainer:
        """A trainer for the server's own phases: a generator is trained against the shared model on its device."""

    def evaluate(self, model: Model, exam: Exam) -> Tensor:
        """(tasks, 4) counts of the shared model, as `score_tasks`."""

    def describe(self) -> dict[str, Any]:
        """Facts for the result's environment: device, precision, workers, peak memory."""

    def close(self) -> None:
        """Release workers and devices."""


@runtime_checkable
class Leading(Protocol):
    """An engine of several processes, one of which does the server's own work for all."""

    def once(self, work: Callable[[], Tree]) -> Tree:
        """What `work` gives where the leader does it; nobody else does. Every process calls this."""
