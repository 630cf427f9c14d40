"""One phase: ask every client, wait, ask again where it failed, and end when there is nothing left to wait for."""

from __future__ import annotations

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

FAILED, LATE, REJECTED = "failed", "late", "rejected"
Notify = Callable[[dict[str, Any]], None]


@dataclass
class Waiting:
    """A client that has not answered. ticket: of the request under way; due: when to ask again; missing: what it asked
    for; trouble: what went wrong last."""

    ticket: str = ""
    due: float = 0.0
    failures: int = 0
    missing: tuple[str, ...] = ()
    trouble: Absent = field(default_factory=lambda: Absent(LATE, "it was not connected"))


class Asking:
    """write: (client, what it lacks) -> request; read: (client, answer) -> what the phase is after, or PacketError."""

    def __init__(
        self,
        phase: str,
        clients: Sequence[int],
        transport: Transport,
        patience: Patience,
        write: Callable[[int, tuple[str, ...]], Packet],
        read: Callable[[int, Answer], Any],
        notify: Notify,
    ) -> None:
        self.phase, self.clients = phase, clients
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
        self.transport.forget([one.ticket for one in self.waiting.values() if one.ticket])
        everybody = {**{client: one.trouble for client, one in self.waiting.items()}, **self.answers}
        return {client: everybody[client] for client in sorted(everybody)}

    def _over(self, seconds: float) -> bool:
        return self.patience.over(self.phase, len(self.clients), len(self.answers), seconds)

    def _send(self) -> None:
        """To every client that is connected, has no request under way, and whose time it is."""
        here, now = self.transport.connected(), time.monotonic()
        for client, one in self.waiting.items():
            if client in here and not one.ticket and one.due <= now:
                kind = self.phase if self.phase in ("train", "evaluate") else "query"
                one.ticket = self.transport.send(client, self.write(client, one.missing), kind)
                one.trouble = Absent(LATE, "the phase ended before it answered")

    def _take(self, ticket: str, answer: Packet | Failure) -> None:
        client = next((client for client, one in self.waiting.items() if one.ticket == ticket), None)
        if client is None:
            return  # of an earlier phase, which went on without it
        one = self.waiting[client]
        one.ticket = ""
        if isinstance(answer, Failure):
            self._failed(client, Absent(FAILED, answer.reason))
            return
        try:
            self._understand(client, one, Answer.of(answer))
        except PacketError as error:
            self._failed(client, Absent(REJECTED, str(error)))

    def _understand(self, client: int, one: Waiting, answer: Answer) -> None:
        if answer.kind == ask.REPLY:
            self.answers[client] = self.read(client, answer)
            del self.waiting[client]
        elif answer.kind == ask.MISSING and not set(answer.missing) <= set(one.missing):
            one.missing = tuple({*one.missing, *answer.missing})  # sent with the next request, which is due at once
        else:
            self._failed(client, Absent(REJECTED if answer.kind == ask.MISSING else FAILED, answer.reason))

    def _failed(self, client: int, trouble: Absent) -> None:
        one = self.waiting[client]
        one.failures += 1
        one.trouble, one.due = trouble, time.monotonic() + self.patience.backoff(one.failures)
        again = {"failures": one.failures, "again_in": round(self.patience.backoff(one.failures), 1)}
        what = {"phase": self.phase, "kind": trouble.kind, "reason": trouble.reason}
        self.notify({"event": "client", "client": client, **what, **again})
