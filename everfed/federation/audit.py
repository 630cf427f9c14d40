"""The audit log of a server or a client: who asked what, when, and what was answered; one line of JSON for each.

Every line holds the hash of the line before it, and the number and hash of the last line are kept in a second file. So
a line that was changed, removed or added, and a log that was cut, are found by `verify`. A user who may write both
files can make a new log; that shows only to the one who noted its last hash elsewhere: every answer of a client carries
it, and the server writes it into a log of its own.

    audit.jsonl        {"number": 1, "time": "...", "before": "<hash>", "event": {...}, "hash": "<hash>"}
    audit.jsonl.last   {"number": 1, "hash": "<hash>"}
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import itertools
import json
import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everfed.errors import UserError
from everfed.federation.packet import Packet, PacketError, digest
from everfed.federation.request import FAILED, HELLO, Answer, Request
from everfed.federation.transport import Failure, Transport
from everfed.store.files import write_atomic
from everfed.store.ledger import GrowingFile, Lost

if TYPE_CHECKING:
    from everfed.core.events import Observer

AUDIT = "audit.jsonl"
START = "0" * 64  # what the first line names as the hash before it
HEAD = "audit"  # in the header of a client's answers: the last hash of its log


_LOG = logging.getLogger("everfed.audit")


class AuditError(UserError):
    """A log that was changed or cut."""


@dataclass(frozen=True)
class Last:
    """The last line of a log."""

    number: int = 0
    hash: str = START


class AuditLog:
    """Appends to the log at `path`, from any thread; one process at a time. A log that was changed is kept under
    another name, and the first line of the new one says so, also where it is removed while it is in use."""

    def __init__(self, path: Path) -> None:
        self.path, self._lock = path, threading.Lock()
        try:
            self._file, self.last = _opened(path)
        except AuditError as error:
            self._begin_anew(error)

    def write(self, **event: Any) -> None:
        """Append an event. Raises OSError, such as on a full disk; then the log is as it was."""
        with self._lock:
            try:
                self._append(event)
            except Lost as error:
                self._begin_anew(error)
                self._append(event)

    def _append(self, event: dict[str, Any]) -> None:
        line, last = _line(self.last, event)
        content = json.dumps(asdict(last)).encode()
        self._file.append(line, then=lambda: write_atomic(_last_path(self.path), content, durable=False))
        self.last = last

    def _begin_anew(self, error: UserError) -> None:
        moved = _set_aside(self.path)
        self._file, self.last = GrowingFile(self.path, durable=False), Last()
        _LOG.warning("%s; it is kept as %s, and a new log begins", error, moved)
        self._append({"what": "replaced", "reason": str(error), "kept_as": moved.name})


def verify(path: Path) -> Last:
    """Read the whole log; returns its last line. Raises AuditError with the line that is wrong."""
    if not path.exists():
        raise AuditError(f"{path}: there is no such file")
    last, kept = Last(), _kept(path)
    found = kept == last
    for line in _lines(path):
        last, found = line, found or kept == line
    if not found:
        raise AuditError(f"{path}: line {kept.number} is missing or another one; the log was cut or replaced")
    if last.number > kept.number + 1:  # one more: the process was killed between the two files
        raise AuditError(f"{path}: line {kept.number + 2} and what follows were added by another program")
    return last


def _lines(path: Path) -> Iterator[Last]:
    """Every line in turn, checked against the one before it."""
    last = Last()
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                content = json.loads(line)
                expected, last = _line(last, content["event"], content["time"])
            except (ValueError, KeyError, TypeError) as error:
                raise AuditError(f"{path}: line {number} is not a line of a log") from error
            if line != expected:
                raise AuditError(f"{path}: line {number} was changed, or a line before it was removed or added")
            yield last


def _line(last: Last, event: dict[str, Any], moment: str | None = None) -> tuple[bytes, Last]:
    time = moment or datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    content = {"number": last.number + 1, "time": time, "before": last.hash, "event": event}
    found = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps({**content, "hash": found}).encode() + b"\n", Last(last.number + 1, found)


def _opened(path: Path) -> tuple[GrowingFile, Last]:
    """An existing log with its last line, or a new one. Raises AuditError."""
    kept = _kept(path)
    if kept != Last() and not path.exists():
        raise AuditError(f"{path} is missing, and had {kept.number} lines")
    return GrowingFile(path, durable=False), verify(path)


def _set_aside(path: Path) -> Path:
    """Rename a log and the file of its last line; returns the new name."""
    number = next(n for n in itertools.count(1) if not path.with_name(f"{path.name}.{n}").exists())
    moved = path.with_name(f"{path.name}.{number}")
    for old, new in ((path, moved), (_last_path(path), _last_path(moved))):
        if old.exists():
            os.replace(old, new)
    return moved


def _kept(path: Path) -> Last:
    try:
        return Last(**json.loads(_last_path(path).read_text()))
    except FileNotFoundError:
        return Last()
    except (ValueError, TypeError) as error:
        raise AuditError(f"{_last_path(path)} cannot be read: {error}") from error


def _last_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.last")


# what is written down -------------------------------------------------------------------------------------------------
def described(packet: Packet, contents: bool = True) -> dict[str, Any]:
    """A packet in a few words: its kind, what it requests or why it was refused, its size and a digest of its pieces.
    contents: False for pieces of our own, whose names are digests already."""
    header = packet.header
    found: dict[str, Any] = {name: header[name] for name in ("kind", "run", "epoch", "recipe") if name in header}
    if header.get("reason"):
        found["reason"] = header["reason"]
    if header.get("kind") != HELLO:
        with contextlib.suppress(PacketError):
            found["steps"] = [[step.phase, list(step.place)] for step in Request.of(packet).steps]
    found["bytes"] = sum(map(len, packet.pieces.values()))
    if packet.pieces:
        names = [f"{name} {digest(data) if contents else len(data)}" for name, data in sorted(packet.pieces.items())]
        found["digest"] = digest("\n".join(names).encode())
    return found


class Audited:
    """A client whose requests and answers are written down; what cannot be written down is not answered. server: the
    address that it takes part at."""

    def __init__(self, client: Any, log: AuditLog, server: str) -> None:
        self.client, self.log, self.server = client, log, server

    def answer(self, packet: Packet) -> Packet:
        try:
            self.log.write(what="request", server=self.server, **described(packet))
            answer: Packet = self.client.answer(packet)
            self.log.write(what="answer", server=self.server, **described(answer))
        except OSError as error:
            _LOG.warning("the audit log cannot be written: %s", error)
            return Answer(FAILED, reason="its audit log cannot be written").packet()
        return Packet({**answer.header, HEAD: self.log.last.hash}, answer.pieces)


class AuditedTransport:
    """A transport whose requests and answers are written down."""

    def __init__(self, transport: Transport, log: AuditLog) -> None:
        self.transport, self.log, self.name = transport, log, transport.name
        self._clients: dict[str, int] = {}  # ticket -> client

    @property
    def limit(self) -> int:
        return self.transport.limit

    @limit.setter
    def limit(self, size: int) -> None:
        self.transport.limit = size

    def connected(self) -> frozenset[int]:
        return self.transport.connected()

    def send(self, client: int, packet: Packet, kind: str) -> str:
        self.log.write(what="request", client=client, **described(packet, contents=False))
        ticket = self.transport.send(client, packet, kind)
        self._clients[ticket] = client
        return ticket

    def receive(self) -> list[tuple[str, Packet | Failure]]:
        found = self.transport.receive()
        for ticket, answer in found:
            client = self._clients.pop(ticket, -1)
            if isinstance(answer, Failure):
                self.log.write(what="failure", client=client, reason=answer.reason)
            else:
                self.log.write(what="answer", client=client, their=answer.header.get(HEAD), **described(answer))
        return found

    def forget(self, tickets: list[str]) -> None:
        for ticket in tickets:
            self._clients.pop(ticket, None)
        self.transport.forget(tickets)

    def close(self) -> None:
        self.transport.close()


def noted(notify: Observer, log: AuditLog) -> Observer:
    """`notify`, with the connections and refusals of clients written down."""

    def both(event: dict[str, Any]) -> None:
        if event.get("event") == "client" and event.get("kind") in ("connected", "gone", "refused"):
            log.write(what=event["kind"], client=event.get("client"), reason=str(event.get("reason", "")))
        notify(event)

    return both
