"""What operators see and do: lines with time and level, reasons of refusals, keys that are renewed and revoked."""

from __future__ import annotations

import logging
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from everfed.cli import app
from everfed.errors import UserError
from everfed.federation import certificates
from everfed.federation import request as ask
from everfed.federation.logs import stamped, stamped_event
from everfed.federation.packet import PROTOCOL, Packet
from everfed.federation.request import Answer
from everfed.reports.progress import PlainLines, ProgressState
from tests.federation.loop import site
from tests.support.toy import Bench

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


def test_lines_have_a_time_and_a_level() -> None:
    assert re.fullmatch(f"{STAMP} INFO site-a joins", stamped("site-a joins"))
    assert re.fullmatch(f"{STAMP} WARNING the worker ended", stamped("the worker ended", logging.WARNING))
    lines: list[str] = []
    show = PlainLines(lines.append, ProgressState(""), stamped_event)
    show({"event": "client", "client": 1, "kind": "connected", "reason": "site-b"})
    show({"event": "client", "client": 1, "kind": "gone", "reason": "not connected"})
    show({"event": "warning", "message": "the SuperLink was away"})
    assert [re.sub(STAMP, "T", line) for line in lines] == [
        "T INFO client 1 connected: site-b",
        "T WARNING client 1 gone: not connected",
        "T WARNING warning: the SuperLink was away",
    ]


def test_a_client_that_the_server_refuses_sees_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from everfed.federation.packet import PacketError
    from everfed.federation.transport import GridTransport, Node
    from tests.federation.test_grid import FakeGrid, here

    def nobody(node: Node) -> int:
        raise PacketError("'site-x' is not enrolled with this key")

    grid = FakeGrid([here(7)])
    transport = GridTransport(lambda: grid, nobody, poll=0.0, look=0.0)  # type: ignore[arg-type,return-value]
    transport.connected()
    transport._register(7, Packet({"protocol": PROTOCOL, "kind": ask.HELLO, "name": "site-x", "client": -1}))
    notice = grid.packets[-1]
    assert notice.header == {
        "protocol": PROTOCOL,
        "kind": ask.NOTICE,
        "reason": "'site-x' is not enrolled with this key",
    }
    with caplog.at_level(logging.WARNING):
        answer = Answer.of(site(Bench("fedavg"), tmp_path, 0).answer(notice))
    assert answer.kind == ask.REPLY and not answer.replies
    assert "the server refuses site-0: 'site-x' is not enrolled with this key" in caplog.text


def test_keys_are_renewed_and_revoked_by_commands(tmp_path: Path) -> None:
    def run(*words: str, code: int = 0) -> str:
        result = CliRunner().invoke(app, ["federation", *words, "--out", str(tmp_path)], env={"COLUMNS": "300"})
        assert result.exit_code == code, result.output
        return " ".join(result.output.split())

    run("keys", "--host", "localhost", "--client", "site-a", "--client", "site-b")
    files = [tmp_path / name for name in ("server.crt", "server.key", "clients/site-a.pub", "secrets/site-a")]
    before = [path.read_bytes() for path in files]
    assert "nothing is overwritten" in run("keys", "--client", "site-a", code=2)
    run("keys", "--host", "localhost", "--client", "site-a", "--renew")
    after = [path.read_bytes() for path in files]
    assert all(old != new for old, new in zip(before, after, strict=True))
    certificates.check_server(tmp_path)
    run("revoke", "site-b")
    assert not (tmp_path / "clients/site-b.pub").exists() and not (tmp_path / "secrets/site-b").exists()
    assert "enrolled in" in run("revoke", "site-b", code=2)


@pytest.mark.federation
@pytest.mark.usefixtures("patient")
def test_a_superlink_accepts_the_keys_of_its_folder_and_no_others(tmp_path: Path) -> None:
    """Revoked and replaced keys are refused although its database knew them; the others stay. A SuperLink that is
    started again knows what it knew."""
    from everfed.federation.flower.link import Address, register
    from everfed.federation.security import enrolled
    from tests.federation.test_local_users import superlink

    with superlink(tmp_path, secure=True) as (port, _):
        pki, address = tmp_path / "pki", Address("127.0.0.1", port)
        secret = {name: certificates.make_client(pki, name).read_bytes() for name in ("site-a", "site-b", "site-c")}
        first = enrolled(pki)
        register(address, first)
    with superlink(tmp_path, True, port) as (_, root):
        register(address, first)
        certificates.revoke(pki, "site-b")
        certificates.revoke(pki, "site-c")
        renewed = certificates.make_client(pki, "site-c").read_bytes()
        register(address, enrolled(pki))
        assert activated(port, root, secret["site-a"]) and activated(port, root, renewed)
        assert not activated(port, root, secret["site-b"]) and not activated(port, root, secret["site-c"])
        with pytest.raises(UserError, match="key of 'site-b', which was withdrawn before"):
            register(address, first)


def activated(port: int, root: bytes | None, secret: bytes) -> bool:
    """May a SuperNode with this private key connect?"""
    import httpx
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.proto.fleet_pb2 import ActivateNodeRequest
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    private: Any = load_ssh_private_key(secret, None)
    signing = NodeAuthHttpInterceptor(private, private.public_key())
    version = RuntimeVersionHttpInterceptor(component_name="SuperNode")
    wanted = ActivateNodeRequest(public_key=public_key_to_bytes(private.public_key()), heartbeat_interval=30)
    with FleetHttpClient.from_server_address(f"127.0.0.1:{port}", False, root, [version, signing]) as client:
        try:
            return bool(client.ActivateNode(wanted).node_id)
        except httpx.HTTPStatusError:
            return False


def test_the_database_s_log_is_written_back(tmp_path: Path) -> None:
    """Four hundred objects of 1 MiB, stored and removed: the log stays near SQLite's thousand pages, and at the end of
    the SuperLink it is moved into the database."""
    from everfed.federation.flower import superlink

    path, log = tmp_path / "link.db", tmp_path / "link.db-wal"
    superlink.create(path)
    with closing(sqlite3.connect(path)) as store:
        store.execute("PRAGMA journal_mode = WAL")
        store.execute("CREATE TABLE objects (content BLOB)")
        largest = 0
        for _ in range(400):
            store.execute("INSERT INTO objects VALUES (?)", (bytes(1 << 20),))
            store.execute("DELETE FROM objects")
            store.commit()
            largest = max(largest, log.stat().st_size)
        assert largest <= 1000 * superlink.PAGE + (8 << 20)
        superlink.write_back(path)
        assert log.stat().st_size == 0
        assert store.execute("SELECT count(*) FROM objects").fetchone() == (0,)


def test_a_new_database_has_large_pages_and_one_whose_keys_are_known_is_kept(tmp_path: Path) -> None:
    from everfed.federation.flower import superlink

    def pages() -> tuple[int, int]:
        with closing(sqlite3.connect(path)) as store:
            return store.execute("PRAGMA page_size").fetchone()[0], store.execute("PRAGMA user_version").fetchone()[0]

    path = tmp_path / "link.db"
    superlink.create(path)
    with closing(sqlite3.connect(path)) as store:
        store.execute("PRAGMA user_version = 7")
    (tmp_path / superlink.REGISTERED).write_text("{}")
    superlink.create(path)
    assert pages() == (superlink.PAGE, 7)
    (tmp_path / superlink.REGISTERED).unlink()
    superlink.create(path)
    assert pages() == (superlink.PAGE, 0)
