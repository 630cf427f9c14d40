"""Atomic and durable writing of files that only their owner can read: they hold data, states and keys. And a lock on a
folder."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import multiprocessing.util
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO

from everfed.errors import UserError

DIGEST_BYTES = 16
FOLDER_MODE, FILE_MODE = 0o700, 0o600


Opener = Callable[[Path], BinaryIO]


def open_file(path: Path) -> BinaryIO:
    """The default opener of files that are read."""
    return open(path, "rb")


def private(path: str, flags: int) -> int:
    """The `opener` of files that only their owner can read."""
    return os.open(path, flags, FILE_MODE)


def write_atomic(path: Path, data: bytes, durable: bool = True, shared: bool = False) -> None:
    """Write `data` to `path` so that a crash at any moment leaves the old content or the new. durable=False: does not
    sync, so that only a crash of the process is covered; for files that are checked when read and can be restored.
    shared: others may read it, as the umask says; for reports and tables."""
    # two threads may write the same file, so each has a temporary one of its own
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        _write(temporary, [data], durable, shared)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is raised, not that of removing
            temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def write_synced(path: Path, chunks: Iterable[bytes | memoryview]) -> str:
    """Write `chunks` one after the other and wait until they are on the disk; a crash may leave half of them. Returns
    the `digest` of the whole."""
    checksum = hashlib.blake2b(digest_size=DIGEST_BYTES)

    def hashed(chunk: bytes | memoryview) -> bytes | memoryview:
        checksum.update(chunk)
        return chunk

    # `map` does not keep a chunk while the next one is made, as a loop's variable would: both may be large
    _write(path, map(hashed, chunks), durable=True, shared=False)
    return checksum.hexdigest()


def _write(path: Path, chunks: Iterable[bytes | memoryview], durable: bool, shared: bool) -> None:
    with open(path, "wb", opener=None if shared else private) as file:
        file.writelines(chunks)
        if durable:
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
    """Create `folder` and what is missing above it, for their owner alone, durably."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(FOLDER_MODE, exist_ok=True)
        sync_folder(path.parent)


def make_private(folder: Path) -> None:
    """Create `folder`, or close an existing one to others. Raises UserError if it belongs to another user."""
    make_folder(folder)
    found = folder.stat()
    if found.st_uid != os.getuid():
        raise UserError(f"{folder} belongs to another user, who could read and change what is in it; choose another")
    if found.st_mode & 0o077:
        folder.chmod(FOLDER_MODE)


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


# locks ---------------------------------------------------------------------------------------------------------------
class Locked(Exception):
    """Another process holds the lock."""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock on the file `path`, which is created when missing, until the body ends or the process does, however
    it ends. Raises Locked, or OSError."""
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


# parts of a page that are generated ----------------------------------------------------------------------------------
def marked_names(text: str, kind: str) -> list[str]:
    """The names of a page's parts of one kind, in their order."""
    return [found[2] for found in _marked(kind).finditer(text)]


def marked_parts_renewed(text: str, kind: str, content: Callable[[str], str]) -> str:
    """The page with every part of one kind written anew. content: of the name of a part."""
    return _marked(kind).sub(lambda found: f"{found[1]}{content(found[2])}\n{found[4]}", text)


def _marked(kind: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {kind}: (?!end)(\S+) -->\n)(.*?)(<!-- {kind}: end -->)", re.DOTALL)
