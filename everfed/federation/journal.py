"""The journal of a client on its disk: its state after each step, with the reply.

A step is one phase at one place of the run. It is written atomically before its reply is sent; a repeated request gets
the stored reply, so that no step is made twice when a reply was lost. A server that resumed from an older checkpoint
repeats places: the state before them is still here, because steps are removed only once the server's checkpoint has
passed them.

<folder>/<round>.<position>.<repeat>.<stage>.safetensors
<folder>/epoch                                            the highest epoch of the server (how often it was started)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from everfed.core import tree
from everfed.core.context import PlaceKey
from everfed.core.message import State
from everfed.core.tree import Tree
from everfed.store.files import make_folder, remove_temporaries, write_atomic

_SUFFIX = ".safetensors"
EPOCH = "epoch"


class Stale(Exception):
    """An outdated request: of an earlier epoch of the server, or for a place that was passed."""


@dataclass(frozen=True)
class JournalEntry:
    """A finished step. request: its name; epoch: of the server then; has_state: whether it changed the state."""

    request: str
    epoch: int
    has_state: bool


class Journal:
    """The steps of one client in one run. One process at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_folder(folder)
        remove_temporaries(folder)
        self.epoch = self._read_epoch()
        self._last_state: tuple[PlaceKey, State] | None = None
        self._entries: dict[PlaceKey, JournalEntry] = {}
        for path in folder.glob(f"*{_SUFFIX}"):
            content = tree.from_bytes(path.read_bytes())
            entry = JournalEntry(str(content["request"]), int(content["epoch"]), content["state"] is not None)
            self._entries[_place(path)] = entry

    @property
    def places(self) -> list[PlaceKey]:
        """The places of all steps, in order."""
        return sorted(self._entries)

    @property
    def client(self) -> int:
        """The client's index in the run, which every step's name ends with."""
        return int(self._entries[self.places[-1]].request.split(".")[1])

    def accept_epoch(self, epoch: int) -> None:
        """Record the epoch of a request. Raises Stale for an earlier one than before."""
        if epoch < self.epoch:
            raise Stale(f"the request is of epoch {epoch} of the server, which is in epoch {self.epoch}")
        if epoch > self.epoch:
            write_atomic(self.folder / EPOCH, str(epoch).encode())
            self.epoch = epoch

    def find(self, place: PlaceKey, request: str) -> Tree | None:
        """The stored reply to this request, or None. Steps of an earlier epoch from `place` on are removed; raises
        Stale when the place was passed in this epoch."""
        entry = self._entries.get(place)
        if entry is not None and entry.request == request:
            reply: Tree = self._read(place)["reply"]
            return reply
        ahead = [other for other in self.places if other >= place]
        if any(self._entries[other].epoch == self.epoch for other in ahead):
            raise Stale(f"place {place} was passed; the newest is {ahead[-1]}")
        for other in reversed(ahead):  # the newest first: a crash in between leaves no gap
            self._remove(other)
        return None

    def before(self, place: PlaceKey) -> State | None:
        """The client's state before `place`; None when it was never called."""
        earlier = [other for other in self.places if other < place and self._entries[other].has_state]
        if not earlier:
            return None
        if self._last_state is None or self._last_state[0] != earlier[-1]:
            self._last_state = (earlier[-1], self._read(earlier[-1])["state"])
        return self._last_state[1]

    def record(self, place: PlaceKey, request: str, state: State, reply: Tree) -> None:
        """Write a step to disk."""
        before = self.before(place)
        changed = before is None or not tree.equal(before, state)
        content = {"state": state if changed else None, "reply": reply, "request": request, "epoch": self.epoch}
        write_atomic(self._path(place), tree.to_bytes(content))
        self._entries[place] = JournalEntry(request, self.epoch, changed)
        if changed:
            self._last_state = (place, state)

    def forget(self, durable: PlaceKey) -> None:
        """Remove the steps before `durable`, except the last one with a state: later steps start from it."""
        passed = [place for place in self.places if place < durable]
        states = [place for place in passed if self._entries[place].has_state]
        for place in passed:
            if place not in states[-1:]:
                self._remove(place)

    def _remove(self, place: PlaceKey) -> None:
        self._path(place).unlink(missing_ok=True)
        del self._entries[place]
        if self._last_state is not None and self._last_state[0] == place:
            self._last_state = None

    def _read(self, place: PlaceKey) -> Tree:
        return tree.from_bytes(self._path(place).read_bytes())

    def _path(self, place: PlaceKey) -> Path:
        return self.folder / f"{'.'.join(map(str, place))}{_SUFFIX}"

    def _read_epoch(self) -> int:
        path = self.folder / EPOCH
        return int(path.read_text()) if path.exists() else 0


def _place(path: Path) -> PlaceKey:
    round_index, position, repeat, stage = map(int, path.name.removesuffix(_SUFFIX).split("."))
    return round_index, position, repeat, stage
