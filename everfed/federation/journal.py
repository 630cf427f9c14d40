"""What a client remembers on its own disk: its state after each step, with the reply it gave.

A step is one phase at one place of the run. It is written, whole or not at all, before its reply leaves; asked for
again, the reply comes from here, so nothing is counted twice when a reply was lost. A server that went on from an older
checkpoint asks for places again: the state before them is still here, because steps are forgotten only when the server
says that its checkpoint has passed them.

<folder>/<round>.<position>.<repeat>.<stage>.safetensors
<folder>/epoch                                            the highest life of the server that was heard of
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from everfed.core import tree
from everfed.core.context import Place
from everfed.core.part import State
from everfed.core.tree import Tree
from everfed.store.files import make_folder, remove_temporaries, write_atomic

_SUFFIX = ".safetensors"
EPOCH = "epoch"


class Stale(Exception):
    """A request from the past: of an earlier life of the server, or for a place that was passed."""


@dataclass(frozen=True)
class Entry:
    """A step that was made. request: what was asked, by content; epoch: the server's life; has_state: whether the state
    changed (else it is the one before)."""

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
        self._warm: tuple[Place, State] | None = None
        self._entries: dict[Place, Entry] = {}
        for path in folder.glob(f"*{_SUFFIX}"):
            content = tree.from_bytes(path.read_bytes())
            entry = Entry(str(content["request"]), int(content["epoch"]), content["state"] is not None)
            self._entries[_place(path)] = entry

    @property
    def places(self) -> list[Place]:
        """The steps that are remembered, in order."""
        return sorted(self._entries)

    def accept_epoch(self, epoch: int) -> None:
        """A request of the server's life `epoch`. Raises Stale for one of an earlier life."""
        if epoch < self.epoch:
            raise Stale(f"it comes from life {epoch} of the server, which is in life {self.epoch}")
        if epoch > self.epoch:
            write_atomic(self.folder / EPOCH, str(epoch).encode())
            self.epoch = epoch

    def find(self, place: Place, request: str) -> Tree | None:
        """The reply that was given to this request, or None. What was done differently in an earlier life of the server
        is taken back; raises Stale when this life has passed the place."""
        entry = self._entries.get(place)
        if entry is not None and entry.request == request:
            reply: Tree = self._read(place)["reply"]
            return reply
        ahead = [other for other in self.places if other >= place]
        if any(self._entries[other].epoch == self.epoch for other in ahead):
            raise Stale(f"place {place} was passed; the newest is {ahead[-1]}")
        for other in reversed(ahead):  # the newest first: a crash in between leaves a beginning without a gap
            self._remove(other)
        return None

    def before(self, place: Place) -> State | None:
        """The state in which the client comes to `place`; None when it was never called."""
        earlier = [other for other in self.places if other < place and self._entries[other].has_state]
        if not earlier:
            return None
        if self._warm is None or self._warm[0] != earlier[-1]:
            self._warm = (earlier[-1], self._read(earlier[-1])["state"])
        return self._warm[1]

    def record(self, place: Place, request: str, state: State, reply: Tree) -> None:
        """Make a step durable."""
        before = self.before(place)
        changed = before is None or not tree.equal(before, state)
        content = {"state": state if changed else None, "reply": reply, "request": request, "epoch": self.epoch}
        write_atomic(self._path(place), tree.to_bytes(content))
        self._entries[place] = Entry(request, self.epoch, changed)
        if changed:
            self._warm = (place, state)

    def forget(self, durable: Place) -> None:
        """Drop what a server that goes on from `durable` or later cannot ask for; the state it starts from is kept."""
        passed = [place for place in self.places if place < durable]
        states = [place for place in passed if self._entries[place].has_state]
        for place in passed:
            if place not in states[-1:]:
                self._remove(place)

    def _remove(self, place: Place) -> None:
        self._path(place).unlink(missing_ok=True)
        del self._entries[place]
        if self._warm is not None and self._warm[0] == place:
            self._warm = None

    def _read(self, place: Place) -> Tree:
        return tree.from_bytes(self._path(place).read_bytes())

    def _path(self, place: Place) -> Path:
        return self.folder / f"{'.'.join(map(str, place))}{_SUFFIX}"

    def _read_epoch(self) -> int:
        path = self.folder / EPOCH
        return int(path.read_text()) if path.exists() else 0


def _place(path: Path) -> Place:
    round_index, position, repeat, stage = map(int, path.name.removesuffix(_SUFFIX).split("."))
    return round_index, position, repeat, stage
