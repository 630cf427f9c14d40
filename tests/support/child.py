"""everfed's command line in processes of their own that can be killed, at a moment or at a file operation.

Starting Python and importing torch takes seconds, so most of these processes are forked from one server that has done
it already (multiprocessing's forkserver, warm.py); they are real processes with a pid of their own. `python_m` starts
one the long way.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from multiprocessing.forkserver import ensure_running
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.support.waiting import HANG

KILLED = -signal.SIGKILL
WAIT = HANG  # seconds after which a process that should have ended is a failure

_ROOT = Path(__file__).resolve().parents[2]
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["tests.support.warm"])


@dataclass(frozen=True)
class Fate:
    """What befalls a process. dies_at: the file operation, counted from 1, at which it is killed. dies_over: it is
    killed when it is about to rename, make or remove something with this in its name. file_limit: the largest file
    it can write, in bytes. halts_at: it is stopped as soon as the log of its run holds that many events, or that many
    of a `kind`, until it is killed or continued, however slow the test is; settled: with its checkpoint written."""

    dies_at: int = 0
    dies_over: str = ""
    file_limit: int = 0
    halts_at: int = 0
    kind: str = ""
    settled: bool = False


@dataclass(frozen=True)
class Ended:
    """A process that is over. code: its exit code, or minus the signal that killed it."""

    code: int
    stdout: str
    stderr: str


class Child:
    """`python -m MODULE ARGUMENTS`, running in the folder `cwd`. terminal: it leads a process group of its own, as a
    command that is typed in a terminal does."""

    def __init__(
        self,
        cwd: Path,
        *arguments: str,
        fate: Fate = Fate(),  # noqa: B008 - frozen
        module: str = "everfed",
        terminal: bool = False,
    ) -> None:
        self._logs = [cwd / f".{name}-{time.monotonic_ns()}" for name in ("stdout", "stderr")]
        job = (module, list(arguments), str(cwd), [str(path) for path in self._logs], fate, terminal)
        self.process: BaseProcess = _SERVER.Process(target=_serve, args=job)
        with chdir(_ROOT):  # the server finds what it imports beside it
            ensure_running()
        self.process.start()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def kill(self) -> None:
        self.process.kill()

    def ctrl_c(self) -> None:
        """Of its terminal, where it reaches the processes that it has forked, too."""
        os.killpg(self.pid, signal.SIGINT)

    def go_on(self) -> None:
        """After it halted."""
        os.kill(self.pid, signal.SIGCONT)

    def alive(self) -> bool:
        return self.process.is_alive()

    def halted(self) -> bool:
        return state_of(self.pid) == "T"

    def wait(self) -> Ended:
        self.process.join(WAIT)
        code = self.process.exitcode
        if code is None:
            self.kill()
            raise AssertionError(f"still running after {WAIT:.0f} s: {self._texts()}")
        return Ended(code, *self._texts())

    def workers(self) -> list[int]:
        """Pids of the processes it has forked."""
        try:
            return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]
        except FileNotFoundError:
            return []

    def _texts(self) -> list[str]:
        return [path.read_text() if path.exists() else "" for path in self._logs]


def everfed(cwd: Path, *arguments: str, fate: Fate = Fate()) -> Ended:  # noqa: B008 - frozen
    """A command, to its end."""
    return Child(cwd, *arguments, fate=fate).wait()


def python_m(cwd: Path, *arguments: str) -> subprocess.Popen[str]:
    """The same, started as a user would."""
    command = [sys.executable, "-m", "everfed", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=cwd, env=environment, stdout=pipe, stderr=pipe, text=True)


@contextmanager
def running(cwd: Path, *arguments: str, fate: Fate = Fate()) -> Iterator[Child]:  # noqa: B008 - frozen
    """A command that is killed at the end of the block if it still runs; begins when it has halted, if it is to."""
    child = Child(cwd, *arguments, fate=fate)
    try:
        if fate.halts_at:
            until(child.halted, child)
            assert child.halted(), f"it ended before it halted: {child.wait()}"
        yield child
    finally:
        child.kill()
        child.wait()


def until(condition: Callable[[], Any], child: Child | subprocess.Popen[str] | None) -> None:
    """Wait for a condition, or for the end of the process that should bring it about, where there is one."""
    deadline = time.monotonic() + WAIT
    alive = child.alive if isinstance(child, Child) else lambda: child is None or child.poll() is None
    while not condition() and alive():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)


def state_of(pid: int) -> str:
    """R: running, S: sleeping, T: stopped by a signal, Z: ended, ...; "" when it is gone (proc(5))."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def events(folder: Path) -> list[dict[str, Any]]:
    """The events a run has written so far, half a line left out."""
    path = folder / "events.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def count(folder: Path, kind: str) -> int:
    return sum(event["event"] == kind for event in events(folder))


# inside the process ----------------------------------------------------------------------------------------------


def _serve(module: str, arguments: list[str], cwd: str, logs: Sequence[str], fate: Fate, terminal: bool) -> None:
    if terminal:
        os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what is started in a shell's background
    for descriptor, path in zip((1, 2), logs, strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), descriptor)
    os.chdir(cwd)
    sys.path.insert(0, cwd)
    if fate.file_limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (fate.file_limit, fate.file_limit))
    if fate.dies_at or fate.dies_over:
        sys.addaudithook(_Reaper(fate))
    if fate.halts_at:
        _halt_at(fate)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _halt_at(fate: Fate) -> None:
    from everfed.store.event_log import EventLog

    written = EventLog.__call__

    def write(log: EventLog, event: dict[str, Any]) -> None:
        written(log, event)
        folder = Path(log._file.name).parent
        if (count(folder, fate.kind) if fate.kind else len(events(folder))) < fate.halts_at:
            return
        EventLog.__call__ = written  # type: ignore[method-assign]
        for thread in threading.enumerate():
            if fate.settled and thread.name == "checkpoint":
                thread.join()
        os.kill(os.getpid(), signal.SIGSTOP)

    EventLog.__call__ = write  # type: ignore[method-assign]


class _Reaper:
    """Kills its process at the fated file operation: Python announces every one before it happens."""

    CHANGES = frozenset({"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate"})

    def __init__(self, fate: Fate) -> None:
        self.fate, self.operations = fate, 0

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in self.CHANGES and not (event == "open" and self._changes(arguments)):
            return
        self.operations += 1
        over = self.fate.dies_over and event != "open" and any(self.fate.dies_over in str(a) for a in arguments)
        if over or self.operations == self.fate.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    @staticmethod
    def _changes(arguments: tuple[Any, ...]) -> bool:
        """Opened for writing, or a folder to be synced."""
        path, _, flags = arguments
        writes = isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        return writes or (isinstance(path, (str, os.PathLike)) and os.path.isdir(path))
