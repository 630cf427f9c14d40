"""Frames, rosters, the status of a run, the Flower app and the example files."""

from __future__ import annotations

import configparser
import json
import os
import socket
import sys
import time
import tomllib
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from everfed.cli import app
from everfed.errors import UserError
from everfed.federation import packet as wire
from everfed.federation.codec import to_reply
from everfed.federation.flower.app import files
from everfed.federation.joining import KEY_REFUSED, Joining, children, join, refusal
from everfed.federation.local import call_worker, listen, socket_path
from everfed.federation.packet import Packet, PacketError
from everfed.federation.request import Answer, Request
from everfed.federation.roster import Roster
from everfed.federation.serving import next_epoch
from everfed.federation.supervisor import Child, environment
from everfed.store.files import locked
from tests.support.waiting import HANG

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "federation"
VALUES = st.text() | st.integers() | st.booleans() | st.floats(allow_nan=False)


def received(data: bytes, limit: int = wire.FRAME_LIMIT) -> Packet:
    here, there = socket.socketpair()
    with here, there:
        here.sendall(data)
        here.shutdown(socket.SHUT_WR)
        return wire.receive(there, limit)


# frames and decoders --------------------------------------------------------------------------------------------------
@given(st.dictionaries(st.text(), VALUES, max_size=5), st.dictionaries(st.text(), st.binary(max_size=50), max_size=4))
def test_a_packet_crosses_a_socket_unchanged(header: dict[str, wire.Value], pieces: dict[str, bytes]) -> None:
    packet = Packet(header, pieces)
    assert received(b"".join(wire.to_frame(packet))) == packet


@settings(max_examples=500)
@given(st.binary(max_size=300))
def test_any_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises((PacketError, EOFError)):
        received(data)


@settings(max_examples=500)
@given(st.data())
def test_a_frame_with_a_byte_changed_is_a_packet_or_refused(data: st.DataObject) -> None:
    frame = bytearray(b"".join(wire.to_frame(Packet({"kind": "x", "n": 3}, {"a": b"12345", "b": b""}))))
    frame[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
    with suppress(PacketError, EOFError):
        assert isinstance(received(bytes(frame)), Packet)


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from(["protocol", "kind", "steps", "run", "holds", "missing", "durable"]), VALUES))
def test_headers_of_any_content_are_understood_or_refused(header: dict[str, wire.Value]) -> None:
    for read in (Answer.of, Request.of):
        with pytest.raises(PacketError):
            read(Packet(header))


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_bytes_that_are_no_reply_are_refused(data: bytes) -> None:
    with pytest.raises(PacketError):
        to_reply(data)


def test_what_is_too_large_is_not_read() -> None:
    frame = b"".join(wire.to_frame(Packet({}, {"a": b"\0" * 1000})))
    with pytest.raises(PacketError, match="may have 999 bytes"):
        received(frame, limit=999)
    with pytest.raises(PacketError, match="head may have"):
        received(b"\xff\xff\xff\xff")


def test_a_worker_that_never_comes_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError, match="no everfed worker answers"):
        call_worker(str(tmp_path / "nobody.sock"), Packet({}), timeout=0.2)


def test_a_socket_is_its_owners_alone_and_its_path_is_short(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 120)
    assert len(str(socket_path(deep))) < 108
    with listen(tmp_path / "s") as listener:
        assert listener.getsockname() == str(tmp_path / "s")
        assert (tmp_path / "s").stat().st_mode & 0o077 == 0


# who is who -----------------------------------------------------------------------------------------------------------
def test_a_client_keeps_its_index(tmp_path: Path) -> None:
    roster = Roster(tmp_path / "r.json", 3)
    assert [roster.enrol("b", -1, b""), roster.enrol("a", 2, b""), roster.enrol("c", -1, b"")] == [0, 2, 1]
    again = Roster(tmp_path / "r.json", 3)
    assert [again.enrol("c", -1, b""), again.enrol("b", 0, b"")] == [1, 0]
    with pytest.raises(PacketError, match="3, 0 of them free"):
        again.enrol("d", -1, b"")
    with pytest.raises(PacketError, match="but is client 0"):
        again.enrol("b", 1, b"")


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "x" * 65, "a\nb", "a..b"])
def test_names_that_are_paths_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(PacketError, match="not a client's name"):
        Roster(tmp_path / "r.json", 3).enrol(name, -1, b"")


