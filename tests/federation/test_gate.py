"""What a SuperLink answers to whom, decided from headers: no body of a refused call is read."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from everfed.federation import certificates
from everfed.federation.flower.gate import LIMIT, PULL, SMALL, TOLERANCE, Door, Gate, Limits
from everfed.federation.local import entrance
from everfed.federation.proxy import BODY
from tests.federation.secured import signature
from tests.federation.test_local_users import superlink
from tests.support.ports import free_port
from tests.support.waiting import HANG

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

LARGE = {"content-length": str(SMALL + 1)}


@pytest.fixture
def pki(tmp_path: Path) -> Path:
    certificates.make_authority(tmp_path / "pki")
    for name in ("site-a", "stranger"):
        certificates.make_client(tmp_path / "pki", name)
    (tmp_path / "pki" / certificates.CLIENTS / "stranger.pub").unlink()
    return tmp_path / "pki"


class Calls:
    """A gate, and what came through it."""

    def __init__(self, clients: Path | None) -> None:
        self.limits, self.passed, self.message = Limits(), 0, b""
        self.gate: Any = Gate(self._flower, self.limits, clients)

    async def _flower(self, scope: Any, receive: Any, send: Any) -> None:
        self.passed += 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": self.message})

    def deliver(self, headers: dict[str, str]) -> None:
        """A message is handed out to this client."""
        self.message = b"a message"
        assert self.status({**headers, "content-length": "2"}, PULL) == 200
        self.message = b""

    def status(self, headers: dict[str, str], path: str = "/v1/fleet/pull-object") -> int:
        sent: list[Any] = []

        async def receive() -> Any:
            raise AssertionError("the gate reads no body")

        async def send(message: Any) -> None:
            sent.append(message)

        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "method": "POST", "path": path, "headers": pairs}
        with ThreadPoolExecutor(1) as thread:  # a browser's tests leave a running loop in this one
            thread.submit(asyncio.run, self.gate(scope, receive, send)).result()
        return int(sent[0]["status"])


def test_large_bodies_are_for_enrolled_keys_only(pki: Path) -> None:
    calls, signed = Calls(pki / certificates.CLIENTS), signature(pki / certificates.SECRETS / "site-a")
    stranger = signature(pki / certificates.SECRETS / "stranger")
    assert calls.status({"content-length": str(SMALL)}) == 200  # Flower refuses it, and says why
    assert calls.status({**LARGE, **signed}) == 200
    borrowed = {**stranger, "flwr-public-key": signed["flwr-public-key"]}
    old = signature(pki / certificates.SECRETS / "site-a", age=TOLERANCE + 1)
    early = signature(pki / certificates.SECRETS / "site-a", age=-TOLERANCE - 1)
    for headers in ({}, stranger, borrowed, old, early, {**signed, "flwr-timestamp": "x"}):
        assert calls.status({**LARGE, **headers}) == 401, headers
    assert calls.passed == 2


def test_nobody_sends_more_than_the_protocol_needs_or_without_saying_how_much(pki: Path) -> None:
    signed = signature(pki / certificates.SECRETS / "site-a")
    for calls in (Calls(pki / certificates.CLIENTS), Calls(None)):
        assert calls.status({"content-length": str(BODY << 20), **signed}) == 200
        assert calls.status({"content-length": str((BODY << 20) + 1), **signed}) == 413
        assert calls.status({"transfer-encoding": "chunked", **signed}) == 411
        assert calls.status({"content-length": "-1", **signed}) == 411


def test_a_key_that_is_enrolled_later_counts_and_a_revoked_one_does_not(pki: Path) -> None:
    calls = Calls(pki / certificates.CLIENTS)
    signed = signature(pki / certificates.SECRETS / "site-a")
    assert calls.status({**LARGE, **signed}) == 200
    certificates.make_client(pki, "site-b")
    assert calls.status({**LARGE, **signature(pki / certificates.SECRETS / "site-b")}) == 200
    certificates.revoke(pki, "site-a")
    assert calls.status({**LARGE, **signed}) == 401


def test_a_client_may_send_a_reply_of_the_limit_for_each_message_that_it_got(pki: Path) -> None:
    """Flower itself has no limit. Each client has its own; announcing replies and asking for messages does not help."""
    site_b = signature(certificates.make_client(pki, "site-b"))
    for folder in (pki / certificates.CLIENTS, None):
        calls, signed = Calls(folder), signature(pki / certificates.SECRETS / "site-a")
        calls.limits.limit = 1000

        def push(size: int, who: dict[str, str], calls: Calls = calls) -> int:
            return calls.status({**who, "content-length": str(size)}, "/v1/fleet/push-object")

        assert push(1, signed) == 413
        calls.deliver(signed)
        assert [push(600, signed), push(400, signed), push(1, signed)] == [200, 200, 413]
        for path in (PULL, "/v1/fleet/push-messages"):
            calls.status({**signed, "content-length": "2"}, path)
        assert push(1, signed) == 413 and push(1, site_b) == 413
        calls.deliver(signed)
        assert push(1000, signed) == 200


def test_nobody_uses_up_what_another_client_may_send(pki: Path) -> None:
    """Objects need a signature, so a stranger who shows another's key does not count for it."""
    calls, signed = Calls(pki / certificates.CLIENTS), signature(pki / certificates.SECRETS / "site-a")
    calls.limits.limit = 1000
    calls.deliver(signed)
    forged = {**signed, "flwr-signature": "AAAA", "content-length": "1000"}
    assert calls.status(forged, "/v1/fleet/push-object") == 401
    assert calls.status({**signed, "content-length": "1000"}, "/v1/fleet/push-object") == 200


