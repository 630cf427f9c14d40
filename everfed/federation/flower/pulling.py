"""Pulls the replies of untrusted clients from a SuperLink, within a limit of bytes.

Flower's own pull has no size limit. Here one that is too large or cannot be read is an error of that client alone. The
message that it replies to is taken from the SuperLink, which has checked it, not from the reply's own bytes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from flwr.app import Message, RecordDict

from everfed.federation.flower.internals import (
    ConfirmMessageReceivedRequest,
    ObjectPullError,
    ObjectUnavailableError,
    PullAppMessagesRequest,
    fetch_objects,
    inflate_object_from_contents,
    iterate_object_tree,
    make_pull_object_fn_protobuf,
)
from everfed.federation.flower.replies import UNUSABLE, Reply, ReplyThreads
from everfed.federation.transport import Failure

STALL = 120.0  # seconds without a new object of a reply after which it is given up
Pull = Callable[[str], bytes]


class TooLarge(ObjectPullError):
    """More bytes than a reply may have."""


class Unreadable(ValueError):
    """Objects that are no message."""


class Puller(ReplyThreads):
    """client: of the SuperLink's Runtime API. stall: seconds without a new object after which a reply is given up."""

    def __init__(self, client: Any, node: Any, run_id: int, stall: float = STALL) -> None:
        super().__init__()
        self.client, self.node, self.run_id, self.stall = client, node, run_id, stall

    def pull(self, tickets: list[str], limit: int) -> list[tuple[str, Reply]]:
        """The replies that are complete, or failures in their place. limit: bytes of a reply."""
        found = self.client.PullMessages(PullAppMessagesRequest(message_ids=tickets))
        for proto, tree in zip(found.messages_list, found.message_object_trees, strict=True):
            ticket = proto.metadata.reply_to_message_id
            self.start(ticket, partial(self._reply, proto.metadata.message_id, ticket, tree, limit))
        return self.collect()

    def _reply(self, name: str, ticket: str, tree: Any, limit: int, dropped: threading.Event) -> Reply:
        pull_object = make_pull_object_fn_protobuf(self.client.PullObject, self.node, self.run_id)
        fetch_one = bounded(pull_object, limit, self.stall, dropped)
        try:
            names = [one.object_id for one in iterate_object_tree(tree)]
            contents = fetch_objects(names, fetch_one)
            self.client.ConfirmMessageReceived(
                ConfirmMessageReceivedRequest(node=self.node, run_id=self.run_id, message_object_id=name)
            )
            return inflated(name, ticket, contents)
        except (TooLarge, Unreadable) as error:
            return Failure(f"{UNUSABLE}: {error}", own=True)
        except ObjectPullError as error:
            return Failure(f"the reply is not available: {error}")


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
