"""Messages and replies as bytes.

The values of a message are sent as one tree. A `Cached` payload is a piece of its own, named by the digest of its
content: a client reports which ones it holds and receives the others. Its version number, which a resumed server may
use again, does not matter here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from everfed.core.client import Reply
from everfed.core.message import Cached, Message, PerClient, addressed
from everfed.core.tree import Tree, TreeError, from_bytes, to_bytes
from everfed.federation.packet import PacketError, digest

HEADER_LIMIT = 8 << 20  # bytes of a reply's header: parsed it takes many times its size; a model needs a few thousand
Named = tuple[str, str, str]  # part, key, name of the content


@dataclass(frozen=True)
class EncodedMessage:
    """A message to one client in bytes. body: the tree without `Cached` payloads, None in a round in which nothing is
    sent; name: digest of the body; once: (part, key, name) of its payloads; payloads: their bytes by name."""

    body: bytes | None
    name: str = ""
    once: tuple[Named, ...] = ()
    payloads: dict[str, bytes] = field(default_factory=dict)


class MessageEncoder:
    """Encodes one message for each client. Content that is the same for all clients, and every `Cached` payload, is
    encoded only once."""

    def __init__(self, message: Message | None) -> None:
        self.message = message
        self._common: EncodedMessage | None = None  # where the message has no value by client
        self._names: dict[int, str] = {}
        self._payloads: dict[str, bytes] = {}
        self.once = tuple(self._pack(part, key, value) for part, key, value in _once(message or {}))

    def encode(self, client: int) -> EncodedMessage:
        """The message to `client`. A `Cached` becomes None in the tree, so that keys keep their order."""
        encoded = self._common or self._encode(client)
        self._names[client] = encoded.name
        if not any(isinstance(value, PerClient) for tree in (self.message or {}).values() for value in tree.values()):
            self._common = encoded
        return encoded

    def name(self, client: int) -> str:
        """The name of the message to `client`; its bytes are not kept."""
        return self._names[client] if client in self._names else self.encode(client).name

    def _encode(self, client: int) -> EncodedMessage:
        if self.message is None:
            return EncodedMessage(None)
        own = addressed(self.message, client)
        rest = {part: {k: None if isinstance(v, Cached) else v for k, v in tree.items()} for part, tree in own.items()}
        body = to_bytes(rest)
        return EncodedMessage(body, digest(body), self.once, self._payloads)

    def _pack(self, part: str, key: str, value: Cached) -> Named:
        data = to_bytes({"value": value.value})
        name = digest(data)
        self._payloads[name] = data
        return part, key, name


def _once(message: Message) -> Iterator[tuple[str, str, Cached]]:
    for part, tree in message.items():
        for key, value in tree.items():
            if isinstance(value, Cached):
                yield part, key, value


def to_message(body: bytes, once: tuple[Named, ...], payload: Callable[[str], Any]) -> Message:
    """The decoded message; `payload` gives a `Cached` value by its name. Raises PacketError."""
    try:
        message: Message = from_bytes(body)
        for part, key, name in once:
            message[part][key] = payload(name)
    except (TreeError, KeyError, TypeError) as error:
        raise PacketError(f"not a message: {error}") from error
    return message


def payload_value(data: bytes) -> Any:
    """The value of a `Cached` payload. Raises PacketError."""
    try:
        return from_bytes(data)["value"]
    except (TreeError, KeyError) as error:
        raise PacketError(f"not a payload: {error}") from error


def reply_to_tree(reply: Reply) -> Tree:
    loss = reply.loss if reply.loss is None else float(reply.loss)
    return {"values": reply.values, "samples": reply.samples, "steps": reply.steps, "loss": loss}


def to_reply(data: bytes) -> Reply:
    """Decodes a reply from an untrusted client. Raises PacketError for anything else."""
    try:
        tree = from_bytes(data, HEADER_LIMIT)
    except TreeError as error:
        raise PacketError(str(error)) from error
    values, samples, steps, loss = (tree.get(name) for name in ("values", "samples", "steps", "loss"))
    if set(tree) != {"values", "samples", "steps", "loss"} or not _by_part(values):
        raise PacketError("a reply holds values by part, samples, steps and loss")
    if not _count(samples) or not _count(steps) or not (loss is None or isinstance(loss, float)):
        raise PacketError("samples and steps of a reply are counts, and its loss is a number")
    return Reply(values, samples, steps, loss)  # type: ignore[arg-type]


def _by_part(values: Any) -> bool:
    return isinstance(values, dict) and all(isinstance(tree, dict) for tree in values.values())


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool | Tensor) and value >= 0
