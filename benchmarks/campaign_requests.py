"""Requests to a federation on loopback from those who have no business there: without a key, with the key of another
client, as another user of the machine."""

from __future__ import annotations

import json
import os
import random
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from everfed.federation.certificates import SECRETS
from everfed.federation.proxy import FLEET
from tests.federation.secured import signature

TIMEOUT = 3.0  # seconds to wait for an answer
NOBODY = 65534
PROTOBUF = {"Content-Type": "application/protobuf"}


@dataclass(frozen=True)
class Target:
    """What is attacked. port: the SuperLink's; pki: its folder of keys, of which `spare` and `stranger` are the
    attacker's; nodes: the honest clients' node ids; run: the id of Flower's run; sockets, files: of the owner alone."""

    port: int
    pki: Path
    nodes: list[int] = field(default_factory=list)
    run: int = 0
    sockets: list[Path] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)


@dataclass(frozen=True)
class Request:
    """send: returns what came back, in a word. refused: nothing but a refusal may come back."""

    name: str
    send: Callable[[], str]
    refused: bool = True


def requests(target: Target, rng: random.Random) -> list[Request]:
    """All of them, in a drawn order."""
    found = [*_bytes(target, rng), *_paths(target), *_unsigned(target, rng), *_registered(target, rng)]
    found += _as_nobody(target)
    rng.shuffle(found)
    return found


def is_refusal(answer: str) -> bool:
    return not answer.startswith("status 2")


# bytes ----------------------------------------------------------------------------------------------------------------
def _bytes(target: Target, rng: random.Random) -> Iterator[Request]:
    """Bytes that are no call, bare and inside TLS."""
    call = b"POST /v1/fleet/get-run HTTP/1.1\r\nHost: x\r\n"
    texts = {
        "random bytes": rng.randbytes(400),
        "a megabyte of random bytes": rng.randbytes(1 << 20),
        "zeros": bytes(5000),
        "a line without an end": b"POST " + b"A" * 200_000,
        "a header of a megabyte": call + b"X: " + b"a" * (1 << 20) + b"\r\n\r\n",
        "ten thousand headers": b"POST / HTTP/1.1\r\n" + b"".join(b"X%d: 1\r\n" % n for n in range(10_000)) + b"\r\n",
        "a length of ten gigabytes": call + b"Content-Length: 9999999999\r\n\r\nab",
        "a negative length": call + b"Content-Length: -5\r\n\r\n",
        "two lengths": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        "a chunk that never ends": call + b"Transfer-Encoding: chunked\r\n\r\nFFF\r\nab",
        "a chunk of odd size": call + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n",
        "smuggled": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 60\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
                    b"POST /v1/control/list-runs HTTP/1.1\r\nHost: x\r\n\r\n",
        "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(50),
        "HTTP 9": b"POST / HTTP/9.9\r\n\r\n",
        "a websocket": b"GET /v1/control HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                       b"Sec-WebSocket-Key: AAAA\r\nSec-WebSocket-Version: 13\r\n\r\n",
        "a NUL in the path": b"GET /\0 HTTP/1.1\r\nHost: x\r\n\r\n",
        "everfed's own frame": b"\x10\0\0\0" + b'{"header":{}}   ',
    }  # fmt: skip
    for name, data in texts.items():
        for inside in (False, True):
            yield Request(f"{name}, {'inside' if inside else 'without'} TLS", _sender(target, data, inside))
    yield Request(
        "half a handshake", _sender(target, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40), False)
    )
    for n in range(5):
        yield Request(f"a connection that stays open {n}", lambda: _held(target))


def _sender(target: Target, data: bytes, inside: bool) -> Callable[[], str]:
    return lambda: _exchange(target.port, data, inside)


def _exchange(port: int, data: bytes, inside: bool) -> str:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT) as plain:
            connection: socket.socket = _anything().wrap_socket(plain) if inside else plain
            with connection:
                connection.sendall(data)
                first = connection.recv(64)
    except (OSError, ssl.SSLError) as error:
        return type(error).__name__
    return f"status {first.split()[1].decode()}" if first.startswith(b"HTTP/1.1 ") else f"{len(first)} bytes"


def _anything() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


_open: list[socket.socket] = []


def _held(target: Target) -> str:
    """A connection that says nothing, until this process ends."""
    _open.append(socket.create_connection(("127.0.0.1", target.port), timeout=TIMEOUT))
    return "open"


# calls ----------------------------------------------------------------------------------------------------------------
def _call(target: Target, path: str, body: bytes = b"", method: str = "POST", **headers: str) -> Callable[[], str]:
    def send() -> str:
        try:
            with httpx.Client(verify=False, timeout=TIMEOUT) as client:
                url = f"https://127.0.0.1:{target.port}{path}"
                answer = client.request(method, url, content=body, headers={**PROTOBUF, **headers})
                return f"status {answer.status_code}"
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return type(error).__name__

    return send


