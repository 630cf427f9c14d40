"""The packets between server and client: a header of plain values and pieces of bytes. No torch, no pickle.

On a socket a packet is a frame: the length of its head (4 bytes), its head (JSON: the header, and names and sizes of
the pieces), then the pieces. The reader sets a size limit, and nothing is read beyond it.
"""

from __future__ import annotations

import hashlib
import json
import socket
import struct
from dataclasses import dataclass, field
from typing import Any

PROTOCOL = 2
HEAD_LIMIT = 4 << 20
FRAME_LIMIT = 8 << 30
_LENGTH = struct.Struct("<I")

Value = str | int | float | bool


class PacketError(ValueError):
    """Bytes that are not a packet, or a packet with missing or wrong content."""


@dataclass(frozen=True)
class Packet:
    """header: plain values by name; pieces: bytes by name."""

    header: dict[str, Value]
    pieces: dict[str, bytes] = field(default_factory=dict)

    def text(self, name: str) -> str:
        return self._value(name, str)

    def number(self, name: str) -> int:
        value = self._value(name, int)
        if isinstance(value, bool):
            raise PacketError(f"{name!r} of a packet must be a whole number, not {value}")
        return value

    def json(self, name: str) -> Any:
        """A value that is itself JSON."""
        try:
            return json.loads(self.text(name))
        except (ValueError, RecursionError) as error:
            raise PacketError(f"{name!r} of a packet is not JSON: {error}") from error

    def piece(self, name: str) -> bytes:
        if name not in self.pieces:
            raise PacketError(f"a packet lacks its piece {name!r}")
        return self.pieces[name]

    def _value(self, name: str, kind: type[Any]) -> Any:
        value = self.header.get(name)
        if not isinstance(value, kind):
            raise PacketError(f"{name!r} of a packet must be {kind.__name__}, not {type(value).__name__}")
        return value


def digest(data: bytes) -> str:
    """A name for content: equal names mean equal bytes."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def to_frame(packet: Packet) -> list[bytes]:
    """The byte strings to write to a socket, in order."""
    sizes = [[name, len(data)] for name, data in packet.pieces.items()]
    head = json.dumps({"header": packet.header, "pieces": sizes}).encode()
    if len(head) > HEAD_LIMIT:
        raise PacketError(f"a packet's head has {len(head)} bytes, more than {HEAD_LIMIT}")
    return [_LENGTH.pack(len(head)) + head, *packet.pieces.values()]


def send(connection: socket.socket, packet: Packet) -> None:
    """Write a packet as one frame."""
    for part in to_frame(packet):
        connection.sendall(part)


def receive(connection: socket.socket, limit: int = FRAME_LIMIT) -> Packet:
    """Read one frame. Raises PacketError for anything else, EOFError when the connection is closed."""
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if length > HEAD_LIMIT:
        raise PacketError(f"a packet's head may have {HEAD_LIMIT} bytes, not {length}")
    header, sizes = _head(_exactly(connection, length))
    if sum(sizes.values()) > limit:
        raise PacketError(f"a packet may have {limit} bytes, not {sum(sizes.values())}")
    return Packet(header, {name: _exactly(connection, size) for name, size in sizes.items()})


def _head(data: bytes) -> tuple[dict[str, Value], dict[str, int]]:
    try:
        head = json.loads(data)
        header, pieces = head["header"], {str(name): size for name, size in head["pieces"]}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise PacketError(f"not a packet's head: {error}") from error
    plain = isinstance(header, dict) and all(isinstance(value, str | int | float | bool) for value in header.values())
    sized = all(isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in pieces.values())
    if not plain or not sized or len(pieces) != len(head["pieces"]):
        raise PacketError("a packet's head holds plain values, and pieces of different names with their sizes")
    return header, pieces


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        more = connection.recv(min(count - len(data), 1 << 20))
        if not more:
            raise EOFError("the other end closed the connection")
        data += more
    return bytes(data)
