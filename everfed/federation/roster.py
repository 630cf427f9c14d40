"""Who is which client of a run: names, their indices, and the keys they are bound to. Written beside the run."""

from __future__ import annotations

import json
from pathlib import Path

from everfed.federation.names import is_name
from everfed.federation.packet import PacketError
from everfed.store.files import write_atomic

ROSTER = "roster.json"


class Roster:
    """clients: how many there may be. keys: the public keys that names must come with; empty where nodes are not
    authenticated. A client keeps its index for as long as the run lives."""

    def __init__(self, path: Path, clients: int, keys: dict[str, bytes] | None = None) -> None:
        self.path, self.clients, self.keys = path, clients, keys or {}
        self.indices: dict[str, int] = json.loads(path.read_text()) if path.exists() else {}

    def enrol(self, name: str, wanted: int, key: bytes) -> int:
        """The index of the client `name`. wanted: the one it asks for, -1 for any. Raises PacketError."""
        if not is_name(name):
            raise PacketError(f"no name of a client: {name[:80]!r}")
        if self.keys and self.keys.get(name) != key:
            raise PacketError(f"{name!r} is not enrolled with the key it came with")
        if name not in self.indices:
            self.indices = {**self.indices, name: self._free(name, wanted)}
            write_atomic(self.path, json.dumps(self.indices, indent=2).encode())
        if wanted not in (-1, self.indices[name]):
            raise PacketError(f"{name!r} asks to be client {wanted}, but it is client {self.indices[name]} of this run")
        return self.indices[name]

    def _free(self, name: str, wanted: int) -> int:
        free = sorted(set(range(self.clients)) - set(self.indices.values()))
        if not free or wanted not in (-1, *free):
            which = "any client" if wanted == -1 else f"client {wanted}"
            raise PacketError(f"{name!r} cannot be {which}: the run has {self.clients}, {len(free)} of them free")
        if wanted != -1:
            return wanted
        enrolled = sorted(self.keys)  # by name, so that it does not matter who comes first
        own = enrolled.index(name) if name in enrolled else free[0]
        return own if own in free else free[0]