def test_a_name_is_bound_to_its_key(tmp_path: Path) -> None:
    roster = Roster(tmp_path / "r.json", 3, {"a": b"key"})
    assert roster.enrol("a", -1, b"key") == 0
    for name, key in (("a", b"other"), ("b", b"key"), ("a", b"")):
        with pytest.raises(PacketError, match="not enrolled"):
            roster.enrol(name, -1, key)


def test_enrolled_clients_are_numbered_by_name_whoever_comes_first(tmp_path: Path) -> None:
    keys = {name: name.encode() for name in ("a", "b", "c")}
    roster = Roster(tmp_path / "r.json", 3, keys)
    assert [roster.enrol(name, -1, name.encode()) for name in ("c", "a", "b")] == [2, 0, 1]
    spare = Roster(tmp_path / "s.json", 2, keys)  # more are enrolled than take part
    assert [spare.enrol(name, -1, name.encode()) for name in ("c", "a")] == [0, 1]


def test_lives_are_counted(tmp_path: Path) -> None:
    first, second = next_epoch(tmp_path), next_epoch(tmp_path)
    assert (first[0], first[1], second[1]) == (second[0], 1, 2)
    assert len(first[0]) == 32


# processes ------------------------------------------------------------------------------------------------------------
def test_a_child_that_ends_is_started_again_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everfed.federation.supervisor.FIRST", 0.05)
    said: list[str] = []
    child = Child("it", [sys.executable, "-S", "-c", "print(1)"], tmp_path / "log", environment(tmp_path))
    end = time.monotonic() + HANG
    while len(said) < 2 and time.monotonic() < end:
        child.check(said.append)
        time.sleep(0.02)
    child.stop()
    assert len(said) == 2 and "it ended with code 0" in said[0]
    assert (tmp_path / "log").read_text().startswith("1\n1\n")


class Exited:
    """A process that has ended."""

    def poll(self) -> int:
        return 1


def test_the_wait_before_a_restart_doubles_up_to_a_minute_and_is_short_again_after_a_steady_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, waits = [0.0], []
    monkeypatch.setattr("everfed.federation.supervisor.time", SimpleNamespace(monotonic=lambda: now[0]))
    child = Child("it", [], tmp_path / "log", {})
    for life in [0.0] * 8 + [30.0, 31.0, 0.0]:  # seconds that it runs
        child.process, child.started = Exited(), now[0]  # type: ignore[assignment]
        now[0] += life
        child.check(lambda line: None)
        waits.append(child.due - now[0])
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60, 1, 2]


def test_a_child_s_lines_are_said_once_and_whole(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("of an earlier life\n")
    code = "import time; print('one', flush=True); print('two\\nthr', end='', flush=True); time.sleep(0.5); print('ee')"
    said: list[str] = []
    child = Child("it", [sys.executable, "-S", "-c", code], tmp_path / "log", environment(tmp_path), relays=True)
    end = time.monotonic() + HANG
    while not any("ended" in line for line in said) and time.monotonic() < end:
        child.check(said.append)
        time.sleep(0.02)
    child.stop()
    assert said[:3] == ["one", "two", "three"] and "it ended with code 0" in said[3]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", ""),
        ("INFO : fine\n", ""),
        ("Traceback\nKeyError: 'x'\n\n", "KeyError: 'x'"),
        (
            "ERROR : Exit Code: 305\nFailed to initialize the connection to the SuperLink.\n[code: 1] No.\nmore",
            "[code: 1] No.",
        ),
        ("Failed to initialize the connection to the SuperLink.\n   [code: 2004] Failed to activate", KEY_REFUSED),
    ],
)
def test_why_a_supernode_ended(text: str, why: str) -> None:
    assert refusal(text) == why


