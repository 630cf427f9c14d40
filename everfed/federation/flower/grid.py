"""Packets over Flower's Grid: who is connected, one message per request, answers matched by what they reply to."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
from flwr.app import Message
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from flwr.supercore.run import RunNotRunningException

from everfed.federation import request as ask
from everfed.federation.flower.pulling import UNUSABLE
from everfed.federation.flower.records import from_records, to_records
from everfed.federation.flower.tuning import tune
from everfed.federation.packet import PROTOCOL, Packet, PacketError
from everfed.federation.transport import Failure

CODES = {
    0: "unknown error",
    1: "the app could not be loaded",
    2: "the app raised an exception",
    3: "the message is not available",
    4: "the reply is not available",
    5: "the node is not available",
    8: "the app's process died",
    UNUSABLE: "its reply may not be used",
}
OWN = frozenset({1, 2, 8, UNUSABLE})  # errors of the client's app, not of the way to it
HELLO_LIMIT = 1 << 20  # bytes in which a node says who it is
SHARE, LONGEST = 0.05, 1.0  # the longer an answer takes the later it is looked for: a look costs the SuperLink, too
# a push that an outage cut in two is over, too: what is half there is dropped with the run
LOST = (httpx.HTTPError, RunNotRunningException, ObjectPushError, OSError)


@dataclass(frozen=True)
class Node:
    """A SuperNode as it introduced itself. key: its public key, empty where nodes are not authenticated."""

    id: int
    name: str
    client: int
    key: bytes = b""


Enrol = Callable[[Node], int]  # the index of a client; raises PacketError for one that may not take part
Notify = Callable[[dict[str, Any]], None]


class GridTransport:
    """open_grid: connects, and again after the connection was lost for good; enrol: who is which client."""

    name = "flower"

    def __init__(
        self,
        open_grid: Callable[[], Grid],
        enrol: Enrol,
        notify: Notify = lambda event: None,
        poll: float = 0.1,
        look: float = 2.0,
        lifetime: float = 12 * 3600.0,
    ) -> None:
        self._open_grid, self._enrol, self.notify = open_grid, enrol, notify
        self.poll, self.look, self.lifetime = poll, look, lifetime
        self.limit = HELLO_LIMIT
        self._grid: Grid | None = None
        self._nodes: dict[int, int] = {}  # node -> client
        self._refused: set[int] = set()
        self._greeting: dict[str, int] = {}  # message -> node that was asked who it is
        self._tickets: dict[str, int] = {}  # message -> node
        self._lost: list[tuple[str, Packet | Failure]] = []
        self._keys: dict[int, bytes] = {}
        self._since: dict[int, str] = {}  # node -> when Flower last activated it
        self._looked = self._sent = float("-inf")
        self._outages = 0
        tune()

    # who is there ------------------------------------------------------------------------------------------------
    def connected(self) -> frozenset[int]:
        if time.monotonic() - self._looked >= self.look:
            self._safely(self._look)
            self._looked = time.monotonic()
        return frozenset(self._nodes.values())

    def _look(self, grid: Grid) -> None:
        """Greet nodes that are new, and let go of those that are not there any more."""
        nodes = list(grid.get_nodes())
        here = {node.node_id: bytes(getattr(node, "public_key", b"")) for node in nodes}
        for node in [node for node in self._nodes if node not in here]:
            self._gone(node, "not connected")
        self._notice_restarts({node.node_id: str(getattr(node, "last_activated_at", "")) for node in nodes})
        self._keys = here
        self._refused &= set(here)
        asked = {*self._nodes, *self._refused, *self._greeting.values()}
        for node in [node for node in here if node not in asked]:
            hello = Packet({"protocol": PROTOCOL, "kind": ask.HELLO})
            self._greeting[self._push(grid, node, hello, "query")] = node

    def _notice_restarts(self, since: dict[int, str]) -> None:
        """A node that keeps its number over a restart (it has a key) has lost what it was asked. Flower says so only to
        whoever looks while it is away."""
        for node in [node for node, when in since.items() if self._since.get(node, when) != when]:
            self._greeting = {message: asked for message, asked in self._greeting.items() if asked != node}
            self._lose(node)
            if node in self._nodes:
                self._gone(node, "its SuperNode was restarted")
        self._since |= since

    def _gone(self, node: int, reason: str) -> None:
        self.notify({"event": "client", "client": self._nodes.pop(node), "kind": "gone", "reason": reason})

    def _welcome(self, node: int, answer: Packet | Failure) -> None:
        """A node said who it is."""
        if isinstance(answer, Failure):
            return  # it is greeted again at the next look
        try:
            ask.require_protocol(answer)
            who = Node(node, answer.text("name"), answer.number("client"), self._keys.get(node, b""))
            client = self._enrol(who)
        except PacketError as error:
            self._refused.add(node)
            self.notify({"event": "client", "client": -1, "kind": "refused", "reason": str(error), "node": str(node)})
            return
        for older in [other for other, index in self._nodes.items() if index == client]:
            self._replaced(older)
        self._nodes[node] = client
        self.notify({"event": "client", "client": client, "kind": "connected", "reason": who.name})

    def _replaced(self, node: int) -> None:
        """The client of this node came back under a new number, before Flower missed the old one."""
        del self._nodes[node]
        self._lose(node)

    def _lose(self, node: int) -> None:
        """What this node was asked will not be answered."""
        lost = [ticket for ticket, asked in self._tickets.items() if asked == node]
        self._lost += [(ticket, Failure("the client was restarted")) for ticket in lost]
        self.forget(lost)

    def _lose_all(self, reason: str) -> None:
        self._lost += [(ticket, Failure(reason)) for ticket in self._tickets]
        self._tickets, self._greeting = {}, {}

    # packets -----------------------------------------------------------------------------------------------------
    def send(self, client: int, packet: Packet, kind: str) -> str:
        node = next((node for node, index in self._nodes.items() if index == client), None)
        ticket = None if node is None else self._safely(lambda grid: self._push(grid, node, packet, kind))
        if ticket is None:
            ticket = f"lost-{time.monotonic_ns()}"
            self._lost.append((ticket, Failure("the SuperLink could not be reached")))
        elif node is not None:
            self._tickets[ticket] = node
        return ticket

    def _push(self, grid: Grid, node: int, packet: Packet, kind: str) -> str:
        self._sent = time.monotonic()
        message = Message(to_records(packet), node, kind, ttl=self.lifetime)
        (ticket,) = grid.push_messages([message])
        if not ticket:
            raise ConnectionError("the SuperLink did not take a message")
        return str(ticket)

    def receive(self) -> list[tuple[str, Packet | Failure]]:
        since = time.monotonic() - self._sent
        time.sleep(max(self.poll, min(LONGEST, SHARE * since)))
        waiting = [*self._tickets, *self._greeting]
        found = self._safely(lambda grid: list(grid.pull_messages(waiting))) if waiting else None
        answers = [one for reply in found or () for one in self._sorted(reply)]
        self._notice_outage()
        lost, self._lost = self._lost, []
        return [*lost, *answers]

    def _notice_outage(self) -> None:
        """A SuperLink that was away came back. It believes that what it was handing out when it went was delivered, and
        nobody will answer that: everything under way is asked for again."""
        outages = getattr(self._grid, "outages", 0)
        if outages > self._outages:
            self.notify(
                {"event": "warning", "message": "the SuperLink was away; what was under way is asked for again"}
            )
            self._lose_all("the SuperLink was away")
        self._outages = outages

    def _sorted(self, reply: Message) -> list[tuple[str, Packet | Failure]]:
        """By what it replies to: an error says another sender than the node that is gone."""
        ticket = reply.metadata.reply_to_message_id
        answer = _answer(reply)
        if ticket in self._greeting:
            self._welcome(self._greeting.pop(ticket), answer)
            return []
        return [(ticket, answer)] if self._tickets.pop(ticket, None) is not None else []

    def forget(self, tickets: list[str]) -> None:
        for ticket in tickets:
            self._tickets.pop(ticket, None)

    def close(self) -> None:
        grid, self._grid = self._grid, None
        if grid is not None and hasattr(grid, "close"):
            grid.close()

    # the connection ----------------------------------------------------------------------------------------------
    def _safely(self, call: Callable[[Grid], Any]) -> Any:
        """The result of a call on the grid; None when the connection is lost. Everything under way is then lost, too,
        and asked for again over a new one."""
        try:
            self._grid = self._grid or self._open_grid()
            if hasattr(self._grid, "limit"):  # Flower's own grid has none
                self._grid.limit = self.limit
            return call(self._grid)
        except LOST as error:
            self.notify({"event": "warning", "message": f"lost the SuperLink: {type(error).__name__}: {error}"})
            self._lose_all("the connection to the SuperLink was lost")
            self.close()
            time.sleep(1.0)
            return None


def _answer(reply: Message) -> Packet | Failure:
    if reply.has_error():
        code = int(reply.error.code)
        reason = CODES.get(code, f"Flower's error {code}")
        return Failure(f"{reason}: {reply.error.reason}" if reply.error.reason else reason, code in OWN)
    try:
        return from_records(reply.content)
    except PacketError:
        return Packet({})  # which nobody will understand: it is rejected like any other garbage
