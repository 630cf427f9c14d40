"""Who is connected: nodes that come, go, and come back under the number they had."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from everfed.federation.packet import PROTOCOL, Packet
from everfed.federation.transport import Failure, GridTransport, Node, Seen


def here(node: int, since: str = "at eight") -> Seen:
    return Seen(node, since, b"key")


@dataclass
class FakeGrid:
    """answers: replies that are ready, by what they reply to."""

    nodes: list[Seen]
    sent: list[tuple[str, int]] = field(default_factory=list)
    answers: dict[str, Packet] = field(default_factory=dict)
    broken: Exception | None = None
    packets: list[Packet] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    limit: int = 0

    def get_nodes(self) -> list[Seen]:
        return self.nodes

    def push(self, node: int, packet: Packet, kind: str) -> str:
        if self.broken is not None:
            broken, self.broken = self.broken, None
            raise broken
        if node not in {one.id for one in self.nodes}:
            return ""
        ticket = f"m{len(self.sent)}"
        self.packets.append(packet)
        self.sent.append((ticket, node))
        return ticket

    def pull(self, tickets: list[str]) -> list[tuple[str, Packet]]:
        return [(ticket, self.answers.pop(ticket)) for ticket in tickets if ticket in self.answers]

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)

    def forget(self, tickets: list[str]) -> None:
        for ticket in tickets:
            self.answers.pop(ticket, None)

    def close(self) -> None:
        """The run is over."""

    def greet(self) -> None:
        """Answer the last message: it asked who that node is."""
        ticket, node = self.sent[-1]
        hello: dict[str, Any] = {"protocol": PROTOCOL, "kind": "hello", "name": f"site-{node}", "client": node}
        self.answers[ticket] = Packet(hello)


@dataclass
class Meeting:
    grid: FakeGrid
    events: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.transport = GridTransport(
            lambda: self.grid,  # type: ignore[arg-type,return-value]
            lambda node: self.enrol(node),
            self.events.append,
            poll=0.0,
            look=0.0,
        )

    def enrol(self, node: Node) -> int:
        return node.client

    def reported(self) -> list[tuple[str, str]]:
        return [(event["kind"], event["reason"]) for event in self.events]


@pytest.fixture
def met() -> Meeting:
    """Node 5 is connected as client 5."""
    meeting = Meeting(FakeGrid([here(5)]))
    assert meeting.transport.connected() == frozenset()
    meeting.grid.greet()
    assert meeting.transport.receive() == []
    assert meeting.transport.connected() == {5}
    return meeting


def test_a_node_that_was_restarted_between_two_looks_is_asked_again(met: Meeting) -> None:
    """It has the same number, and Flower never says that what it was asked is lost."""
    ticket = met.transport.send(5, Packet({"protocol": 1}), "train")
    met.grid.nodes = [here(5, "at nine")]
    assert met.transport.connected() == frozenset()
    assert met.transport.receive() == [(ticket, Failure("the client was restarted"))]
    met.grid.greet()
    met.transport.receive()
    assert met.transport.connected() == {5}
    assert met.reported() == [("connected", "site-5"), ("gone", "its SuperNode was restarted"), ("connected", "site-5")]
    met.grid.answers[ticket] = Packet({"protocol": 1})
    assert met.transport.receive() == []  # nobody waits for it any more


def test_a_node_that_was_away_and_restarted_is_asked_again(met: Meeting) -> None:
    ticket = met.transport.send(5, Packet({"protocol": 1}), "train")
    for nodes in ([], [here(5, "at nine")]):
        met.grid.nodes = nodes
        assert met.transport.connected() == frozenset()
    assert met.transport.receive() == [(ticket, Failure("the client was restarted"))]


def test_a_node_restarted_while_it_was_greeted_is_greeted_again() -> None:
    meeting = Meeting(FakeGrid([here(5)]))
    meeting.transport.connected()
    meeting.transport.connected()
    assert len(meeting.grid.sent) == 1
    meeting.grid.nodes = [here(5, "at nine")]
    meeting.transport.connected()
    assert len(meeting.grid.sent) == 2
    meeting.grid.greet()
    meeting.transport.receive()
    assert meeting.transport.connected() == {5}


def test_a_node_that_only_beats_is_left_alone(met: Meeting) -> None:
    ticket = met.transport.send(5, Packet({"protocol": 1}), "train")
    for _ in range(3):
        assert met.transport.connected() == {5}
    met.grid.answers[ticket] = Packet({"protocol": 1})
    assert [name for name, _ in met.transport.receive()] == [ticket]
    assert met.reported() == [("connected", "site-5")]


def test_a_message_to_a_node_that_the_superlink_does_not_know_is_lost_alone(met: Meeting) -> None:
    kept = met.transport.send(5, Packet({"protocol": 1}), "train")
    met.grid.nodes = []
    lost = met.transport.send(5, Packet({"protocol": 1}), "train")
    assert met.transport.receive() == [(lost, Failure("the SuperLink could not be reached"))]
    met.grid.answers[kept] = Packet({"protocol": 1})
    assert [name for name, _ in met.transport.receive()] == [kept]


@pytest.mark.parametrize("error", [ConnectionError("the SuperLink was away"), EOFError("closed"), OSError("no")])
def test_what_was_under_way_when_the_run_was_lost_is_sent_again(
    met: Meeting, error: Exception, monkeypatch: Any
) -> None:
    """With everything that was under way, over a new run."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    under_way = met.transport.send(5, Packet({"protocol": 1}), "train")
    met.grid.broken = error
    cut = met.transport.send(5, Packet({"protocol": 1}), "train")
    found = dict(met.transport.receive())
    assert found.keys() == {under_way, cut} and all(isinstance(one, Failure) and not one.own for one in found.values())
    again = met.transport.send(5, Packet({"protocol": 1}), "train")
    met.grid.answers[again] = Packet({"protocol": 1})
    assert [name for name, _ in met.transport.receive()] == [again]


def test_the_longer_an_answer_takes_the_later_it_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A twentieth of the time since the last request: 0.1 s at first, 0.5 s after 10 s, 1 s from 20 s on."""
    now, grid = [100.0], FakeGrid([here(5)])
    monkeypatch.setattr("everfed.federation.transport.time.monotonic", lambda: now[0])
    transport = GridTransport(lambda: grid, lambda node: node.client, poll=0.1)  # type: ignore[arg-type,return-value]
    transport.connected()  # greets
    for now[0] in (100.5, 110.0, 120.0, 4000.0):
        transport.receive()
    assert grid.waits == pytest.approx([0.1, 0.5, 1.0, 1.0])
