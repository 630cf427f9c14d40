"""Keys and certificates that everfed makes: accepted where they should be, by real TLS, and refused elsewhere."""

from __future__ import annotations

import datetime
import socket
import ssl
import stat
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from everfed.cli import app
from everfed.errors import UserError
from everfed.federation import certificates as pki

HOST = "fl.example.org"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pki")
    pki.make_authority(path, "hospitals")
    pki.make_server(path, [HOST, "10.1.2.3"])
    pki.make_client(path, "site-a")
    return path


def handshake(server: Path, ca: Path, host: str) -> str | None:
    """TLS between two ends in this process; what the client says against the server, None when it is content."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server / pki.SERVER, server / pki.SERVER_KEY)
    ours, theirs = socket.socketpair()

    def answer() -> None:
        try:
            with context.wrap_socket(theirs, server_side=True) as connection:
                connection.recv(1)
        except (ssl.SSLError, OSError):
            theirs.close()

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        with ssl.create_default_context(cafile=str(ca)).wrap_socket(ours, server_hostname=host):
            return None
    except ssl.SSLError as error:
        return str(error)
    finally:
        ours.close()
        thread.join()


@pytest.mark.parametrize("host", [HOST, "localhost", "127.0.0.1", "10.1.2.3"])
def test_clients_that_hold_the_authority_accept_the_server(folder: Path, host: str) -> None:
    assert handshake(folder, folder / pki.CA, host) is None


def test_another_name_and_another_authority_are_refused(folder: Path, tmp_path: Path) -> None:
    pki.make_authority(tmp_path)
    assert "mismatch" in (handshake(folder, folder / pki.CA, "evil.example.org") or "")
    assert "verify failed" in (handshake(folder, tmp_path / pki.CA, HOST) or "")


def test_an_expired_certificate_is_refused_by_clients_and_before_that_by_the_server(tmp_path: Path) -> None:
    pki.make_authority(tmp_path)
    pki.make_server(tmp_path, [HOST], 30, now=datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=400))
    assert "expired" in (handshake(tmp_path, tmp_path / pki.CA, HOST) or "")
    with pytest.raises(UserError, match="server.crt expired on .*everfed federation keys"):
        pki.check_server(tmp_path)


def test_server_files_are_checked(folder: Path, tmp_path: Path) -> None:
    assert pki.check_server(folder) == []
    year = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=350)
    assert "expires in 14 days" in pki.check_server(folder, year)[0]
    with pytest.raises(UserError, match="is the clock right"):
        pki.check_server(folder, year - datetime.timedelta(days=500))
    with pytest.raises(UserError, match="ca.crt cannot be read"):
        pki.check_server(tmp_path)
    pki.make_authority(tmp_path)
    for name in (pki.SERVER, pki.SERVER_KEY):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    with pytest.raises(UserError, match="is not signed by"):
        pki.check_server(tmp_path)
    (tmp_path / pki.SERVER).write_text("nonsense")
    with pytest.raises(UserError, match="not a certificate"):
        pki.check_server(tmp_path)


def test_private_keys_are_their_owner_s_only(folder: Path) -> None:
    for path in (folder / pki.CA_KEY, folder / pki.SERVER_KEY, folder / pki.SECRETS / "site-a"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (folder / pki.SERVER_KEY).chmod(0o644)
    with pytest.raises(UserError, match="can be read by others"):
        pki.check_server(folder)
    (folder / pki.SERVER_KEY).chmod(0o600)


def test_node_keys_are_what_flower_reads(folder: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

    private = load_ssh_private_key((folder / pki.SECRETS / "site-a").read_bytes(), None)
    public = load_ssh_public_key((folder / pki.CLIENTS / "site-a.pub").read_bytes())
    assert isinstance(private, ec.EllipticCurvePrivateKey) and private.public_key() == public
    assert private.curve.name == "secp384r1"


@pytest.mark.parametrize("name", ["../evil", "a/b", "", "x" * 65])
def test_a_client_s_name_cannot_leave_the_folder(folder: Path, name: str) -> None:
    with pytest.raises(UserError, match="the client"):
        pki.make_client(folder, name)


def test_nothing_is_overwritten(folder: Path) -> None:
    for again in (
        lambda: pki.make_authority(folder),
        lambda: pki.make_server(folder, [HOST]),
        lambda: pki.make_client(folder, "site-a"),
    ):
        with pytest.raises(UserError, match="nothing is overwritten"):
            again()


@pytest.mark.parametrize("host", ["a b", "http://x", "x/y", "a..b", "ä.org", "x" * 300])
def test_hosts_are_checked(tmp_path: Path, host: str) -> None:
    pki.make_authority(tmp_path)
    with pytest.raises(UserError, match="--host"):
        pki.make_server(tmp_path, [host])


def test_the_command_makes_what_is_missing(tmp_path: Path) -> None:
    run, out = CliRunner(), str(tmp_path / "pki")
    first = run.invoke(app, ["federation", "keys", "--out", out, "--host", HOST, "--client", "a", "--client", "b"])
    assert first.exit_code == 0 and "move it to that client" in first.output
    assert sorted(p.name for p in (tmp_path / "pki" / "clients").iterdir()) == ["a.pub", "b.pub"]
    assert run.invoke(app, ["federation", "keys", "--out", out, "--client", "c"]).exit_code == 0
    again = run.invoke(app, ["federation", "keys", "--out", out, "--client", "c"])
    assert again.exit_code == 2
    shown = run.invoke(app, ["federation", "proxy", "--certificates", out, "--listen", "8443"])
    assert shown.exit_code == 0 and "listen 8443 ssl;" in shown.output
