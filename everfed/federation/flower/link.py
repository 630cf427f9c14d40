"""A run on a SuperLink in this process: submits everfed's app, takes its server task, and sends its heartbeats.

So the server is the process that the user started, with its own console. All of it goes through the SuperLink's unix
socket, which only the user who started the SuperLink can open.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from everfed.federation.flower.app import bundle
from everfed.federation.flower.internals import (
    AcquireTaskRequest,
    ControlHttpClient,
    HttpGrid,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    RetryInvoker,
    RuntimeHttpClient,
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SendTaskHeartbeatRequest,
    StartRunRequest,
    TaskIdentity,
    run_from_proto,
    through_socket,
)
from everfed.federation.flower.pulling import Puller
from everfed.federation.flower.replies import Reply
from everfed.federation.local import control_socket

SERVER_APP, COMPLETED = "flwr-serverapp", "completed"  # Flower's words for the task of a server, and for its end
HEARTBEAT = 15.0
OUTAGE = 90.0  # seconds without the SuperLink after which a new run is submitted to it


@dataclass(frozen=True)
class Address:
    """A SuperLink. root: the certificate of its authority; None without TLS."""

    host: str
    port: int
    root: bytes | None = None

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def control(self) -> Path:
        """The unix socket on which runs and nodes are managed."""
        return control_socket(self.port)


class HeldGrid(HttpGrid):
    """Flower's grid on a task of this process. It waits for the end of an outage, and raises other errors, where
    Flower's own would end the process."""

    def __init__(self, address: Address, token: str) -> None:
        super().__init__(str(address), address.root is None, address.root, token=token)
        self._address = address
        self._retry_invoker = RetryInvoker(
            lambda: (most for most in itertools.repeat(2.0)),
            httpx.TransportError,
            max_tries=None,
            max_time=OUTAGE,
            on_backoff=self._missed,
        )
        self.outages = 0  # how often the SuperLink did not answer
        self.limit = 0  # bytes of one reply; set before messages are pulled
        self._puller: Puller | None = None  # from the first pull on: the task's run is known then
        self._ended = threading.Event()
        self._heartbeats = threading.Thread(target=self._send_heartbeats, name="heartbeat", daemon=True)

    def _connect(self) -> None:
        """Called by Flower before the first request."""
        version, token = RuntimeVersionHttpInterceptor("flwr-serverapp"), RuntimeTokenHttpInterceptor(self._token)
        address, retry = self._address, self._retry_invoker
        self._client = through_socket(RuntimeHttpClient, address.control, address.root, (version, token), retry)

    def _missed(self, state: object) -> None:
        self.outages += 1

    def begin(self) -> None:
        """Take the task's input: from here on its run is running."""
        taken = self._runtime_client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id = taken.task_id, taken.run.run_id
        TaskIdentity.node_id = taken.context.node_id
        self.set_run(run_from_proto(taken.run))
        self._heartbeats.start()

    def pull(self, tickets: list[str]) -> list[tuple[str, Reply]]:
        """Replies within the limit; failures in place of larger ones and of malformed ones."""
        if self._puller is None:
            self._puller = Puller(self._runtime_client, self.node, self.run.run_id)
        return self._puller.pull(tickets, self.limit)

    def wait(self, seconds: float) -> None:
        """Until a reply that was announced is complete, or for so long."""
        self._puller.wait(seconds) if self._puller is not None else time.sleep(seconds)

    def forget(self, tickets: Iterable[str]) -> None:
        """Stop pulling the replies to these messages."""
        if self._puller is not None:
            self._puller.forget(tickets)

    def _send_heartbeats(self) -> None:
        """The SuperLink ends a task after a minute without a heartbeat."""
        while not self._ended.wait(HEARTBEAT):
            try:
                self._runtime_client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
            except httpx.HTTPError:
                continue  # the next call of the grid raises the error

    def close(self) -> None:
        """End the run on the SuperLink."""
        self._ended.set()
        if self._puller is not None:
            self._puller.close()
        self._retry_invoker.max_tries = 1
        with contextlib.suppress(httpx.HTTPError):  # else it ends by itself, for lack of heartbeats
            self._runtime_client.PushTaskOutput(PushTaskOutputRequest(sub_status=COMPLETED, details=""))
        super().close()


def open_grid(address: Address) -> HeldGrid:
    """Submit a run and hold it. Raises httpx.HTTPError while the SuperLink is away."""
    run_id = _submit(address)
    version = RuntimeVersionHttpInterceptor(component_name="SuperExec")
    with through_socket(RuntimeHttpClient, address.control, address.root, [version]) as client:
        while True:
            taken = client.AcquireTask(AcquireTaskRequest(supported_task_types=[SERVER_APP]))
            if not taken.token:
                time.sleep(0.1)
                continue
            grid = HeldGrid(address, taken.token)
            grid.begin()
            if taken.task.run_id == run_id:
                return grid
            grid.close()  # submitted by a server that was killed before it could take it


def open_control(address: Address) -> ControlHttpClient:
    """A client of the interface by which runs and nodes are managed."""
    version = RuntimeVersionHttpInterceptor(component_name="flwr CLI")
    return through_socket(ControlHttpClient, address.control, address.root, [version])


def _submit(address: Address) -> int:
    fab: Any = vars(bundle())
    with open_control(address) as client:
        return int(client.StartRun(StartRunRequest(fab=fab)).run_id)
