"""What the runner asks of an engine: run a phase on clients, score a model. A simulator, a process pool and a network
all fit behind it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from everfed.core.context import Place, Setup
from everfed.core.handle import Server
from everfed.core.message import MODEL, Message, Model, Traffic, sizes, unwrap
from everfed.core.phase import Phase, Reducer, Reduction
from everfed.core.trainer import Trainer
from everfed.core.tree import Tree
from everfed.errors import ClientError as ClientError

if TYPE_CHECKING:
    from everfed.core.client import Reply
    from everfed.core.evaluate import EvalSpec


@dataclass(frozen=True)
class Absent:
    """A client that does not count in a phase. kind: "failed" (it said so, or it is gone), "late" (the phase ended
    without it) or "rejected" (what it sent may not be used). A round goes on with the others."""

    kind: str
    reason: str


@dataclass(frozen=True)
class Trained:
    """A client that trained: the sum of its step losses, its steps and its samples."""

    client: int
    loss: Tensor | float
    steps: int
    samples: int


class Replies:
    """Collects a phase's replies: reduces values as they arrive and keeps each client's loss, steps and samples."""

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
        self.traffic.up.update(sizes(reply.values) if reply.sent is None else reply.sent)
        if reply.steps:
            loss = 0.0 if reply.loss is None else reply.loss
            self.trained.append(Trained(client, loss, reply.steps, reply.samples))


def opened(
    setup: Setup, phase: Phase, place: Place, message: Message | None, reply: Reply, model: Model | None = None
) -> Reply:
    """A reply as it is checked and reduced, of a client that received `message`. model: the shared one now, where it is
    another than the client received. Raises ValueError for a reply that cannot be read."""
    opening = setup.method.opening
    if not opening or reply.sent is not None or not message or MODEL not in message:
        return reply
    received, sent = unwrap({MODEL: message[MODEL]})[MODEL], sizes(reply.values)
    for part in opening:
        server = Server(part.name, {}, setup.server(phase.name, place), model=model or received, read_only=True)
        reply = part.open(server, phase, reply, received)
    return replace(reply, sent=sent)


@dataclass(frozen=True)
class PhaseCall:
    """A phase at its place in the run, with the message that its clients receive."""

    phase: Phase
    message: Message | None
    place: Place


class Engine(ABC):
    """Runs clients. Keeps their state (through a store), never the server's."""

    name: str
    sharded = False  # does `exchange` yield only some of the replies, and `merge` add the others?
    batches_phases = False  # can it send several phases in one message? Then `batch` names those that follow

    @abstractmethod
    def exchange(
        self, phase: Phase, clients: Sequence[int], message: Message | None, place: Place
    ) -> Iterator[tuple[int, Reply | Absent]]:
        """Run `phase` on `clients` and yield their replies in ascending client order. A simulation raises ClientError
        where one fails; an engine of real clients may say that a client is absent, and why."""

    @abstractmethod
    def workbench(self) -> Trainer:
        """A trainer for the server's own phases: a generator is trained against the shared model on its device."""

    @abstractmethod
    def evaluate(self, model: Model, spec: EvalSpec) -> Tensor:
        """(tasks, 4) counts of the shared model, as `score_tasks`."""

    def refusal(self, model: Model) -> str:
        """Why a new shared model is not adopted; "" where it is."""
        return ""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Facts for the result's environment: device, precision, workers, peak memory."""

    def close(self) -> None:
        """Release workers and devices."""
        return

    def merge(self, replies: Replies) -> None:
        """Add the replies that other processes received, on every process; after `exchange` is exhausted."""
        return

    def total(self, value: int) -> int:
        """The sum of `value` over all processes of the engine."""
        return value

    def once(self, work: Callable[[], Tree]) -> Tree:
        """What `work` returns; where several processes hold the server's state, one of them does it for all."""
        return work()

    def batch(self, calls: Sequence[PhaseCall]) -> None:
        """These phases follow the next exchange, on the same clients, and their messages are known already. Each still
        has an exchange of its own."""
        return
