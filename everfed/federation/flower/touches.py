"""The names outside Flower's public interface that everfed uses, and the check that the installed version has them.

Flower may change these between two versions without notice. A version on which a name is missing, or takes other
parameters, is refused with the list of what does not fit. Only the modules of this folder import them, most of them
through `internals`.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import Any

from everfed.errors import UserError

TESTED = ("1.41.0", "1.42.0")  # versions that pass the federation's tests


class FlowerVersionError(UserError):
    """The installed Flower lacks something that everfed uses."""


@dataclass(frozen=True)
class Touch:
    """A name in a module of Flower. where: `module:name` or `module:Class.name`; why: what it is used for; parameters:
    those that are passed by name, or in this order; attributes: those that are read or replaced on it."""

    where: str
    why: str
    parameters: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()

    def problem(self) -> str:
        """Why this does not fit the installed Flower; "" if it does."""
        module, _, name = self.where.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError):
            return f"{self.where} is missing ({self.why})"
        lacking = [one for one in self.parameters if one not in _parameters(found)]
        lacking += [one for one in self.attributes if not hasattr(found, one)]
        return f"{self.where} has no {', '.join(lacking)} ({self.why})" if lacking else ""


def _parameters(found: Any) -> set[str]:
    try:
        return set(inspect.signature(found).parameters)
    except (TypeError, ValueError):
        return set()


_UTILS = "flwr.supercore.inflatable.inflatable_utils"
_OBJECT = "flwr.supercore.inflatable.inflatable_object"
_PROTOBUF = "flwr.supercore.inflatable.inflatable_protobuf_utils"
TOUCHES = (
    # both ends
    Touch(f"{_UTILS}:pull_objects", "fetching a message's objects with short waits",
          ("object_ids", "pull_object_fn", "initial_backoff", "backoff_cap", "max_tries_per_object")),
    Touch(f"{_UTILS}:push_objects", "sending a message's objects", ("objects", "push_object_fn", "object_ids_to_push")),
    Touch(f"{_UTILS}:inflate_object_from_contents", "decoding a message", ("object_id", "object_contents")),
    Touch(f"{_UTILS}:ObjectPullError", "errors of fetching"),
    Touch(f"{_UTILS}:ObjectUnavailableError", "errors of fetching"),
    Touch(f"{_UTILS}:ObjectPushError", "errors of sending"),
    Touch(f"{_OBJECT}:iterate_object_tree", "the objects of a message"),
    Touch(f"{_OBJECT}:get_object_tree", "the objects of a message"),
    Touch(f"{_OBJECT}:get_all_nested_objects", "the objects of a message"),
    Touch(f"{_OBJECT}:no_object_id_recompute", "hashing every object once"),
    Touch("flwr.supercore.run:RunNotRunningException", "a run that has ended"),
    Touch("flwr.supercore.interceptors:RuntimeVersionHttpInterceptor", "every call's version", ("component_name",)),
    # the server
    Touch("flwr.cli.build:build_fab_from_files", "everfed's app as Flower's bundle"),
    Touch("flwr.common.serde:run_from_proto", "the run of a task"),
    Touch(f"{_PROTOBUF}:make_pull_object_fn_protobuf", "fetching replies"),
    Touch("flwr.supercore.control:ControlHttpClient", "runs and nodes on the SuperLink",
          ("base_url", "interceptors", "retry_invoker"),
          ("StartRun", "ListNodes", "RegisterNode", "UnregisterNode")),
    Touch("flwr.supercore.runtime:RuntimeHttpClient", "tasks and messages on the SuperLink",
          ("base_url", "interceptors", "retry_invoker"),
          ("AcquireTask", "PullTaskInput", "PushTaskOutput", "SendTaskHeartbeat", "PullMessages",
                      "PullObject", "ConfirmMessageReceived")),
    Touch("flwr.supercore.retry:RetryInvoker", "waiting for the end of an outage",
          ("wait_gen_factory", "recoverable_exceptions", "max_tries", "max_time", "on_backoff")),
    Touch("flwr.supercore.interceptors:RuntimeTokenHttpInterceptor", "the server's task", ("token",)),
    Touch("flwr.supercore.task_identity:TaskIdentity", "the sender of messages"),
    Touch("flwr.superlink.grid.http_grid:HttpGrid", "sending messages",
          attributes=("_connect", "_runtime_client", "set_run", "get_nodes", "push_messages")),
    # the SuperNode
    Touch("flwr.supernode.fleet_http_connection:http_request_response", "a SuperNode's connection",
          ("server_address", "insecure", "root_certificates", "authentication_keys")),
    Touch("flwr.supernode.fleet_http_connection:HEARTBEAT_DEFAULT_INTERVAL", "more frequent heartbeats"),
    Touch("flwr.supercore.heartbeat:HEARTBEAT_DEFAULT_INTERVAL", "more frequent heartbeats"),
)  # fmt: skip


def problems() -> list[str]:
    """What of the installed Flower does not fit."""
    return [found for found in (touch.problem() for touch in TOUCHES) if found]


def installed_version() -> str:
    from importlib.metadata import version

    return version("flwr")


def require_fitting() -> None:
    """Raises FlowerVersionError with everything that does not fit. Tested versions are not looked through."""
    version = installed_version()
    found = [] if version in TESTED else problems()
    if found:
        raise FlowerVersionError(f"flwr {version} does not fit; install {' or '.join(TESTED)}: {'; '.join(found)}")
