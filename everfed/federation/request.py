"""Requests of the server and answers of a client, as headers of packets.

A request names the run, the epoch (how often its server was started), the durable place from which the server would
resume, and one or more steps. Several steps are made one after the other and answered together.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from everfed.core.context import PlaceKey
from everfed.federation.packet import PROTOCOL, Packet, PacketError, Value, digest
from everfed.federation.runs import is_run

HELLO, STEPS, NOTICE = "hello", "steps", "notice"  # NOTICE: why the server refuses this client
REPLY, MISSING, REFUSED, FAILED = "reply", "missing", "refused", "failed"
RECIPE = "recipe"  # the piece that holds the run's recipe


@dataclass(frozen=True)
class Step:
    """One phase at one place of the run. task: the client's own, -1 for none. body: the name of the message's tree, ""
    in a round in which nothing is sent. once: (part, key, name) of its payloads. drifting: the client sees more than
    one task."""

    phase: str
    place: PlaceKey
    task: int
    body: str
    once: tuple[tuple[str, str, str], ...] = ()
    drifting: bool = False

    @property
    def name(self) -> str:
        """Digest of the step's content, without its place."""
        return digest(json.dumps([self.phase, self.task, self.body, self.once, self.drifting]).encode())

    def to_json(self) -> list[Any]:
        return [self.phase, self.place, self.task, self.body, self.once, self.drifting]

    @staticmethod
    def from_json(value: Any) -> Step:
        try:
            phase, place, task, body, once, drifting = value
            named = tuple((part, key, name) for part, key, name in once)
            round_index, position, repeat, stage = place
        except (TypeError, ValueError) as error:
            raise PacketError(f"not a step: {error}") from error
        numbers, texts = (*place, task), (phase, body, *(text for one in named for text in one))
        if any(type(number) is not int for number in numbers) or any(type(text) is not str for text in texts):
            raise PacketError("a step names its phase, its place, a task and its content")
        if min(place) < 0:
            raise PacketError(f"no place in a run: {place}")
        return Step(phase, (round_index, position, repeat, stage), task, body, named, drifting is True)


@dataclass(frozen=True)
class Request:
    """Steps for one client. run: the run's identity; recipe: digest of the recipe's text; scale: that of `everfed run`;
    durable: everything before it is saved on the server."""

    run: str
    epoch: int
    client: int
    recipe: str
    scale: float
    durable: PlaceKey
    steps: tuple[Step, ...]

    def header(self) -> dict[str, Value]:
        return {
            "protocol": PROTOCOL,
            "kind": STEPS,
            "run": self.run,
            "epoch": self.epoch,
            "client": self.client,
            "recipe": self.recipe,
            "scale": self.scale,
            "durable": json.dumps(self.durable),
            "steps": json.dumps([step.to_json() for step in self.steps]),
        }

    @staticmethod
    def of(packet: Packet) -> Request:
        """Raises PacketError."""
        durable, steps = packet.json("durable"), packet.json("steps")
        if not isinstance(steps, list) or not _is_place(durable):
            raise PacketError("a request holds a list of steps and a durable place")
        scale = packet.header.get("scale")
        if not isinstance(scale, float | int) or not 0 < scale <= 1:
            raise PacketError("a request names its scale, above 0 and at most 1")
        run = packet.text("run")
        if not is_run(run):
            raise PacketError(f"not a run's identity: {run[:80]!r}")
        return Request(
            run,
            packet.number("epoch"),
            packet.number("client"),
            packet.text("recipe"),
            float(scale),
            (durable[0], durable[1], durable[2], durable[3]),
            tuple(Step.from_json(step) for step in steps),
        )


@dataclass(frozen=True)
class Answer:
    """A client's answer. kind: REPLY (one piece per step), MISSING (the names of pieces to send), REFUSED or FAILED
    (with a reason). holds: the payloads it has. fresh: it had no state before the first step."""

    kind: str
    request: str = ""
    reason: str = ""
    missing: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()
    fresh: bool = False
    replies: tuple[bytes, ...] = field(default=(), repr=False)

    def packet(self) -> Packet:
        header: dict[str, Value] = {
            "protocol": PROTOCOL,
            "kind": self.kind,
            "request": self.request,
            "reason": self.reason,
            "missing": json.dumps(self.missing),
            "holds": json.dumps(self.holds),
            "fresh": self.fresh,
        }
        return Packet(header, {f"reply.{index}": data for index, data in enumerate(self.replies)})

    @staticmethod
    def of(packet: Packet) -> Answer:
        """Decodes the packet of an untrusted client. Raises PacketError."""
        require_protocol(packet)
        kind, missing, holds = packet.text("kind"), packet.json("missing"), packet.json("holds")
        if kind not in (REPLY, MISSING, REFUSED, FAILED):
            raise PacketError(f"no kind of answer: {kind[:40]!r}")
        if not _texts(missing) or not _texts(holds):
            raise PacketError("an answer lists names")
        replies = tuple(packet.piece(f"reply.{index}") for index in range(len(packet.pieces)))
        fresh = bool(packet.header.get("fresh", False))
        reason = packet.text("reason")[:1000]
        return Answer(kind, packet.text("request"), reason, tuple(missing), tuple(holds), fresh, replies)


def require_protocol(packet: Packet) -> None:
    """Raises PacketError when the sender has another protocol version."""
    if packet.number("protocol") != PROTOCOL:
        raise PacketError(
            f"protocol {packet.header['protocol']} at the other end, {PROTOCOL} here: install the same everfed version"
        )


def fingerprint(request: Request) -> str:
    """Digest of a request's run, epoch and steps; an answer repeats it."""
    return digest(json.dumps([request.run, request.epoch, *(s.to_json() for s in request.steps)]).encode())


def _is_place(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 4 and all(type(number) is int for number in value)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= 10_000 and all(isinstance(text, str) for text in value)
