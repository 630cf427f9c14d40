"""The audit log: what it holds, and that every change to it is found."""

from __future__ import annotations

import json
import random
import resource
import signal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from everfed.cli import app
from everfed.federation import request as ask
from everfed.federation.audit import AUDIT, HEAD, Audited, AuditedTransport, AuditError, AuditLog, verify
from everfed.federation.packet import PROTOCOL, Packet
from everfed.federation.request import Answer
from everfed.federation.transport import Failure
from tests.federation.loop import federated, loop_of, site
from tests.support.toy import Bench


def log_of(folder: Path, lines: int = 5) -> Path:
    log = AuditLog(folder / AUDIT)
    for number in range(lines):
        log.write(what="request", client=number, kind="steps")
    return folder / AUDIT


def events(path: Path) -> list[dict[str, object]]:
    return [json.loads(line)["event"] for line in path.read_text().splitlines()]


def test_a_log_that_nobody_touched_is_accepted_and_goes_on(tmp_path: Path) -> None:
    path = log_of(tmp_path)
    assert verify(path).number == 5
    AuditLog(path).write(what="answer")
    assert verify(path).number == 6 and len(events(path)) == 6


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000))
def test_every_change_of_a_byte_is_found(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    path, rng = log_of(tmp_path_factory.mktemp("log")), random.Random(seed)
    data = bytearray(path.read_bytes())
    where = rng.randrange(len(data))
    data[where] ^= 1 << rng.randrange(8)
    path.write_bytes(bytes(data))
    with pytest.raises(AuditError, match="line"):
        verify(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda lines: lines[:-1], "line 5 is missing"),
        (lambda lines: lines[:2], "line 5 is missing"),
        (lambda lines: [], "line 5 is missing"),
        (lambda lines: lines[1:], "line 1 was changed"),
        (lambda lines: [*lines[:2], *lines[3:]], "line 3 was changed"),
        (lambda lines: [lines[0], lines[2], lines[1], *lines[3:]], "line 2 was changed"),
        (lambda lines: [*lines[:3], lines[2], *lines[3:]], "line 4 was changed"),
        (lambda lines: [*lines, b"not JSON\n"], "line 6 is not a line"),
    ],
)
def test_lines_that_were_cut_moved_or_added_are_found(change: object, said: str, tmp_path: Path) -> None:
    path = log_of(tmp_path)
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))  # type: ignore[operator]
    with pytest.raises(AuditError, match=said):
        verify(path)


def test_a_log_written_anew_is_found_by_a_hash_that_was_noted(tmp_path: Path) -> None:
    path = log_of(tmp_path)
    noted = verify(path).hash
    path.unlink()
    (tmp_path / f"{AUDIT}.last").unlink()
    log_of(tmp_path, lines=6)
    good, bad = (
        CliRunner().invoke(app, ["federation", "audit", str(path), *more]) for more in ((), ("--holds", noted))
    )
    assert good.exit_code == 0 and "6 lines, unchanged" in " ".join(good.output.split())
    assert bad.exit_code == 2 and "written anew" in " ".join(bad.output.split())


def test_a_process_killed_while_writing_loses_a_line_at_most(tmp_path: Path) -> None:
    path = log_of(tmp_path)
    last, whole = (tmp_path / f"{AUDIT}.last").read_bytes(), path.read_bytes()
    AuditLog(path).write(what="answer")
    (tmp_path / f"{AUDIT}.last").write_bytes(last)  # killed between the two files
    assert verify(path).number == 6
    path.write_bytes(whole + b'{"number": 6, "ti')  # killed within the line
    AuditLog(path).write(what="answer")
    assert verify(path).number == 6


