"""Replies as a hostile client may have stored them on the SuperLink: too large, unreadable, of another name."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from flwr.app import Message, RecordDict
from flwr.common.serde import message_to_proto
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.task_identity import TaskIdentity

from everfed.federation.flower.grid import _answer
from everfed.federation.flower.pulling import Puller
from everfed.federation.flower.records import to_records
from everfed.federation.flower.replies import OneByOne, Reply
from everfed.federation.packet import Packet
from everfed.federation.transport import Failure
from tests.core.test_tree_hostile import mutated
from tests.support.waiting import HANG

NODE = Node(node_id=1)
LARGE = Packet({"protocol": 1, "kind": "large"}, {"reply.0": b"9876543210" * 5000})
SMALL = Packet({"protocol": 1, "kind": "reply"}, {"reply.0": b"0123456789" * 50})


@pytest.fixture(autouse=True)
def _a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's messages say whose they are."""
    for name in ("_run_id", "_task_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1, raising=False)


@dataclass
class Stored:
    """A reply on the SuperLink. ticket: what it replies to, as the SuperLink knows."""

    proto: Any
    tree: Any
    contents: dict[str, bytes]
    ticket: str


def stored(packet: Packet, ticket: str = "t0", says: str | None = None) -> Stored:
    """says: what its own bytes name as the message it replies to."""
    request = Message(RecordDict(), 5, "train")
    request.metadata.__dict__["_message_id"] = says or ticket
    reply = Message(to_records(packet), reply_to=request)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    contents = {name: one.deflate() for name, one in get_all_nested_objects(reply).items()}
    proto = message_to_proto(reply)
    proto.metadata.reply_to_message_id = ticket
    return Stored(proto, get_object_tree(reply), contents, ticket)


@dataclass
class Link:
    """The calls of the Runtime API that a pull makes. given: bytes that were handed out."""

    replies: list[Stored]
    given: int = 0
    confirmed: list[str] = field(default_factory=list)
    announced: set[str] = field(default_factory=set)

    def PullMessages(self, request: Any) -> Any:
        """As the SuperLink does: every reply is handed out once."""
        asked = set(request.message_ids) - self.announced
        self.announced |= asked
        here = [one for one in self.replies if one.ticket in asked]
        return SimpleNamespace(messages_list=[r.proto for r in here], message_object_trees=[r.tree for r in here])

    def PullObject(self, request: Any) -> Any:
        (content,) = [r.contents[request.object_id] for r in self.replies if request.object_id in r.contents][:1]
        self.given += len(content)
        return SimpleNamespace(object_found=True, object_available=True, object_content=content)

    def ConfirmMessageReceived(self, request: Any) -> None:
        self.confirmed.append(request.message_object_id)


class Waiting(Link):
    """One reply, "late", is announced; its objects come when `sent` is set."""

    def __init__(self, *replies: Stored) -> None:
        super().__init__([stored(LARGE, "late"), *replies])
        self.sent = threading.Event()

    def PullObject(self, request: Any) -> Any:
        if request.object_id in self.replies[0].contents and not self.sent.is_set():
            return SimpleNamespace(object_found=True, object_available=False, object_content=b"")
        return super().PullObject(request)


def answers(link: Link, limit: int = 1 << 20) -> dict[str, Packet | Failure]:
    puller, tickets = Puller(link, NODE, 1), [one.ticket for one in link.replies]
    found: dict[str, Packet | Failure] = {}
    while len(found) < len(tickets):  # on a busy machine a reply may take longer than one pull waits
        found |= {ticket: answer(one) for ticket, one in puller.pull(tickets, limit)}
    return found


def answer(reply: Reply) -> Packet | Failure:
    return reply if isinstance(reply, Failure) else _answer(reply)


def test_an_honest_reply_arrives_as_it_was_sent_and_is_confirmed() -> None:
    link = Link([stored(SMALL)])
    assert answers(link) == {"t0": SMALL}
    assert link.confirmed == [link.replies[0].proto.metadata.message_id]


def test_a_reply_beyond_the_limit_is_not_taken_in_and_the_others_are() -> None:
    """Eighty megabytes in chunks, of which hardly more than the limit is ever fetched."""
    noise = random.Random(0).randbytes(1 << 20)
    large = Packet(SMALL.header, {f"reply.{n}": bytes([n]) + noise for n in range(80)})
    link = Link([stored(large, "large"), stored(SMALL, "small")])
    found = answers(link, limit=4 << 20)
    assert found["small"] == SMALL
    refused = found["large"]
    assert isinstance(refused, Failure) and refused.own
    assert "its reply may not be used" in refused.reason and f"more than {4 << 20} bytes" in refused.reason
    assert link.given < 64 << 20


@pytest.mark.parametrize("times", [400, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_byte_level_fuzzer_of_stored_replies(times: int) -> None:
    """Every object of a reply in turn, with bytes changed: a packet or a failure of that client, and nothing raises."""
    rng, kinds = random.Random(4), {"packet": 0, "failure": 0}
    for _ in range(times):
        bad, good = stored(SMALL, "bad"), stored(Packet({"protocol": 1}), "good")
        name = rng.choice(sorted(bad.contents))
        bad.contents[name] = mutated(rng, bad.contents[name])
        found = answers(Link([bad, good]))
        assert found["good"] == Packet({"protocol": 1})
        kinds["packet" if isinstance(found["bad"], Packet) else "failure"] += 1
        assert isinstance(found["bad"], Packet) or found["bad"].own
    assert all(kinds.values()), kinds


def test_what_is_no_message_is_a_failure() -> None:
    """The object that should be the message is one of its parts, or a message of parts."""
    one = stored(SMALL)
    for name in one.contents:
        wrong = stored(SMALL)
        wrong.proto.metadata.message_id = name
        found = answers(Link([wrong]))["t0"]
        assert found == SMALL or (isinstance(found, Failure) and found.own)


def test_a_reply_counts_for_what_the_superlink_says_it_replies_to() -> None:
    """A client that writes another's request into its bytes does not speak for it."""
    assert set(answers(Link([stored(SMALL, "mine", says="yours")]))) == {"mine"}


def test_an_object_that_is_missing_may_come_later() -> None:
    """It is not the client's own failure."""

    class Losing(Link):
        def PullObject(self, request: Any) -> Any:
            return SimpleNamespace(object_found=False, object_available=False, object_content=b"")

    found = answers(Losing([stored(SMALL)]))["t0"]
    assert isinstance(found, Failure) and not found.own


# an app that announced its reply and died ----------------------------------------------------------------------------
def test_a_reply_that_was_announced_and_never_sent_holds_up_nothing() -> None:
    link = Waiting(stored(SMALL, "small"))
    puller = Puller(link, NODE, 1, stall=HANG)
    assert [answer(one) for _, one in pulled(puller, "late", "small")] == [SMALL]
    link.replies.append(stored(SMALL, "next"))
    assert [ticket for ticket, _ in pulled(puller, "late", "next")] == ["next"]
    puller.close()


def pulled(puller: Puller, *tickets: str) -> list[tuple[str, Reply]]:
    """What comes first."""
    found: list[tuple[str, Reply]] = []
    while not found:
        found = puller.pull(list(tickets), 1 << 20)
    return found


def test_a_reply_whose_objects_come_late_arrives_and_wakes_the_server() -> None:
    link = Waiting()
    puller = Puller(link, NODE, 1, stall=HANG)
    assert puller.pull(["late"], 1 << 20) == []
    threading.Timer(0.2, link.sent.set).start()
    puller.wait(10 * HANG)  # beyond the limit of a test: it is woken, or it hangs
    ((_, found),) = puller.pull(["late"], 1 << 20)
    assert answer(found) == LARGE and link.confirmed


def test_a_reply_that_does_not_come_is_a_failure_in_the_end_and_is_asked_for_again() -> None:
    link = Waiting()
    puller = Puller(link, NODE, 1, stall=0.5)
    ((_, failure),) = pulled(puller, "late")
    assert isinstance(failure, Failure) and not failure.own and "announced, but not sent" in failure.reason


def test_a_reply_that_nothing_waits_for_is_not_pulled_on() -> None:
    link = Waiting()
    puller = Puller(link, NODE, 1, stall=HANG)
    puller.pull(["late"], 1 << 20)
    threads = [thread for thread in threading.enumerate() if thread.name == "pull"]
    puller.forget(["late"])
    for thread in threads:
        thread.join()
    link.sent.set()
    assert puller.pull(["late"], 1 << 20) == [] and not link.confirmed


def test_a_lost_connection_is_raised_by_the_next_pull() -> None:
    class Broken(Link):
        def PullObject(self, request: Any) -> Any:
            raise ConnectionError("the SuperLink is away")

    with pytest.raises(ConnectionError, match="away"):
        pulled(Puller(Broken([stored(SMALL)]), NODE, 1), "t0")


# Flower's public Grid ------------------------------------------------------------------------------------------------
class Plain:
    """A Grid as a ServerApp gets it: `pull_messages` returns every reply that was asked for, or raises."""

    def __init__(self, **replies: Any) -> None:
        self.replies, self.here = replies, threading.Event()

    def get_nodes(self) -> list[Any]:
        return []

    def push_messages(self, messages: Any) -> list[str]:
        return []

    def pull_messages(self, tickets: list[str]) -> list[Message]:
        found = []
        for one in [self.replies.pop(ticket) for ticket in tickets if ticket in self.replies]:
            if one is self.here:
                one.wait()
            elif isinstance(one, BaseException):
                raise one
            else:
                found.append(one)
        return found


def test_over_the_public_grid_one_half_and_one_unreadable_reply_hold_nobody() -> None:
    """Flower's pull waits for all objects of all replies, and what its decoders raise would end the run."""
    good = Message(to_records(SMALL), 5, "train")
    grid = Plain(unreadable=IndexError("no such object"), good=good)
    grid.replies["half"] = grid.here
    link, found = OneByOne(grid), {}  # type: ignore[arg-type]
    while len(found) < 2:
        found |= {ticket: answer(one) for ticket, one in link.pull(["half", "unreadable", "good", "none yet"])}
    failure = found.pop("unreadable")
    assert found == {"good": SMALL}
    assert isinstance(failure, Failure) and failure.own and "IndexError: no such object" in failure.reason
    link.close()  # at the deadline: its thread is given up
    grid.here.set()
    assert link.pull([]) == []


def test_over_the_public_grid_a_lost_connection_is_raised() -> None:
    with pytest.raises(ConnectionError, match="away"):
        OneByOne(Plain(t=ConnectionError("the SuperLink is away"))).pull(["t"])  # type: ignore[arg-type]
