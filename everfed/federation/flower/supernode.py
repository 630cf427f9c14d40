"""Flower's own `flower-supernode` between two gates: no other app comes in, and no other user reaches its tasks.

A SuperNode runs whatever app the SuperLink hands out. Here it reaches the SuperLink through this process (`Filter`),
which passes no other app on and no message above the limit. It gives tasks on a port, to anyone who can connect; here
every call there needs a secret. Flower starts a process for each message; here it is forked from one that has loaded
everything (`client_app`).

    python -m everfed.federation.flower.supernode --superlink HOST:PORT --worker SOCKET --home DIR --insecure
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import secrets
import shutil
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from everfed.federation import certificates
from everfed.federation.flower import client_app
from everfed.federation.flower.app import NAME, PUBLISHER, VERSION, bundle
from everfed.federation.flower.gate import (
    CALL,
    CLOSING,
    PULL,
    Door,
    Patient,
    Receive,
    Scope,
    Send,
    answer,
    bypass,
    headers_of,
    through,
    whole_body,
)
from everfed.federation.flower.superlink import LOOPBACK, executor, installed
from everfed.federation.local import NODE_KEY
from everfed.federation.logs import log_to_stderr
from everfed.federation.packet import FRAME_LIMIT
from everfed.federation.proxy import BODY, FLEET
from everfed.store.files import make_private

COMMAND = "flower-supernode"
TASKS = 0.05  # seconds between two looks for a task
PATIENCE = 60.0  # seconds to wait for the SuperLink's answer
HOP = frozenset({b"host", b"connection", b"content-length", b"accept-encoding", b"proxy-authorization"})
RUN, FAB_ID, FAB_VERSION, FAB_HASH = 1, 2, 3, 5  # fields of Flower's answer to get-run
_LOG = logging.getLogger("everfed.supernode")


class Refused(Exception):
    """An answer of the SuperLink that is not passed on."""


class Filter:
    """An ASGI application that passes a SuperNode's calls to the SuperLink at `server`. verify: the TLS context, None
    without TLS; app: the only bundle that is passed on; limit: bytes of one message."""

    def __init__(self, server: str, verify: ssl.SSLContext | None, app: bytes, limit: int) -> None:
        import hashlib

        import httpx

        self.url = f"{'http' if verify is None else 'https'}://{server}"
        plain = {"accept-encoding": "identity"}
        self.client = httpx.AsyncClient(verify=verify or True, timeout=PATIENCE, headers=plain)
        self.limit, self._taken = limit, 0
        name = hashlib.sha256(app).hexdigest()
        self._fab = _field(1, _field(1, name.encode()) + _field(2, app))
        self._run = {FAB_ID: f"{PUBLISHER}/{NAME}", FAB_VERSION: VERSION, FAB_HASH: name}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        import httpx

        call = scope["path"].removeprefix(CALL)
        if scope["method"] != "POST" or call not in FLEET or scope["path"] != CALL + call:
            await answer(send, 404, "no call of a SuperNode")
            return
        headers = [(name, value) for name, value in headers_of(scope).items() if name not in HOP]
        try:
            request = self.client.build_request(
                "POST", self.url + scope["path"], content=await whole_body(receive), headers=headers
            )
            response = await self.client.send(request, stream=True)
            try:
                body = await self._body(call, response)
            finally:
                await response.aclose()
            if response.status_code == 200:
                self._check(call, body)
        except httpx.TransportError as error:
            _LOG.warning("cannot reach the SuperLink at %s: %s", self.url, error or type(error).__name__)
            await answer(send, 503, "the SuperLink cannot be reached")
        except Refused as error:
            _LOG.warning("refused: %s", error)
            await answer(send, 413, str(error))
        else:
            await answer(send, response.status_code, body=body)

    async def _body(self, call: str, response: Any) -> bytes:
        body = bytearray()
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > BODY << 20:
                raise Refused(f"an answer to {call} has more than {BODY} MiB")
        return bytes(body)

    def _check(self, call: str, body: bytes) -> None:
        if CALL + call == PULL and body:
            self._taken = 0
        if call == "pull-object":
            self._taken += len(body)
            if self._taken > self.limit:
                raise Refused(f"the message has more than {self.limit} bytes")
        if call == "get-fab" and body != self._fab:
            raise Refused("the run was submitted with an app that is not everfed's")
        if call == "get-run":
            runs = _fields(body).get(RUN, [])
            found = _fields(runs[0]) if len(runs) == 1 else {}
            if any(found.get(number) != [text.encode()] for number, text in self._run.items()):
                raise Refused("a run was submitted with an app that is not everfed's")


# what is needed of Flower's encoding, protobuf: https://protobuf.dev/programming-guides/encoding
def _field(number: int, content: bytes) -> bytes:
    """A field of bytes."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    return bytes([value & 0x7F | 0x80]) + _varint(value >> 7) if value > 0x7F else bytes([value])


