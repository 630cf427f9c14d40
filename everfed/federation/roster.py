"""The clients of a run: names, indices, and the keys that names are bound to. Stored in the run folder."""

from __future__ import annotations

import json
from pathlib import Path

from everfed.federation.names import is_name
from everfed.federation.packet import PacketError
from everfed.store.files import write_atomic

ROSTER = "roster.json"


class Roster:
    """clients: how many there may be. keys: the public key of each name; empty where nodes are not authenticated. A
    client has the same index for the whole run."""

    def __init__(self, path: Path, clients: int, keys: dict[str, bytes] | None = None) -> None:
        self.path, self.clients, self.keys = path, clients, keys or {}
        self.indices: dict[str, int] = json.loads(path.read_text()) if path.exists() else {}

    def enrol(self, name: str, wanted: int, key: bytes) -> int:
        """The index of the client `name`. wanted: the one it requests, -1 for any. Raises PacketError."""
        if not is_name(name):
            raise PacketError(f"not a client's name: {name[:80]!r}")
        if self.keys and self.keys.get(name) != key:
            raise PacketError(f"{name!r} is not enrolled with this key")
        if name not in self.indices:
            self.indices = {**self.indices, name: self._free(name, wanted)}
            write_atomic(self.path, json.dumps(self.indices, indent=2).encode())
        if wanted not in (-1, self.indices[name]):
            raise PacketError(
                f"{name!r} requests to be client {wanted}, but is client {self.indices[name]} of this run"
            )
        return self.indices[name]

    def name(self, client: int) -> str:
        """The name of a client; "" where none is enrolled with this index."""
        return next((name for name, index in self.indices.items() if index == client), "")

    def _free(self, name: str, wanted: int) -> int:
        free = sorted(set(range(self.clients)) - set(self.indices.values()))
        if not free or wanted not in (-1, *free):
            which = "any client" if wanted == -1 else f"client {wanted}"
            raise PacketError(f"{name!r} cannot be {which}: the run has {self.clients}, {len(free)} of them free")
        if wanted != -1:
            return wanted
        enrolled = sorted(self.keys)  # by name, so that the order of connecting does not matter
        own = enrolled.index(name) if name in enrolled else free[0]
        return own if own in free else free[0]
