"""Sends a phase's requests to its clients, repeats those that fail or stay unanswered, and collects the answers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from everfed.core.engine import Absent
from everfed.core.events import Observer
from everfed.federation.packet import Packet, PacketError
from everfed.federation.phase_options import PhaseOptions
from everfed.federation.request import MISSING, REPLY, Answer
from everfed.federation.transport import Failure, Transport

FAILED, LATE, REJECTED, SILENT = "failed", "late", "rejected", "silent"
ASKED = (
    4  # how often a client may ask for pieces that it lacks: the recipe, then the rest, and once more if it restarts
)


@dataclass
class Pending:
    """A client that has not answered yet.

    tickets: of its open requests (several after repeats). sent: time of the last request. due: time of the next one,
    infinity once the client is given up. unanswered: the next request repeats one that got no answer. failures: all of
    them; own: those that the client itself caused. missing: pieces that it requested, in so many answers (asked). last:
    its last failure.
    """

    tickets: list[str] = field(default_factory=list)
    sent: float = 0.0
    due: float = 0.0
    unanswered: bool = False
    failures: int = 0
    own: int = 0
    missing: tuple[str, ...] = ()
    asked: int = 0
    last: Absent = field(default_factory=lambda: Absent(LATE, "it was not connected"))


class PhaseRequests:
    """The requests of one phase.

    write: (client, missing pieces) -> request. read: (client, answer) -> the content, or PacketError. given_up: clients
    given up in earlier phases, updated here; each gets one request per phase until it answers.
    """

    def __init__(
        self,
        phase: str,
        clients: Sequence[int],
        transport: Transport,
        options: PhaseOptions,
        write: Callable[[int, tuple[str, ...]], Packet],
        read: Callable[[int, Answer], Any],
        notify: Observer,
        given_up: set[int],
    ) -> None:
        self.phase, self.clients, self.given_up = phase, clients, given_up
        self.transport, self.options = transport, options
        self.write, self.read, self.notify = write, read, notify
        self.pending = {client: Pending() for client in clients}
        self.answers: dict[int, Any] = {}

    def run(self) -> dict[int, Any]:
        """{client: the content that `read` returned, or Absent}, in client order."""
        started = time.monotonic()
        while not self._over(time.monotonic() - started):
            self._send()
            for ticket, answer in self.transport.receive():
                self._receive(ticket, answer)
        self.transport.forget([ticket for one in self.pending.values() for ticket in one.tickets])
        found = {**{client: one.last for client, one in self.pending.items()}, **self.answers}
        return {client: found[client] for client in sorted(found)}

    def _over(self, seconds: float) -> bool:
        given_up = sum(one.due == math.inf for one in self.pending.values())
        return self.options.over(self.phase, len(self.clients), len(self.answers), seconds, given_up)

    def _send(self) -> None:
        """Send to every connected client whose request is due."""
        connected, now = self.transport.connected(), time.monotonic()
        for client, one in self.pending.items():
            if client in connected and one.due <= now:
                if one.unanswered:
                    reason = f"no answer for {now - one.sent:.0f} s; request repeated"
                    self.notify({**self._event(client, SILENT), "reason": reason})
                kind = self.phase if self.phase in ("train", "evaluate") else "query"
                one.tickets.append(self.transport.send(client, self.write(client, one.missing), kind))
                one.due, one.unanswered = now + self.options.silent(len(one.tickets)), True
                one.sent, one.last = now, Absent(LATE, "the phase ended before it answered")

    def _event(self, client: int, kind: str) -> dict[str, Any]:
        return {"event": "client", "client": client, "phase": self.phase, "kind": kind}

    def _receive(self, ticket: str, answer: Packet | Failure) -> None:
        client = next((client for client, one in self.pending.items() if ticket in one.tickets), None)
        if client is None:
            return  # of an earlier phase, which went on without it
        one = self.pending[client]
        one.tickets.remove(ticket)
        if isinstance(answer, Failure):
            self._failed(client, Absent(FAILED, answer.reason), answer.own)
            return
        try:
            self._accept(client, one, Answer.of(answer))
        except PacketError as error:
            self._failed(client, Absent(REJECTED, str(error)))

    def _accept(self, client: int, one: Pending, answer: Answer) -> None:
        if answer.kind == REPLY:
            self.answers[client] = self.read(client, answer)
            self.transport.forget(one.tickets)
            del self.pending[client]
            self.given_up.discard(client)
        elif answer.kind == MISSING and one.asked < ASKED and not set(answer.missing) <= set(one.missing):
            one.missing = tuple({*one.missing, *answer.missing})  # sent with the next request, which is due at once
            one.due, one.unanswered, one.asked = 0.0, False, one.asked + 1
        elif answer.kind == MISSING:
            self._failed(client, Absent(REJECTED, "it asks for what it was sent, or for more without end"))
        else:
            self._failed(client, Absent(FAILED, answer.reason))

    def _failed(self, client: int, failure: Absent, own: bool = True) -> None:
        one = self.pending[client]
        one.failures, one.own, one.last = one.failures + 1, one.own + own, failure
        one.unanswered = False
        event = {**self._event(client, failure.kind), "reason": failure.reason, "failures": one.failures}
        if own and self._is_last_try(client, one.own):
            one.due, one.last = math.inf, Absent(failure.kind, f"given up after {one.own} tries: {failure.reason}")
            self.given_up.add(client)
            self.notify({**event, "given_up": True})
        else:
            wait = self.options.backoff(one.failures)
            one.due = time.monotonic() + wait
            self.notify({**event, "again_in": round(wait, 1)})

    def _is_last_try(self, client: int, failures: int) -> bool:
        tries = self.options.tries
        return tries > 0 and failures >= (1 if client in self.given_up else tries)
