"""Processes that belong together: started, restarted after a while when they end, and gone when their parent is."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

FIRST, LONGEST = 1.0, 60.0  # seconds before a process that ended is started again: doubled each time, up to this
STEADY = 30.0  # a process that lived this long starts over with the shortest wait
LAST_WORDS = 8192  # bytes at the end of a log in which the reason of an end is looked for
_PR_SET_PDEATHSIG = 1
# A model is copied many times on its way. By default glibc maps fresh pages for every large block and gives them back,
# and having them zeroed takes five times as long as the copy itself; below these bytes blocks and free memory are kept.
REUSE = {"MALLOC_MMAP_THRESHOLD_": str(256 << 20), "MALLOC_TRIM_THRESHOLD_": str(512 << 20)}

Say = Callable[[str], None]
Explain = Callable[[str], str]  # what a process wrote since it was started -> why it ended; "" where it does not say


def environment(home: Path) -> dict[str, str]:
    """For Flower's processes: their own folder, no telemetry, commands from this Python's environment."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    return {**REUSE, **os.environ, **quiet, "FLWR_HOME": str(home), "PATH": path, "PYTHONUNBUFFERED": "1"}


@dataclass
class Child:
    """One process. command: how to start it; log: where its output goes; explain: reads in it why it ended; relays: is
    what it writes said here, too?"""

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
    _begun: int = 0  # where its log ended when it was started
    _heard: int = 0  # how far its log was read

    def start(self) -> None:
        with open(self.log, "ab") as log:
            self._begun = self._heard = log.tell()
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

    def tend(self, say: Say) -> None:
        """Start it when it is due; notice when it has ended."""
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
        why = self.explain(self._last_words())
        told = f" ({why})" if why else ""
        say(f"{self.name} ended with code {code}{told}; starting it again in {self.wait:.0f} s (see {self.log})")

    def _relay(self, say: Say) -> None:
        """Say the lines that it has written since the last time."""
        with suppress(OSError), open(self.log, "rb") as log:
            log.seek(self._heard)
            lines, end, _ = log.read().rpartition(b"\n")
            self._heard += len(lines) + len(end)
            for line in lines.decode(errors="replace").splitlines():
                say(line)

    def _last_words(self) -> str:
        """What it wrote last."""
        with suppress(OSError), open(self.log, "rb") as log:
            log.seek(max(self._begun, log.seek(0, os.SEEK_END) - LAST_WORDS))
            return log.read().decode(errors="replace")
        return ""

    def stop(self, patience: float = 5.0) -> None:
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None


def tend(children: Sequence[Child], say: Say, poll: float = 0.2) -> None:
    """Keep all of them running until a signal ends this process."""

    def leave(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, leave)
    try:
        while True:
            for child in children:
                child.tend(say)
            time.sleep(poll)
    finally:
        for child in reversed(children):
            child.stop()


def die_with_parent(how: signal.Signals = signal.SIGTERM) -> None:
    """On Linux a child is told when its parent is gone, however it went."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, how)
