"""Decides which calls a SuperLink or a SuperNode answers, from their headers alone: no body of a refused call is read.

Flower serves all interfaces of a SuperLink on one port, and anyone who can connect to it may start, list and stop runs;
a SuperNode's port gives tasks to anyone. Here a port for clients answers the calls of SuperNodes only (`Gate`). All
other calls need a secret (`Door`), which Flower's own commands send because it stands in their `http_proxy`.
"""

from __future__ import annotations

import asyncio
import datetime
import hmac
import logging
import os
import time
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from everfed.federation.proxy import BODY, FLEET

SMALL = 64 << 10  # bytes of a call without an enrolled key; a SuperNode's calls have a few hundred, objects aside
TOLERANCE = 305.0  # seconds; Flower's own, for the time that a SuperNode signs
HOLD = 20.0  # seconds for which an empty answer is held back; Flower's clients wait for 30
SHARE = 0.05  # of the time waited so far, before the next look
CLOSING: dict[str, Any] = {"timeout_graceful_shutdown": 1}  # for uvicorn: an answer that is held back is not waited for
FIRST_LIMIT = 1 << 20  # bytes of a reply before a server has set a limit
LIMIT = "/everfed/limit/"  # a server sets the limit of a reply: POST with the bytes at the end of the path
CALL = "/v1/fleet/"
PUSH, PULL = f"{CALL}push-object", f"{CALL}pull-messages"
# the body of an answer that means "not yet": no message, an object that is announced, no task
NOT_YET = {
    PULL: b"",
    f"{CALL}pull-object": b"\x08\x01",
    "/v1/runtime/pull-object": b"\x08\x01",
    "/v1/runtime/pull-messages": b"",
    "/v1/runtime/acquire-task": b"",
}
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
_LOG = logging.getLogger("everfed.superlink")