def _fields(message: bytes) -> dict[int, list[bytes]]:
    """The fields of bytes, by number. Raises Refused for what is no message."""
    found: dict[int, list[bytes]] = {}
    at = 0

    def varint() -> int:
        nonlocal at
        value, shift = 0, 0
        while True:
            byte = message[at]
            at, value, shift = at + 1, value | (byte & 0x7F) << shift, shift + 7
            if byte < 0x80:
                return value

    try:
        while at < len(message):
            tag = varint()
            kind = tag & 7
            size = varint() if kind in (0, 2) else {1: 8, 5: 4}[kind]
            if kind == 2:
                found.setdefault(tag >> 3, []).append(message[at : at + size])
            at += 0 if kind == 0 else size
    except (IndexError, KeyError) as error:
        raise Refused("an answer cannot be read") from error
    if at != len(message):
        raise Refused("an answer is not whole")
    return found


def serve(server: str, worker: str, home: Path, poll: float, limit: int, root: Path | None, key: Path | None) -> None:
    """Run the SuperNode until a signal ends this process, or Flower does."""
    import uvicorn

    make_private(home)
    verify = ssl.create_default_context(cafile=str(root)) if root else None
    calls = Patient(Filter(server, verify, bundle(home), limit), poll)
    own = _own_certificates(home / "tls") if root else None
    filtered = socket.create_server((LOOPBACK, 0))
    options = {"ssl_certfile": own / certificates.SERVER, "ssl_keyfile": own / certificates.SERVER_KEY} if own else {}
    config = uvicorn.Config(calls, lifespan="off", log_level="warning", **CLOSING, **options)  # type: ignore[arg-type]
    passing = functools.partial(uvicorn.Server(config).run, [filtered])
    threading.Thread(target=passing, name="filter", daemon=True).start()

    tasks, secret = socket.create_server((LOOPBACK, 0)), secrets.token_hex(32)
    _behind_door(tasks, secret)
    port = tasks.getsockname()[1]
    env = through(port, secret, os.environ)
    path = f"{client_app.start(home, env)}{os.pathsep}{env.get('PATH', '')}"
    executor(f"{LOOPBACK}:{port}", {**env, "PATH": path}, TASKS)
    bypass()
    words = [COMMAND, "--superlink", f"{LOOPBACK}:{filtered.getsockname()[1]}", "--isolation", "process"]
    words += ["--host", LOOPBACK, "--port", str(port), "--node-config", f'{NODE_KEY}="{worker}"']
    words += ["--root-certificates", str(own / certificates.CA)] if own else ["--insecure"]
    sys.argv = [*words, "--auth-supernode-private-key", str(key)] if key else words
    installed(COMMAND)()


def _own_certificates(folder: Path) -> Path:
    """Certificates for the way from the SuperNode to the filter: with a key it calls by TLS only."""
    shutil.rmtree(folder, ignore_errors=True)
    certificates.make_authority(folder, "everfed-supernode")
    certificates.make_server(folder, [LOOPBACK])
    return folder


def _behind_door(tasks: socket.socket, secret: str) -> None:
    """Serve the SuperNode's own port, which it starts with uvicorn, at this socket and behind a door."""
    import uvicorn

    original, server = uvicorn.Config, uvicorn.Server

    def config(app: Any, **options: Any) -> uvicorn.Config:
        return original(Door(Patient(app, TASKS), secret), **CLOSING, **options)

    class OneSocket(server):  # type: ignore[misc,valid-type]
        def run(self, sockets: list[socket.socket] | None = None) -> None:
            super().run([tasks])

    uvicorn.Config, uvicorn.Server = config, OneSocket  # type: ignore[assignment,misc]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="everfed-supernode", description=__doc__.splitlines()[0])
    parser.add_argument("--superlink", required=True, metavar="HOST:PORT", help="the SuperLink, or the proxy before it")
    parser.add_argument("--worker", required=True, metavar="PATH", help="the worker's unix socket")
    parser.add_argument("--home", type=Path, required=True, metavar="DIR", help="a folder for Flower's files")
    parser.add_argument("--poll", type=float, default=0.5, metavar="S", help="seconds between two polls for messages")
    parser.add_argument("--limit", type=int, default=FRAME_LIMIT, metavar="BYTES", help="of one message")
    parser.add_argument("--root-certificates", type=Path, default=None, metavar="FILE", help="the authority's")
    parser.add_argument("--key", type=Path, default=None, metavar="FILE", help="this client's private key")
    parser.add_argument("--insecure", action="store_true", help="neither TLS nor a key")
    chosen = parser.parse_args(arguments)
    if chosen.insecure == (chosen.root_certificates is not None):
        parser.error("give --root-certificates or --insecure")
    os.umask(0o077)
    log_to_stderr()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))  # the node is deactivated on the way out
    serve(
        chosen.superlink,
        chosen.worker,
        chosen.home,
        chosen.poll,
        chosen.limit,
        chosen.root_certificates,
        chosen.key,
    )


if __name__ == "__main__":
    main()
