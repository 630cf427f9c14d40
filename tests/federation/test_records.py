"""Packets as Flower's records and back, and the wake socket between a SuperNode and its executor."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everfed.federation.local import socket_path, wake, wake_listener
from everfed.federation.packet import Packet, PacketError

flwr_app = pytest.importorskip("flwr.app", reason="needs the flower extra")

from flwr.app import Message, Metadata, RecordDict  # noqa: E402
from flwr.app.message import make_message  # noqa: E402
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore  # noqa: E402
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState  # noqa: E402

from everfed.federation.flower import records  # noqa: E402
from everfed.federation.flower.records import from_records, to_records  # noqa: E402
from everfed.federation.flower.supernode import LOOK, ShorterSleep, with_wakeup  # noqa: E402

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


def test_a_ring_wakes_who_waits(tmp_path: Path) -> None:
    path = str(socket_path(tmp_path, "executor"))
    wait = wake_listener(path, 60.0)
    threading.Timer(0.05, wake, (path,)).start()
    started = time.monotonic()
    wait()
    assert time.monotonic() - started < 30.0


def test_rings_that_nobody_heard_count_as_one(tmp_path: Path) -> None:
    path = str(socket_path(tmp_path, "executor"))
    wait = wake_listener(path, 0.05)
    for _ in range(3):
        wake(path)
    wait()
    started = time.monotonic()
    wait()
    assert time.monotonic() - started >= 0.05


def test_nobody_need_be_there_to_ring_for(tmp_path: Path) -> None:
    wake(str(tmp_path / "nobody.sock"))


def test_an_executor_takes_the_place_of_one_that_was_killed(tmp_path: Path) -> None:
    path = str(tmp_path / "executor.sock")
    wake_listener(path, 0.01)
    wait = wake_listener(path, 60.0)
    wake(path)
    wait()


def test_the_supernode_rings_when_a_message_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    woken: list[str] = []
    monkeypatch.setattr("everfed.federation.flower.supernode.wake", woken.append)
    assert with_wakeup(lambda **named: None, "wake_socket")(state=node_state()) is None and not woken
    assert with_wakeup(lambda **named: 7, "wake_socket")(state=node_state()) == 7 and woken == ["wake_socket"]


def test_a_reply_that_came_late_does_not_lie_until_the_next_message() -> None:
    """A SuperNode has one message and gets two replies: the second is sent although there is no message any more."""
    state, pull = node_state(), with_wakeup(lambda **named: None, "")
    state.store_message(message("asked"))
    assert pull(state=state) is None, "a message is no reply"
    for late in ("first", "second"):
        state.store_message(message(late, "asked"))
        assert pull(state=state) is not None
        assert [one.metadata.message_id for one in state.get_messages_legacy(is_reply=True)] == [late]
    assert pull(state=state) is None, "all is sent"


def message(name: str, reply_to: str = "") -> Message:
    metadata = Metadata(1, name, 2, 3, reply_to, "", time.time(), 60.0, "train")
    return make_message(metadata, RecordDict())


def node_state() -> InMemoryNodeState:
    return InMemoryNodeState(InMemoryObjectStore())


def test_waits_are_cut_by_what_they_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("everfed.federation.flower.supernode.clock.sleep", slept.append)
    shorter = ShorterSleep(0.25)
    shorter.sleep(3)
    shorter.sleep(0.5)
    assert slept == [0.25, LOOK]


def test_flower_has_the_waits_and_sizes_that_are_tuned() -> None:
    from flwr.app.message import array
    from flwr.supercore.inflatable import inflatable_utils

    from everfed.federation.flower.tuning import CHUNK, FIRST, LONGEST, tune

    tune()
    for function in (inflatable_utils.pull_objects, inflatable_utils.pull_and_inflate_object_from_tree):
        chosen = function.__kwdefaults__
        assert chosen is not None
        assert (chosen["initial_backoff"], chosen["backoff_cap"]) == (FIRST, LONGEST)
        assert chosen["max_tries_per_object"] is None and chosen["max_time"] == 7200
    data = bytes(CHUNK + 1)
    assert [len(chunk.data) for _, chunk in flwr_app.Array("uint8", (len(data),), "x", data).slice_array()] == [
        CHUNK,
        1,
    ]
    assert array.FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE == CHUNK


def test_a_database_of_ours_has_large_pages_and_keeps_its_promises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Flower sets stays: write-ahead log (as text), synchronous = NORMAL (1), foreign keys."""
    from flwr.supercore import sql_mixin
    from flwr.supercore.object_store.sql_object_store import SqlObjectStore

    from everfed.federation.flower import superlink

    monkeypatch.setattr(sql_mixin, "SQLITE_PRAGMAS", sql_mixin.SQLITE_PRAGMAS)  # put back afterwards
    monkeypatch.setattr("flwr.superlink.cli.flower_superlink", lambda: None)
    superlink.main()
    store = SqlObjectStore(str(tmp_path / "link.db"))
    store.initialize()
    found = {}
    for name in ("page_size", "wal_autocheckpoint", "journal_mode", "synchronous", "foreign_keys"):
        [row] = store.query(f"PRAGMA {name}")
        (found[name],) = row.values()
    assert found == {
        "page_size": 65536,
        "wal_autocheckpoint": 2048,
        "journal_mode": "wal",
        "synchronous": 1,
        "foreign_keys": 1,
    }
