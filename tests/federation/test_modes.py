"""What other users of a machine can read of a federation: nothing."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from everfed.cli import app
from everfed.errors import UserError
from everfed.federation import certificates
from everfed.store.files import make_folder, make_private, write_atomic
from tests.federation.field import field
from tests.federation.loop import federated, loop_of
from tests.support.toy import Bench

OPEN_UMASK = 0o022  # as most systems have it: without care files are 0644 and folders 0755


@pytest.fixture(autouse=True)
def _usual_umask() -> object:
    before = os.umask(OPEN_UMASK)
    yield
    os.umask(before)


def readable(folder: Path) -> list[str]:
    """Files and folders below `folder` that others may use, by name. What lies in a closed folder counts, too."""
    every = [folder, *folder.rglob("*")]
    return [str(path.relative_to(folder.parent)) for path in every if stat.S_IMODE(path.lstat().st_mode) & 0o077]


def test_files_and_folders_are_their_owner_s_alone(tmp_path: Path) -> None:
    make_folder(tmp_path / "state")
    write_atomic(tmp_path / "state" / "journal", b"samples")
    write_atomic(tmp_path / "state" / "once", b"samples", durable=False)
    assert readable(tmp_path / "state") == []
    write_atomic(tmp_path / "report.html", b"a page", shared=True)
    assert stat.S_IMODE((tmp_path / "report.html").stat().st_mode) == 0o644


def test_a_folder_from_before_is_closed(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir(0o755)
    make_private(tmp_path / "old")
    assert stat.S_IMODE((tmp_path / "old").stat().st_mode) == 0o700


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(UserError, match="belongs to another user"):
        make_private(tmp_path)


def test_nothing_that_a_client_writes_can_be_read_by_others(tmp_path: Path) -> None:
    bench = Bench("er")
    federated(bench, loop_of(bench, tmp_path / "clients"))
    for client in range(bench.stream.clients):
        assert readable(tmp_path / "clients" / str(client)) == []


@pytest.mark.federation
@pytest.mark.slow
def test_nothing_that_real_processes_write_can_be_read_by_others(tmp_path: Path) -> None:
    with field(tmp_path, 1) as one:
        out = one.serve(one.recipe(), "run")
        for folder in (out, one.sites[0].folder, one.settings.folder):
            assert readable(folder) == []


def test_join_refuses_a_key_that_others_can_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flwr", reason="the extra `flower` is not installed")
    monkeypatch.chdir(tmp_path)
    certificates.make_authority(tmp_path)
    secret = certificates.make_client(tmp_path, "site-a")
    secret.chmod(0o640)
    words = ["join", "--server", "localhost:1", "--certificate", "ca.crt", "--key", str(secret), "--name", "site-a"]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert "secrets/site-a can be read by others; chmod 600 it" in " ".join(result.output.split())


def test_keys_that_do_not_belong_on_a_server_are_named(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="the extra `flower` is not installed")
    from everfed.federation.security import read_security

    certificates.make_authority(tmp_path)
    certificates.make_server(tmp_path, ["localhost"])
    for name in ("site-a", "site-b"):
        certificates.make_client(tmp_path, name)
    warnings: list[str] = []
    read_security(tmp_path, warnings.append)
    assert [line.partition("; ")[2] for line in warnings] == [
        "move it away from the server",
        "move each to its client and delete it",
    ]
    assert "site-a, site-b" in warnings[1]
    (tmp_path / certificates.CA_KEY).unlink()
    for name in ("site-a", "site-b"):
        (tmp_path / certificates.SECRETS / name).unlink()
    read_security(tmp_path, warnings.append)
    assert len(warnings) == 2
