"""Where a federation's time goes: its processes note what each of their threads does, all on one clock.

    EVERFED_TRACE=FOLDER python -m benchmarks.federation_trace MODULE:FUNCTION [arguments]

runs a process of the federation with its calls noted, and so do those it forks; nothing of this is in the processes
that are not started this way. A note says what a thread did from when to when, and notes nest: what counts is the
innermost. `partition` divides a stretch of time among kinds of work: at every moment the first of KINDS that any thread
of any process is at, and "waiting" when none is at any, for then every process sleeps, or waits for one that does.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

FOLDER = "EVERFED_TRACE"
TRAINING, DISK, BYTES, DATABASE, TRANSPORT, START, REST = (
    "training",
    "client's disk",
    "serialisation",
    "SuperLink's database",
    "transport",
    "process start",
    "server's own work",
)
WAITING = "waiting"
# what a process imports only after it has begun
LATER = {
    "everfed.federation.worker": ("everfed.federation.runtime",),
    "everfed.federation.flower.superlink": ("flwr.superlink.cli", "flwr.superlink.main"),
    "everfed.federation.flower.supernode": ("flwr.supernode.cli",),
}
KINDS = (TRAINING, DISK, BYTES, DATABASE, TRANSPORT, START, REST)


@dataclass(frozen=True)
class Note:
    """What a thread was at. depth: how many other notes of its thread it lies in."""

    thread: str
    depth: int
    kind: str
    what: str
    start: float
    end: float


class Notebook:
    """The notes of this process, a line each, in a file of its own; a fork begins another."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._files = folder, {}
        self._local = threading.local()

    @contextmanager
    def at(self, kind: str, what: str) -> Iterator[list[str]]:
        """Note the body. What is yielded holds the kind, which the body may change."""
        said, start = [kind], time.monotonic()
        self._local.depth = depth = getattr(self._local, "depth", -1) + 1
        try:
            yield said
        finally:
            self._local.depth = depth - 1
            line = [f"{os.getpid()}.{threading.get_ident()}", depth, said[0], what, start, time.monotonic()]
            os.write(self._file(), (json.dumps(line) + "\n").encode())

    def _file(self) -> int:
        pid = os.getpid()
        if pid not in self._files:
            self._files[pid] = os.open(self.folder / f"{pid}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        return int(self._files[pid])

    def noted(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its calls noted."""

        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            with self.at(kind, function.__name__):
                return function(*arguments, **named)

        call.__kwdefaults__ = getattr(function, "__kwdefaults__", None)  # one dict: who changes it changes both
        return call

    def replace(self, kind: str, place: str, *names: str) -> None:
        """Note the calls of a module's functions, or of a class's (module:Class), wherever they were imported to."""
        module, _, owner = place.partition(":")
        home = importlib.import_module(module)
        for name in names:
            if owner:
                method = getattr(home, owner).__dict__[name]
                plain = isinstance(method, classmethod | staticmethod)
                new = self.noted(kind, method.__func__ if plain else method)
                setattr(getattr(home, owner), name, type(method)(new) if plain else new)
            else:
                self._everywhere(getattr(home, name), self.noted(kind, getattr(home, name)))

    def _everywhere(self, old: object, new: object) -> None:
        for module in list(sys.modules.values()):
            for name, value in list(getattr(module, "__dict__", {}).items()):
                if value is old:
                    setattr(module, name, new)


def install(folder: Path) -> Notebook:
    """Note the calls of what this process has imported. Everything it will use must be."""
    book, here = Notebook(folder), set(sys.modules)
    if "flwr.supercore.protobuf.client" in here:
        _requests(book)
        book.replace(BYTES, "flwr.supercore.inflatable.inflatable_object", "get_object_id")
        book.replace(BYTES, "flwr.app.message.arraychunk:ArrayChunk", "deflate", "inflate")
        book.replace(BYTES, "flwr.app.message:Array", "inflate")
        book.replace(WAITING, "flwr.supercore.inflatable.inflatable_utils", "pull_objects", "push_objects")
    if "flwr.supercore.sql_mixin" in here:
        _database(book)
    if "everfed.federation.codec" in here:
        book.replace(BYTES, "everfed.core.tree", "to_bytes", "from_bytes")
        book.replace(BYTES, "everfed.federation.packet", "digest")
    if "everfed.federation.client" in here:
        book.replace(TRAINING, "everfed.federation.client:_Call", "answered")
        book.replace(DISK, "everfed.federation.journal:Journal", "find", "before", "record", "forget")
        book.replace(DISK, "everfed.federation.payloads:PayloadCache", "put", "has")
        book.replace(TRANSPORT, "everfed.federation.packet", "send", "receive")
    return book


def _requests(book: Notebook) -> None:
    """HTTP, from the side that asks: what the other side does in the meantime is part of it. A look for something that
    is not there yet is waiting."""
    from flwr.supercore.protobuf.client import ProtobufClient

    plain = ProtobufClient._unary_unary

    def request(self: Any, *, path: str, **named: Any) -> Any:
        with book.at(TRANSPORT, path) as said:
            answer = plain(self, path=path, **named)
            if path.endswith(("heartbeat", "get-nodes")) or not _brought(answer):
                said[0] = WAITING
            return answer

    ProtobufClient._unary_unary = request  # type: ignore[method-assign]


def _brought(answer: Any) -> bool:
    looked = {"AcquireTaskResponse": "token", "PullObjectResponse": "object_available"}
    looked |= {"PullAppMessagesResponse": "messages_list", "PullMessagesResponse": "messages_list"}
    field = looked.get(type(answer).__name__)
    return field is None or bool(getattr(answer, field))


def _database(book: Notebook) -> None:
    from flwr.supercore.sql_mixin import SqlMixin

    plain = SqlMixin.session

    @contextmanager
    def session(self: Any) -> Iterator[Any]:
        with book.at(DATABASE, "session"), plain(self) as opened:
            yield opened

    SqlMixin.session = session  # type: ignore[method-assign]


# reading ---------------------------------------------------------------------------------------------------------
def read(folder: Path) -> list[Note]:
    """Every process's notes."""
    return [
        Note(*json.loads(line)) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()
    ]


def partition(notes: Iterable[Note], start: float, end: float) -> dict[str, float]:
    """Seconds of [start, end] by kind; they add up to its length."""
    changes: list[tuple[float, str, int]] = []
    for note in innermost(notes, start, end):
        changes += [(note.start, note.kind, 1), (note.end, note.kind, -1)]
    seconds = dict.fromkeys((*KINDS, WAITING), 0.0)
    active: Counter[str] = Counter()
    now = start
    for moment, kind, change in sorted([*changes, (end, WAITING, 0)]):
        seconds[_first(active)] += moment - now
        active[kind] += change
        now = moment
    return seconds


def _first(active: Counter[str]) -> str:
    """What counts of all that is going on. The database alone is busy with looks that bring nothing."""
    busy = [kind for kind in KINDS if active[kind] and (kind != DATABASE or active[TRANSPORT])]
    return busy[0] if busy else WAITING


def innermost(notes: Iterable[Note], start: float, end: float) -> Iterator[Note]:
    """The same stretches of time without overlaps within a thread: where notes lie in each other the inner one's."""
    threads: dict[str, list[Note]] = defaultdict(list)
    for note in notes:
        if note.start < end and note.end > start:
            threads[note.thread].append(note)
    for thread in threads.values():
        edges = sorted({start, end, *(min(max(edge, start), end) for one in thread for edge in (one.start, one.end))})
        for left, right in pairwise(edges):
            over = [one for one in thread if one.start <= left and one.end >= right]
            if over:
                inner = max(over, key=lambda one: one.depth)
                yield Note(inner.thread, 0, inner.kind, inner.what, left, right)


def main() -> None:
    module, _, function = sys.argv[1].partition(":")
    del sys.argv[1]
    entry = getattr(importlib.import_module(module), function)
    for later in LATER.get(module, ()):
        importlib.import_module(later)
    install(Path(os.environ[FOLDER]))
    entry()


if __name__ == "__main__":
    main()
