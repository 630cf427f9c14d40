"""A file of JSON lines that only grows: what happened and can never be taken back."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from everfed.errors import UserError
from everfed.store.files import sync_folder

PRIVACY_LEDGER = "privacy.jsonl"  # in a client's folder and in a run's: what was released


class Lost(UserError):
    """The file was removed while it was in use."""


class AppendedFile:
    """entries: all that the file holds. A line is on the disk before `add` returns. One process at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        sync_folder(path.parent)
        self.entries: list[dict[str, Any]] = self._read()

    def add(self, entry: dict[str, Any]) -> None:
        """Raises Lost when the file is gone, and OSError when the disk is full; `entries` is unchanged then."""
        data = json.dumps(entry).encode() + b"\n"
        before = os.fstat(self._file).st_size
        try:
            if os.write(self._file, data) != len(data):
                raise OSError(f"{self.path}: the disk took a part of a line only")
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, before)
            raise
        if os.fstat(self._file).st_nlink == 0:
            raise Lost(f"{self.path} was removed while it was in use")
        self.entries.append(entry)

    def close(self) -> None:
        os.close(self._file)

    def _read(self) -> list[dict[str, Any]]:
        """Removes half a line at the end, of a process that was killed: nothing followed from it."""
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            os.ftruncate(self._file, len(whole))
        return [self._entry(number, line) for number, line in enumerate(whole.splitlines(), start=1)]

    def _entry(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            found = json.loads(line)
        except ValueError as error:
            raise UserError(f"{self.path}, line {number} is damaged: {error}") from error
        if not isinstance(found, dict):
            raise UserError(f"{self.path}, line {number} is damaged: not a table")
        return found
