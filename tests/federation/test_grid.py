"""Who is connected, as the Grid tells it: nodes that come, go, and come back under the number they had."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

import httpx
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError

from everfed.federation.flower.grid import GridTransport, Node
from everfed.federation.flower.records import from_records, to_records
from everfed.federation.packet import PROTOCOL, Packet
from everfed.federation.transport import Failure


@dataclass
class Here:
    node_id: int
    last_activated_at: str = "at eight"
    public_key: bytes = b"key"


@dataclass
class Says:
    """A message as Flower hands it out."""

    content: Any

    def has_error(self) -> bool:
        return False


@dataclass
class FakeGrid:
    """answers: replies that are ready, by what they reply to."""

    nodes: list[Here]
    sent: list[tuple[str, int]] = field(default_factory=list)
    answers: dict[str, Packet] = field(default_factory=dict)
    outages: int = 0
    broken: Exception | None = None
    contents: list[Any] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    limit: int = 0

    def packets(self) -> list[Packet]:
        """What was sent."""
        return [from_records(content) for content in self.contents]

    def get_nodes(self) -> list[Here]:
        return self.nodes

    def push_messages(self, messages: list[Any]) -> list[str]:
        if self.broken is not None:
            broken, self.broken = self.broken, None
            raise broken
        tickets = [f"m{len(self.sent) + index}" for index in range(len(messages))]
        self.contents += [message.content for message in messages]
        self.sent += [(t, m.metadata.dst_node_id) for t, m in zip(tickets, messages, strict=True)]
        return tickets

    def pull(self, tickets: list[str]) -> list[tuple[str, Says]]:
        found = [ticket for ticket in tickets if ticket in self.answers]
        return [(ticket, Says(to_records(self.answers.pop(ticket)))) for ticket in found]

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


@pytest.fixture(autouse=True)
def _a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's messages say whose they are."""
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_run_id", "_task_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1, raising=False)


@pytest.fixture
def met() -> Meeting:
    """Node 5 is connected as client 5."""
    meeting = Meeting(FakeGrid([Here(5)]))
    assert meeting.transport.connected() == frozenset()
    meeting.grid.greet()
    assert meeting.transport.receive() == []
    assert meeting.transport.connected() == {5}
    return meeting


def test_a_node_that_was_restarted_between_two_looks_is_asked_again(met: Meeting) -> None:
    """It has the same number, and Flower never says that what it was asked is lost."""
    ticket = met.transport.send(5, Packet({"protocol": 1}), "train")
    met.grid.nodes = [Here(5, "at nine")]
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
    for nodes in ([], [Here(5, "at nine")]):
        met.grid.nodes = nodes
        assert met.transport.connected() == frozenset()
    assert met.transport.receive() == [(ticket, Failure("the client was restarted"))]


def test_a_node_restarted_while_it_was_greeted_is_greeted_again() -> None:
    meeting = Meeting(FakeGrid([Here(5)]))
    meeting.transport.connected()
    meeting.transport.connected()
    assert len(meeting.grid.sent) == 1
    meeting.grid.nodes = [Here(5, "at nine")]
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


def test_what_was_under_way_when_the_superlink_was_away_is_asked_again(met: Meeting) -> None:
    """It may have handed a message out with its last breath; what it has an answer to is taken."""
    lost, answered = (met.transport.send(5, Packet({"protocol": 1, "n": n}), "train") for n in range(2))
    met.grid.answers[answered] = Packet({"protocol": 1})
    met.grid.outages += 3
    found = dict(met.transport.receive())
    assert found.keys() == {lost, answered}
    assert found[lost] == Failure("the SuperLink was away") and isinstance(found[answered], Packet)
    assert [event["message"] for event in met.events if event["event"] == "warning"] == [
        "the SuperLink was away; open requests are repeated"
    ]
    again = met.transport.send(5, Packet({"protocol": 1}), "train")
    met.grid.answers[again] = Packet({"protocol": 1})
    assert [name for name, _ in met.transport.receive()] == [again]
    assert met.transport.connected() == {5}


@pytest.mark.parametrize("error", [ObjectPushError("x", 1, "s"), httpx.ConnectError("no"), OSError("no")])
def test_a_message_that_an_outage_cut_in_two_is_sent_again(met: Meeting, error: Exception, monkeypatch: Any) -> None:
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
    now, grid = [100.0], FakeGrid([Here(5)])
    monkeypatch.setattr("everfed.federation.flower.grid.time.monotonic", lambda: now[0])
    transport = GridTransport(lambda: grid, lambda node: node.client, poll=0.1)  # type: ignore[arg-type,return-value]
    transport.connected()  # greets
    for now[0] in (100.5, 110.0, 120.0, 4000.0):
        transport.receive()
    assert grid.waits == pytest.approx([0.1, 0.5, 1.0, 1.0])
