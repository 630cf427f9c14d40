"""Files that only grow, line by line: what happened and can never be taken back."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from everfed.errors import UserError
from everfed.store.files import make_folder, private, sync_folder

PRIVACY_LEDGER = "privacy.jsonl"  # in a client's folder and in a run's: what was released


class Lost(UserError):
    """The file was removed or replaced while it was in use."""


class GrowingFile:
    """A file of lines. Half a line at its end, of a process that was killed, is removed: nothing followed from it.
    durable: a line is on the disk before `append` returns. One process at a time."""

    def __init__(self, path: Path, durable: bool = True) -> None:
        self.path, self.durable, self._is_new = path, durable, not path.exists()
        with open(path, "ab", opener=private) as file:
            self._identity = _identity(file)
            file.truncate(path.read_bytes().rfind(b"\n") + 1)

    def lines(self) -> list[bytes]:
        return self.path.read_bytes().splitlines()

    def append(self, line: bytes, then: Callable[[], None] = lambda: None) -> None:
        """Add a line, which ends with a line feed. then: called before it counts. Raises Lost, or OSError, such as on a
        full disk; the file is as it was then."""
        with self._opened() as file:
            size = file.seek(0, os.SEEK_END)
            try:
                if file.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
                if self.durable:
                    os.fsync(file.fileno())
                if self.durable and self._is_new:
                    sync_folder(self.path.parent)
                then()
            except OSError:
                file.truncate(size)
                raise
            self._is_new = False

    def _opened(self) -> BinaryIO:
        """The file itself: neither a new one, nor another one of its name."""
        try:
            file = open(self.path, "r+b", buffering=0)  # noqa: SIM115 - the caller closes it
        except FileNotFoundError as error:
            raise Lost(f"{self.path} was removed while it was in use") from error
        if _identity(file) != self._identity:
            file.close()
            raise Lost(f"{self.path} was removed while it was in use, and another file has its name")
        return file


def _identity(file: BinaryIO) -> tuple[int, int]:
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino


class AppendedFile:
    """A growing file of JSON tables. entries: all that it holds."""

    def __init__(self, path: Path) -> None:
        self.path, self._file = path, GrowingFile(path)
        self.entries = [self._entry(number, line) for number, line in enumerate(self._file.lines(), start=1)]

    def add(self, entry: dict[str, Any]) -> None:
        """Raises Lost when the file is gone, and OSError when the disk is full; `entries` is unchanged then."""
        self._file.append(json.dumps(entry).encode() + b"\n")
        self.entries.append(entry)

    def _entry(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            found = json.loads(line)
        except ValueError as error:
            raise UserError(f"{self.path}, line {number} is damaged: {error}") from error
        if not isinstance(found, dict):
            raise UserError(f"{self.path}, line {number} is damaged: not a table")
        return found


class LedgerError(UserError):
    """A ledger that cannot be read. Going on without it would forget what was revealed."""


class Conflict(ValueError):
    """A key that is recorded with another value."""


class LedgerFile:
    """Records that are never changed, each on the disk before `record` returns: one JSON list [key, value] a line.

    One process at a time.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._file = path, GrowingFile(path) if path.exists() else None
        lines = self._file.lines() if self._file is not None else []
        self._records = dict(self._record(number, line) for number, line in enumerate(lines, start=1))

    def find(self, key: str) -> str | None:
        """The value recorded under `key`."""
        return self._records.get(key)

    def record(self, key: str, value: str) -> None:
        """Append a record; the same one again changes nothing. Raises Conflict for another value, Lost where the file
        was removed, and OSError where the disk is full; nothing is recorded then."""
        known = self._records.get(key)
        if known is not None and known != value:
            raise Conflict(f"{self.path}: {key!r} is recorded as {known!r}, not {value!r}")
        if known is None:
            self._file = self._file or self._create()
            self._file.append(json.dumps([key, value]).encode() + b"\n")
            self._records[key] = value

    def _create(self) -> GrowingFile:
        make_folder(self.path.parent)
        return GrowingFile(self.path)

    def _record(self, number: int, line: bytes) -> tuple[str, str]:
        try:
            key, value = json.loads(line)
        except (TypeError, ValueError) as error:
            raise LedgerError(f"{self.path}, line {number}: not a record [key, value]; restore the file") from error
        return str(key), str(value)
