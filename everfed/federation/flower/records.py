"""Packets as Flower's records: the header is a ConfigRecord, every piece an Array of an ArrayRecord.

Flower names objects by their content and sends each once, so the pieces that all clients get reach the SuperLink once.
"""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from everfed.federation.packet import Packet, PacketError

HEADER, PIECES = "header", "pieces"
STYPE = "everfed.bytes"


def to_records(packet: Packet) -> RecordDict:
    arrays = {name: Array("uint8", (len(data),), STYPE, data) for name, data in packet.pieces.items()}
    return RecordDict({HEADER: ConfigRecord(dict(packet.header)), PIECES: ArrayRecord(arrays)})


def from_records(records: RecordDict) -> Packet:
    """Raises PacketError when the records are not a packet's."""
    header, pieces = records.get(HEADER), records.get(PIECES)
    if set(records) != {HEADER, PIECES} or not isinstance(header, ConfigRecord) or not isinstance(pieces, ArrayRecord):
        raise PacketError(f"a packet has the records {HEADER!r} and {PIECES!r}")
    if any(array.stype != STYPE for array in pieces.values()):
        raise PacketError(f"a packet's pieces are arrays of type {STYPE!r}")
    if not all(isinstance(value, str | int | float | bool) for value in header.values()):
        raise PacketError("a packet's header holds plain values")
    return Packet(dict(header), {name: array.data for name, array in pieces.items()})  # type: ignore[arg-type]
