"""The benchmark's account of time: every moment counts once, for the innermost and most telling thing that went on."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.federation_trace import (
    BYTES,
    DATABASE,
    REST,
    TRAINING,
    TRANSPORT,
    WAITING,
    Note,
    Notebook,
    partition,
    read,
)


def test_parts_add_up_and_inner_notes_count() -> None:
    """A thread's round of 10 s with 2 s of bytes in it, another's training of 3 s, 1 s of it at the same time."""
    notes = [
        Note("a", 0, REST, "round", 0.0, 10.0),
        Note("a", 1, BYTES, "to_bytes", 1.0, 3.0),
        Note("a", 1, WAITING, "receive", 3.0, 9.0),
        Note("b", 0, TRAINING, "call", 2.0, 5.0),
    ]
    parts = partition(notes, 0.0, 10.0)
    assert parts[TRAINING] == 3.0 and parts[BYTES] == 1.0 and parts[WAITING] == 4.0 and parts[REST] == 2.0
    assert sum(parts.values()) == 10.0
    assert sum(partition(notes, 2.5, 4.5).values()) == 2.0 and partition(notes, 2.5, 4.5)[TRAINING] == 2.0


def test_the_database_counts_where_something_is_carried() -> None:
    looks = [Note("link", 0, DATABASE, "session", 0.0, 1.0), Note("node", 0, WAITING, "pull-messages", 0.0, 1.0)]
    assert partition(looks, 0.0, 1.0)[WAITING] == 1.0
    carried = [*looks, Note("app", 0, TRANSPORT, "push-object", 0.25, 1.0)]
    assert partition(carried, 0.0, 1.0)[DATABASE] == 0.75


def test_notes_are_written_down(tmp_path: Path) -> None:
    book = Notebook(tmp_path)
    with book.at(TRANSPORT, "outer") as said, book.at(BYTES, "inner"):
        said[0] = WAITING
    inner, outer = read(tmp_path)
    assert (inner.kind, inner.depth, outer.kind, outer.depth) == (BYTES, 1, WAITING, 0)
    assert outer.start <= inner.start <= inner.end <= outer.end
    with pytest.raises(ZeroDivisionError):
        book.noted(BYTES, lambda: 1 / 0)()
    assert len(read(tmp_path)) == 3
