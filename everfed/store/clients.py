"""Stores client states that may exceed memory: hot states in memory up to a budget, the others on disk, versioned.

Every state on disk is a file of its own, named by client and version, and is never rewritten. A checkpoint is then a
list of versions: the same files serve paging and resuming, and a checkpoint writes only what changed since the last.
Paging does not sync: a file must survive a power failure only once a checkpoint names it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from everfed.core import tree
from everfed.core.message import State
from everfed.store.files import FOLDER_MODE, private, sync_folder

DEFAULT_BUDGET = 2 << 30
_SUFFIX = ".safetensors"
_AT_ONCE = 16

Page = tuple[int, int]  # (client, version)


class ClientStore:
    """State by client. Without a folder everything stays in memory.

    Thread-safe: a checkpoint may be written while clients run. States must never be changed in place.
    """

    def __init__(self, folder: Path | None = None, budget: int = DEFAULT_BUDGET) -> None:
        self.folder = folder
        self.budget = budget
        self._hot: OrderedDict[int, State] = OrderedDict()
        self._hot_bytes = 0
        self._sizes: dict[int, int] = {}
        self._version: dict[int, int] = {}
        self._saved: dict[int, int] = {}  # client -> newest version that is on disk
        self._unsynced: set[Page] = set()  # on disk, but not synced
        self._stale: set[Page] = set()  # on disk and no longer needed by the live run, but maybe by a checkpoint
        self._clock = 0
        self._lock = threading.RLock()
        if folder is not None:
            folder.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
            self._forget(set())

    def get(self, client: int) -> State | None:
        """The client's state, or None when it was never put."""
        with self._lock:
            if client in self._hot:
                self._hot.move_to_end(client)
                return self._hot[client]
            if client not in self._version:
                return None
            state = tree.from_bytes(self.path(client, self._version[client]).read_bytes())
            self._keep(client, state)
            return state

    def peek(self, client: int) -> State | None:
        """The same, without changing which states are in memory."""
        with self._lock:
            if client in self._hot or client not in self._version:
                return self._hot.get(client)
            path = self.path(client, self._version[client])
        return tree.from_bytes(path.read_bytes())

    def put(self, client: int, state: State) -> None:
        """Replace the client's state."""
        with self._lock:
            before = self._version.get(client)
            if before is not None and self._saved.get(client) == before:
                self._stale.add((client, before))
            self._clock += 1
            self._version[client] = self._clock
            self._keep(client, state)

    def clear(self) -> None:
        """Remove every state; only for a store without a folder."""
        if self.folder is not None:
            raise RuntimeError("a store with a folder cannot be cleared; use `restore`")
        with self._lock:
            for table in (self._hot, self._version, self._saved, self._sizes):
                table.clear()
            self._hot_bytes = 0

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
        """Write a snapshot's states to disk, and wait until all files of `versions` are durable."""
        for client, state in dirty.items():
            self._write(client, versions[client], state)
        with self._lock:
            pages = [(client, version) for client, version in self._unsynced if versions.get(client) == version]
        if pages and self.folder is not None:
            # concurrent syncs are committed together by the file system: many times faster than one by one
            with ThreadPoolExecutor(min(_AT_ONCE, len(pages))) as pool:
                list(pool.map(lambda page: _sync(self.path(*page)), pages))
            sync_folder(self.folder)  # their names
        with self._lock:
            self._unsynced.difference_update(pages)

    def restore(self, versions: Mapping[int, int]) -> None:
        """Go back to the states of a checkpoint."""
        with self._lock:
            self._sizes = {client: _payload(self.path(client, v)) for client, v in versions.items()}
            self._hot.clear()
            self._hot_bytes = 0
            self._version = dict(versions)
            self._saved = dict(versions)
            self._forget(set(versions.items()))

    def keep(self, wanted: Callable[[int], bool]) -> None:
        """Drop the clients that are not `wanted` (another process has them); their files stay."""
        with self._lock:
            for client in [known for known in self._version if not wanted(known)]:
                if self._hot.pop(client, None) is not None:
                    self._hot_bytes -= self._sizes[client]
                for table in (self._version, self._saved, self._sizes):
                    table.pop(client, None)

    def collect(self, versions: Mapping[int, int]) -> None:
        """Remove files that neither the checkpoint `versions` nor the live run needs."""
        if self.folder is None:
            return
        with self._lock:
            gone = {(client, version) for client, version in self._stale if versions.get(client) != version}
            self._stale -= gone
            self._unsynced -= gone
        for client, version in gone:
            self.path(client, version).unlink(missing_ok=True)

    def _forget(self, named: set[Page]) -> None:
        """Mark all files in the folder but `named` as stale: an earlier process of this run left them. Versions go on
        from the highest of all, so that no file name is used twice."""
        found = set(self._pages())
        self._stale = found - named
        self._unsynced = set()
        self._clock = max((version for _, version in found | named), default=0)

    def _pages(self) -> Iterator[Page]:
        """The pages in the folder."""
        if self.folder is not None:
            for name in os.listdir(self.folder):
                client, _, version = name.removesuffix(_SUFFIX).partition(".")
                if name.endswith(_SUFFIX) and client.isdecimal() and version.isdecimal():
                    yield int(client), int(version)

    # paging ------------------------------------------------------------------------------------------------------
    def _keep(self, client: int, state: State) -> None:
        if client in self._hot:
            self._hot_bytes -= self._sizes[client]
        self._hot[client] = state
        self._hot.move_to_end(client)
        self._sizes[client] = tree.tensor_bytes(state)
        self._hot_bytes += self._sizes[client]
        while self.folder is not None and self._hot_bytes > self.budget and len(self._hot) > 1:
            self._page_out()

    def _page_out(self) -> None:
        """Drop the least recently used state from memory, after writing it to disk."""
        client, state = next(iter(self._hot.items()))
        if self._saved.get(client) != self._version[client]:
            self._write(client, self._version[client], state)
        del self._hot[client]
        self._hot_bytes -= self._sizes[client]

    def path(self, client: int, version: int) -> Path:
        """The file of a client's state."""
        if self.folder is None:
            raise RuntimeError("this store has no folder")
        return self.folder / f"{client}.{version}{_SUFFIX}"

    def _write(self, client: int, version: int, state: State) -> None:
        with self._lock:
            if self._saved.get(client) == version:
                return
        _write_page(self.path(client, version), tree.to_chunks(state))
        with self._lock:
            self._unsynced.add((client, version))
            self._saved[client] = max(version, self._saved.get(client, 0))
            if self._version[client] != version:  # the client was called again while a checkpoint wrote this
                self._stale.add((client, version))


def _write_page(path: Path, chunks: Iterable[tree.Chunk]) -> None:
    """Write a file atomically with respect to other threads and a crash of the process; nothing is synced."""
    # a checkpoint and a page-out may write the same file at once, so each has a temporary one of its own
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with open(temporary, "wb", opener=private) as file:
            file.writelines(chunks)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _sync(path: Path) -> None:
    """Wait until the content of `path` is on the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _payload(path: Path) -> int:
    """Tensor bytes of a safetensors file: all of it but the header and its length."""
    with open(path, "rb") as file:
        header = int.from_bytes(file.read(8), "little")
    return path.stat().st_size - 8 - header
