"""A SuperLink of our own, kept running; or one that runs already."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from everfed.errors import UserError
from everfed.federation.supervisor import Child, Say, environment
from everfed.federation.proxy import check_binding
from everfed.store.files import make_folder

PID = "superlink.pid"
START = 120.0  # seconds in which a SuperLink must have come up


class LinkError(UserError):
    """A SuperLink that cannot be started or used."""


@dataclass(frozen=True)
class Security:
    """Files of TLS and node authentication: the certificate of who signed, the server's own, and its key."""

    ca: Path
    certificate: Path
    key: Path


@dataclass(frozen=True)
class Settings:
    """host, port: where it listens; folder: its database and its log; security: None only on loopback."""

    host: str
    port: int
    folder: Path
    security: Security | None = None

    def command(self) -> list[str]:
        words = [
            sys.executable,
            "-m",
            "everfed.federation.flower.superlink",
            "--host",
            self.host,
            "--port",
            str(self.port),
            "--isolation",
            "process",
        ]
        words += ["--database", str(self.folder / "link.db"), "--disable-runtime-dependency-installation"]
        if self.security is None:
            return [*words, "--insecure"]
        files = self.security
        words += ["--ssl-ca-certfile", str(files.ca), "--ssl-certfile", str(files.certificate)]
        return [*words, "--ssl-keyfile", str(files.key), "--enable-supernode-auth"]


def answers(host: str, port: int) -> bool:
    """Does anything listen there?"""
    with suppress(OSError), socket.create_connection((host, port), timeout=2.0):
        return True
    return False


@contextmanager
def running(settings: Settings, say: Say) -> Iterator[bool]:
    """A SuperLink at the address: the one that answers there, or one of our own that is started again whenever it ends,
    and ended with us. Yields whether it is our own."""
    check_binding(settings.host, settings.security is None)
    make_folder(settings.folder)
    left = _left_behind(settings)
    if answers(settings.host, settings.port) and left is None:
        say(f"joining the SuperLink at {settings.host}:{settings.port}")
        yield False
        return
    if left is not None:  # of a server that was killed
        os.kill(left, signal.SIGTERM)
        _until(lambda: not answers(settings.host, settings.port), "the SuperLink that was left behind does not end")
    with _kept(settings, say):
        yield True


@contextmanager
def _kept(settings: Settings, say: Say) -> Iterator[None]:
    log = settings.folder / "superlink.log"
    child = Child("the SuperLink", settings.command(), log, environment(settings.folder / "flwr"))
    ended = threading.Event()

    def tend() -> None:
        while not ended.wait(0.2):
            before = child.process
            child.tend(say)
            if child.process is not None and child.process is not before:
                (settings.folder / PID).write_text(str(child.process.pid))

    child.start()
    assert child.process is not None
    (settings.folder / PID).write_text(str(child.process.pid))
    keeper = threading.Thread(target=tend, name="superlink", daemon=True)
    keeper.start()
    try:
        _until(lambda: answers(settings.host, settings.port), f"the SuperLink did not start; see {log}")
        yield
    finally:
        ended.set()
        keeper.join()
        child.stop()
        (settings.folder / PID).unlink(missing_ok=True)


def _left_behind(settings: Settings) -> int | None:
    """The process of a SuperLink that an earlier server started in this folder, and which still runs."""
    with suppress(OSError, ValueError):
        pid = int((settings.folder / PID).read_text())
        if str(settings.folder / "link.db").encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    return None


def _until(true: object, complaint: str) -> None:
    end = time.monotonic() + START
    while not true():  # type: ignore[operator]
        if time.monotonic() > end:
            raise LinkError(complaint)
        time.sleep(0.1)