def test_only_the_door_answers_other_calls(pki: Path) -> None:
    calls = Calls(pki / certificates.CLIENTS)
    for path in ("/v1/control/start-run", "/v1/runtime/acquire-task", "/docs", "/v1/fleet/unknown", f"{LIMIT}1"):
        assert calls.status({}, path) == 403
    limits = calls.limits
    calls.gate = Door(calls.gate.app, "secret", limits)
    words = {"proxy-authorization": "Basic ZXZlcmZlZDpzZWNyZXQ="}  # everfed:secret
    for path in ("/v1/control/start-run", "/v1/runtime/acquire-task", "/docs"):
        assert calls.status({}, path) == calls.status({"proxy-authorization": "Basic eDp5"}, path) == 403
        assert calls.status({**words, "content-length": str(BODY << 21)}, path) == 200
    assert calls.status(words, f"{LIMIT}77") == 200 and limits.limit == 77


@pytest.mark.federation
@pytest.mark.usefixtures("patient")
def test_a_superlink_refuses_a_large_call_without_a_key_before_its_body(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger announces 32 MiB and sends none of them. The answer comes at once; Flower alone waits for all of them
    and keeps them in memory before it looks for a key. The process listens at its port and its door alone."""
    for api in ("CONTROL", "FLEET"):
        monkeypatch.setenv(f"FLWR_INTERNAL_GRPC_{api}_API", "1")
    with superlink(tmp_path, secure=True) as (port, root):
        assert root is not None
        context = ssl.create_default_context(cadata=root.decode())
        plain = socket.create_connection(("127.0.0.1", port), timeout=HANG)
        with plain, context.wrap_socket(plain, server_hostname="127.0.0.1") as connection:
            head = f"POST /v1/fleet/push-object HTTP/1.1\r\nHost: x\r\nContent-Length: {32 << 20}\r\n\r\n"
            connection.sendall(head.encode())
            assert connection.recv(1000).startswith(b"HTTP/1.1 401")
        pid = int((tmp_path / "link" / "superlink.pid").read_text())
        door = entrance(port)
        assert door is not None and sorted(listening(pid)) == sorted([port, door.port])


def test_a_flower_that_opens_its_port_itself_is_not_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version might not call `uvicorn.run`; then nothing is answered, rather than everything to everybody."""
    import uvicorn

    from everfed.federation.flower import superlink as module

    def flower_superlink() -> None:
        words = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=False))
        socket.create_server((words["--host"], int(words["--port"]))).close()

    entry = SimpleNamespace(load=lambda: flower_superlink)
    monkeypatch.setattr(module, "entry_points", lambda **names: [entry])
    monkeypatch.setattr(uvicorn, "run", uvicorn.run)
    monkeypatch.setattr(sys, "argv", sys.argv)
    with pytest.raises(OSError, match="in use"):
        module.serve("127.0.0.1", free_port(), tmp_path / "link.db", None)


def listening(pid: int) -> list[int]:
    """The ports of all addresses on which this process listens."""
    sockets = {found[1] for path in Path(f"/proc/{pid}/fd").iterdir() if (found := inode(path))}
    rows = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()]
    return [int(row[1].rpartition(":")[2], 16) for row in rows if len(row) > 9 and row[3] == "0A" and row[9] in sockets]


def inode(path: Path) -> re.Match[str] | None:
    try:
        return re.fullmatch(r"socket:\[(\d+)\]", str(path.readlink()))
    except OSError:
        return None