async def answer(send: Send, status: int, text: str = "", body: bytes | None = None) -> None:
    """Send a whole answer: plain text, or the body of a call."""
    kind = b"text/plain" if body is None else b"application/protobuf"
    content = f"{text}\n".encode() if body is None else body
    head = [(b"content-type", kind), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": content})


async def whole_body(receive: Receive) -> bytes:
    """The body of a request."""
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(body)


def headers_of(scope: Scope) -> dict[bytes, bytes]:
    return dict(reversed(scope["headers"]))  # the first of two equal names, as Flower reads them


class Limits:
    """How many bytes clients may send. limit: of a reply. A client may send so many after each message that it got;
    Flower itself has no limit."""

    def __init__(self) -> None:
        self.limit = FIRST_LIMIT
        self._left: dict[bytes, int] = {}  # by public key

    def grant(self, key: bytes) -> None:
        self._left[key] = self.limit

    def take(self, key: bytes, count: int) -> bool:
        """Is it within what this client may send?"""
        self._left[key] = self._left.get(key, 0) - count
        return self._left[key] >= 0


class Gate:
    """An ASGI application in front of a SuperLink's, for the port that clients reach. clients: the folder of the
    enrolled public keys, None where calls are not signed."""

    def __init__(self, app: App, limits: Limits, clients: Path | None = None) -> None:
        self.app, self.limits = app, limits
        self.keys = None if clients is None else EnrolledKeys(clients)
        self.open = {CALL + call for call in FLEET}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            _LOG.warning("refused %s %s: %s", scope.get("method"), scope.get("path"), refusal[1])
            await answer(send, *refusal)
            return
        await self.app(scope, receive, self._granting(scope, send) if scope["path"] == PULL else send)

    def _granting(self, scope: Scope, send: Send) -> Send:
        """`send`, which notices that a message is handed out."""
        key = headers_of(scope).get(b"flwr-public-key", b"")

        async def sent(message: Message) -> None:
            if message.get("body"):
                self.limits.grant(key)
            await send(message)

        return sent

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """(status, reason) of a call that is not answered."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in self.open:
            return 403, "it is only for the owner of this SuperLink"
        headers, pushes = headers_of(scope), scope["path"] == PUSH
        length = headers.get(b"content-length", b"0")
        if b"transfer-encoding" in headers or not length.isdigit():
            return 411, "it does not say how long it is"
        if int(length) > BODY << 20:
            return 413, f"it has more than {BODY} MiB"
        if (pushes or int(length) > SMALL) and self.keys is not None and not self.keys.signed(headers):
            return 401, f"it sends objects, or more than {SMALL >> 10} KiB, and shows no enrolled key"
        if pushes and not self.limits.take(headers.get(b"flwr-public-key", b""), int(length)):
            return 413, f"this client's reply has more than {self.limits.limit} bytes"
        return None


class Door:
    """An ASGI application in front of Flower's, for a port on loopback: every call needs the secret."""

    def __init__(self, app: App, secret: str, limits: Limits | None = None) -> None:
        self.app, self.limits = app, limits
        self._wanted = f"Basic {b64encode(f'everfed:{secret}'.encode()).decode()}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] != "http" or not self._shown(scope):
            await answer(send, 403, "it is only for the owner of this process")
        elif self.limits is not None and scope["path"].startswith(LIMIT):
            self.limits.limit = int(scope["path"].removeprefix(LIMIT))
            await answer(send, 200)
        else:
            await self.app(scope, receive, send)

    def _shown(self, scope: Scope) -> bool:
        """Does the call show the secret? Takes as long whatever is wrong with it."""
        return hmac.compare_digest(headers_of(scope).get(b"proxy-authorization", b""), self._wanted)


class Patient:
    """An ASGI application that holds an answer back which means "not yet", and asks `app` again every `poll` seconds,
    later less often: Flower's clients would sleep for one to ten seconds."""

    def __init__(self, app: App, poll: float) -> None:
        self.app, self.poll = app, poll

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        not_yet = NOT_YET.get(scope.get("path", ""))
        if not_yet is None:
            await self.app(scope, receive, send)
            return
        request, start = await whole_body(receive), time.monotonic()
        while True:
            sent = await _called(self.app, scope, request)
            body = b"".join(message.get("body", b"") for message in sent)
            if sent[0]["status"] != 200 or body != not_yet or (waited := time.monotonic() - start) > HOLD:
                break
            await asyncio.sleep(max(self.poll, SHARE * waited))
        for message in sent:
            await send(message)


async def _called(app: App, scope: Scope, body: bytes) -> list[Message]:
    """What `app` sends in answer to this request."""
    sent: list[Message] = []
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return left.pop() if left else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    await app(dict(scope), receive, send)
    return sent


def through(port: int, secret: str, env: Mapping[str, str]) -> dict[str, str]:
    """The environment in which Flower's commands reach the door at `port`: an HTTP client sends what stands in
    `http_proxy` with every call, and a proxy is given the whole address of a call."""
    kept = {name: value for name, value in env.items() if name.lower() not in ("http_proxy", "no_proxy", "all_proxy")}
    return {**kept, "http_proxy": f"http://everfed:{secret}@127.0.0.1:{port}"}


def bypass() -> None:
    """Let this process call its own machine without a proxy."""
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(
        dict.fromkeys([*os.environ.get("no_proxy", "").split(","), "127.0.0.1", "localhost"])
    ).strip(",")


class EnrolledKeys:
    """The public keys in a folder of certificates; read again when a file is added or removed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._changed, self._keys = -1, dict[bytes, Any]()

    def signed(self, headers: dict[bytes, bytes]) -> bool:
        """Is this call signed, now, with one of them?"""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec

        try:
            moment = headers[b"flwr-timestamp"]
            signed = datetime.datetime.fromisoformat(moment.decode("ascii"))
            age = (datetime.datetime.now(datetime.UTC) - signed).total_seconds()
            key = self._known()[b64decode(headers[b"flwr-public-key"], validate=True)]
            key.verify(b64decode(headers[b"flwr-signature"], validate=True), moment, ec.ECDSA(hashes.SHA256()))
        except (KeyError, ValueError, TypeError, InvalidSignature):
            return False
        return abs(age) < TOLERANCE

    def _known(self) -> dict[bytes, Any]:
        """{key in PEM, as SuperNodes send it: key}"""
        from cryptography.hazmat.primitives.serialization import load_pem_public_key

        from everfed.federation.security import enrolled

        changed = self.folder.stat().st_mtime_ns if self.folder.is_dir() else -1
        if changed != self._changed:
            found = enrolled(self.folder.parent).values()
            self._changed, self._keys = changed, {pem: load_pem_public_key(pem) for pem in found}
        return self._keys
