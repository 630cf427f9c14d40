"""The ledger: what is in it stays in it, whatever a crash cuts off."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest

from everfed.store.ledger import Conflict, LedgerError, LedgerFile, Lost


def test_records_are_there_for_the_next_process(tmp_path: Path) -> None:
    path = tmp_path / "new" / "ledger.jsonl"
    first = LedgerFile(path)
    assert first.find("a") is None and not path.exists()
    first.record("a", "0,1,2")
    first.record("b", "x")
    again = LedgerFile(path)
    assert (again.find("a"), again.find("b")) == ("0,1,2", "x")
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_record_is_never_changed(tmp_path: Path) -> None:
    ledger = LedgerFile(tmp_path / "ledger.jsonl")
    ledger.record("a", "0,1,2")
    ledger.record("a", "0,1,2")
    with pytest.raises(Conflict, match="recorded as '0,1,2', not '0,1'"):
        ledger.record("a", "0,1")
    assert (tmp_path / "ledger.jsonl").read_text() == '["a", "0,1,2"]\n'


def test_every_record_is_synced_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bytes] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append((tmp_path / "l").read_bytes()), real(fd))[1])
    ledger = LedgerFile(tmp_path / "l")
    ledger.record("a", "1")
    ledger.record("b", "2")
    assert synced[0] == b'["a", "1"]\n' and synced[-1] == b'["a", "1"]\n["b", "2"]\n'


@pytest.mark.parametrize("cut", range(1, 11))
def test_a_line_that_was_cut_off_is_removed(cut: int, tmp_path: Path) -> None:
    """11 bytes with the newline; the reply that it was to allow was never sent."""
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b'["a", "1"]\n' + b'["b", "2"]\n'[:cut])
    ledger = LedgerFile(path)
    assert ledger.find("a") == "1" and ledger.find("b") is None
    ledger.record("b", "3")
    assert LedgerFile(path).find("b") == "3"


@pytest.mark.parametrize("line", ["x", "[1]", "{}", '["a"]', "3", '["a", "b", "c"]'])
def test_a_damaged_ledger_is_not_taken_for_an_empty_one(line: str, tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text(f'["a", "1"]\n{line}\n')
    with pytest.raises(LedgerError, match=r"ledger\.jsonl, line 2"):
        LedgerFile(path)


def test_a_record_that_the_disk_took_half_of_leaves_the_ledger_whole(tmp_path: Path) -> None:
    ledger = LedgerFile(tmp_path / "l")
    ledger.record("a", "1")
    try:
        before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (15, resource.RLIM_INFINITY))  # of 22 bytes
        with pytest.raises(OSError):
            ledger.record("b", "2")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, before)
    assert ledger.find("b") is None
    ledger.record("b", "3")
    assert LedgerFile(tmp_path / "l").find("b") == "3"


@pytest.mark.parametrize("replaced", [False, True])
def test_a_ledger_that_is_removed_while_it_is_in_use_records_nothing_more(replaced: bool, tmp_path: Path) -> None:
    """In a new file the earlier records would be forgotten."""
    path = tmp_path / "l"
    ledger = LedgerFile(path)
    ledger.record("a", "1")
    path.rename(tmp_path / "old")
    if replaced:
        path.write_bytes(b"")
    with pytest.raises(Lost, match="was removed while it was in use"):
        ledger.record("b", "2")
    assert ledger.find("b") is None and path.exists() == replaced
