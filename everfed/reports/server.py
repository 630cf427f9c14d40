"""Serves the dashboard with FastAPI. It reads run folders and changes nothing but the readers' notes on runs.

GET /                  the page
GET /static/NAME       its style and scripts
GET /api/runs          every run, in short
GET /api/live          the same as server-sent events: everything once, then changes
GET /api/compare       curves of several runs, drawn (run=ID..., what=..., by=, x=, and others below)
GET /api/options       the options in which runs differ
POST /api/note         name, tag or hide a run (id=ID; JSON: name, tags, hidden)
GET /api/run           one run in full, drawn (id=ID)
GET /api/report        the report of several runs, as a file (run=ID...)
"""

# Annotations are not postponed here: FastAPI reads those of the routes, whose types are imported only when needed.
import asyncio
import contextlib
import hmac
import ipaddress
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import parse_qs, urlsplit

from everfed.errors import UserError, optional_package
from everfed.reports import figures, html
from everfed.reports.dashboard import Dashboard, NoRun, Note, Updates, assets
from everfed.reports.figures import View

if TYPE_CHECKING:
    from fastapi import FastAPI

EVERY = 1.0  # seconds between two polls of the folder
GRACE = 5  # seconds that open requests have after ctrl-C


def create_app(root: Path, token: str | None = None, every: float = EVERY) -> "FastAPI":
    """The dashboard of the runs below `root`. Raises UserError where FastAPI is missing or root is no folder."""
    fastapi = _fastapi()
    dashboard = Dashboard(root)
    feed = Updates(dashboard.index, every)

    @contextlib.asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        watching = asyncio.create_task(feed.watch())
        yield
        watching.cancel()

    app = fastapi.FastAPI(title="everfed", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.state.feed = feed
    app.add_middleware(AccessControl, token=token)
    _add_page(app)
    _add_runs(app, dashboard, feed)
    _add_comparisons(app, dashboard)
    _add_errors(app)
    return app


def _fastapi() -> Any:
    _, fastapi = (optional_package(name, "ui", "the dashboard") for name in ("uvicorn", "fastapi"))
    return fastapi


def _add_page(app: "FastAPI") -> None:
    from fastapi import HTTPException
    from fastapi.responses import HTMLResponse, Response

    page, files = html.asset("dashboard.html"), assets()

    @app.get("/")
    def front() -> HTMLResponse:
        return HTMLResponse(page)

    @app.get("/static/{name}")
    def static(name: str) -> Response:
        if name not in files:
            raise HTTPException(404, "there is no such file")
        kind, text = files[name]
        return Response(text, media_type=kind)


def _add_runs(app: "FastAPI", dashboard: Dashboard, feed: Updates) -> None:
    from fastapi import Request
    from fastapi.responses import JSONResponse, StreamingResponse

    @app.get("/api/runs")
    def runs() -> JSONResponse:
        return JSONResponse(dashboard.runs())

    @app.get("/api/live")
    async def live() -> StreamingResponse:
        return StreamingResponse(feed.listen(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})

    @app.get("/api/options")
    def options() -> JSONResponse:
        return JSONResponse(dashboard.options())

    @app.post("/api/note")
    def annotate(request: Request, id: str, note: Note) -> JSONResponse:
        check_own_page(request.headers)
        dashboard.annotate(id, note)
        return JSONResponse({"id": id})

    @app.get("/api/run")
    def one(id: str) -> JSONResponse:
        return JSONResponse(dashboard.run(id))


def _add_comparisons(app: "FastAPI", dashboard: Dashboard) -> None:
    from fastapi import Query
    from fastapi.responses import HTMLResponse

    names = Annotated[list[str], Query()]
    infinite = float("inf")

    @app.get("/api/compare")
    def compare(
        run: names,
        what: names = list(figures.PANELS),  # noqa: B006 (FastAPI copies it)
        by: str = "method",
        first: float = -infinite,
        last: float = infinite,
        x: str = "round",
        smooth: float = 0.0,
        log: bool = False,
        together: bool = False,
    ) -> HTMLResponse:
        view = View(by, window=(first, last), along=x, smooth=smooth, log=log)
        return HTMLResponse(dashboard.compare(run, what, view, together))

    @app.get("/api/report")
    def report(run: names) -> HTMLResponse:
        named = 'attachment; filename="everfed-report.html"'
        headers = {"Content-Disposition": named, "Content-Security-Policy": html.POLICY}
        return HTMLResponse(dashboard.report(run), headers=headers)


def _add_errors(app: "FastAPI") -> None:
    from fastapi.responses import JSONResponse

    @app.exception_handler(UserError)
    def users(request: Any, error: UserError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, status_code=422)

    @app.exception_handler(NoRun)
    def no_run(request: Any, error: NoRun) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, status_code=404)

    @app.exception_handler(Forbidden)
    def forbidden(request: Any, error: Forbidden) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, status_code=403)


def serve(root: Path, host: str, port: int, token: str | None, announce: Callable[[str], None]) -> None:
    """Serve until interrupted; `announce` is called with the address, which has the token where none was given: other
    users of this machine reach loopback, too. Raises UserError: extras, folder, token, address in use."""
    check_token(host, token)
    made = "" if token else secrets.token_urlsafe(24)
    app = create_app(root, token or made)
    import uvicorn

    class Interruptible(uvicorn.Server):
        def handle_exit(self, sig: int, frame: Any) -> None:
            app.state.feed.closed = True  # open pages hold a connection for ever; it is closed first
            super().handle_exit(sig, frame)

    with _listen(host, port) as listening:
        shown = f"[{host}]" if ":" in host else host
        announce(f"http://{shown}:{listening.getsockname()[1]}/{made and f'?token={made}'}")
        config = uvicorn.Config(app, log_level="warning", access_log=False, ws="none", timeout_graceful_shutdown=GRACE)
        Interruptible(config).run(sockets=[listening])


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise UserError(f"cannot listen on {host}, port {port}: {error.strerror or error}; try --port 0") from error


# access: from this machine, or with a token ------------------------------------------------------------------------
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