# files ----------------------------------------------------------------------------------------------------------------
def test_status_of_a_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.toml").write_text("")
    (run / "federation.json").write_text('{"run": "a", "epoch": 2}')
    (run / "roster.json").write_text('{"site-a": 0, "site-b": 1}')
    phase = {"event": "phase", "phase": "train", "clients": [0, 1]}
    lines = [
        {"event": "client", "client": 0, "kind": "connected", "reason": "site-a"},
        {"event": "client", "client": 1, "kind": "failed", "reason": "the node is not available"},
        {**phase, "round": 0},
        {**phase, "round": 1, "absent": {"1": "late: gone"}},
    ]
    (run / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"half')
    result = CliRunner().invoke(app, ["federation", "status", str(run), "--json"])
    found = json.loads(result.stdout)
    assert (found["state"], found["round"], found["epoch"]) == ("unfinished", 2, 2)
    assert [(c["name"], c["answers"], c["failures"], c["state"]) for c in found["clients"]] == [
        ("site-a", 2, 0, "connected"),
        ("site-b", 1, 1, "unknown"),
    ]


def test_a_federation_is_not_resumed_as_a_simulation(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text("[method]\nname = 'fedavg'\n")
    (tmp_path / "settings.json").write_text('{"federated": true}')
    result = CliRunner().invoke(app, ["resume", str(tmp_path)])
    assert result.exit_code == 2
    assert "everfed serve --out" in result.output.replace("\n", " ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["serve", "demo"], "--certificates"),
        (["serve", "demo", "--insecure", "--host", "0.0.0.0"], "loopback"),
        (["join", "--server", "h:1"], "--insecure"),
        (["join", "--server", "example.org:1", "--insecure"], "loopback"),
    ],
)
def test_security_is_the_default(words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flwr", reason="the extra `flower` is not installed")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert said in result.output
    assert os.listdir(tmp_path) in ([], ["runs"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--certificate", "no.crt", "--key", "no"], "--certificate no.crt: there is no such file"),
        (["--insecure", "--data", "no_such_module:f"], "module 'no_such_module' cannot be imported"),
        (["--insecure", "--data", "os:no_such"], "has no 'no_such'"),
        (["--insecure", "--name", "../x"], "is not a name"),
    ],
)
def test_what_join_can_know_it_says_at_once(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("flwr", reason="the extra `flower` is not installed")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["join", "--server", "localhost:1", *words], env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())
    assert os.listdir(tmp_path) == []


def test_of_a_client_s_processes_the_worker_s_log_is_shown_and_the_others_last_error(tmp_path: Path) -> None:
    worker, supernode = children(Joining("127.0.0.1:1", tmp_path, "site-0"))
    assert (worker.relays, supernode.relays) == (True, False)
    assert supernode.explain is refusal and refusal("OSError: no") == "OSError: no"


def test_a_folder_has_one_client_at_a_time(tmp_path: Path) -> None:
    with locked(tmp_path / ".join.lock"), pytest.raises(UserError, match="another `everfed join` runs"):
        join(Joining("127.0.0.1:1", tmp_path, "site-0"), lambda line: None)


def test_the_flower_app_is_one_that_flower_builds() -> None:
    build = pytest.importorskip("flwr.cli.build", reason="the extra `flower` is not installed")
    content, _ = build.build_fab_from_files(files())
    assert len(content) < 5000
    components = tomllib.loads(files()["pyproject.toml"].decode())["tool"]["flwr"]["app"]["components"]
    assert set(components) == {"serverapp", "clientapp"}


def test_the_clients_app_imports_no_torch() -> None:
    import subprocess

    pytest.importorskip("flwr", reason="the extra `flower` is not installed")
    code = "import sys, everfed.federation.flower.client_app; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_examples_parse_and_name_commands_that_exist() -> None:
    """By parsing only: there is no container engine and no systemd here."""
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with the extra `flower`")
    compose = yaml.safe_load((EXAMPLES / "compose.yaml").read_text())
    assert set(compose["services"]) == {"server", "proxy", "site-a", "site-b"}
    commands = [service["command"].split() for service in compose["services"].values()]
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string((EXAMPLES / "everfed-join.service").read_text().replace("\\\n", ""))
    commands.append(unit["Service"]["ExecStart"].split())
    for words in [words for words in commands if words[0].endswith("everfed")]:
        known = CliRunner().invoke(app, [words[1], "--help"], env={"COLUMNS": "200"}).output
        assert all(word in known for word in words if word.startswith("--")), words


def test_the_examples_recipe_is_one() -> None:
    from everfed.recipe import read

    recipe = read(EXAMPLES / "recipe.toml")
    assert (recipe.stream.scenario, recipe.federation.deadline) == ("own", 0)


def test_a_simulation_without_any_data_is_an_error(tmp_path: Path) -> None:
    """The recipe of a real federation, whose data lies on its clients, has none where it is simulated."""
    words = ["run", str(EXAMPLES / "recipe.toml"), "--out", str(tmp_path / "run"), "--set", "train.rounds_per_task=1"]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert "no client had any sample" in " ".join(result.output.split())
    assert not (tmp_path / "run" / "result.json").exists()
