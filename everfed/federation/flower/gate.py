"""Decides which calls a SuperLink answers, from their headers alone: no body of a refused call is read.

Flower serves all of its interfaces on one port, and anyone who can connect to it may start, list and stop runs. Behind
this gate the port answers the calls of SuperNodes only; the rest is answered on a unix socket that only the owner of
the SuperLink can open. Flower reads the whole body of a call before it looks at the caller's key, so here a caller who
shows no enrolled key may send little.
"""

from __future__ import annotations

import datetime
import logging
from base64 import b64decode
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from everfed.federation.proxy import BODY, FLEET

SMALL = 64 << 10  # bytes of a call without an enrolled key; a SuperNode's calls have a few hundred, objects aside
TOLERANCE = 305.0  # seconds; Flower's own, for the time that a SuperNode signs
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
_LOG = logging.getLogger("everfed.superlink")


class Gate:
    """An ASGI application in front of Flower's. owner: the unix socket on which everything is answered; clients: the
    folder of the enrolled public keys, None where calls are not signed."""

    def __init__(self, app: App, owner: Path, clients: Path | None = None) -> None:
        self.app, self.owner = app, str(owner)
        self.keys = None if clients is None else EnrolledKeys(clients)
        self.open = {f"/v1/fleet/{call}" for call in FLEET}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = None if scope["type"] == "lifespan" else self._refusal(scope)
        if refusal is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            status, reason = refusal
            _LOG.warning("refused %s %s: %s", scope["method"], scope["path"], reason)
            await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": f"{reason}\n".encode()})

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """(status, reason) of a call that is not answered."""
        if scope["type"] == "http" and tuple(scope.get("server") or ()) == (self.owner, None):
            return None
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in self.open:
            return 403, "it is only for the owner of this SuperLink"
        headers = dict(reversed(scope["headers"]))  # the first of two equal names, as Flower reads them
        length = headers.get(b"content-length", b"0")
        if b"transfer-encoding" in headers or not length.isdigit():
            return 411, "it does not say how long it is"
        if int(length) > BODY << 20:
            return 413, f"it has more than {BODY} MiB"
        if int(length) > SMALL and self.keys is not None and not self.keys.signed(headers):
            return 401, f"it has more than {SMALL >> 10} KiB and shows no enrolled key"
        return None


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
