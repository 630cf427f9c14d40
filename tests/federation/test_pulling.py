"""Replies of clients over Flower's public Grid: half there, unreadable, no packet, slow."""

from __future__ import annotations

import random
import socket
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

import httpx
from flwr.app import ConfigRecord, Error, RecordDict

from everfed.federation import packet as wire
from everfed.federation.flower.link import Address, CarriedRun
from everfed.federation.flower.records import to_records
from everfed.federation.flower.replies import OneByOne
from everfed.federation.flower.server_app import carry
from everfed.federation.local import Entrance, listen
from everfed.federation.packet import Packet
from everfed.federation.transport import Connection, Failure, Seen
from tests.core.test_tree_hostile import mutated
from tests.support.waiting import HANG

SMALL = Packet({"protocol": 1, "kind": "reply"}, {"reply.0": b"0123456789" * 50})
Found = dict[str, Packet | Failure]


@dataclass
class Reply:
    """A message as Flower hands it out."""

    content: Any = None
    error: Any = None

    def has_error(self) -> bool:
        return self.error is not None


@dataclass
class Grid:
    """As a ServerApp gets it: `pull_messages` returns every reply that was asked for, waits for one that is half there,
    and raises what the decoder raises."""

    replies: dict[str, Any] = field(default_factory=dict)
    rest: threading.Event = field(default_factory=threading.Event)  # of the reply that is half there
    asked: list[str] = field(default_factory=list)
    ended: Exception | None = None

    def get_nodes(self) -> list[Any]:
        if self.ended is not None:
            raise self.ended
        return [SimpleNamespace(node_id=2**63 + 5, last_activated_at="at eight", public_key=b"\xffkey")]

    def push_messages(self, messages: Any) -> list[str | None]:
        [message] = messages
        self.asked.append(message.kind)
        return [f"m{len(self.asked)}" if message.node else None]

    def pull_messages(self, tickets: list[str]) -> list[Any]:
        found = []
        for ticket in [ticket for ticket in tickets if ticket in self.replies]:
            one = self.replies.pop(ticket)
            if isinstance(one, threading.Event):
                one.wait()
                one = Reply(to_records(SMALL))
            if isinstance(one, BaseException):
                raise one
            found.append(one)
        return found


def a_message(content: Any, node: int, kind: str, ttl: float) -> Any:
    """Flower's own can only be made in the process of an app."""
    return SimpleNamespace(content=content, node=node, kind=kind)


def collected(link: Connection, *tickets: str, count: int = 1) -> Found:
    """The first replies that come."""
    found: Found = {}
    while len(found) < count:
        found |= dict(link.pull([ticket for ticket in tickets if ticket not in found]))
        link.wait(0.01)
    return found


def over(grid: Grid) -> OneByOne:
    return OneByOne(grid)  # type: ignore[arg-type]


def test_one_half_and_one_unreadable_reply_hold_nobody() -> None:
    """Flower's pull waits for all objects of all replies, and what its decoders raise would end the run."""
    grid = Grid()
    grid.replies = {"unreadable": IndexError("no such object"), "good": Reply(to_records(SMALL)), "half": grid.rest}
    link = over(grid)
    found = collected(link, "half", "unreadable", "good", "none yet", count=2)
    failure = found.pop("unreadable")
    assert found == {"good": SMALL}
    assert isinstance(failure, Failure) and failure.own and "IndexError: no such object" in failure.reason
    link.forget(["half"])  # at the deadline: its thread is given up
    threads = [thread for thread in threading.enumerate() if thread.name == "pull"]
    grid.rest.set()
    for thread in threads:
        thread.join(HANG)
    assert link.pull([]) == []


def test_a_reply_whose_objects_come_late_arrives_and_wakes_the_server() -> None:
    grid = Grid()
    grid.replies = {"late": grid.rest}
    link = over(grid)
    assert link.pull(["late"]) == []
    threading.Timer(0.2, grid.rest.set).start()
    link.wait(10 * HANG)  # beyond the limit of a test: it is woken, or it hangs
    assert link.pull(["late"]) == [("late", SMALL)]


