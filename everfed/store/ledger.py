"""A ledger: records that are appended and never changed, each on the disk before `record` returns.

One JSON list [key, value] per line.
"""

from __future__ import annotations

import json
from pathlib import Path

from everfed.errors import UserError
from everfed.store.appended import GrowingFile
from everfed.store.files import make_folder


class LedgerError(UserError):
    """A ledger that cannot be read. Going on without it would forget what was revealed."""


class Conflict(ValueError):
    """A key that is recorded with another value."""


class LedgerFile:
    """The records of one file. One process at a time."""

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
