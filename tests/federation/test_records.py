"""Packets as Flower's records and back, and their objects in transit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everfed.federation.packet import Packet, PacketError
from everfed.federation.supervisor import CHUNK, environment

flwr_app = pytest.importorskip("flwr.app", reason="needs the flower extra")


from everfed.federation.flower import records  # noqa: E402
from everfed.federation.flower.records import from_records, to_records  # noqa: E402

values = st.one_of(st.text(), st.integers(-(2**31), 2**31), st.booleans(), st.floats(allow_nan=False))


@given(st.dictionaries(st.text(min_size=1), values), st.dictionaries(st.text(min_size=1), st.binary()))
def test_a_packet_comes_back_as_it_was(header: dict[str, str | int], pieces: dict[str, bytes]) -> None:
    packet = Packet(header, pieces)
    assert from_records(to_records(packet)) == packet


def test_large_pieces_are_arrays_and_small_ones_travel_with_the_header() -> None:
    """Of 1, LIMIT and LIMIT + 1 bytes only the last is worth requests of its own."""
    pieces = {"a": b"x", "b": bytes(records.LIMIT), "c": bytes(records.LIMIT + 1)}
    made = to_records(Packet({"kind": "steps"}, pieces))
    assert set(made["small"]) == {"a", "b"} and set(made["large"]) == {"c"}
    assert from_records(made).pieces == pieces
    assert set(to_records(Packet({"kind": "hello"}))) == {"header"}


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"header": flwr_app.ConfigRecord(), "other": flwr_app.ConfigRecord()},
        {"header": flwr_app.ArrayRecord()},
        {"header": flwr_app.ConfigRecord({"numbers": [1, 2]})},
        {"header": flwr_app.ConfigRecord({"kind": b"steps"})},
        {"header": flwr_app.ConfigRecord(), "small": flwr_app.ConfigRecord({"a": "text"})},
        {"header": flwr_app.ConfigRecord(), "large": flwr_app.ConfigRecord()},
        {
            "header": flwr_app.ConfigRecord(),
            "large": flwr_app.ArrayRecord({"a": flwr_app.Array("uint8", (1,), "numpy.ndarray", b"x")}),
        },
        {
            "header": flwr_app.ConfigRecord(),
            "small": flwr_app.ConfigRecord({"a": b"x"}),
            "large": flwr_app.ArrayRecord({"a": flwr_app.Array("uint8", (1,), records.STYPE, b"x")}),
        },
    ],
)
def test_records_that_are_no_packet_are_refused(content: dict[str, object]) -> None:
    with pytest.raises(PacketError):
        from_records(flwr_app.RecordDict(content))


def test_objects_of_our_processes_are_large(tmp_path: Path) -> None:
    chunks = (
        f"[len(one.data) for _, one in flwr.app.Array('uint8', ({CHUNK + 1},), 'x', bytes({CHUNK + 1})).slice_array()]"
    )
    words = [sys.executable, "-c", f"import flwr.app; print({chunks})"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment(tmp_path))
    assert done.stdout.strip() == f"[{CHUNK}, 1]"
