"""The unix sockets between the processes of a client. No torch, no Flower.

An app sends packets to the worker; a SuperNode wakes its executor.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from everfed.errors import UserError
from everfed.federation import packet as wire
from everfed.federation.packet import Packet

NODE_KEY = "everfed-socket"  # --node-config names the worker's socket by it
PATIENCE = 60.0  # seconds to wait for a worker that is being started
_RETRY = 0.1
_ODD = re.compile(r"[\"\\\x00-\x1f\x7f]")  # characters that cannot stand in the quoted path in --node-config
_LONGEST_PATH = 100  # characters; the address of a unix socket may have about 108


def socket_path(folder: Path, process: str = "worker") -> Path:
    """The socket of a process of this client folder."""
    path = folder.absolute() / f"{process}.sock"
    if len(str(path)) <= _LONGEST_PATH and not _ODD.search(str(path)):
        return path
    return _own_folder() / f"{wire.digest(os.fsencode(path))}.sock"


def _own_folder() -> Path:
    """A folder with a short name that only this user can write to: another user's socket could pose as the worker."""
    folder = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"everfed-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UserError(f"{folder} must be a folder that only you can use; remove it, or choose a shorter --folder")
    return folder


def listen(path: Path) -> socket.socket:
    """A socket at `path`; one that an earlier worker left there is removed. Only its owner may connect."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen()
    return listener


def wake_listener(path: str, longest: float) -> Callable[[], None]:
    """A function that waits until `wake(path)` is called, or for `longest` seconds. Earlier calls count as one."""
    Path(path).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listener.bind(path)
    Path(path).chmod(0o600)

    def wait() -> None:
        listener.settimeout(longest)
        with contextlib.suppress(TimeoutError):
            listener.recv(1)
            listener.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while listener.recv(1):
                    pass

    return wait


def wake(path: str) -> None:
    """Wake the listener at `path`. Errors are ignored: a listener also polls."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as caller, contextlib.suppress(OSError):
        caller.setblocking(False)
        caller.sendto(b".", path)


def call_worker(path: str, packet: Packet, patience: float = PATIENCE) -> Packet:
    """Send a packet to the worker that listens at `path`; returns its answer."""
    with _connected(path, patience) as connection:
        wire.send(connection, packet)
        return wire.receive(connection)


def _connected(path: str, patience: float) -> socket.socket:
    """A connection to the worker; waits while it is being started."""
    end = time.monotonic() + patience
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
