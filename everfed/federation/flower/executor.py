"""Runs the ClientApps of a SuperNode, forked from a process that has Flower imported already.

Flower's own SuperExec starts a Python interpreter for each message, with seconds of imports; a fork takes milliseconds.
It uses the same interface: with `flower-supernode --isolation process` any process may fetch tasks.

    python -m everfed.federation.flower.executor --runtime 127.0.0.1:PORT [--wake-socket PATH]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence

import httpx
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import run_clientapp

import everfed.federation.flower.client_app  # noqa: F401 - imported before the first fork
from everfed.federation.flower.tuning import tune
from everfed.federation.local import wake_listener
from everfed.federation.supervisor import die_with_parent

POLL = 0.05  # seconds between two polls for a task
SLOW_POLL = 1.0  # the same with a wake socket: a poll costs the SuperNode milliseconds


def serve(address: str, wait: Callable[[], None]) -> None:
    """Fetch tasks and run each in a process of its own, for ever; `wait` when there is none. The SuperNode may be
    restarted meanwhile."""
    acquire = _acquirer(address)
    while True:
        _reap()
        token = acquire()
        if token:
            _fork(address, token)
        else:
            wait()


def _acquirer(address: str) -> Callable[[], str]:
    """A function that returns the token of the next task, or ""."""
    version = RuntimeVersionHttpInterceptor(component_name="SuperExec")
    client = RuntimeHttpClient.from_server_address(address, True, None, [version])
    request = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])

    def acquire() -> str:
        try:
            return str(client.AcquireTask(request).token)
        except httpx.HTTPError:  # it is being started, or restarted
            time.sleep(0.5)
            return ""

    return acquire


def _fork(address: str, token: str) -> None:
    if os.fork():
        return
    # Killed at once. Flower's own `parent_pid` reports the task as ended without answering a message that is still
    # arriving, which then stays unanswered; for a process without heartbeats the SuperNode sends an error.
    die_with_parent(signal.SIGKILL)
    try:
        run_clientapp(address, token, insecure=True)
    except SystemExit as ended:
        os._exit(ended.code if isinstance(ended.code, int) else 1)
    finally:
        os._exit(1)


def _reap() -> None:
    """Collect the exit codes of processes that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="everfed-executor", description=__doc__.splitlines()[0])
    parser.add_argument("--runtime", required=True, metavar="HOST:PORT", help="the SuperNode's Runtime API")
    parser.add_argument("--poll", type=float, default=POLL, metavar="S", help="seconds between two polls for a task")
    parser.add_argument("--wake-socket", default=None, metavar="PATH", help="where the SuperNode reports a new task")
    chosen = parser.parse_args(arguments)
    tune()
    wait = wake_listener(chosen.wake_socket, SLOW_POLL) if chosen.wake_socket else lambda: time.sleep(chosen.poll)
    serve(chosen.runtime, wait)


if __name__ == "__main__":
    main()
