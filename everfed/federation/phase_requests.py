"""One phase: ask every client, wait, ask again where it failed, and end when there is nothing left to wait for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from everfed.core.engine import Absent
from everfed.federation import request as ask
from everfed.federation.packet import Packet, PacketError
from everfed.federation.patience import Patience
from everfed.federation.request import Answer
from everfed.federation.transport import Failure, Transport

FAILED, LATE, REJECTED, SILENT = "failed", "late", "rejected", "silent"
Notify = Callable[[dict[str, Any]], None]


@dataclass
class Waiting:
    """A client that has not answered. tickets: of the requests under way, more than one where it kept silent; asked:
    when it was asked last; due: when to ask again, infinity for one that is given up; silent: whether that is for lack
    of a word; own: how many of its failures
    were its own; missing: what it asked for; trouble: what went wrong last."""

    tickets: list[str] = field(default_factory=list)
    asked: float = 0.0
    due: float = 0.0
    silent: bool = False
    failures: int = 0
    own: int = 0
    missing: tuple[str, ...] = ()
    trouble: Absent = field(default_factory=lambda: Absent(LATE, "it was not connected"))


class PhaseRequests:
    """write: (client, what it lacks) -> request; read: (client, answer) -> what the phase is after, or PacketError.
    hopeless: the clients that were given up when they were last asked; they have one try until they answer again."""

    def __init__(
        self,
        phase: str,
        clients: Sequence[int],
        transport: Transport,
        patience: Patience,
        write: Callable[[int, tuple[str, ...]], Packet],
        read: Callable[[int, Answer], Any],
        notify: Notify,
        hopeless: set[int],
    ) -> None:
        self.phase, self.clients, self.hopeless = phase, clients, hopeless
        self.transport, self.patience = transport, patience
        self.write, self.read, self.notify = write, read, notify
        self.waiting = {client: Waiting() for client in clients}
        self.answers: dict[int, Any] = {}

    def run(self) -> dict[int, Any]:
        """{client: what `read` made of its answer, or Absent}, in client order."""
        started = time.monotonic()
        while not self._over(time.monotonic() - started):
            self._send()
            for ticket, answer in self.transport.receive():
                self._take(ticket, answer)
        self.transport.forget([ticket for one in self.waiting.values() for ticket in one.tickets])
        everybody = {**{client: one.trouble for client, one in self.waiting.items()}, **self.answers}
        return {client: everybody[client] for client in sorted(everybody)}

    def _over(self, seconds: float) -> bool:
        given_up = sum(one.due == math.inf for one in self.waiting.values())
        return self.patience.over(self.phase, len(self.clients), len(self.answers), seconds, given_up)

    def _send(self) -> None:
        """To every client that is connected and whose time it is."""
        here, now = self.transport.connected(), time.monotonic()
        for client, one in self.waiting.items():
            if client in here and one.due <= now:
                self._tell_silence(client, one, now)
                kind = self.phase if self.phase in ("train", "evaluate") else "query"
                one.tickets.append(self.transport.send(client, self.write(client, one.missing), kind))
                one.due, one.silent = now + self.patience.silent(len(one.tickets)), True
                one.asked, one.trouble = now, Absent(LATE, "the phase ended before it answered")

    def _tell_silence(self, client: int, one: Waiting, now: float) -> None:
        if one.silent:
            what = {"phase": self.phase, "kind": SILENT, "reason": f"no word for {now - one.asked:.0f} s; asked again"}
            self.notify({"event": "client", "client": client, **what})

    def _take(self, ticket: str, answer: Packet | Failure) -> None:
        client = next((client for client, one in self.waiting.items() if ticket in one.tickets), None)
        if client is None:
            return  # of an earlier phase, which went on without it
        one = self.waiting[client]
        one.tickets.remove(ticket)
        if isinstance(answer, Failure):
            self._failed(client, Absent(FAILED, answer.reason), answer.own)
            return
        try:
            self._understand(client, one, Answer.of(answer))
        except PacketError as error:
            self._failed(client, Absent(REJECTED, str(error)))

    def _understand(self, client: int, one: Waiting, answer: Answer) -> None:
        if answer.kind == ask.REPLY:
            self.answers[client] = self.read(client, answer)
            self.transport.forget(one.tickets)
            del self.waiting[client]
            self.hopeless.discard(client)
        elif answer.kind == ask.MISSING and not set(answer.missing) <= set(one.missing):
            one.missing = tuple({*one.missing, *answer.missing})  # sent with the next request, which is due at once
            one.due, one.silent = 0.0, False
        else:
            self._failed(client, Absent(REJECTED if answer.kind == ask.MISSING else FAILED, answer.reason))

    def _failed(self, client: int, trouble: Absent, own: bool = True) -> None:
        one = self.waiting[client]
        one.failures, one.own, one.trouble = one.failures + 1, one.own + own, trouble
        one.silent = False  # another request may be out still; nobody waits for it
        what = {"phase": self.phase, "kind": trouble.kind, "reason": trouble.reason, "failures": one.failures}
        if own and self._enough(client, one.own):
            one.due, one.trouble = math.inf, Absent(trouble.kind, f"given up after {one.own} tries: {trouble.reason}")
            self.hopeless.add(client)
            again: dict[str, Any] = {"given_up": True}
        else:
            wait = self.patience.backoff(one.failures)
            one.due, again = time.monotonic() + wait, {"again_in": round(wait, 1)}
        self.notify({"event": "client", "client": client, **what, **again})

    def _enough(self, client: int, failures: int) -> bool:
        tries = self.patience.tries
        return tries > 0 and failures >= (1 if client in self.hopeless else tries)
