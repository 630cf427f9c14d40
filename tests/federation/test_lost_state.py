"""A state folder that is removed while its client runs: `everfed join` reports it, and starts again or ends."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from everfed.cli import app
from everfed.federation.joining import END, RESTART, Joining, join
from everfed.federation.local import call_worker, entrance, entrance_file, socket_path
from everfed.federation.packet import PROTOCOL, Packet
from everfed.federation.request import HELLO
from everfed.federation.superlink import Settings, running
from everfed.federation.supervisor import FolderWatch, StateLost
from everfed.federation.worker import serve
from tests.federation.field import until
from tests.federation.loop import site
from tests.support.child import Child
from tests.support.ports import free_port
from tests.support.toy import Bench
from tests.support.waiting import HANG


def answers(path: Path) -> bool:
    """Does a process listen at this unix socket?"""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        return caller.connect_ex(str(path)) == 0


@contextmanager
def joined(folder: Path, output: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """`everfed join` as a user runs it, without a server; its worker has started."""
    command = [sys.executable, "-m", "everfed", "join", "--folder", str(folder), "--name", "a", "--insecure", *options]
    # a server that never answers: where there is none, the SuperNode would end and be started again all the time
    with open(output, "wb") as log, socket.create_server(("127.0.0.1", 0)) as silent:
        server = f"127.0.0.1:{silent.getsockname()[1]}"
        process = subprocess.Popen([*command, "--server", server], stdout=log, stderr=log)
        yield from _until_it_listens(process, folder)


def _until_it_listens(process: subprocess.Popen[bytes], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    try:
        until(lambda: socket_path(folder).exists(), what="for the worker")
        yield process
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGTERM)
        process.wait(HANG)


def remove(path: Path, to: Path) -> None:
    """At once: where files are removed one after the other, a process may see that the first is gone and write a new
    one before the last is. to: an existing folder."""
    path.rename(to / f"removed-{path.name}")


@pytest.mark.federation
@pytest.mark.parametrize("what", ["folder", pytest.param("contents", marks=pytest.mark.slow)])
def test_a_client_whose_folder_is_removed_starts_again(tmp_path: Path, what: str) -> None:
    folder, output = tmp_path / "state", tmp_path / "output"
    with joined(folder, output) as process:
        until((folder / "privacy.jsonl").exists, what="for the ledger")
        if what == "folder":
            remove(folder, tmp_path)
        else:
            for path in folder.iterdir():
                if not path.name.startswith("."):
                    remove(path, tmp_path)
        until(lambda: "starting again without it" in output.read_text(), what="for the report")
        until(lambda: answers(socket_path(folder)), what="for a worker")  # the first one has ended by now
        assert process.poll() is None
    assert "was removed or replaced while this client was running: its state is lost" in output.read_text()


@pytest.mark.parametrize(
    ("options", "again"),
    [
        ({}, True),
        ({"lost_state": END}, False),
        ({"budget": 8.0}, False),
        ({"lost_state": RESTART, "budget": 8.0}, False),
    ],
)
def test_only_a_client_without_a_budget_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], again: bool
) -> None:
    """In this process, with children that do nothing: the account of what was spent is gone with the folder."""
    folder, begun, said = tmp_path / "state", [], list[str]()

    def supervise(children: Any, say: Any, watch: Any) -> None:
        begun.append(children)
        if len(begun) == 2:
            raise KeyboardInterrupt
        shutil.rmtree(folder)
        watch()

    monkeypatch.setattr("everfed.federation.joining.supervise", supervise)
    with pytest.raises(KeyboardInterrupt if again else StateLost):
        join(Joining("127.0.0.1:1", folder, "a", **options), said.append)
    assert len(begun) == (2 if again else 1)
    assert any("starting again without it" in line for line in said) is again


def test_a_lost_state_that_ends_the_command_is_an_error_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "state"

    def supervise(children: Any, say: Any, watch: Any) -> None:
        shutil.rmtree(folder)
        watch()

    monkeypatch.setattr("everfed.federation.joining.supervise", supervise)
    words = ["join", "--server", "127.0.0.1:1", "--insecure", "--folder", str(folder), "--name", "a", "--budget", "8"]
    ended = CliRunner().invoke(app, words)
    assert ended.exit_code != 0 and isinstance(ended.exception, SystemExit)
    assert "its state is lost" in ended.output.replace("\n", " ")
    assert not folder.exists()


@pytest.mark.slow
@pytest.mark.federation
@pytest.mark.parametrize("options", [["--lost-state", "end"], ["--budget", "8"]])
def test_a_client_whose_folder_is_removed_ends_by_its_policy(tmp_path: Path, options: list[str]) -> None:
    folder, output = tmp_path / "state", tmp_path / "output"
    with joined(folder, output, *options) as process:
        remove(folder, tmp_path)
        assert process.wait(HANG) != 0
    text = output.read_text()
    assert "its state is lost" in text.replace("\n", " ") and "Traceback" not in text
    assert not folder.exists()


def test_a_worker_of_its_own_ends_with_a_code_that_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    worker = Child(tmp_path, "--folder", str(folder), "--name", "a", module="everfed.federation.worker")
    until(lambda: socket_path(folder).exists(), what="for the worker")
    remove(folder, tmp_path)
    ended = worker.wait()
    assert ended.code == 3 and "its state is lost" in ended.stderr


def test_a_folder_that_goes_between_two_looks_is_lost_state_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the look at the folder, before the look at the socket in it, which then cannot be made again."""
    monkeypatch.chdir(tmp_path)  # the address of a socket has to be short
    folder = Path("state")
    folder.mkdir()

    class Late(FolderWatch):
        def check(self) -> None:
            super().check()
            remove(folder, tmp_path)

    with pytest.raises(StateLost, match="was removed or replaced"):
        serve(site(Bench("fedavg"), tmp_path, 0), folder / "worker.sock", Late(folder))


