"""A real SuperLink behind the real nginx: who is not enrolled stays outside, and nobody there can submit a run."""

from __future__ import annotations

import datetime
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from everfed.federation import certificates
from everfed.federation.supervisor import environment
from tests.federation.secured import Signing, ask, flower, listens, needs_nginx, process, proxied, wait
from tests.support.ports import free_port

pytest.importorskip("flwr", reason="pip install 'everfed[flower]'")
pytestmark = [pytest.mark.slow, pytest.mark.federation, needs_nginx]

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Site:
    """pki: its folder; inside: the SuperLink's port on loopback; outside: the proxy's; log: the SuperLink's."""

    pki: Path
    inside: int
    outside: int
    log: Path


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    from everfed.federation.local import entrance
    from everfed.federation.superlink import Security, Settings

    base = tmp_path_factory.mktemp("site")
    pki, port = base / "pki", free_port()
    certificates.make_authority(pki)
    certificates.make_server(pki, [HOST])
    for name in ("site-a", "site-b", "stranger"):
        certificates.make_client(pki, name)
    files = Security(pki / certificates.CA, pki / certificates.SERVER, pki / certificates.SERVER_KEY)
    (base / "link").mkdir()
    command = Settings(HOST, port, base / "link", files).command()
    with process(command, base / "superlink.log", environment(base / "flwr")):
        wait(lambda: listens(port) and entrance(port) is not None, (base / "superlink.log").read_text())
        register(pki, port, "site-a")
        with proxied(base / "nginx", pki, port) as outside:
            yield Site(pki, port, outside, base / "superlink.log")


def control(pki: Path, port: int) -> Any:
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

    version = RuntimeVersionHttpInterceptor(component_name="flwr CLI")
    root = (pki / certificates.CA).read_bytes()
    return ControlHttpClient.from_server_address(f"{HOST}:{port}", False, root, [version])


def register(pki: Path, port: int, *names: str) -> None:
    from everfed.federation.flower import link
    from everfed.federation.security import enrolled

    link.register(link.Address(HOST, port), {name: enrolled(pki)[name] for name in names})


def online(site: Site) -> int:
    from everfed.federation.flower.link import Address, command

    nodes = command(Address(HOST, site.inside).entrance(), "supernode", "list")["nodes"]
    return sum(node["status"] == "online" for node in nodes)


@contextmanager
def supernode(site: Site, log: Path, *more: str, port: int | None = None) -> Iterator[Any]:
    command = [flower("flower-supernode"), "--superlink", f"{HOST}:{port or site.outside}", "--isolation", "process"]
    command += ["--port", str(free_port()), "--host", HOST, *more]
    with process(command, log, environment(log.parent / f"flwr-{log.stem}")) as child:
        yield child


def key(site: Site, name: str) -> list[str]:
    return [*trusting(site), "--auth-supernode-private-key", str(site.pki / certificates.SECRETS / name)]


def trusting(site: Site) -> list[str]:
    return ["--root-certificates", str(site.pki / certificates.CA)]


def test_an_enrolled_client_joins_through_the_proxy(site: Site, tmp_path: Path) -> None:
    with supernode(site, tmp_path / "a.log", *key(site, "site-a")):
        wait(lambda: online(site) == 1, (tmp_path / "a.log").read_text())


@pytest.mark.parametrize(
    "who",
    [
        pytest.param("stranger", id="a key that is not enrolled"),
        pytest.param("", id="no key"),
    ],
)
def test_others_are_refused_and_the_refusal_is_logged(site: Site, tmp_path: Path, who: str) -> None:
    before, log = site.log.stat().st_size, tmp_path / "b.log"
    with supernode(site, log, *(key(site, who) if who else trusting(site))) as child:
        wait(lambda: refused(child, log), log.read_text())
    said = site.log.read_bytes()[before:].decode(errors="replace")
    assert re.search(r"POST /v1/fleet/(activate|register)-node HTTP/1.1\" 412", said), said
    assert "/v1/fleet/pull-messages" not in said


def refused(child: Any, log: Path) -> bool:
    return child.poll() is not None or "could not establish a connection" in log.read_text()


