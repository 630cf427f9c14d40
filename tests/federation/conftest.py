"""What tests of a federation's processes share."""

from __future__ import annotations

import pytest

from tests.support.waiting import HANG


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A SuperLink that a busy machine keeps from starting, or from answering a call of this process, is waited for."""
    client = pytest.importorskip("flwr.supercore.protobuf.client", reason="the extra `flower` is not installed")
    monkeypatch.setattr("everfed.federation.superlink.START", HANG)
    monkeypatch.setitem(client.ProtobufClient.__init__.__kwdefaults__, "timeout", HANG)  # 30 s by default