def test_a_lost_connection_and_a_run_that_has_ended_are_raised() -> None:
    """What Flower raises for a run that has ended is known by what the next call raises."""
    for away in (ConnectionError("the SuperLink is away"), httpx.ReadTimeout("the SuperLink is away")):
        with pytest.raises(ConnectionError, match="away"):
            collected(over(Grid({"t": away})), "t")
    ended = RuntimeError("the run is not running")
    with pytest.raises(RuntimeError, match="not running"):
        collected(over(Grid({"t": ended}, ended=ended)), "t")


@pytest.mark.parametrize(
    ("reply", "own", "said"),
    [
        (Reply(error=Error(2, "ValueError")), True, "the app raised an exception: ValueError"),
        (Reply(error=Error(5, "")), False, "the node is not available"),
        (Reply(error=Error(99, "")), False, "Flower's error 99"),
    ],
)
def test_errors_of_flower_are_failures(reply: Reply, own: bool, said: str) -> None:
    assert collected(over(Grid({"t": reply})), "t") == {"t": Failure(said, own)}


@pytest.mark.parametrize("content", [RecordDict(), RecordDict({"other": ConfigRecord()}), "no records", None])
def test_what_is_no_packet_is_rejected_like_any_malformed_one(content: Any) -> None:
    assert collected(over(Grid({"t": Reply(content)})), "t") == {"t": Packet({})}


# between the server and its ServerApp -------------------------------------------------------------------------------
@pytest.fixture
def carried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """(grid, the server's end) of a run whose ServerApp is a thread."""
    entrance, limits = Entrance(1, "secret", str(tmp_path)), []
    monkeypatch.setattr("everfed.federation.flower.link.entrance", lambda port: entrance)
    monkeypatch.setattr("everfed.federation.flower.link.set_limit", lambda found, count: limits.append(count))
    monkeypatch.setattr("everfed.federation.flower.replies.Message", a_message)
    grid = Grid()
    with listen(tmp_path / "run.sock") as listener:
        thread = threading.Thread(target=carry, args=(over(grid), str(tmp_path / "run.sock")), daemon=True)
        thread.start()
        link = CarriedRun(Address("h", 1), entrance, listener.accept()[0])
        yield grid, link, limits
        link.close()
        thread.join(HANG)
        assert not thread.is_alive()


def test_packets_nodes_and_failures_pass_between_a_server_and_its_serverapp(carried: Any) -> None:
    grid, link, limits = carried
    assert link.get_nodes() == [Seen(2**63 + 5, "at eight", b"\xffkey")]
    link.limit = 1000
    assert [link.push(7, SMALL, "train"), link.push(7, SMALL, "query"), link.push(0, SMALL, "train")] == [
        "m1",
        "m2",
        "",
    ]
    assert grid.asked == ["train", "query", "train"] and limits == [1000]
    grid.replies = {"m1": Reply(to_records(SMALL)), "m2": Reply(error=Error(1, "no")), "m3": grid.rest}
    found = collected(link, "m1", "m2", "m3", count=2)
    assert found == {"m1": SMALL, "m2": Failure("the app could not be loaded: no", True)}
    link.forget(["m3"])
    grid.rest.set()
    assert link.pull([]) == []


def test_bytes_that_were_changed_end_the_connection_and_nothing_else() -> None:
    """A byte-level fuzzer of what a ServerApp sends: a packet, or an error that counts as a lost run."""
    rng, kinds = random.Random(4), {"answer": 0, "lost": 0}
    frame = b"".join(wire.to_frame(Packet({"ticket": "t", "header": "{}"}, {"reply.0": b"0123"})))
    for _ in range(300):
        here, there = socket.socketpair()
        link = CarriedRun(Address("h", 1), Entrance(1, "s", ""), here)
        with here, there:
            there.sendall(mutated(rng, frame))
            there.shutdown(socket.SHUT_WR)
            try:
                link._answer(link._receive())
                kinds["answer"] += 1
            except (EOFError, OSError, wire.PacketError):
                kinds["lost"] += 1
    assert all(kinds.values()), kinds


def test_a_superlink_that_was_started_anew_is_a_lost_run(carried: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ServerApp of the old one may wait for it for ever."""
    grid, link, _ = carried
    monkeypatch.setattr("everfed.federation.flower.link.entrance", lambda port: Entrance(2, "other", ""))
    monkeypatch.setattr(OneByOne, "wait", lambda self, seconds: grid.rest.wait())
    with pytest.raises(ConnectionError, match="the SuperLink was away"):
        link.wait(1.0)
    grid.rest.set()