def _paths(target: Target) -> Iterator[Request]:
    """Flower's interfaces for runs and tasks, straight and by other spellings."""
    control = ("start-run", "stop-run", "list-runs", "stream-logs", "list-nodes", "register-node", "unregister-node",
               "create-federation", "pull-artifacts")  # fmt: skip
    runtime = ("acquire-task", "pull-task-input", "push-task-output", "push-messages", "pull-messages", "get-nodes",
               "send-task-heartbeat", "request-token", "pull-object")  # fmt: skip
    for call in control:
        yield Request(f"control {call}", _call(target, f"/v1/control/{call}"))
    for call in runtime:
        yield Request(f"runtime {call}", _call(target, f"/v1/runtime/{call}"))
    others = ("/v1/fleet/../control/list-runs", "//v1/control/list-runs", "/v1/%63ontrol/list-runs", "/docs",
              "/metrics", "/v1/control/list-runs/", "/V1/CONTROL/LIST-RUNS", "/v1/fleet/%2e%2e/control/list-runs",
              "/openapi.json",
              "/v1/control/list-runs?x=/v1/fleet/get-run", "/v1/control;/list-runs", "/", "/" + "a" * 8000)  # fmt: skip
    for path in others:
        yield Request(f"path {path[:60]}", _call(target, path))
    for method in ("GET", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH"):
        yield Request(f"{method} get-run", _call(target, "/v1/fleet/get-run", method=method))


def _unsigned(target: Target, rng: random.Random) -> Iterator[Request]:
    """SuperNodes' calls without a key, with nonsense for one, with a stranger's, with an old signature."""
    wrong = {"flwr-public-key": "AAAA", "flwr-signature": "AAAA", "flwr-timestamp": "x"}
    for call in FLEET:
        path = f"/v1/fleet/{call}"
        yield Request(f"{call} without a signature", _call(target, path))
        yield Request(f"{call} with a signature of nonsense", _call(target, path, rng.randbytes(50), **wrong))
        yield Request(f"{call} with a stranger's key", _signed(target, path, "stranger", rng.randbytes(30)))
        yield Request(f"{call} with an old signature", _signed(target, path, "spare", age=400.0))
    yield Request("twenty megabytes without a signature", _call(target, "/v1/fleet/push-object", bytes(20 << 20)))


def _signed(target: Target, path: str, who: str, body: bytes = b"", age: float = 0.0) -> Callable[[], str]:
    secret = target.pki / SECRETS / who
    return lambda: _call(target, path, body, **signature(secret, age))()


def _registered(target: Target, rng: random.Random) -> Iterator[Request]:
    """Calls with the key of a registered client that belongs to the attacker, about other clients and about nothing."""
    from flwr.proto import fleet_pb2 as fleet
    from flwr.proto import message_pb2 as message
    from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
    from flwr.proto.node_pb2 import Node
    from flwr.proto.run_pb2 import GetRunRequest

    def signed(name: str, call: str, proto: Any, refused: bool = True) -> Request:
        body = proto if isinstance(proto, bytes) else proto.SerializeToString()
        return Request(f"a client: {name}", _signed(target, f"/v1/fleet/{call}", "spare", body), refused)

    for node in target.nodes:
        other = Node(node_id=node)
        yield signed("another's messages", "pull-messages", fleet.PullMessagesRequest(node=other))
        yield signed("another's heartbeat", "send-node-heartbeat",
                     SendNodeHeartbeatRequest(node=other, heartbeat_interval=30))  # fmt: skip
        yield signed("ends another", "deactivate-node", fleet.DeactivateNodeRequest(node_id=node))
        yield signed("removes another", "unregister-node", fleet.UnregisterNodeFleetRequest(node_id=node))
        yield signed("another's object", "pull-object",
                     message.PullObjectRequest(node=other, run_id=target.run, object_id="0" * 64))  # fmt: skip
        yield signed("an object for another", "push-object", message.PushObjectRequest(
            node=other, run_id=target.run, object_id="0" * 64, object_content=b"evil"))  # fmt: skip
        yield signed("confirms another's message", "confirm-message-received", message.ConfirmMessageReceivedRequest(
            node=other, run_id=target.run, message_object_id="0" * 64))  # fmt: skip
        forged = fleet.PushMessagesRequest(node=other)
        one = forged.messages_list.add()
        one.metadata.run_id, one.metadata.src_node_id, one.metadata.dst_node_id = target.run, node, 1
        one.metadata.reply_to_message_id = "0" * 64
        yield signed("a reply in another's name", "push-messages", forged)
    for call in FLEET:
        if call not in ("unregister-node", "deactivate-node"):  # its own, by an empty message, would end the attack
            for n in range(3):
                yield signed(f"{call} of random bytes {n}", call, rng.randbytes(rng.randrange(1, 300)), refused=False)
    yield signed("thirty megabytes", "push-object", message.PushObjectRequest(
        node=Node(node_id=1), run_id=target.run, object_id="0" * 64, object_content=bytes(30 << 20)))  # fmt: skip
    for run in (0, 1, 2**63, target.run):
        yield signed(f"run {run}", "get-run", GetRunRequest(node=Node(node_id=1), run_id=run), refused=False)


# another user ---------------------------------------------------------------------------------------------------------
def _as_nobody(target: Target) -> Iterator[Request]:
    """Sockets and files of the owner, as another user of the machine; only root can take that user's place."""
    if os.getuid() != 0:
        return
    for path in target.sockets:
        yield Request(f"another user connects to {path.name}", lambda path=path: _try(path, "connect"))
    for path in target.files:
        for what in ("read", "write", "list"):
            yield Request(f"another user: {what} {path.name}", lambda path=path, what=what: _try(path, what))


TRY = f"""
import os, socket, sys
path, what = sys.argv[1:]
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
try:
    if what == "connect":
        socket.socket(socket.AF_UNIX).connect(path)
    elif what == "list":
        os.listdir(path if os.path.isdir(path) else os.path.dirname(path))
    else:
        open(path, "rb" if what == "read" else "r+b").close()
except OSError as error:
    print(type(error).__name__)
else:
    print("status 200")
"""  # fmt: skip


def _try(path: Path, what: str) -> str:
    done = subprocess.run([sys.executable, "-c", TRY, str(path), what], capture_output=True, text=True, timeout=30)
    return done.stdout.strip() or json.dumps(done.stderr[-200:])
