"""Client state that may outgrow memory: hot states in memory under a budget, the rest on disk, versioned.

Every state that reaches the disk is a file of its own, named by client and version, and is never rewritten. A
checkpoint is then a list of versions: the same files serve paging and resuming, and a checkpoint costs what changed
since the last.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

from everfed.core import tree
from everfed.core.part import State
from everfed.store.files import write_atomic

DEFAULT_BUDGET = 2 << 30


class ClientStore:
    """State by client. Without a folder everything stays in memory.

    Thread-safe: a checkpoint may be written while clients run. States are never changed in place by anyone.
    """

    def __init__(self, folder: Path | None = None, budget: int = DEFAULT_BUDGET) -> None:
        self.folder = folder
        self.budget = budget
        self._hot: OrderedDict[int, State] = OrderedDict()
        self._hot_bytes = 0
        self._sizes: dict[int, int] = {}
        self._version: dict[int, int] = {}
        self._saved: dict[int, int] = {}  # client -> newest version that is on disk
        self._clock = 0
        self._lock = threading.RLock()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def get(self, client: int) -> State | None:
        """The client's state, or None when it was never put."""
        with self._lock:
            if client in self._hot:
                self._hot.move_to_end(client)
                return self._hot[client]
            if client not in self._version:
                return None
            state = self._read(client, self._version[client])
            self._keep(client, state)
            return state

    def put(self, client: int, state: State) -> None:
        """Replace the client's state."""
        with self._lock:
            self._clock += 1
            self._version[client] = self._clock
            self._keep(client, state)

    def bytes(self) -> int:
        """Bytes of all states, in memory and on disk."""
        return sum(self._sizes.values())

    def hot_bytes(self) -> int:
        """Bytes held in memory."""
        return self._hot_bytes

    def clients(self) -> list[int]:
        return sorted(self._version)

    # checkpoints -------------------------------------------------------------------------------------------------
    def snapshot(self) -> tuple[dict[int, int], dict[int, State]]:
        """(versions of all clients, the states among them that are not on disk yet)."""
        with self._lock:
            dirty = {c: s for c, s in self._hot.items() if self._saved.get(c) != self._version[c]}
            return dict(self._version), dirty

    def write(self, versions: Mapping[int, int], dirty: Mapping[int, State]) -> None:
        """Put a snapshot's states on disk."""
        for client, state in dirty.items():
            self._write(client, versions[client], state)

    def restore(self, versions: Mapping[int, int]) -> None:
        """Go back to the states a checkpoint names."""
        with self._lock:
            self._hot.clear()
            self._hot_bytes = 0
            self._version = dict(versions)
            self._saved = dict(versions)
            self._clock = max(versions.values(), default=0)
            self._sizes = {client: _payload(self._path(client, v)) for client, v in versions.items()}

    def collect(self, versions: Mapping[int, int]) -> None:
        """Remove files that neither the checkpoint `versions` nor the live run needs."""
        if self.folder is None:
            return
        with self._lock:
            needed = {self._path(c, v).name for kept in (versions, self._version) for c, v in kept.items()}
        for path in self.folder.glob("*.safetensors"):
            if path.name not in needed:
                path.unlink(missing_ok=True)

    # paging ------------------------------------------------------------------------------------------------------
    def _keep(self, client: int, state: State) -> None:
        if client in self._hot:
            self._hot_bytes -= self._sizes[client]
        self._hot[client] = state
        self._hot.move_to_end(client)
        self._sizes[client] = tree.tensor_bytes(state)
        self._hot_bytes += self._sizes[client]
        while self.folder is not None and self._hot_bytes > self.budget and len(self._hot) > 1:
            cold, cold_state = self._hot.popitem(last=False)
            self._hot_bytes -= self._sizes[cold]
            if self._saved.get(cold) != self._version[cold]:
                self._write(cold, self._version[cold], cold_state)

    def _path(self, client: int, version: int) -> Path:
        if self.folder is None:
            raise RuntimeError("this store has no folder")
        return self.folder / f"{client}.{version}.safetensors"

    def _write(self, client: int, version: int, state: State) -> None:
        path = self._path(client, version)
        if not path.exists():
            write_atomic(path, tree.to_bytes(state))
        with self._lock:
            self._saved[client] = max(version, self._saved.get(client, 0))

    def _read(self, client: int, version: int) -> State:
        return tree.from_bytes(self._path(client, version).read_bytes())


def _payload(path: Path) -> int:
    """Tensor bytes of a safetensors file: all of it but the header and its length."""
    with open(path, "rb") as file:
        header = int.from_bytes(file.read(8), "little")
    return path.stat().st_size - 8 - header
