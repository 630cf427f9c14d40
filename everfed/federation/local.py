"""The unix sockets of a federation's processes, which only their owner can open. No torch, no Flower.

A client's ClientApp sends packets to its worker; a run's ServerApp receives packets from its server.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from everfed.errors import UserError
from everfed.federation import packet as wire
from everfed.federation.packet import Packet
from everfed.store.files import Locked, locked

NODE_KEY = "everfed-socket"  # --node-config names the worker's socket by it
TIMEOUT = 60.0  # seconds to wait for a worker that is being started
_RETRY = 0.1
_ODD = re.compile(r"[\"\\\x00-\x1f\x7f]")  # characters that cannot stand in the quoted path in --node-config
_LONGEST_PATH = 100  # characters; the address of a unix socket may have about 108


def socket_path(folder: Path) -> Path:
    """The socket of the worker of this client folder."""
    path = folder.absolute() / "worker.sock"
    if len(str(path)) <= _LONGEST_PATH and not _ODD.search(str(path)):
        return path
    return own_folder() / f"{wire.digest(os.fsencode(path))}.sock"


def run_socket(run: int) -> Path:
    """The socket at which the server of a run waits for the run's ServerApp."""
    return own_folder() / f"run-{run}.sock"


def own_folder() -> Path:
    """A folder with a short name that only this user can write to: another user's socket could pose as the worker. The
    first that can be had: another user may have taken the name in a folder that all can write to."""
    places = [os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), os.path.expanduser("~/.cache")]
    folders = [Path(place) / f"everfed-{os.getuid()}" for place in places if os.path.isabs(place)]
    for folder in folders:
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
                return folder
    tried = ", ".join(str(folder) for folder in folders)
    raise UserError(f"one of {tried} must be a folder that only you can use; remove one, or choose a shorter --folder")


@dataclass(frozen=True)
class Entrance:
    """Where this user manages the runs of a SuperLink. port: on loopback; secret: what every call there needs; folder:
    of the SuperLink's database and keys. New for every process of the SuperLink."""

    port: int
    secret: str
    folder: str


def entrance_file(port: int) -> Path:
    """The file that holds the entrance of this user's SuperLink at `port`, locked while the SuperLink runs."""
    return own_folder() / f"superlink-{port}.json"


@contextmanager
def entrance_open(port: int, entrance: Entrance) -> Iterator[None]:
    """Tell this user's other processes where the entrance is, until the body ends or the process does."""
    path = entrance_file(port)
    end = time.monotonic() + TIMEOUT
    while True:
        try:
            with locked(path):
                path.write_text(json.dumps(asdict(entrance)))
                yield
                path.unlink(missing_ok=True)
            return
        except Locked:  # by a process that looks whether it is
            if time.monotonic() > end:
                raise
            time.sleep(_RETRY)


def entrance(port: int) -> Entrance | None:
    """The entrance of this user's SuperLink at `port`, if one runs."""
    with suppress(OSError, ValueError, TypeError), open(entrance_file(port)) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return Entrance(**json.load(file))
    return None


def listen(path: Path) -> socket.socket:
    """A socket at `path`; one that an earlier worker left there is removed. Only its owner may connect."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)  # from its creation on: a later chmod would leave a moment in which others can connect
    try:
        listener.bind(str(path))
    finally:
        os.umask(before)
    listener.listen()
    return listener


def call_worker(path: str, packet: Packet, timeout: float = TIMEOUT) -> Packet:
    """Send a packet to the worker that listens at `path`; returns its answer."""
    with connected(path, timeout) as connection:
        wire.send(connection, packet)
        return wire.receive(connection)


def connected(path: str, timeout: float = TIMEOUT) -> socket.socket:
    """A connection to the process that listens at `path`; waits while it is being started."""
    end = time.monotonic() + timeout
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(path)
            return connection
        except OSError as error:
            connection.close()
            if time.monotonic() > end:
                raise ConnectionError(f"no everfed worker answers at {path}: {error}") from error
            time.sleep(_RETRY)
