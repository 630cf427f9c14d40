"""The socket between a client's app and its worker, on one machine. No torch, no Flower."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from everfed.federation import packet as wire
from everfed.federation.packet import Packet

NODE_KEY = "everfed-socket"  # --node-config names the worker's socket by it
PATIENCE = 60.0  # seconds in which a worker that is being started must have come up
_ONCE_MORE = 0.1
_LONGEST_PATH = 100  # what an address of a unix socket may have, with some to spare


def socket_path(folder: Path) -> Path:
    """Where the worker of this client folder listens."""
    path = folder.absolute() / "worker.sock"
    if len(str(path)) <= _LONGEST_PATH:
        return path
    name = wire.digest(str(path).encode())
    return Path(os.environ.get("XDG_RUNTIME_DIR", "/tmp")) / f"everfed-{name}.sock"


def listen(path: Path) -> socket.socket:
    """A socket at `path`, in place of what an earlier worker left there. Only its owner may connect."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen()
    return listener


def ask(path: str, packet: Packet, patience: float = PATIENCE) -> Packet:
    """One packet to the worker that listens at `path`, and its answer."""
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
            time.sleep(_ONCE_MORE)
