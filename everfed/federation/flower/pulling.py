"""Pulls the replies of untrusted clients from a SuperLink.

Flower's own pull has no size limit, and raises for bytes that are no message, which would end the run and lose the
other replies. Here a reply has a limit, and one that cannot be read is an error of that client alone. The message that
it replies to is taken from the SuperLink, which has checked it, not from the reply's own bytes.

A reply is announced before its objects are sent, and the objects may never come. So each reply is pulled in a thread of
its own: one client can hold up neither the others nor the end of a phase.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Error, Message, Metadata, RecordDict

from everfed.federation.flower.internals import (
    SYSTEM_MESSAGE_TYPE,
    ConfirmMessageReceivedRequest,
    ErrorCode,
    Node,
    ObjectPullError,
    ObjectTree,
    ObjectUnavailableError,
    PullAppMessagesRequest,
    fetch_objects,
    inflate_object_from_contents,
    iterate_object_tree,
    make_message,
    make_pull_object_fn_protobuf,
    now,
)

UNUSABLE = 1000  # an error code of ours: the reply is too large or cannot be read
GRACE = 1.0  # seconds that `pull` waits for a reply from when it was announced: most are there by then
STALL = 120.0  # seconds without a new object of a reply after which it is given up
Pull = Callable[[str], bytes]


class TooLarge(ObjectPullError):
    """More bytes than a reply may have."""


class Unreadable(ValueError):
    """Objects that are no message."""


@dataclass
class Fetch:
    """A reply that is being pulled. dropped: nothing waits for it any more."""

    started: float
    dropped: threading.Event = field(default_factory=threading.Event)


class Puller:
    """client: of the SuperLink's Runtime API. stall: seconds without a new object after which a reply is given up."""

    def __init__(self, client: Any, node: Node, run_id: int, stall: float = STALL) -> None:
        self.client, self.node, self.run_id, self.stall = client, node, run_id, stall
        self._fetches: dict[str, Fetch] = {}  # by the message that is replied to
        self._finished: list[Message | BaseException] = []
        self._changed = threading.Condition()

    def pull(self, tickets: list[str], limit: int) -> list[Message]:
        """The replies that are complete, or errors in their place; the others go on being pulled. limit: bytes of a
        reply. Raises what the connection raises."""
        found = self.client.PullMessages(PullAppMessagesRequest(message_ids=tickets))
        for proto, tree in zip(found.messages_list, found.message_object_trees, strict=True):
            self._start(proto.metadata.message_id, proto.metadata.reply_to_message_id, tree, limit)
        with self._changed:
            while (left := self._grace()) > 0:
                self._changed.wait(left)
            finished, self._finished = self._finished, []
        for one in finished:
            if isinstance(one, BaseException):
                raise one
        return [one for one in finished if isinstance(one, Message)]

    def wait(self, seconds: float) -> None:
        """Until a reply is complete, or for so long."""
        with self._changed:
            if not self._finished:
                self._changed.wait(seconds)

    def forget(self, tickets: Iterable[str]) -> None:
        """Stop pulling the replies to these."""
        with self._changed:
            for ticket in tickets:
                if ticket in self._fetches:
                    self._fetches.pop(ticket).dropped.set()

    def close(self) -> None:
        """Stop pulling. The threads of Flower's pulls would keep this process from ending."""
        self.forget(list(self._fetches))

    def _grace(self) -> float:
        """Seconds for which the youngest unfinished reply is still waited for."""
        newest = max((one.started for one in self._fetches.values()), default=float("-inf"))
        return newest + GRACE - time.monotonic()

    def _start(self, name: str, ticket: str, tree: ObjectTree, limit: int) -> None:
        fetch = Fetch(time.monotonic())
        with self._changed:
            self._fetches[ticket] = fetch
        threading.Thread(target=self._run, args=(fetch, name, ticket, tree, limit), name="pull", daemon=True).start()

    def _run(self, fetch: Fetch, name: str, ticket: str, tree: ObjectTree, limit: int) -> None:
        try:
            result: Message | BaseException = self._reply(fetch, name, ticket, tree, limit)
        except BaseException as error:  # raised by the next `pull`
            result = error
        with self._changed:
            if self._fetches.get(ticket) is fetch:
                del self._fetches[ticket]
                self._finished.append(result)
            self._changed.notify_all()

    def _reply(self, fetch: Fetch, name: str, ticket: str, tree: ObjectTree, limit: int) -> Message:
        pull_object = make_pull_object_fn_protobuf(self.client.PullObject, self.node, self.run_id)
        fetch_one = bounded(pull_object, limit, self.stall, fetch.dropped)
        try:
            names = [one.object_id for one in iterate_object_tree(tree)]
            contents = fetch_objects(names, fetch_one)
            self.client.ConfirmMessageReceived(
                ConfirmMessageReceivedRequest(node=self.node, run_id=self.run_id, message_object_id=name)
            )
            return inflated(name, ticket, contents)
        except (TooLarge, Unreadable) as error:
            return _error(self.run_id, self.node, ticket, UNUSABLE, str(error))
        except ObjectPullError as error:
            return _error(self.run_id, self.node, ticket, ErrorCode.MESSAGE_UNAVAILABLE, str(error))


def bounded(fetch: Pull, limit: int, stall: float = STALL, dropped: threading.Event | None = None) -> Pull:
    """`fetch` with a limit on all bytes together and on the time without a new object; called from several threads."""
    taken, last, lock = [0], [time.monotonic()], threading.Lock()

    def limited(name: str) -> bytes:
        if taken[0] > limit:
            raise TooLarge(name, f"the message has more than {limit} bytes")
        if dropped is not None and dropped.is_set():
            raise ObjectPullError(name, "nothing waits for it any more")
        try:
            content = fetch(name)
        except ObjectUnavailableError as error:
            if time.monotonic() - last[0] > stall:
                raise ObjectPullError(name, f"announced, but not sent for {stall:.0f} s") from error
            raise
        with lock:
            taken[0] += len(content)
            last[0] = time.monotonic()
        if taken[0] > limit:
            raise TooLarge(name, f"the message has more than {limit} bytes")
        return content

    return limited


def inflated(name: str, ticket: str, contents: dict[str, bytes]) -> Message:
    try:
        message = inflate_object_from_contents(name, contents)
    except Exception as error:  # untrusted bytes in Flower's decoders may raise anything
        raise Unreadable(f"the message cannot be read: {type(error).__name__}: {error}"[:300]) from error
    if not isinstance(message, Message):
        raise Unreadable(f"it is no message but {type(message).__name__}")
    if message.has_content() and not isinstance(message.content, RecordDict):
        raise Unreadable(f"the message holds no records but {type(message.content).__name__}")
    message.metadata.__dict__["_message_id"] = name
    message.metadata.__dict__["_reply_to_message_id"] = ticket
    return message


def _error(run_id: int, node: Node, ticket: str, code: int, reason: str) -> Message:
    metadata = Metadata(
        run_id=run_id,
        message_id="",
        src_node_id=node.node_id,
        dst_node_id=node.node_id,
        reply_to_message_id=ticket,
        group_id="",
        created_at=now().timestamp(),
        ttl=0,
        message_type=SYSTEM_MESSAGE_TYPE,
    )
    return make_message(metadata, error=Error(code=code, reason=reason))
