"""A lock on a folder that is released when its process ends, however it ends."""

from __future__ import annotations

import fcntl
import multiprocessing.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from everfed.store.files import private


class Locked(Exception):
    """Another process holds the lock."""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock on the file `path`, which is created when missing. Raises Locked, or OSError."""
    file = _acquire(path)
    # a forked worker inherits the lock, and would hold it after its parent was killed
    multiprocessing.util.register_after_fork(file, lambda inherited: inherited.close())
    with file:
        yield


def _acquire(path: Path) -> IO[str]:
    while True:
        file = open(path, "a", opener=private)  # noqa: SIM115 - handed on
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is(file, path):
                return file
        except BlockingIOError as error:
            file.close()
            raise Locked from error
        except OSError:
            file.close()
            raise
        file.close()


def _is(file: IO[str], path: Path) -> bool:
    """Is this still the file of that name? Its last holder may have removed it in between."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
