"""A real server on loopback for the length of a test."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from everfed.reports.server import create_app
from tests.support.waiting import HANG


@contextlib.contextmanager
def served(root: Path, token: str | None = None, every: float = 0.05) -> Iterator[int]:
    """The dashboard of `root`; gives its port. What is there already has been read when it opens."""
    import uvicorn

    app = create_app(root, token, every)
    app.state.feed.index.poll()
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", access_log=False, ws="none"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        app.state.feed.closed = True
        server.should_exit = True
        thread.join(HANG)


def until(condition: Callable[[], Any], seconds: float = HANG) -> Any:
    """Wait for a condition that must come true; its value."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError("waited in vain")


Answer = tuple[int, dict[str, str], bytes]


def get(port: int, path: str, method: str = "GET", **headers: str) -> Answer:
    """(status, headers, body); the path goes out as it is, dots and all."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, body


def events(port: int, path: str = "/api/live", **headers: str) -> Iterator[dict[str, Any]]:
    """Server-sent events as they come."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    assert answer.status == 200 and answer.getheader("content-type", "").startswith("text/event-stream")
    try:
        while line := answer.readline():
            if line.startswith(b"data: "):
                yield json.loads(line.removeprefix(b"data: "))
    finally:
        connection.close()
