"""A lock is held by one holder at a time, also where the file of the lock is removed by its last holder."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO

import pytest

from everfed.store.files import Locked, locked


@pytest.mark.parametrize("made_again", [False, True])
def test_a_lock_whose_file_is_removed_before_it_is_taken_is_taken_on_the_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_again: bool
) -> None:
    """Its last holder removes the file after this one opened it; a lock on the removed file would exclude nobody."""
    path, flock = tmp_path / "lock", fcntl.flock
    operations: list[int] = []

    def removed_first(file: IO[str], operation: int) -> None:
        if not operations:
            path.unlink()
            if made_again:
                path.touch()
        operations.append(operation)
        flock(file, operation)

    monkeypatch.setattr("everfed.store.files.fcntl.flock", removed_first)
    with locked(path), pytest.raises(Locked), locked(path):
        pass
    assert operations == [fcntl.LOCK_EX | fcntl.LOCK_NB] * 3  # on the removed file, on the new one, and the refused one
