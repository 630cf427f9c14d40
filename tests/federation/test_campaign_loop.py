"""The campaign of `benchmarks.campaign_loop`, a slice of it: lies, dishonest requests and faults in one process."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("flwr", reason="the extra `flower` is not installed")
pytest.importorskip("dp_accounting", reason="pip install 'everfed[privacy]'")

from benchmarks.campaign_loop import MODES, bench_of, campaign, simulated


@pytest.fixture(autouse=True)
def _no_wait_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def test_a_run_without_a_reply_ends_in_other_bits() -> None:
    """Else the campaign's comparison would show nothing."""
    bench = bench_of("plain", 2)
    assert not (simulated(bench, {}) == simulated(bench, {(0, "train", 0): {1}})).all()


@pytest.mark.parametrize(
    ("mode", "share"),
    [("plain", 0.03), ("secure aggregation", 0.015), *(pytest.param(m, 1.0, marks=pytest.mark.slow) for m in MODES)],
)
@pytest.mark.timeout(3600)
def test_no_lie_request_or_fault_ends_a_run_or_changes_its_bits(mode: str, share: float) -> None:
    found = campaign(mode, 0, share)
    assert not found["does not hold"], found["does not hold"]
    assert found["clients left out by faults"] == 0
    assert set(found["answers"]) <= {"refused", "failed", "missing", "reply", "hello"}
