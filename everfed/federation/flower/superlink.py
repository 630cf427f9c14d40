"""A SuperLink whose interfaces for runs and tasks are closed to other users of the machine.

Flower serves all of its interfaces on one port, and anyone who can connect to it may start, list and stop runs. Here
the port answers the calls of SuperNodes only; the rest is served on a unix socket that only the owner can open.

Messages are stored in SQLite as objects of megabytes until they are fetched. With pages of 64 KiB (4 by default), and
with its log written back every 32 MiB (4 by default), storing and removing them takes less CPU time and waits for the
disk less often. Durability is unchanged (write-ahead log, synchronous = NORMAL). An existing database keeps its page
size.

    python -m everfed.federation.flower.superlink --host HOST --port PORT --database FILE --insecure
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sqlite3
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from everfed.federation.local import control_socket, listen
from everfed.federation.logs import log_to_stderr
from everfed.federation.proxy import FLEET

PAGE, LOG = 65536, 32 << 20  # bytes of a page; bytes of the write-ahead log at which it is written back and truncated
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
_LOG = logging.getLogger("everfed.superlink")


class Gate:
    """The SuperLink's interfaces: everything on the unix socket `owner`, the calls of SuperNodes elsewhere."""

    def __init__(self, app: App, owner: Path) -> None:
        self.app, self.owner = app, str(owner)
        self.open = {f"/v1/fleet/{call}" for call in FLEET}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._may(scope):
            await self.app(scope, receive, send)
            return
        if scope["type"] == "http":
            _LOG.warning("refused %s %s: it is only for the owner of this SuperLink", scope["method"], scope["path"])
            await send({"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": b"only for the owner of this SuperLink\n"})

    def _may(self, scope: Scope) -> bool:
        if scope["type"] != "http":
            return False
        owner = tuple(scope.get("server") or ()) == (self.owner, None)
        return owner or (scope["method"] == "POST" and scope["path"] in self.open)


def serve(host: str, port: int, database: Path, security: tuple[Path, Path, Path] | None) -> None:
    """Serve until a signal ends this process. security: the files of the authority's certificate, the server's own and
    its key."""
    import uvicorn
    from flwr.supercore.http_logging import get_uvicorn_log_config
    from flwr.superlink.cli.flower_superlink import SuperLinkLifespan
    from flwr.superlink.main import create_app

    configure_database()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    outside = socket.create_server((host, port), family=family)  # before the socket of a running one is replaced
    owner = control_socket(port)
    app = create_app(_settings(host, port, database, security), SuperLinkLifespan)
    _, certificate, key = security or (None, None, None)
    config = uvicorn.Config(
        Gate(app, owner),
        log_config=get_uvicorn_log_config(logging.INFO),
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )
    with outside, listen(owner) as inside:
        try:
            uvicorn.Server(config).run(sockets=[outside, inside])
        finally:
            owner.unlink(missing_ok=True)
            write_back(database)


def configure_database() -> None:
    """Databases that this process opens have large pages, and a log that is written back and truncated."""
    from flwr.supercore import sql_mixin

    layout = (("page_size", str(PAGE)),)  # before anything is written
    log = (("wal_autocheckpoint", str(LOG // PAGE)), ("journal_size_limit", str(LOG)))
    sql_mixin.SQLITE_PRAGMAS = (*layout, *sql_mixin.SQLITE_PRAGMAS, *log)  # type: ignore[assignment]


def write_back(database: Path) -> None:
    """Move the write-ahead log into the database."""
    with suppress(sqlite3.Error), closing(sqlite3.connect(database, timeout=5.0)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _settings(host: str, port: int, database: Path, security: tuple[Path, Path, Path] | None) -> Any:
    """Flower's settings of a SuperLink that runs no app itself."""
    from flwr.superlink.config_loader import SuperLinkLifespanConfig, load_control_authn_plugin

    ca, certificate, key = (str(path) for path in security) if security else (None, None, None)
    return SuperLinkLifespanConfig(
        control_address="",
        health_server_address=None,
        host=host,
        port=port,
        insecure=security is None,
        certificates=tuple(path.read_bytes() for path in security) if security else None,  # type: ignore[arg-type]
        superexec_auth_secret=None,
        authn_plugin=load_control_authn_plugin(),
        event_log_plugin=None,
        fleet_event_log_plugin=None,
        enable_event_log=False,
        artifact_provider=None,
        enable_supernode_auth=security is not None,
        fleet_api_type="grpc-rere",
        fleet_api_address=None,
        simulation=False,
        ssl_ca_certfile=ca,
        ssl_certfile=certificate,
        ssl_keyfile=key,
        database=str(database),
        isolation="process",
        runtime_dependency_install=False,
    )


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
