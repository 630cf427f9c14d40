"""Atomic and durable writing of files."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from pathlib import Path

DIGEST_BYTES = 16


def write_atomic(path: Path, data: bytes, durable: bool = True) -> None:
    """Write `data` to `path` so that a crash at any moment leaves the old content or the new. durable=False: does not
    sync, so that only a crash of the process is covered; for files that are checked when read and can be restored."""
    # two threads may write the same file, so each has a temporary one of its own
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        write_synced(temporary, data) if durable else temporary.write_bytes(data)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is raised, not that of removing
            temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def write_synced(path: Path, data: bytes) -> None:
    """Write `data` and wait until it is on the disk; a crash may leave half of it."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make what was created, renamed and removed inside `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Create `folder` and what is missing above it, durably."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_folder(path.parent)


def remove_temporaries(folder: Path, name: str = "*") -> None:
    """Remove temporary files of `name` that killed processes left in `folder`. No process may be writing there."""
    for path in folder.glob(f".{name}.tmp"):
        if path.is_file():
            path.unlink(missing_ok=True)


def digest(data: bytes) -> str:
    """A checksum of content."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def file_digest(path: Path) -> str:
    """`digest` of a file's content, read in pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=DIGEST_BYTES)).hexdigest()
