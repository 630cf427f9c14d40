"""What tests of a federation's processes share."""

from __future__ import annotations

import pytest

from tests.support.waiting import HANG


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A SuperLink or a ServerApp that a busy machine keeps from starting is waited for."""
    monkeypatch.setattr("everfed.federation.superlink.START", HANG)
    monkeypatch.setattr("everfed.federation.flower.link.START", HANG)
