"""Secure aggregation on the server's side: wraps any engine and turns one exchange into five.

Only keys, encrypted letters, masked vectors, votes and shares reach this process. What the runner receives is the sum.
`secure_sum` decides who may be in a sum, and opens it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from everfed.core.client import Reply
from everfed.core.context import Ledger, Place, Setup
from everfed.core.engine import Absent, Engine, Replies, Trained
from everfed.core.evaluate import EvalSpec
from everfed.core.events import Observer
from everfed.core.handle import Server
from everfed.core.message import Message, Model, PerClient, Traffic, addressed, payload_bytes
from everfed.core.phase import Phase, Total, When
from everfed.core.trainer import Trainer
from everfed.core.tree import Tree
from everfed.errors import CompositionError
from everfed.privacy.encoding import Sums
from everfed.privacy.members import set_text
from everfed.privacy.secure import NAME, SecureAggregation
from everfed.privacy.secure_sum import SecurePhase, TooFewClients

__all__ = ["Secured", "TooFewClients"]


class Secured(Engine):
    """Wraps the engine that runs the clients. `exchange` yields empty replies; `merge` adds their sum. ledger: records
    which sets were opened, for a server that may be stopped and resumed; a simulation needs none."""

    def __init__(
        self,
        inner: Engine,
        setup: Setup,
        device: str = "cpu",
        notify: Observer = lambda event: None,
        ledger: Ledger | None = None,
    ) -> None:
        self.inner, self.setup, self.device, self.notify, self.ledger = inner, setup, device, notify, ledger
        self.name = inner.name
        part = setup.method.part(NAME)
        assert isinstance(part, SecureAggregation)
        self.part = part
        self._steps = {step.name: step for step in setup.method.phases(When.INSIDE)}
        self._sums: Sums | None = None
        self._asked = self._broken = 0  # replies, and those that were not finite
        self._traffic = Traffic()
        self._stage = 0  # of the current phase: every exchange has a place of its own

    def exchange(
        self, phase: Phase, clients: Sequence[int], message: Message | None, place: Place
    ) -> Iterator[tuple[int, Reply | Absent]]:
        """Yields which clients are absent, and empty replies of the others: their sum comes with `merge`."""
        self._sums, self._traffic, self._stage, self._broken = None, Traffic(), 0, 0
        if any(isinstance(value, PerClient) for values in (message or {}).values() for value in values.values()):
            raise CompositionError(
                f"privacy.secure_aggregation: phase {phase.name!r} sends clients messages of their own; they could not "
                "know that all were asked the same"
            )
        replies, absent = self._gather(phase, clients, message, place)
        if self.part.adds_up(phase, Server(NAME, {}, self.setup.server(phase.name, place))):
            secured = SecurePhase(self, phase, place, replies, absent)
            self._sums, self._broken = secured.run(), secured.broken
            self._asked = len(replies)
            self._warn(phase, place)
        for client in clients:
            yield client, absent[client] if client in absent else Reply({})

    def merge(self, replies: Replies) -> None:
        """Put the sum where the replies would have been added up."""
        replies.traffic.up.update(self._traffic.up)
        replies.traffic.down.update(self._traffic.down)
        if self._sums is None:
            return
        for path, (value, weight, dtype) in self._sums.totals.items():
            part, key = path.split("/", 1)
            total = replies.reduction.under_way[part][key]
            if weight and isinstance(total, Total):
                total.total = value.to(self.device) if isinstance(value, Tensor) else value
                total.weight, total.dtype = weight, dtype
        replies.trained = _anonymous(self._sums, 2 * self._broken > self._asked)

    def request(
        self, step: str, clients: Sequence[int], message: Message, place: Place
    ) -> tuple[dict[int, Tree], dict[int, Absent]]:
        """One step of the protocol on `clients`: their replies, and which are absent."""
        for client in clients:
            self._traffic.sent(payload_bytes(addressed(message, client), {}))
        self._stage += 1
        replies, absent = self._gather(self._steps[step], clients, message, replace(place, stage=self._stage))
        return {client: reply.values.get(NAME, {}) for client, reply in replies.items()}, absent

    def _gather(
        self, phase: Phase, clients: Sequence[int], message: Message | None, place: Place
    ) -> tuple[dict[int, Reply], dict[int, Absent]]:
        replies: dict[int, Reply] = {}
        absent: dict[int, Absent] = {}
        for client, reply in self.inner.exchange(phase, clients, message, place):
            if isinstance(reply, Absent):
                absent[client] = reply
            else:
                replies[client] = reply
                self._traffic.received(reply.values)
        for client in set(clients) - set(replies) - set(absent):
            absent[client] = Absent("failed", "no answer")
        return replies, absent

    def opened_set(self, place: Place) -> list[int] | None:
        """The clients whose sum was opened at this place before the server was stopped."""
        known = self.ledger.find(_opened_key(place)) if self.ledger is not None else None
        return None if known is None else [int(client) for client in known.split(",")]

    def record_opened(self, place: Place, clients: list[int]) -> None:
        if self.ledger is not None:
            self.ledger.record(_opened_key(place), set_text(clients))

    def _warn(self, phase: Phase, place: Place) -> None:
        sums, where = self._sums, f"secure aggregation, phase {phase.name!r} of round {place.round + 1}"
        if sums is None:
            message = f"{where}: what was opened is no sum of replies, so at least one client sent a false vector; it "
            self.notify({"event": "warning", "message": message + "cannot be known which, and the sum is not used"})
        elif sums.clipped or self._broken:
            what = f"{sums.clipped} numbers were outside [-clip, clip] and {self._broken} replies were not finite"
            self.notify({"event": "warning", "message": f"{where}: {what}; see privacy.clip"})

    # the rest is the inner engine's ------------------------------------------------------------------------------
    def workbench(self) -> Trainer:
        return self.inner.workbench()

    def evaluate(self, model: Model, spec: EvalSpec) -> Tensor:
        return self.inner.evaluate(model, spec)

    def refusal(self, model: Model) -> str:
        return self.inner.refusal(model)

    def describe(self) -> dict[str, Any]:
        return {**self.inner.describe(), "secure_aggregation": True}

    def close(self) -> None:
        self.inner.close()


def _opened_key(place: Place) -> str:
    return f"opened {place.round}.{place.position}.{place.repeat}"


def _anonymous(sums: Sums, broken: bool) -> list[Trained]:
    """As many clients as trained, without their numbers, all with the mean loss; not finite where nothing was added up
    and most replies are broken."""
    if not sums.trained:
        return [Trained(-1, float("nan"), 1, 0)] if broken else []
    mean = sums.loss / sums.trained
    first = Trained(-1, mean, 1, sums.samples)
    return [first, *(Trained(-1, mean, 1, 0) for _ in range(sums.trained - 1))]
