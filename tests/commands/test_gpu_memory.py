"""Runs side by side on one GPU share its memory: each has its part, and gives back what it no longer needs."""

from __future__ import annotations

import pytest
import torch

from everfed.comparison import jobs
from everfed.engines.slots import Setting, Tuner

GIB = 1 << 30


def test_every_run_has_the_same_share_of_the_gpu_and_all_together_leave_room_for_contexts() -> None:
    shares = jobs._shares(jobs.Choice(4, pinned=False))
    assert [share.gpu_memory for share in shares] == [0.225] * 4
    assert all(share.cores is None for share in shares)


def test_a_worker_limits_itself_on_every_gpu_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: dict[int, float] = {}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, device: limits.update({device: share})
    )
    jobs._limit_gpu_memory(0.225)
    assert limits == {0: 0.225, 1: 0.225}


@pytest.mark.parametrize(("share", "more"), [(1.0, 8), (0.1, None)])
def test_slots_are_added_within_the_share_of_the_process(
    monkeypatch: pytest.MonkeyPatch, share: float, more: int | None
) -> None:
    """Four slots use 8 of 100 GiB, 90 are free: eight slots fit, unless this process may have a tenth only."""
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 8 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (90 * GIB, 100 * GIB))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", {3: share}.__getitem__)  # takes no bare "cuda"
    tuner = Tuner(0, 1, torch.device("cuda"))
    tuner.measured(Setting(4, 1), 100.0)
    assert (tuner.setting.slots if tuner.searching else None) == more
