"""What the engine asks of whatever carries its packets. Thin on purpose, so that another carrier than Flower fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from everfed.federation.packet import Packet


@dataclass(frozen=True)
class Failure:
    """A packet was not answered. own: the client had it and failed, rather than the way to it."""

    reason: str
    own: bool = False


class Transport(Protocol):
    """Carries packets to clients, known by their index, and answers back. limit: the bytes that an answer may have, as
    the engine says before it asks."""

    name: str
    limit: int

    def connected(self) -> frozenset[int]:
        """The clients that can be reached now."""

    def send(self, client: int, packet: Packet, kind: str) -> str:
        """Send to a connected client; returns a ticket for its answer. kind: "train", "evaluate" or "query"."""

    def receive(self) -> list[tuple[str, Packet | Failure]]:
        """What has come in since the last call, by ticket. Returns at once, or after a short wait for more."""

    def forget(self, tickets: list[str]) -> None:
        """Nobody waits for these answers any more."""

    def close(self) -> None:
        """Let go of the connection."""
