"""Ports for servers that tests start: free when they are taken, and no one else's afterwards."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

# below the ports that the system gives to connections and to servers that ask for any
RANGE = range(12000, 32000)


def free_port() -> int:
    """A port on loopback that no other process of any test takes while this one lives, however late it is bound."""
    folder = Path(tempfile.gettempdir()) / f"everfed-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    for port in random.SystemRandom().sample(RANGE, len(RANGE)):
        lock = os.open(folder / str(port), os.O_WRONLY | os.O_CREAT, 0o600)  # locked until this process ends
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:  # of another test, or of a program of this machine
            os.close(lock)
    raise AssertionError(f"no port is free in {RANGE}")
