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
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from everfed.errors import UserError
from everfed.reports import figures, html
from everfed.reports.access import AccessControl, Forbidden, check_own_page, check_token
from everfed.reports.dashboard import Dashboard, NoRun, Updates, assets
from everfed.reports.figures import View
from everfed.reports.live import Note

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
    try:
        import fastapi
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UserError(f"the dashboard needs {error.name}: pip install 'everfed[ui]'") from error
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
    """Serve until interrupted; `announce` is called with the address. Raises UserError: extras, folder, token, address
    in use."""
    check_token(host, token)
    app = create_app(root, token)
    import uvicorn

    class Interruptible(uvicorn.Server):
        def handle_exit(self, sig: int, frame: Any) -> None:
            app.state.feed.closed = True  # open pages hold a connection for ever; it is closed first
            super().handle_exit(sig, frame)

    with _listen(host, port) as listening:
        shown = f"[{host}]" if ":" in host else host
        announce(f"http://{shown}:{listening.getsockname()[1]}/")
        config = uvicorn.Config(app, log_level="warning", access_log=False, ws="none", timeout_graceful_shutdown=GRACE)
        Interruptible(config).run(sockets=[listening])


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise UserError(f"cannot listen on {host}, port {port}: {error.strerror or error}; try --port 0") from error
