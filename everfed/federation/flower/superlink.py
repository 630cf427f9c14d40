"""Flower's own `flower-superlink` behind everfed's gate.

The command is run in this process as it is installed, and the server that it starts with `uvicorn.run` is started here:
on the port, for the calls of SuperNodes, and on a unix socket for its owner. The port is taken before the command
begins, so a Flower that would open it in another way ends with an error instead of serving everything to everybody.

Messages are stored in SQLite as objects of megabytes until they are fetched. With pages of 64 KiB (4 by default)
storing and removing them takes less CPU time and waits for the disk less often. An existing database keeps its pages.

    python -m everfed.federation.flower.superlink --host HOST --port PORT --database FILE --insecure
"""

from __future__ import annotations

import argparse
import os
import socket
import sqlite3
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from everfed.federation.certificates import CLIENTS
from everfed.federation.flower.gate import Gate
from everfed.federation.local import control_socket, listen
from everfed.federation.logs import log_to_stderr

COMMAND = "flower-superlink"
PAGE = 65536  # bytes of a page of the database
ELSEWHERE = ("host", "port", "workers", "reload")  # options of `uvicorn.run` that do not hold for given sockets


def serve(host: str, port: int, database: Path, security: tuple[Path, Path, Path] | None) -> None:
    """Serve until a signal ends this process. security: the files of the authority's certificate, the server's own and
    its key."""
    import uvicorn

    create(database)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    outside = socket.create_server((host, port), family=family)  # before the socket of a running one is replaced
    owner = control_socket(port)
    clients = security[0].parent / CLIENTS if security else None

    def run(app: Any, **options: Any) -> None:
        kept = {name: value for name, value in options.items() if name not in ELSEWHERE}
        with listen(owner) as inside:
            uvicorn.Server(uvicorn.Config(Gate(app, owner, clients), **kept)).run(sockets=[outside, inside])

    words = [COMMAND, "--host", host, "--port", str(port), "--database", str(database), "--isolation", "process"]
    words += ["--disable-runtime-dependency-installation", *_security(security)]
    [command] = entry_points(group="console_scripts", name=COMMAND)
    for name in [name for name in os.environ if name.startswith("FLWR_INTERNAL")]:
        del os.environ[name]  # they open ports beside this one
    uvicorn.run, sys.argv = run, words
    try:
        with outside:
            command.load()()
    finally:
        owner.unlink(missing_ok=True)
        write_back(database)


def _security(files: tuple[Path, Path, Path] | None) -> list[str]:
    if files is None:
        return ["--insecure"]
    ca, certificate, key = (str(path) for path in files)
    words = ["--ssl-ca-certfile", ca, "--ssl-certfile", certificate, "--ssl-keyfile", key]
    return [*words, "--enable-supernode-auth"]


def create(database: Path) -> None:
    """Make the file of a new database, with large pages."""
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
