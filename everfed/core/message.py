"""What crosses between server and client, and what it costs.

A message is {part: tree}. A value wrapped in `Cached` is sent to a client only while the client does not hold that
version already: a frozen generator, a knowledge base, the model itself when an earlier phase brought it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from everfed.core.tree import Tree, tensor_bytes

MODEL = "model"


@dataclass(frozen=True)
class Cached:
    """A payload with a version; each client receives each version at most once."""

    version: int | str
    value: Tree | Tensor


@dataclass(frozen=True)
class PerClient:
    """A payload of its own for each client; nobody receives another's, and a client that is not named receives none."""

    values: Mapping[int, Tree | Tensor]


Message = dict[str, dict[str, Any]]  # part -> {key: leaf, tree, Cached or PerClient}
State = dict[str, Tree]  # part -> its state
Model = dict[str, Tensor]  # params, stats, counters
Values = Mapping[str, Any]  # what a hook returns to be sent: {key: leaf or tree}


def addressed(message: Message, client: int) -> Message:
    """What of `message` goes to `client`: its own payload in place of every `PerClient`."""
    return {
        part: {
            key: value.values[client] if isinstance(value, PerClient) else value
            for key, value in values.items()
            if not isinstance(value, PerClient) or client in value.values
        }
        for part, values in message.items()
    }


def common(message: Message) -> Message:
    """What of `message` goes to every client."""
    return {part: {k: v for k, v in tree.items() if not isinstance(v, PerClient)} for part, tree in message.items()}


def own(message: Message, client: int) -> Message:
    """What of `message` goes to `client` alone."""
    found = addressed(message, client)
    only = {part: {k: found[part][k] for k, v in tree.items() if isinstance(v, PerClient) and k in found[part]}
            for part, tree in message.items()}  # fmt: skip
    return {part: tree for part, tree in only.items() if tree}


def with_own(message: Message, alone: Message) -> Message:
    """`common` and `own` together again."""
    return {**message, **{part: {**message.get(part, {}), **tree} for part, tree in alone.items()}}


def unwrap(message: Message) -> dict[str, Tree]:
    """The message as a part reads it: every `Cached` replaced by its payload."""
    return {
        part: {k: v.value if isinstance(v, Cached) else v for k, v in tree.items()} for part, tree in message.items()
    }


def payload_bytes(message: Message, held: dict[str, int | str]) -> dict[str, int]:
    """Bytes by part that reach a client which holds `held` ({"part/key": version})."""
    return {
        part: sum(_value_bytes(value, held.get(f"{part}/{name}")) for name, value in tree.items())
        for part, tree in message.items()
    }


def sizes(reply: Mapping[str, Tree]) -> dict[str, int]:
    """Bytes by part of a reply's values."""
    return {part: tensor_bytes(tree) for part, tree in reply.items()}


def versions(message: Message) -> dict[str, int | str]:
    """What a client holds after it received `message`."""
    return {
        f"{part}/{name}": value.version
        for part, tree in message.items()
        for name, value in tree.items()
        if isinstance(value, Cached)
    }


def _value_bytes(value: Any, version: int | str | None) -> int:
    if isinstance(value, Cached):
        return 0 if value.version == version else tensor_bytes({"": value.value})
    return tensor_bytes({"": value})


@dataclass
class Traffic:
    """Bytes by part and direction, from the server's side: down to clients, up from them."""

    up: Counter[str] = field(default_factory=Counter)
    down: Counter[str] = field(default_factory=Counter)

    def sent(self, sizes: dict[str, int]) -> None:
        self.down.update(sizes)

    def received(self, reply: dict[str, Tree]) -> None:
        self.up.update(sizes(reply))

    def as_dict(self) -> dict[str, Any]:
        parts = sorted(set(self.up) | set(self.down))
        return {
            "bytes_up": sum(self.up.values()),
            "bytes_down": sum(self.down.values()),
            "bytes_by_part": {p: {"up": self.up[p], "down": self.down[p]} for p in parts if self.up[p] or self.down[p]},
        }
