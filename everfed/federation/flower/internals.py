"""Flower's names outside its public interface, for the modules of this folder; `touches` lists and checks them."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx
from flwr.cli.build import build_fab_from_files
from flwr.common.serde import run_from_proto
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, StartRunRequest, UnregisterNodeRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectPushError,
    ObjectUnavailableError,
    inflate_object_from_contents,
    push_objects,
)
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.retry import RetryInvoker
from flwr.supercore.run import RunNotRunningException
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid.http_grid import HttpGrid

__all__ = [
    "AcquireTaskRequest",
    "ConfirmMessageReceivedRequest",
    "ControlHttpClient",
    "HttpGrid",
    "ListNodesRequest",
    "ObjectPullError",
    "ObjectPushError",
    "ObjectUnavailableError",
    "PullAppMessagesRequest",
    "PullTaskInputRequest",
    "PushTaskOutputRequest",
    "RegisterNodeRequest",
    "RetryInvoker",
    "RunNotRunningException",
    "RuntimeHttpClient",
    "RuntimeTokenHttpInterceptor",
    "RuntimeVersionHttpInterceptor",
    "SendTaskHeartbeatRequest",
    "StartRunRequest",
    "TaskIdentity",
    "UnregisterNodeRequest",
    "build_fab_from_files",
    "fetch_objects",
    "get_all_nested_objects",
    "get_object_tree",
    "inflate_object_from_contents",
    "iterate_object_tree",
    "make_pull_object_fn_protobuf",
    "no_object_id_recompute",
    "push_objects",
    "run_from_proto",
    "through_socket",
]

FIRST, LONGEST = 0.05, 0.5  # seconds before an object that has not arrived is requested again, doubled up to this
Client = TypeVar("Client")


def fetch_objects(names: list[str], fetch: Callable[[str], bytes]) -> dict[str, bytes]:
    """The objects of a message, which is announced before they arrive. For a missing one Flower sleeps for a second,
    two, four, up to ten; that was most of a small phase. It gives up after two hours."""
    waits = {"initial_backoff": FIRST, "backoff_cap": LONGEST, "max_tries_per_object": None}
    return inflatable_utils.pull_objects(names, fetch, **waits)  # type: ignore[arg-type]


def through_socket(
    kind: Callable[..., Client], path: Path, root: bytes | None, interceptors: Sequence[Any], retry: Any = None
) -> Client:
    """A client of one of the SuperLink's interfaces over a unix socket. root: the certificate of its authority, None
    without TLS."""
    scheme, verify = "http", ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if root is not None:
        scheme = "https"
        verify.load_verify_locations(cadata=root.decode("ascii"))
    client: Any = kind(f"{scheme}://localhost", interceptors=interceptors, verify=verify, retry_invoker=retry)
    plain, transport = client._client, httpx.HTTPTransport(uds=str(path), verify=verify)
    client._client = httpx.Client(transport=transport, timeout=plain.timeout, follow_redirects=True)
    plain.close()
    return client
