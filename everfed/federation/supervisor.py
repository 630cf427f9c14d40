"""Supervises child processes: restarts those that end, ends all of them with their parent, and notices that the folder
of their state was removed."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from everfed.errors import UserError
from everfed.federation.logs import stamped
from everfed.store.files import private

FIRST, LONGEST = 1.0, 60.0  # seconds before a process that ended is restarted: doubled each time, up to this
STEADY = 30.0  # after this many seconds of life a process is restarted with the shortest wait
LOG_TAIL = 8192  # bytes at the end of a log that are searched for the cause of an exit
POLL = 0.2  # seconds between two looks at the processes
CHUNK = 16 << 20  # bytes of one object of a message: each is a request with several transactions
_PR_SET_PDEATHSIG = 1
# A message is copied many times in transit. By default glibc maps fresh pages for every large block and returns them,
# and zeroing them takes five times as long as the copy itself; below these sizes memory is reused.
REUSE = {"MALLOC_MMAP_THRESHOLD_": str(256 << 20), "MALLOC_TRIM_THRESHOLD_": str(512 << 20)}

Say = Callable[[str], None]  # prints one line
Explain = Callable[[str], str]  # the output of a process since its start -> the cause of its exit, "" if unknown


def python() -> list[str]:
    """This Python, which imports nothing from the folder that it is started in: a file there is not to be code."""
    return [sys.executable, "-P"]


def environment(home: Path) -> dict[str, str]:
    """For Flower's processes: their own folder, no telemetry, large objects, this Python's commands."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    flower = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_HOME": str(home)}
    flower["FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE"] = str(CHUNK)
    return {**REUSE, **os.environ, **flower, "PATH": path, "PYTHONUNBUFFERED": "1"}


@dataclass
class Child:
    """One process. log: the file of its output; explain: finds the cause of its exit there; relays: print its output
    here, too?"""

    name: str
    command: Sequence[str]
    log: Path
    env: Mapping[str, str]
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    wait: float = FIRST
    due: float = 0.0
    deaths: int = field(default=0)
    explain: Explain = lambda text: ""
    relays: bool = False
    _log_start: int = 0  # size of the log when it was started
    _log_read: int = 0  # bytes of the log that were printed

    def start(self) -> None:
        with open(self.log, "ab", opener=private) as log:
            self._log_start = self._log_read = log.tell()
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(self.env),
                preexec_fn=die_with_parent,
                start_new_session=True,  # ctrl-C is the parent's to handle
            )
        self.started = time.monotonic()

    def check(self, say: Say) -> None:
        """Start the process when it is due, and schedule a restart when it has ended."""
        if self.process is None:
            if time.monotonic() >= self.due:
                self.start()
            return
        code = self.process.poll()
        if self.relays:
            self._relay(say)
        if code is None:
            return
        self.deaths += 1
        steady = time.monotonic() - self.started > STEADY
        self.wait = FIRST if steady or self.deaths == 1 else min(LONGEST, 2 * self.wait)
        self.due, self.process = time.monotonic() + self.wait, None
        cause = self.explain(self._log_tail())
        detail = f" ({cause})" if cause else ""
        ended = f"{self.name} ended with code {code}{detail}; restarting in {self.wait:.0f} s (see {self.log})"
        say(stamped(ended, logging.WARNING))

    def _relay(self, say: Say) -> None:
        """Print the lines that were written since the last call."""
        with suppress(OSError), open(self.log, "rb") as log:
            log.seek(self._log_read)
            lines, end, _ = log.read().rpartition(b"\n")
            self._log_read += len(lines) + len(end)
            for line in lines.decode(errors="replace").splitlines():
                say(line)

    def _log_tail(self) -> str:
        """The end of its output since it was started."""
        with suppress(OSError), open(self.log, "rb") as log:
            log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - LOG_TAIL))
            return log.read().decode(errors="replace")
        return ""

    def stop(self, timeout: float = 5.0) -> None:
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None


def supervise(children: Sequence[Child], say: Say, watch: Callable[[], None] = lambda: None) -> None:
    """Keep all of them running until a signal ends this process, or `watch`, called at every look, raises."""

    def leave(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, leave)
    try:
        while True:
            watch()
            for child in children:
                child.check(say)
            time.sleep(POLL)
    finally:
        for child in reversed(children):
            child.stop()


def die_with_parent() -> None:
    """On Linux a child gets SIGTERM when its parent ends, even if it is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class StateLost(UserError):
    """The state folder, or what lies in it, is gone."""


class FolderWatch:
    """files: names in the folder; each must stay from the first time that it is seen there."""

    def __init__(self, folder: Path, *files: str) -> None:
        self.folder, self.files = folder, files
        self._first = self._identities()

    def check(self) -> None:
        """Raises StateLost."""
        now = self._identities()
        for name, identity in self._first.items():
            if now.get(name) != identity:
                what = self.folder / name if name else self.folder
                raise StateLost(f"{what} was removed or replaced while this client was running: its state is lost")
        self._first = {**now, **self._first}

    def _identities(self) -> dict[str, tuple[int, int]]:
        """Device and inode of what is there; "" stands for the folder itself."""
        found = {}
        for name in ("", *self.files):
            try:
                status = (self.folder / name).stat()
            except OSError:
                continue
            found[name] = (status.st_dev, status.st_ino)
        return found
