"""Starts and supervises a SuperLink, or uses one that runs already."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from everfed.errors import UserError
from everfed.federation.local import entrance, entrance_file
from everfed.federation.logs import stamped
from everfed.federation.proxy import check_binding
from everfed.federation.supervisor import Child, Say, environment, python
from everfed.store.files import make_private, write_atomic

PID = "superlink.pid"
START = 120.0  # seconds to wait for a SuperLink that is being started


class LinkError(UserError):
    """A SuperLink that cannot be started or used."""


@dataclass(frozen=True)
class Security:
    """Files of TLS and node authentication: the authority's certificate, the server's own, and its key."""

    ca: Path
    certificate: Path
    key: Path


@dataclass(frozen=True)
class Settings:
    """host, port: of the SuperLink; folder: of its database and log; security: None on loopback only."""

    host: str
    port: int
    folder: Path
    security: Security | None = None

    def command(self) -> list[str]:
        words = [*python(), "-m", "everfed.federation.flower.superlink", "--host", self.host]
        words += ["--port", str(self.port), "--database", str(self.folder / "link.db")]
        if self.security is None:
            return [*words, "--insecure"]
        files = self.security
        return [*words, "--security", str(files.ca), str(files.certificate), str(files.key)]


def is_listening(host: str, port: int) -> bool:
    """Does any process listen there?"""
    with suppress(OSError), socket.create_connection((host, port), timeout=2.0):
        return True
    return False


@contextmanager
def running(settings: Settings, say: Say) -> Iterator[bool]:
    """A SuperLink at the address: the one of this user that runs there, or a new one that is restarted whenever it ends
    and ends with this process. Yields whether it is a new one."""
    check_binding(settings.host, settings.security is None)
    make_private(settings.folder)
    left = _left_behind(settings)
    if left is None and entrance(settings.port) is not None:
        say(stamped(f"joining the SuperLink at {settings.host}:{settings.port}"))
        yield False
        return
    if left is None and is_listening(settings.host, settings.port):
        raise LinkError(
            f"another process listens at {settings.host}:{settings.port}, and it is no SuperLink that you started: "
            "end it, or choose another --port"
        )
    if left is not None:  # of a server that was killed
        os.kill(left, signal.SIGTERM)
        _until(lambda: not is_listening(settings.host, settings.port), "the SuperLink of a killed server does not end")
    with _supervised(settings, say):
        yield True


@contextmanager
def _supervised(settings: Settings, say: Say) -> Iterator[None]:
    log, owner = settings.folder / "superlink.log", entrance_file(settings.port)
    child = Child("the SuperLink", settings.command(), log, environment(settings.folder / "flwr"))
    ended = threading.Event()
    listened: set[int] = set()  # the process, once it has been seen to listen

    def listens() -> bool:
        process = child.process
        if process is None or entrance(settings.port) is None or not is_listening(settings.host, settings.port):
            return False
        listened.add(process.pid)
        return True

    def supervise() -> None:
        while not ended.wait(0.2):
            before = child.process
            child.check(say)
            if child.process is None:
                continue
            pid = child.process.pid
            if child.process is not before:
                listened.clear()
                write_atomic(settings.folder / PID, str(pid).encode(), durable=False)
            elif pid in listened and not owner.exists():
                say(stamped(f"{owner} was removed; the SuperLink is restarted", logging.WARNING))
                child.process.terminate()
                listened.clear()
            elif pid not in listened:
                listens()

    child.start()
    assert child.process is not None
    write_atomic(settings.folder / PID, str(child.process.pid).encode(), durable=False)
    thread = threading.Thread(target=supervise, name="superlink", daemon=True)
    thread.start()
    try:
        _until(listens, f"the SuperLink did not start; see {log}")
        yield
    finally:
        ended.set()
        thread.join()
        child.stop()
        (settings.folder / PID).unlink(missing_ok=True)


def _left_behind(settings: Settings) -> int | None:
    """The process id of a SuperLink that an earlier server started in this folder and that still runs."""
    with suppress(OSError, ValueError):
        pid = int((settings.folder / PID).read_text())
        if str(settings.folder / "link.db").encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    return None


def _until(condition: Callable[[], bool], message: str) -> None:
    end = time.monotonic() + START
    while not condition():
        if time.monotonic() > end:
            raise LinkError(message)
        time.sleep(0.1)
