"""Packets as Flower's records: a ConfigRecord holds the header and the small pieces, an ArrayRecord the large ones.

Flower names objects by their content and sends each once, so pieces for all clients reach the SuperLink once. But each
object is a request of its own at every hop, and an Array is two: small pieces are sent with the header.
"""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from everfed.federation.packet import Packet, PacketError

HEADER, SMALL, LARGE = "header", "small", "large"
APP_RAISED, FOREIGN_APP = 2, 7  # Flower's numbers of a client's errors
STYPE = "everfed.bytes"
LIMIT = 1 << 18  # bytes up to which a piece is small


def to_records(packet: Packet) -> RecordDict:
    small = {name: data for name, data in packet.pieces.items() if len(data) <= LIMIT}
    large = {n: Array("uint8", (len(d),), STYPE, d) for n, d in packet.pieces.items() if n not in small}
    records = RecordDict({HEADER: ConfigRecord(dict(packet.header))})
    if small:
        records[SMALL] = ConfigRecord(dict(small))
    if large:
        records[LARGE] = ArrayRecord(large)
    return records


def from_records(records: RecordDict) -> Packet:
    """Raises PacketError when the records are not a packet's."""
    header, small = records.get(HEADER), records.get(SMALL, ConfigRecord())
    large = records.get(LARGE, ArrayRecord())
    if not {HEADER} <= set(records) <= {HEADER, SMALL, LARGE} or not isinstance(header, ConfigRecord):
        raise PacketError(f"a packet has the record {HEADER!r}, and may have {SMALL!r} and {LARGE!r}")
    if not isinstance(small, ConfigRecord) or not all(isinstance(data, bytes) for data in small.values()):
        raise PacketError("a packet's small pieces are bytes in a ConfigRecord")
    if not isinstance(large, ArrayRecord) or any(array.stype != STYPE for array in large.values()):
        raise PacketError(f"a packet's large pieces are arrays of type {STYPE!r}")
    if not all(isinstance(value, str | int | float | bool) for value in header.values()):
        raise PacketError("a packet's header holds plain values")
    if set(small) & set(large):
        raise PacketError("a packet's pieces have different names")
    pieces = {**small, **{name: array.data for name, array in large.items()}}
    return Packet(dict(header), pieces)  # type: ignore[arg-type]
