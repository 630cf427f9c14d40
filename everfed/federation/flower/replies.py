"""Flower's public Grid as a connection that untrusted clients cannot hold up. It runs in the ServerApp's process.

The Grid returns all replies together, waits for the slowest, and raises for one that cannot be read. A reply is
announced before its objects are sent, and the objects may never come, or be no message. So each reply is pulled alone,
in a thread of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import httpx
from flwr.app import Message
from flwr.serverapp import Grid

from everfed.federation.flower.records import APP_RAISED, FOREIGN_APP, from_records, to_records
from everfed.federation.packet import Packet, PacketError
from everfed.federation.transport import LIFETIME, Failure, Seen

UNUSABLE = "its reply may not be used"
CODES = {
    0: "unknown error",
    1: "the app could not be loaded",
    APP_RAISED: "the app raised an exception",
    3: "the message is not available",
    4: "the reply is not available",
    5: "the node is not available",
    FOREIGN_APP: "the client refuses this run's app",
    8: "the app's process died",
}
OWN = frozenset({1, APP_RAISED, FOREIGN_APP, 8})  # errors of the client's app, not of the network


class OneByOne:
    """A connection over a Grid. limit: unused; the gate of the SuperLink counts bytes."""

    limit = 0

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self._open: dict[str, threading.Thread] = {}  # pulls, by the message that is replied to
        self._finished: list[tuple[str, Packet | Failure] | BaseException] = []
        self._changed = threading.Condition()

    def get_nodes(self) -> list[Seen]:
        with lost():
            nodes = list(self.grid.get_nodes())
        return [
            Seen(node.node_id, str(getattr(node, "last_activated_at", "")), bytes(getattr(node, "public_key", b"")))
            for node in nodes
        ]

    def push(self, node: int, packet: Packet, kind: str) -> str:
        with lost():
            (ticket,) = self.grid.push_messages([Message(to_records(packet), node, kind, ttl=LIFETIME)])
        return ticket or ""

    def pull(self, tickets: Iterable[str]) -> list[tuple[str, Packet | Failure]]:
        """The replies that are complete, by ticket; other pulls go on. Raises what the connection raises."""
        with self._changed:
            for ticket in tickets:
                if ticket not in self._open:
                    self._open[ticket] = threading.Thread(target=self._run, args=(ticket,), name="pull", daemon=True)
                    self._open[ticket].start()
            finished, self._finished = self._finished, []
        for one in finished:
            if isinstance(one, BaseException):
                raise one
        return [one for one in finished if isinstance(one, tuple)]

    def _run(self, ticket: str) -> None:
        error: BaseException | None = None
        reply: Packet | Failure | None = None
        try:
            reply = self._one(ticket)
        except BaseException as raised:  # raised again by the next `pull`
            error = raised
        with self._changed:
            if self._open.get(ticket) is threading.current_thread():  # else nothing waits for it any more
                del self._open[ticket]
                self._finished += [error] if error is not None else [(ticket, reply)] if reply is not None else []
            self._changed.notify_all()

    def _one(self, ticket: str) -> Packet | Failure | None:
        try:
            with lost():
                reply = next(iter(self.grid.pull_messages([ticket])), None)
        except OSError:
            raise
        except Exception as error:  # untrusted bytes in Flower's decoders may raise anything
            self.grid.get_nodes()  # raises if it is not the reply but the run that has ended
            return Failure(f"{UNUSABLE}: {type(error).__name__}: {error}"[:300], own=True)
        return None if reply is None else answered(reply)

    def wait(self, seconds: float) -> None:
        """Until a pull is over, or for so long."""
        with self._changed:
            if not self._finished:
                self._changed.wait(seconds)

    def forget(self, tickets: Iterable[str]) -> None:
        """Drop the replies to these."""
        with self._changed:
            for ticket in tickets:
                self._open.pop(ticket, None)

    def close(self) -> None:
        self.forget(list(self._open))


@contextmanager
def lost() -> Iterator[None]:
    """Errors of HTTP as what a connection raises."""
    try:
        yield
    except httpx.HTTPError as error:
        raise ConnectionError(f"{type(error).__name__}: {error}") from error


def answered(reply: Message) -> Packet | Failure:
    """A reply's packet, or why there is none."""
    if reply.has_error():
        code = int(reply.error.code)
        reason = CODES.get(code, f"Flower's error {code}")
        return Failure(f"{reason}: {reply.error.reason}" if reply.error.reason else reason, code in OWN)
    try:
        return from_records(reply.content)
    except (PacketError, AttributeError, TypeError):
        return Packet({})  # an empty packet is rejected like any malformed one
