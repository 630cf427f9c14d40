"""Real processes for tests of a federation's security: nginx, SuperLink, SuperNode."""

from __future__ import annotations

import datetime
import shutil
import socket
import ssl
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any

import pytest

from everfed.federation.proxy import Proxy, nginx
from tests.support.ports import free_port
from tests.support.waiting import HANG

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
needs_nginx = pytest.mark.skipif(
    NGINX is None, reason="nginx is not installed: apt install nginx-light, or put it on PATH"
)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.1)


@contextmanager
def process(command: list[str], log: Path, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    with open(log, "ab") as output:
        child = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=env)
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


@contextmanager
def proxied(folder: Path, pki: Path, upstream: int) -> Iterator[int]:
    """The real nginx with everfed's configuration; yields its port."""
    port = free_port()
    folder.mkdir()
    (folder / "nginx.conf").write_text(nginx(Proxy(f"127.0.0.1:{port}", f"127.0.0.1:{upstream}", pki)))
    command = [str(NGINX), "-p", str(folder), "-c", str(folder / "nginx.conf")]
    checked = subprocess.run([*command, "-t"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    with process([*command, "-g", "daemon off;"], folder / "out.log"):
        wait(lambda: listens(port), "nginx did not start")
        yield port


def ask(
    port: int, path: str, ca: Path, method: str = "POST", body: bytes = b"", headers: dict[str, str] | None = None
) -> tuple[int, bytes]:
    """(status, body) of one request over TLS; the path is sent as it is."""
    connection = HTTPSConnection("127.0.0.1", port, context=ssl.create_default_context(cafile=str(ca)), timeout=HANG)
    try:
        connection.putrequest(method, path, skip_accept_encoding=True)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            connection.putheader(name, value)
        connection.endheaders(body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def flower(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def signature(secret: Path, age: float = 0.0) -> dict[str, str]:
    """The headers by which a SuperNode signs a call, with a clock that is `age` seconds behind. Flower signs the time
    alone."""
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

    private: Any = load_ssh_private_key(secret.read_bytes(), None)
    moment = (datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=age)).isoformat()
    return {
        "flwr-public-key": b64encode(public_key_to_bytes(private.public_key())).decode(),
        "flwr-timestamp": moment,
        "flwr-signature": b64encode(sign_message(private, moment.encode())).decode(),
    }


@dataclass(frozen=True)
class Signing:
    """Signs calls as a SuperNode does."""

    secret: Path
    age: float = 0.0

    def intercept(self, context: Any, call_next: Any) -> Any:
        from flwr.supercore.interceptors.http.utils import add_headers

        add_headers(context.request, signature(self.secret, self.age))
        return call_next(context)