def test_a_changed_log_is_kept_and_a_new_one_begins(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = log_of(tmp_path)
    path.write_bytes(path.read_bytes().replace(b'"client": 2', b'"client": 3'))
    AuditLog(path).write(what="request")
    assert [event["what"] for event in events(path)] == ["replaced", "request"] and verify(path).number == 2
    assert "line 3 was changed" in str(events(path)[0]["reason"]) and "line 3 was changed" in caplog.text
    with pytest.raises(AuditError, match="line 3"):
        verify(tmp_path / f"{AUDIT}.1")


@pytest.mark.parametrize("replaced", [False, True])
def test_a_log_that_is_removed_while_it_is_in_use_is_begun_anew_and_says_so(replaced: bool, tmp_path: Path) -> None:
    log = AuditLog(tmp_path / AUDIT)
    log.write(what="request")
    (tmp_path / AUDIT).rename(tmp_path / "elsewhere")
    if replaced:
        (tmp_path / AUDIT).write_text("")
    log.write(what="answer")
    assert [event["what"] for event in events(tmp_path / AUDIT)] == ["replaced", "answer"]
    assert "was removed while it was in use" in str(events(tmp_path / AUDIT)[0]["reason"])
    assert verify(tmp_path / AUDIT).number == 2


def test_both_ends_write_down_what_was_asked_and_answered(tmp_path: Path) -> None:
    bench = Bench("fedavg")
    loop = loop_of(bench, tmp_path)
    for client, one in loop.sites.items():
        loop.sites[client] = Audited(one, AuditLog(tmp_path / f"{client}.jsonl"), "server:1")  # type: ignore[assignment]
    failed: list[int] = []

    def once(client: int, packet: Packet) -> Packet | Failure:
        return packet if failed or failed.append(client) else Failure("the network is down")  # type: ignore[func-returns-value]

    loop.before = once
    audited = AuditedTransport(loop, AuditLog(tmp_path / "server.jsonl"))  # type: ignore[arg-type]
    federated(bench, audited)  # type: ignore[arg-type]
    server = events(tmp_path / "server.jsonl")
    asked = [event for event in server if event["what"] == "request"]
    answers = [event for event in server if event["what"] == "answer"]
    assert [event["reason"] for event in server if event["what"] == "failure"] == ["the network is down"]
    assert asked[0]["steps"] == [["train", [0, 0, 0, 0]]] and asked[0]["kind"] == "steps" and asked[0]["run"] == "a1"
    assert len(answers) == len(asked) - 1 and {event["kind"] for event in answers} <= {ask.REPLY, ask.MISSING}
    for client in loop.sites:
        own = tmp_path / f"{client}.jsonl"
        mine = [event.get("digest") for event in events(own) if event["what"] == "answer"]
        assert mine == [event.get("digest") for event in answers if event["client"] == client] and mine[-1]
        noted = [event["their"] for event in answers if event["client"] == client]
        assert noted[-1] == verify(own).hash, "the server noted the end of the client's log"


def test_a_refusal_is_written_down(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / AUDIT)
    audited = Audited(site(Bench("fedavg"), tmp_path, 0), log, "server:1")
    answer = audited.answer(Packet({"protocol": PROTOCOL, "kind": "steps"}))
    asked, answered = events(tmp_path / AUDIT)
    assert (asked["what"], answered["what"], answered["kind"]) == ("request", "answer", ask.REFUSED)
    assert "PacketError" in str(answered["reason"]) and asked["server"] == "server:1"
    assert answer.header[HEAD] == verify(tmp_path / AUDIT).hash


@pytest.mark.parametrize("where", ["line", "last"])
def test_on_a_full_disk_nothing_is_answered_and_the_log_stays_whole(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full when the line is half written, or when its number and hash are."""
    log = AuditLog(tmp_path / AUDIT)
    audited = Audited(site(Bench("fedavg"), tmp_path, 0), log, "server:1")
    hello = Packet({"protocol": PROTOCOL, "kind": ask.HELLO})
    audited.answer(hello)
    with monkeypatch.context() as patch:
        if where == "line":
            resource.setrlimit(resource.RLIMIT_FSIZE, (log.path.stat().st_size + 40, resource.RLIM_INFINITY))
        else:
            patch.setattr("everfed.federation.audit.write_atomic", full)
        try:
            before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            failed = Answer.of(audited.answer(hello))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            signal.signal(signal.SIGXFSZ, before)
    assert failed.kind == ask.FAILED and "audit log cannot be written" in failed.reason
    assert verify(log.path).number == 2
    audited.answer(hello)
    assert verify(log.path).number == 4


def full(*arguments: object, **named: object) -> None:
    raise OSError(28, "No space left on device")
