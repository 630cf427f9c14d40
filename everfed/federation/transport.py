"""The interface between the engine and the network. Thin, so that another one than Flower's can implement it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from everfed.federation.packet import Packet


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
