"""The unix sockets of a federation's processes, which only their owner can open. No torch, no Flower.

A client's SuperNode sends packets to its worker; a server manages runs and nodes on its SuperLink.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from everfed.errors import UserError
from everfed.federation import packet as wire
from everfed.federation.packet import Packet

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
    return _own_folder() / f"{wire.digest(os.fsencode(path))}.sock"


def control_socket(port: int) -> Path:
    """The socket by which this user manages the runs of the SuperLink at `port`."""
    return _own_folder() / f"superlink-{port}.sock"


def _own_folder() -> Path:
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


def answers(path: Path) -> bool:
    """Does a process listen at this unix socket?"""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        return caller.connect_ex(str(path)) == 0


def call_worker(path: str, packet: Packet, timeout: float = TIMEOUT) -> Packet:
    """Send a packet to the worker that listens at `path`; returns its answer."""
    with _connected(path, timeout) as connection:
        wire.send(connection, packet)
        return wire.receive(connection)


def _connected(path: str, timeout: float) -> socket.socket:
    """A connection to the worker; waits while it is being started."""
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
