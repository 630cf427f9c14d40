"""The proxy's configuration, in the real nginx, before a server that says what reached it."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from everfed.errors import UserError
from everfed.federation import certificates
from everfed.federation.proxy import FLEET, Proxy, check_binding, nginx
from tests.federation.secured import ask, needs_nginx, proxied

REACHED: list[str] = []


class Echo(BaseHTTPRequestHandler):
    def answer(self) -> None:
        REACHED.append(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        said = f"{self.path} {self.headers.get('flwr-signature')} {len(body)}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    do_GET = do_POST = do_PUT = answer

    def log_message(self, *args: object) -> None:
        """Quiet."""


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pki")
    certificates.make_authority(folder)
    certificates.make_server(folder, ["127.0.0.1"])
    return folder


@pytest.fixture(scope="module")
def port(pki: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pki / certificates.SERVER, pki / certificates.SERVER_KEY)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with proxied(tmp_path_factory.mktemp("proxy") / "nginx", pki, server.server_address[1]) as found:
        yield found
    server.shutdown()


@needs_nginx
@pytest.mark.parametrize("call", FLEET)
def test_the_calls_of_supernodes_pass_with_their_headers_and_bodies(port: int, pki: Path, call: str) -> None:
    status, body = ask(port, f"/v1/fleet/{call}", pki / "ca.crt", body=b"x" * 70_000, headers={"flwr-signature": "abc"})
    assert (status, body) == (200, f"/v1/fleet/{call} abc 70000".encode())


@needs_nginx
@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/health",
        "/docs",
        "/openapi.json",
        "/v1/control/start-run",
        "/v1/control/register-node",
        "/v1/runtime/acquire-task",
        "/v1/fleet",
        "/v1/fleet/",
        "/v1/fleet/unknown",
        "/v1/fleet/pull-messages/",
        "/v1/fleet/pull-messages?x=1",
        "/v1/fleet/../control/start-run",
        "/v1/fleet/%2e%2e/control/start-run",
        "/v1/fleet/..%2fcontrol%2fstart-run",
        "/v1/fleet/pull-messages/../../control/start-run",
        "/v1/control/../fleet/pull-messages",
        "/v1/control/start-run/..%2f..%2ffleet/pull-messages",
        "//v1/control/start-run",
        "/v1/fleet//pull-messages",
        "/V1/FLEET/PULL-MESSAGES",
        "/v1/fleet/pull-messages%00",
        "/v1/fleet/pull-messages;x",
        "/v1/fleet\\..\\control\\start-run",
        "https://127.0.0.1/v1/control/start-run",
    ],
)
def test_nothing_else_reaches_the_superlink(port: int, pki: Path, path: str) -> None:
    before = len(REACHED)
    status, _ = ask(port, path, pki / "ca.crt")
    assert status in (400, 404) and len(REACHED) == before


@needs_nginx
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "CONNECT"])
def test_other_methods_do_not_pass(port: int, pki: Path, method: str) -> None:
    before = len(REACHED)
    status, _ = ask(port, "/v1/fleet/pull-messages", pki / "ca.crt", method=method)
    assert status in (400, 403, 404, 405) and len(REACHED) == before


@needs_nginx
def test_a_body_beyond_the_limit_is_refused_unread(port: int, pki: Path) -> None:
    before = len(REACHED)
    status, _ = ask(port, "/v1/fleet/push-object", pki / "ca.crt", headers={"Content-Length": str(1 << 40)})
    assert status == 413 and len(REACHED) == before


@needs_nginx
def test_who_does_not_hold_the_authority_does_not_speak_to_it(port: int, tmp_path: Path) -> None:
    certificates.make_authority(tmp_path)
    with pytest.raises(ssl.SSLError):
        ask(port, "/v1/fleet/pull-messages", tmp_path / "ca.crt")


def test_the_fleet_s_calls_are_those_of_flower() -> None:
    router = pytest.importorskip("flwr.superlink.routers.fleet.router", reason="pip install 'everfed[flower]'").router
    assert {route.path for route in router.routes} == {f"/v1/fleet/{call}" for call in FLEET}


@pytest.mark.parametrize("upstream", ["10.0.0.1:8000", "0.0.0.0:8000", "example.org:8000", "127.0.0.1", "127.0.0.1:x"])
def test_the_superlink_is_on_loopback(tmp_path: Path, upstream: str) -> None:
    with pytest.raises(UserError, match="on loopback"):
        Proxy("443", upstream, tmp_path)


def test_nothing_can_be_smuggled_into_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="listen must be"):
        Proxy("443; } server { listen 80", "127.0.0.1:8000", tmp_path)
    with pytest.raises(UserError, match="cannot stand"):
        nginx(Proxy("443", "127.0.0.1:8000", tmp_path / 'a"; evil "'))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.9"])
def test_loopback_may_be_bound(host: str) -> None:
    check_binding(host, insecure=True)
    check_binding(host, insecure=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", ""])
def test_nothing_else_may(host: str) -> None:
    with pytest.raises(UserError, match="--insecure binds loopback only"):
        check_binding(host, insecure=True)
    with pytest.raises(UserError, match="everfed federation proxy"):
        check_binding(host, insecure=False)
