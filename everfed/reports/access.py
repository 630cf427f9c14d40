"""Access to the dashboard: from this machine, or with a token."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlsplit

from everfed.errors import UserError

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]
COOKIE = "everfed-token"
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; img-src 'self' "
        b"data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
)
TOKEN_PAGE = (
    "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
    "<title>everfed</title><h1>everfed</h1><form><label>Token <input name=token type=password autofocus></label> "
    "<button>Open</button></form><p>The token that `everfed ui` was started with.</p></html>"
)


def is_loopback(host: str) -> bool:
    """Can only this machine reach an address of that name?"""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise UserError(f"--host {host}: there is no such address: {error.strerror or error}") from error
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found)


def check_token(host: str, token: str | None) -> None:
    """Raise UserError where other machines could reach the page and no token is set."""
    if token is not None and not token.strip():
        raise UserError("--token is empty; name a token, or leave it out on this machine")
    if token is None and not is_loopback(host):
        raise UserError(
            f"--host {host} lets other machines read these runs: set --token SECRET (or EVERFED_UI_TOKEN), "
            "or leave --host out to serve this machine only"
        )


class Forbidden(Exception):
    """A request that this page itself would not send."""


def check_own_page(headers: Mapping[str, str]) -> None:
    """Raise Forbidden for a change that another web page asks for. Browsers send where a request comes from, and ask
    before a page elsewhere may send JSON; neither can be forged by a page."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    origin = headers.get("origin")
    if kind != "application/json" or (origin is not None and urlsplit(origin).netloc != headers.get("host")):
        raise Forbidden("changes are accepted from this dashboard's own page only, as JSON")


class AccessControl:
    """ASGI middleware: refuses requests without access, and adds security headers.

    Without a token only names of this machine are accepted as the Host, so that a page elsewhere cannot read runs
    through a name that it points here (DNS rebinding).
    """

    def __init__(self, app: App, token: str | None) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        answer = self._refusal(scope)
        if answer is None:
            await self.app(scope, receive, _with_headers(send))
        else:
            status, headers, body = answer
            await _with_headers(send)({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": body.encode()})

    def _refusal(self, scope: Scope) -> tuple[int, list[tuple[bytes, bytes]], str] | None:
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        text = [(b"content-type", b"text/plain; charset=utf-8")]
        if self.token is None:
            local = _host_name(headers.get(b"host", "")) in LOCAL_NAMES
            return None if local else (403, text, "This page is served to localhost only.\n")
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if self._right(given) and scope["path"] == "/":
            cookie = f"{COOKIE}={self.token.encode().hex()}; HttpOnly; SameSite=Strict; Path=/"
            return 303, [*text, (b"location", b"/"), (b"set-cookie", cookie.encode())], "Welcome.\n"
        if self._right(_bearer(headers)) or self._right(_cookie(headers)):
            return None
        if scope["path"] == "/":
            return 401, [(b"content-type", b"text/html; charset=utf-8")], TOKEN_PAGE
        return 401, text, "A token is needed: open /?token=... first, or send Authorization: Bearer ...\n"

    def _right(self, given: str) -> bool:
        return self.token is not None and hmac.compare_digest(given.encode(), self.token.encode())


def _host_name(host: str) -> str:
    """example.org:80 -> example.org; [::1]:80 -> ::1."""
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0].lower()


def _bearer(headers: dict[bytes, str]) -> str:
    kind, _, value = headers.get(b"authorization", "").partition(" ")
    return value.strip() if kind.lower() == "bearer" else ""


def _cookie(headers: dict[bytes, str]) -> str:
    """The token from the cookie, where it is written in hexadecimal so that any character may be in it."""
    try:
        found = SimpleCookie(headers.get(b"cookie", "")).get(COOKIE)
        return bytes.fromhex(found.value).decode() if found else ""
    except (CookieError, ValueError):
        return ""


def _with_headers(send: Any) -> Any:
    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            own = {name for name, _ in message.get("headers", [])}
            added = [header for header in HEADERS if header[0] not in own]
            message = {**message, "headers": [*message.get("headers", []), *added]}
        await send(message)

    return sending
