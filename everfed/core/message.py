"""What crosses between server and client, and what it costs.

A message is {part: tree}. A value wrapped in `Once` is sent to a client only while the client does not hold that
version already: a frozen generator, a knowledge base, the model itself when an earlier phase brought it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from everfed.core.tree import Tree, tensor_bytes

MODEL = "model"


@dataclass(frozen=True)
class Once:
    """A payload with a version; each client receives each version at most once."""

    version: int | str
    value: Tree | Tensor


Message = dict[str, dict[str, Any]]  # part -> {key: leaf, tree or Once}


def unwrap(message: Message) -> dict[str, Tree]:
    """The message as a part reads it: every `Once` replaced by its payload."""
    return {part: {k: v.value if isinstance(v, Once) else v for k, v in tree.items()} for part, tree in message.items()}


def payload_bytes(message: Message, held: dict[str, int | str]) -> dict[str, int]:
    """Bytes by part that reach a client which holds `held` ({"part/key": version})."""
    return {
        part: sum(_value_bytes(value, held.get(f"{part}/{name}")) for name, value in tree.items())
        for part, tree in message.items()
    }


def versions(message: Message) -> dict[str, int | str]:
    """What a client holds after it received `message`."""
    return {
        f"{part}/{name}": value.version
        for part, tree in message.items()
        for name, value in tree.items()
        if isinstance(value, Once)
    }


def _value_bytes(value: Any, version: int | str | None) -> int:
    if isinstance(value, Once):
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
        self.up.update({part: tensor_bytes(tree) for part, tree in reply.items()})

    def as_dict(self) -> dict[str, Any]:
        parts = sorted(set(self.up) | set(self.down))
        return {
            "bytes_up": sum(self.up.values()),
            "bytes_down": sum(self.down.values()),
            "bytes_by_part": {p: {"up": self.up[p], "down": self.down[p]} for p in parts if self.up[p] or self.down[p]},
        }