def test_an_expired_certificate_is_refused(site: Site, tmp_path: Path) -> None:
    expired = tmp_path / "pki"
    expired.mkdir()
    for name in (certificates.CA, certificates.CA_KEY):
        shutil.copy(site.pki / name, expired / name)
    year = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=400)
    certificates.make_server(expired, [HOST], 30, now=year)
    with proxied(tmp_path / "nginx", expired, site.inside) as port:
        log = tmp_path / "c.log"
        with supernode(site, log, *key(site, "site-a"), port=port) as child:
            wait(lambda: refused(child, log), log.read_text())
        assert "certificate has expired" in log.read_text()


def test_from_outside_nobody_can_register_a_node_or_submit_a_run(site: Site) -> None:
    import httpx
    from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, StartRunRequest

    from everfed.federation.security import enrolled

    stranger = enrolled(site.pki)["stranger"]
    for call in (
        lambda client: client.RegisterNode(RegisterNodeRequest(public_key=stranger)),
        lambda client: client.StartRun(StartRunRequest()),
        lambda client: client.ListNodes(ListNodesRequest()),
    ):
        with control(site.pki, site.outside) as client, pytest.raises(httpx.HTTPStatusError) as caught:
            call(client)
        assert caught.value.response.status_code == 404
    assert online(site) == 0  # the same call from its owner is answered


@pytest.mark.parametrize("signed", [{}, {"flwr-public-key": "AAAA", "flwr-signature": "AAAA", "flwr-timestamp": "x"}])
def test_the_fleet_answers_no_call_without_a_signature(site: Site, signed: dict[str, str]) -> None:
    headers = {"Content-Type": "application/protobuf", **signed}
    for call in ("pull-messages", "push-messages", "activate-node", "get-run", "pull-object"):
        status, _ = ask(site.outside, f"/v1/fleet/{call}", site.pki / certificates.CA, headers=headers)
        assert status == 401, call


@contextmanager
def fleet(site: Site, name: str, age: float = 0.0) -> Iterator[Any]:
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
    from flwr.supernode.fleet_http_client import FleetHttpClient

    signing = Signing(site.pki / certificates.SECRETS / name, age)
    version = RuntimeVersionHttpInterceptor(component_name="SuperNode")
    root = (site.pki / certificates.CA).read_bytes()
    with FleetHttpClient.from_server_address(f"{HOST}:{site.outside}", False, root, [version, signing]) as client:
        yield client


def test_replayed_and_borrowed_signatures_are_refused(site: Site) -> None:
    """A call that was overheard is of no use after some minutes, and nobody speaks for another's node with a key of his
    own, enrolled or not."""
    import httpx
    from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest, PullMessagesRequest
    from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
    from flwr.proto.node_pb2 import Node

    from everfed.federation.security import enrolled

    register(site.pki, site.inside, "site-a", "site-b")
    keys = enrolled(site.pki)
    with fleet(site, "site-a") as honest, fleet(site, "site-b") as other:
        node = honest.ActivateNode(ActivateNodeRequest(public_key=keys["site-a"], heartbeat_interval=30)).node_id
        theirs = other.ActivateNode(ActivateNodeRequest(public_key=keys["site-b"], heartbeat_interval=30)).node_id
        try:
            beat = SendNodeHeartbeatRequest(node=Node(node_id=node), heartbeat_interval=30)
            assert honest.SendNodeHeartbeat(beat).success
            calls = [
                lambda client: client.SendNodeHeartbeat(beat),
                lambda client: client.PullMessages(PullMessagesRequest(node=Node(node_id=node))),
                lambda client: client.DeactivateNode(DeactivateNodeRequest(node_id=node)),
            ]
            for name, age in (("site-a", 400.0), ("site-b", 0.0), ("stranger", 0.0)):
                for call in calls:
                    with fleet(site, name, age) as client, pytest.raises(httpx.HTTPStatusError) as caught:
                        call(client)
                    assert caught.value.response.status_code == 401, name
            assert honest.SendNodeHeartbeat(beat).success  # it was not put out
        finally:
            honest.DeactivateNode(DeactivateNodeRequest(node_id=node))
            other.DeactivateNode(DeactivateNodeRequest(node_id=theirs))
