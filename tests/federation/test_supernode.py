"""everfed's SuperNode over a SuperLink of this process: what it passes on, what it refuses, what it survives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

import httpx
from flwr.app import Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError
from flwr.supercore.run import RunNotRunningException
from flwr.supercore.task_identity import TaskIdentity

from everfed.federation.flower.app import bundle
from everfed.federation.flower.internals import inflate_object_from_contents
from everfed.federation.flower.records import from_records, to_records
from everfed.federation.flower.supernode import Link, SuperNode
from everfed.federation.packet import Packet

REQUEST = Packet({"protocol": 2, "kind": "steps"}, {"small": b"0123", "large": bytes(1 << 20)})


@pytest.fixture(autouse=True)
def _a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_run_id", "_task_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1, raising=False)


@dataclass
class SuperLink:
    """Messages that wait for a node, and the objects and replies that it pushed."""

    app: str = field(default_factory=lambda: bundle().hash_str)
    waiting: list[Message] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    replies: list[tuple[Message, Any]] = field(default_factory=list)
    pushed: dict[str, bytes] = field(default_factory=dict)
    broken: Exception | None = None

    def ask(self, content: RecordDict) -> None:
        message = Message(content, 5, "train")
        message.metadata.__dict__["_message_id"] = message.object_id
        self.objects = {name: one.deflate() for name, one in get_all_nested_objects(message).items()}
        self.waiting.append(message)

    def link(self) -> Link:
        return Link(self.receive, self.send, self.get_run, self.pull, self.push, lambda run, name: None)

    def receive(self) -> Any:
        if not self.waiting:
            return None
        message = self.waiting.pop()
        return message, get_object_tree(message)

    def get_run(self, run: int) -> Any:
        return type("Run", (), {"fab_hash": self.app})

    def pull(self, run: int, name: str) -> bytes:
        if self.broken is not None:
            raise self.broken
        return self.objects[name]

    def send(self, message: Message, tree: Any, seconds: float) -> tuple[set[str], str]:
        self.replies.append((message, tree))
        return set(get_all_nested_objects(message)), "session"

    def push(self, run: int, session: str, name: str, content: bytes) -> None:
        self.pushed[name] = content

    def reply(self) -> Message:
        ((message, _),) = self.replies
        arrived = inflate_object_from_contents(message.object_id, dict(self.pushed))
        assert isinstance(arrived, Message)
        return arrived


def node(link: SuperLink, answer: Any, limit: int = 1 << 30) -> SuperNode:
    return SuperNode(link.link(), answer, limit)


def unasked(packet: Packet) -> Packet:
    raise AssertionError("the worker was asked")


def test_a_packet_goes_to_the_worker_and_its_answer_comes_back_whole() -> None:
    link, asked = SuperLink(), []

    def worker(packet: Packet) -> Packet:
        asked.append(packet)
        return Packet({"kind": "reply"}, {"reply.0": bytes(range(256)) * 4000})

    link.ask(to_records(REQUEST))
    made = node(link, worker)
    assert made.step() and not made.step()
    assert asked == [REQUEST]
    assert from_records(link.reply().content) == Packet({"kind": "reply"}, {"reply.0": bytes(range(256)) * 4000})


def test_a_run_of_another_app_is_refused_and_nothing_of_it_is_fetched(caplog: pytest.LogCaptureFixture) -> None:
    link = SuperLink(app="0123456789abcdef" * 4, broken=AssertionError("it was fetched"))
    link.ask(to_records(REQUEST))
    node(link, unasked).step()
    error = link.reply().error
    assert int(error.code) == 7 and "an app that is not everfed's (hash 0123456789abcdef)" in str(error.reason)
    assert "an app that is not everfed's" in caplog.text


@pytest.mark.parametrize(
    ("content", "limit", "said"),
    [
        (to_records(REQUEST), 1000, "more than 1000 bytes"),
        (RecordDict(), 1 << 30, "a packet has the record 'header'"),
    ],
)
def test_what_is_no_packet_or_too_large_is_an_error_of_that_message_alone(
    content: RecordDict, limit: int, said: str
) -> None:
    link = SuperLink()
    link.ask(content)
    made = node(link, unasked, limit)
    made.step()
    assert said in str(link.reply().error.reason)
    link.replies.clear()
    link.ask(to_records(Packet({"protocol": 2, "kind": "hello"})))
    made.ask = lambda packet: packet
    made.step()
    assert from_records(link.reply().content).header["kind"] == "hello"


@pytest.mark.parametrize("error", [EOFError("closed"), ConnectionError("no worker"), TimeoutError("slow")])
def test_a_worker_that_is_gone_is_an_error_and_the_node_goes_on(error: Exception) -> None:
    def gone(packet: Packet) -> Packet:
        raise error

    link = SuperLink()
    link.ask(to_records(REQUEST))
    node(link, gone).step()
    assert type(error).__name__ in str(link.reply().error.reason)


@pytest.mark.parametrize(
    "error",
    [
        RunNotRunningException(),
        ObjectPullError("name", "it is not there"),
        httpx.HTTPStatusError("no", request=httpx.Request("POST", "http://x"), response=httpx.Response(500)),
    ],
)
def test_a_message_that_cannot_be_fetched_is_dropped(error: Exception) -> None:
    link = SuperLink(broken=error)
    link.ask(to_records(REQUEST))
    assert node(link, unasked).step() and link.replies == []


def test_the_app_s_hash_does_not_depend_on_where_or_when_it_is_built() -> None:
    bundle.cache_clear()
    first = bundle().hash_str
    bundle.cache_clear()
    assert bundle().hash_str == first
