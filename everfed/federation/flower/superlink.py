"""Flower's own `flower-superlink` behind everfed's gate.

The command is run in this process as it is installed, and the server that it starts with `uvicorn.run` is started here:
on the port, for the calls of SuperNodes, and at a door on loopback, for whoever knows the secret. Both ports are taken
before the command begins, so a Flower that would open one in another way ends with an error instead of serving
everything to everybody. `flower-superexec`, which starts the ServerApp of each run, works at the door.

Messages are stored in SQLite as objects of megabytes until they are fetched. With pages of 64 KiB (4 by default)
storing and removing them takes less CPU time and waits for the disk less often. An existing database keeps its pages.

    python -m everfed.federation.flower.superlink --host HOST --port PORT --database FILE --insecure
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from everfed.federation.certificates import CLIENTS
from everfed.federation.flower.gate import CLOSING, Door, Gate, Limits, Patient, through
from everfed.federation.local import Entrance, entrance_open
from everfed.federation.logs import log_to_stderr
from everfed.federation.supervisor import die_with_parent

REGISTERED = "registered.json"  # in the folder of the database: the keys that it knows, with the numbers of their nodes
COMMAND, EXECUTOR = "flower-superlink", "flower-superexec"
LOOPBACK = "127.0.0.1"
PAGE = 65536  # bytes of a page of the database
POLL = 0.1  # seconds between two looks for an object that was announced
ELSEWHERE = ("host", "port", "workers", "reload")  # options of `uvicorn.run` that do not hold for given sockets
TLS = ("ssl_keyfile", "ssl_certfile")


def serve(host: str, port: int, database: Path, security: tuple[Path, Path, Path] | None) -> None:
    """Serve until a signal ends this process. security: the files of the authority's certificate, the server's own and
    its key."""
    import uvicorn

    create(database)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    outside = socket.create_server((host, port), family=family)
    inside = socket.create_server((LOOPBACK, 0))
    door = Entrance(inside.getsockname()[1], secrets.token_hex(32), str(database.parent))
    clients = security[0].parent / CLIENTS if security else None

    def run(app: Any, **options: Any) -> None:
        kept = {name: value for name, value in options.items() if name not in ELSEWHERE} | CLOSING
        plain = {name: value for name, value in kept.items() if name not in TLS}
        limits = Limits()
        gate = uvicorn.Config(Gate(app, limits, clients), **kept)
        plain |= {"lifespan": "off"}
        own = uvicorn.Config(Door(Patient(app, POLL), door.secret, limits), **plain)

        async def both() -> None:
            await asyncio.gather(uvicorn.Server(gate).serve([outside]), uvicorn.Server(own).serve([inside]))

        address = f"{LOOPBACK}:{door.port}"
        with entrance_open(port, door):
            executor(address, through(door.port, door.secret, os.environ), POLL)
            with suppress(KeyboardInterrupt):
                asyncio.run(both())

    words = [COMMAND, "--host", host, "--port", str(port), "--database", str(database), "--isolation", "process"]
    words += ["--disable-runtime-dependency-installation", *_security(security)]
    for name in [name for name in os.environ if name.startswith("FLWR_INTERNAL")]:
        del os.environ[name]  # they open ports beside this one
    uvicorn.run, sys.argv = run, words
    try:
        with outside, inside:
            installed(COMMAND)()
    finally:
        write_back(database)


def installed(command: str) -> Any:
    """What a command of Flower's runs."""
    [found] = entry_points(group="console_scripts", name=command)
    return found.load()


def executor(address: str, env: Mapping[str, str], poll: float) -> None:
    """Start Flower's executor, which starts a process for each task that it gets at `address`."""
    words = [EXECUTOR, "--insecure", "--runtime-api-address", address, "--parent-pid", str(os.getpid())]
    beside(words, {**env, "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": str(poll)})


def beside(words: Sequence[str], env: Mapping[str, str]) -> None:
    """Start a process that ends with this one, and this one with it."""
    child = subprocess.Popen(words, env=dict(env), preexec_fn=die_with_parent)

    def ended() -> None:
        child.wait()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ended, name=words[0], daemon=True).start()


def _security(files: tuple[Path, Path, Path] | None) -> list[str]:
    if files is None:
        return ["--insecure"]
    ca, certificate, key = (str(path) for path in files)
    words = ["--ssl-ca-certfile", ca, "--ssl-certfile", certificate, "--ssl-keyfile", key]
    return [*words, "--enable-supernode-auth"]


def create(database: Path) -> None:
    """Make the file of a new database, with large pages, in place of one whose keys nobody wrote down: what it holds
    of a run is sent again."""
    if not (database.parent / REGISTERED).exists():
        for ending in ("", "-wal", "-shm"):
            database.with_name(database.name + ending).unlink(missing_ok=True)
    if not database.exists():
        with closing(sqlite3.connect(database)) as connection:
            connection.execute(f"PRAGMA page_size = {PAGE}")
            connection.execute("VACUUM")  # writes the first page


def write_back(database: Path) -> None:
    """Move the write-ahead log into the database."""
    with suppress(sqlite3.Error), closing(sqlite3.connect(database, timeout=5.0)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="everfed-superlink", description=__doc__.splitlines()[0])
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--database", type=Path, required=True, metavar="FILE")
    parser.add_argument("--security", type=Path, nargs=3, default=None, metavar=("CA", "CERTIFICATE", "KEY"))
    parser.add_argument("--insecure", action="store_true", help="neither TLS nor keys")
    chosen = parser.parse_args(arguments)
    if chosen.insecure == (chosen.security is not None):
        parser.error("give --security or --insecure")
    os.umask(0o077)
    log_to_stderr()
    serve(chosen.host, chosen.port, chosen.database, tuple(chosen.security) if chosen.security else None)


if __name__ == "__main__":
    main()
