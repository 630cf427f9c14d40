"""A disk that fails at a chosen operation: the process dies there, or the power goes, or the disk is full.

Python's file operations are counted while a `Disk` is in use. After a death nothing more is done, no clean-up either.
When the power goes, what was not synced may be lost: content that was written, and names that were made or changed.
"""

from __future__ import annotations

import builtins
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest


class Death(BaseException):
    """The process is gone."""


@dataclass
class Change:
    """A name that was made (old is None) or renamed in `folder`, and is lost with the power until that is synced.
    replaced: the content of the file that had the new name before, which is then there again."""

    folder: Path
    old: Path | None
    new: Path
    replaced: bytes | None = None


@dataclass
class Disk:
    """at: which operation fails, counted from 1. failure: what it raises; after a Death everything else does, too."""

    at: int = 0
    failure: BaseException = field(default_factory=Death)
    operations: int = 0
    failed: bool = False
    changes: list[Change] = field(default_factory=list)
    unsynced: set[Path] = field(default_factory=set)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Count and fail; a Death ends here."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(builtins, "open", self._opening(builtins.open))
            for name, wrap in (("replace", self._replacing), ("fsync", self._syncing), ("mkdir", self._making)):
                patch.setattr(os, name, wrap(getattr(os, name)))
            for name in ("unlink", "rmdir"):
                patch.setattr(os, name, self._counted(getattr(os, name)))
            with suppress(Death):
                yield

    def lose_power(self, rng: random.Random | None = None) -> None:
        """Lose what was not synced; with `rng`, half of it."""

        def lost() -> bool:
            return rng is None or rng.random() < 0.5

        for path in sorted(self.unsynced):
            if path.exists() and lost():
                os.truncate(path, path.stat().st_size // 2)
        for change in reversed(self.changes):
            if change.new.exists() and lost():
                _undo(change)

    def step(self) -> None:
        self.operations += 1
        dead = self.failed and isinstance(self.failure, Death)
        if self.operations == self.at or dead:
            self.failed = True
            raise self.failure

    def _counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.step()
            return real(*arguments, **options)

        return counted

    def _opening(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def opened(path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            if "r" in mode:
                return real(path, mode, *arguments, **options)
            self.step()
            if not Path(path).exists():
                self.changes.append(Change(Path(path).parent, None, Path(path)))
            self.unsynced.add(Path(path))
            return real(path, mode, *arguments, **options)

        return opened

    def _replacing(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def replaced(old: Path, new: Path) -> None:
            self.step()
            before = new.read_bytes() if new.is_file() else None
            real(old, new)
            self.changes.append(Change(new.parent, old, new, before))
            self.unsynced = {_moved(path, old, new) for path in self.unsynced}
            for change in self.changes[:-1]:
                if change.folder == old:
                    change.folder, change.new = new, _moved(change.new, old, new)

        return replaced

    def _syncing(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def synced(descriptor: int) -> None:
            self.step()  # nothing is really synced: that would only be slow
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            self.unsynced.discard(path)
            self.changes = [change for change in self.changes if change.folder != path]

        return synced

    def _making(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def made(path: Path, *arguments: Any, **options: Any) -> None:
            self.step()
            real(path, *arguments, **options)
            self.changes.append(Change(Path(path).parent, None, Path(path)))

        return made


def _moved(path: Path, old: Path, new: Path) -> Path:
    return new / path.relative_to(old) if path.is_relative_to(old) else path


def _undo(change: Change) -> None:
    if change.old is not None:
        with suppress(OSError):
            os.replace(change.new, change.old)
            if change.replaced is not None:
                change.new.write_bytes(change.replaced)
    elif change.new.is_dir():
        shutil.rmtree(change.new)
    else:
        change.new.unlink()