def test_a_worker_whose_socket_is_removed_listens_again(tmp_path: Path) -> None:
    """As by a program that cleans up a folder of temporary files; before, the client failed until it was restarted."""
    folder = tmp_path / "state"
    worker = Child(tmp_path, "--folder", str(folder), "--name", "a", module="everfed.federation.worker")
    try:
        until(lambda: socket_path(folder).exists(), what="for the worker")
        socket_path(folder).unlink()
        hello = Packet({"protocol": PROTOCOL, "kind": HELLO})
        assert call_worker(str(socket_path(folder)), hello, timeout=HANG).text("name") == "a"
    finally:
        worker.kill()
        worker.wait()


@pytest.mark.federation
@pytest.mark.usefixtures("patient")
def test_a_superlink_whose_socket_is_removed_is_restarted(tmp_path: Path) -> None:
    said: list[str] = []
    settings = Settings("127.0.0.1", free_port(), tmp_path / "link")
    with running(settings, said.append):
        pid = tmp_path / "link" / "superlink.pid"
        first = pid.read_text()
        entrance_file(settings.port).unlink()
        until(lambda: entrance(settings.port), what="for a SuperLink")
        until(lambda: pid.read_text() != first, what="for another one")
    assert any("was removed; the SuperLink is restarted" in line for line in said)


def test_a_watch_sees_what_is_removed_or_replaced_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    (folder / "a").touch()
    watch = FolderWatch(folder, "a", "b")
    (folder / "other").touch()
    watch.check()
    (folder / "b").touch()  # later than the watch: from now on it must stay
    watch.check()
    (folder / "b").unlink()
    with pytest.raises(StateLost, match=r"state/b was removed"):
        watch.check()
    (folder / "b").touch()
    shutil.move(folder, tmp_path / "elsewhere")
    shutil.copytree(tmp_path / "elsewhere", folder)
    with pytest.raises(StateLost, match="was removed or replaced"):
        watch.check()
