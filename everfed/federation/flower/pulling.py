"""Pulls the replies of untrusted clients from a SuperLink.

Flower's own pull has no size limit, and raises for bytes that are no message, which would end the run and lose the
other replies. Here a reply has a limit, and one that cannot be read is an error of that client alone. The message that
it replies to is taken from the SuperLink, which has checked it, not from the reply's own bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from flwr.app import Error, Message, Metadata, RecordDict

from everfed.federation.flower.internals import (
    SYSTEM_MESSAGE_TYPE,
    ConfirmMessageReceivedRequest,
    ErrorCode,
    Node,
    ObjectPullError,
    PullAppMessagesRequest,
    fetch_objects,
    inflate_object_from_contents,
    iterate_object_tree,
    make_message,
    make_pull_object_fn_protobuf,
    now,
)

UNUSABLE = 1000  # an error code of ours: the reply is too large or cannot be read
Pull = Callable[[str], bytes]


class TooLarge(ObjectPullError):
    """More bytes than a reply may have."""


class Unreadable(ValueError):
    """Objects that are no message."""


def pull(client: Any, node: Node, run_id: int, tickets: list[str], limit: int) -> list[Message]:
    """The replies that have arrived, or errors in their place. client: of the SuperLink's Runtime API; limit: bytes of
    a reply. Raises what the connection raises."""
    found = client.PullMessages(PullAppMessagesRequest(message_ids=tickets))
    fetch = make_pull_object_fn_protobuf(client.PullObject, node, run_id)
    replies = []
    for proto, tree in zip(found.messages_list, found.message_object_trees, strict=True):
        name, ticket = proto.metadata.message_id, proto.metadata.reply_to_message_id
        try:
            contents = fetch_objects([one.object_id for one in iterate_object_tree(tree)], bounded(fetch, limit))
            client.ConfirmMessageReceived(
                ConfirmMessageReceivedRequest(node=node, run_id=run_id, message_object_id=name)
            )
            replies.append(inflated(name, ticket, contents))
        except (TooLarge, Unreadable) as error:
            replies.append(_error(run_id, node, ticket, UNUSABLE, str(error)))
        except ObjectPullError as error:
            replies.append(_error(run_id, node, ticket, ErrorCode.MESSAGE_UNAVAILABLE, str(error)))
    return replies


def bounded(fetch: Pull, limit: int) -> Pull:
    """`fetch` with a limit on all bytes together; called from several threads."""
    taken, lock = [0], threading.Lock()

    def limited(name: str) -> bytes:
        if taken[0] > limit:
            raise TooLarge(name, f"the message has more than {limit} bytes")
        content = fetch(name)
        with lock:
            taken[0] += len(content)
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
