"""A ledger: records that are appended and never changed, each on the disk before `record` returns.

One JSON list [key, value] per line. A line that a crash cut off was never acted on and is removed.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from everfed.errors import UserError
from everfed.store.files import make_folder, sync_folder


class LedgerError(UserError):
    """A ledger that cannot be read. Going on without it would forget what was revealed."""


class Conflict(ValueError):
    """A key that is recorded with another value."""


class Ledger:
    """The records of one file. One process at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._records: dict[str, str] = {}
        if path.exists():
            self._read()

    def find(self, key: str) -> str | None:
        """The value recorded under `key`."""
        return self._records.get(key)

    def record(self, key: str, value: str) -> None:
        """Append a record; the same one again changes nothing. Raises Conflict for another value."""
        known = self._records.get(key)
        if known is not None and known != value:
            raise Conflict(f"{self.path}: {key!r} is recorded as {known!r}, not {value!r}")
        if known is None:
            self._append(json.dumps([key, value]).encode() + b"\n")
            self._records[key] = value

    def _append(self, line: bytes) -> None:
        new = not self.path.exists()
        if new:
            make_folder(self.path.parent)
        with open(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        if new:
            sync_folder(self.path.parent)

    def _read(self) -> None:
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(self.path, whole)
        for number, line in enumerate(data[:whole].splitlines(), start=1):
            try:
                key, value = json.loads(line)
                self._records[str(key)] = str(value)
            except (TypeError, ValueError) as error:
                raise LedgerError(f"{self.path}, line {number}: not a record [key, value]; restore the file") from error
