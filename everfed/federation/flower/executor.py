"""Runs the ClientApps of a SuperNode, forked from a process that has Flower imported already.

Flower's own SuperExec starts a Python interpreter for each message, seconds of imports; a fork takes milliseconds. It
speaks the same interface: `flower-supernode --isolation process` leaves that to whoever asks for tasks.

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

import everfed.federation.flower.client_app  # noqa: F401 - what the forked processes need is here before they are
from everfed.federation.supervisor import die_with_parent
from everfed.federation.flower.tuning import tune
from everfed.federation.local import wake_listener

POLL = 0.05
RUNG = 1.0  # seconds between two looks where a wake_socket says when to: a look costs the SuperNode milliseconds


def serve(address: str, wait: Callable[[], None]) -> None:
    """Take tasks and run each in a process of its own, for ever; `wait` when there is none. The SuperNode may come and
    go."""
    acquire = _acquirer(address)
    while True:
        _reap()
        token = acquire()
        if token:
            _fork(address, token)
        else:
            wait()


def _acquirer(address: str) -> Callable[[], str]:
    """The token of the next task, or nothing."""
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
    # At once and without a word. Flower's own way, `parent_pid`, reports the task as ended without answering a message
    # that is still on its way in, and then nobody ever does; for a process that fell silent the SuperNode answers.
    die_with_parent(signal.SIGKILL)
    try:
        run_clientapp(address, token, insecure=True)
    except SystemExit as ended:
        os._exit(ended.code if isinstance(ended.code, int) else 1)
    finally:
        os._exit(1)


def _reap() -> None:
    """Let processes that have ended go."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="everfed-executor", description=__doc__.splitlines()[0])
    parser.add_argument("--runtime", required=True, metavar="HOST:PORT", help="the SuperNode's Runtime API")
    parser.add_argument("--poll", type=float, default=POLL, metavar="S", help="seconds between two looks for a task")
    parser.add_argument("--wake-socket", default=None, metavar="PATH", help="where the SuperNode says that there is one")
    chosen = parser.parse_args(arguments)
    tune()
    serve(chosen.runtime, wake_listener(chosen.wake_socket, RUNG) if chosen.wake_socket else lambda: time.sleep(chosen.poll))


if __name__ == "__main__":
    main()
