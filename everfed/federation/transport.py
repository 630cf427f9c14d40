"""The interface between the engine and the network, and the transport over a run of Flower's.

The latter tracks connected nodes, sends packets, and matches answers to them. Flower is behind a `Connection`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from everfed.core.events import Observer
from everfed.federation.packet import PROTOCOL, Packet, PacketError
from everfed.federation.request import HELLO, NOTICE, require_protocol

LIFETIME = 12 * 3600.0  # seconds for which the SuperLink keeps a message
HELLO_LIMIT = 1 << 20  # bytes of a node's answer to HELLO
SHARE, LONGEST = 0.05, 1.0  # poll interval: this share of the time waited, up to seconds


@dataclass(frozen=True)
class Failure:
    """A packet was not answered. own: the client received it and failed; otherwise the network did."""

    reason: str
    own: bool = False


class Transport(Protocol):
    """Sends packets to clients, known by their index, and receives their answers. limit: bytes that an answer may have;
    set by the engine before it sends."""

    name: str
    limit: int

    def connected(self) -> frozenset[int]:
        """The clients that can be reached now."""

    def send(self, client: int, packet: Packet, kind: str) -> str:
        """Send to a connected client; returns a ticket for its answer. kind: "train", "evaluate" or "query"."""

    def receive(self) -> list[tuple[str, Packet | Failure]]:
        """The answers since the last call, by ticket. Returns at once, or after a short wait for more."""

    def forget(self, tickets: list[str]) -> None:
        """Drop the answers to these."""

    def close(self) -> None:
        """Close the connection."""


@dataclass(frozen=True)
class Node:
    """A SuperNode, from its answer to HELLO. key: its public key, empty where nodes are not authenticated."""

    id: int
    name: str
    client: int
    key: bytes = b""


@dataclass(frozen=True)
class Seen:
    """A SuperNode that is connected. since: when Flower last activated it; key: its public key."""

    id: int
    since: str = ""
    key: bytes = b""


class Connection(Protocol):
    """A run on a SuperLink. limit: bytes of one reply. A call raises OSError or EOFError when the run is lost."""

    limit: int

    def get_nodes(self) -> Iterable[Seen]:
        """The SuperNodes that are connected."""

    def push(self, node: int, packet: Packet, kind: str) -> str:
        """Send; returns a ticket for the answer, "" if the SuperLink does not accept it."""

    def pull(self, tickets: Iterable[str]) -> list[tuple[str, Packet | Failure]]:
        """The answers that have come, by ticket."""

    def wait(self, seconds: float) -> None:
        """For so long, or until an answer is there."""

    def forget(self, tickets: Iterable[str]) -> None:
        """Drop the answers to these."""

    def close(self) -> None:
        """End the run."""


LOST = (OSError, EOFError, PacketError)
Enrol = Callable[[Node], int]  # the index of a client; raises PacketError for one that may not take part


class GridTransport:
    """open_grid: opens a connection, again after one was lost; enrol: gives a node's client index. poll, look: seconds
    between two polls for answers, and for nodes."""

    name = "flower"

    def __init__(
        self,
        open_grid: Callable[[], Connection],
        enrol: Enrol,
        notify: Observer = lambda event: None,
        poll: float = 0.1,
        look: float = 2.0,
    ) -> None:
        self._open_grid, self._enrol, self.notify = open_grid, enrol, notify
        self.poll, self.look = poll, look
        self.limit = HELLO_LIMIT
        self._grid: Connection | None = None
        self._nodes: dict[int, int] = {}  # node -> client
        self._refused: set[int] = set()
        self._reported: set[tuple[int, str]] = set()  # failures of nodes before they were enrolled
        self._hellos: dict[str, int] = {}  # HELLO message -> node
        self._tickets: dict[str, int] = {}  # message -> node
        self._lost: list[tuple[str, Packet | Failure]] = []
        self._keys: dict[int, bytes] = {}
        self._since: dict[int, str] = {}  # node -> when Flower last activated it
        self._refreshed = self._sent = float("-inf")

    # nodes -------------------------------------------------------------------------------------------------------
    def connected(self) -> frozenset[int]:
        if time.monotonic() - self._refreshed >= self.look:
            self._safely(self._refresh_nodes)
            self._refreshed = time.monotonic()
        return frozenset(self._nodes.values())

    def _refresh_nodes(self, grid: Connection) -> None:
        """Send HELLO to new nodes, and drop those that are not connected any more."""
        nodes = list(grid.get_nodes())
        here = {node.id: node.key for node in nodes}
        for node in [node for node in self._nodes if node not in here]:
            self._gone(node, "not connected")
        self._detect_restarts({node.id: node.since for node in nodes})
        self._keys = here
        self._refused &= set(here)
        known = {*self._nodes, *self._refused, *self._hellos.values()}
        for node in [node for node in here if node not in known]:
            hello = Packet({"protocol": PROTOCOL, "kind": HELLO})
            if ticket := self._push(grid, node, hello, "query"):
                self._hellos[ticket] = node

    def _detect_restarts(self, since: dict[int, str]) -> None:
        """A node with a key keeps its number over a restart, but has lost its messages. Flower lists it as offline only
        while it is away."""
        for node in [node for node, when in since.items() if self._since.get(node, when) != when]:
            self._hellos = {message: other for message, other in self._hellos.items() if other != node}
            self._lose(node)
            if node in self._nodes:
                self._gone(node, "its SuperNode was restarted")
        self._since |= since

    def _gone(self, node: int, reason: str) -> None:
        self.notify({"event": "client", "client": self._nodes.pop(node), "kind": "gone", "reason": reason})

    def _register(self, node: int, answer: Packet | Failure) -> None:
        """Enrol a node that has answered HELLO."""
        if isinstance(answer, Failure):  # HELLO is sent again at the next refresh
            self._report_once(node, answer.reason)
            return
        try:
            require_protocol(answer)
            found = Node(node, answer.text("name"), answer.number("client"), self._keys.get(node, b""))
            client = self._enrol(found)
        except PacketError as error:
            self._refused.add(node)
            self.notify({"event": "client", "client": -1, "kind": "refused", "reason": str(error), "node": str(node)})
            notice = Packet({"protocol": PROTOCOL, "kind": NOTICE, "reason": str(error)})
            self._safely(lambda grid: self._push(grid, node, notice, "query"))  # its answer is not waited for
            return
        for older in [other for other, index in self._nodes.items() if index == client]:
            self._replaced(older)
        self._nodes[node] = client
        self.notify({"event": "client", "client": client, "kind": "connected", "reason": found.name})

    def _report_once(self, node: int, reason: str) -> None:
        """Report why a node cannot take part, unless it was reported before."""
        if (node, reason) not in self._reported:
            self._reported.add((node, reason))
            self.notify({"event": "client", "client": -1, "kind": "failed", "reason": reason, "node": str(node)})

    def _replaced(self, node: int) -> None:
        """The client of this node has connected as another node, before Flower dropped this one."""
        del self._nodes[node]
        self._lose(node)

    def _lose(self, node: int) -> None:
        """Report this node's open requests as failed."""
        lost = [ticket for ticket, other in self._tickets.items() if other == node]
        self._lost += [(ticket, Failure("the client was restarted")) for ticket in lost]
        self.forget(lost)

    def _lose_all(self, reason: str) -> None:
        self._lost += [(ticket, Failure(reason)) for ticket in self._tickets]
        self._tickets, self._hellos = {}, {}

    # packets -----------------------------------------------------------------------------------------------------
    def send(self, client: int, packet: Packet, kind: str) -> str:
        node = next((node for node, index in self._nodes.items() if index == client), None)
        ticket = None if node is None else self._safely(lambda grid: self._push(grid, node, packet, kind))
        if not ticket:
            ticket = f"lost-{time.monotonic_ns()}"
            self._lost.append((ticket, Failure("the SuperLink could not be reached")))
        elif node is not None:
            self._tickets[ticket] = node
        return ticket

    def _push(self, grid: Connection, node: int, packet: Packet, kind: str) -> str:
        self._sent = time.monotonic()
        return grid.push(node, packet, kind)

    def receive(self) -> list[tuple[str, Packet | Failure]]:
        since = time.monotonic() - self._sent
        self._wait(max(self.poll, min(LONGEST, SHARE * since)))
        waiting = [*self._tickets, *self._hellos]
        found = self._safely(lambda grid: grid.pull(waiting)) if waiting else None
        answers = [one for ticket, answer in found or () for one in self._matched(ticket, answer)]
        lost, self._lost = self._lost, []
        return [*lost, *answers]

    def _wait(self, seconds: float) -> None:
        (time.sleep if self._grid is None else self._grid.wait)(seconds)

    def _matched(self, ticket: str, answer: Packet | Failure) -> list[tuple[str, Packet | Failure]]:
        if ticket in self._hellos:
            self._register(self._hellos.pop(ticket), answer)
            return []
        return [(ticket, answer)] if self._tickets.pop(ticket, None) is not None else []

    def forget(self, tickets: list[str]) -> None:
        for ticket in tickets:
            self._tickets.pop(ticket, None)
        if self._grid is not None:
            self._grid.forget(tickets)

    def close(self) -> None:
        grid, self._grid = self._grid, None
        if grid is not None:
            grid.close()

    # the connection ----------------------------------------------------------------------------------------------
    def _safely(self, call: Callable[[Connection], Any]) -> Any:
        """The result of a call on the grid; None when the connection is lost. All open requests then fail, and are
        repeated over a new connection."""
        try:
            self._grid = self._grid or self._open_grid()
            self._grid.limit = self.limit
            return call(self._grid)
        except LOST as error:
            self.notify({"event": "warning", "message": f"lost the SuperLink: {type(error).__name__}: {error}"})
            self._lose_all("the connection to the SuperLink was lost")
            self.close()
            time.sleep(1.0)
            return None
