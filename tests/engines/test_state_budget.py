"""How much client state is kept in memory, where nobody said."""

from __future__ import annotations

import pytest
import torch

from everfed import engines
from everfed.recipe import EngineSection

GIB = 2**30


def test_it_is_what_the_recipe_says_or_two_gib() -> None:
    assert engines.state_budget(EngineSection(state_memory=0.5, device="cpu")) == GIB // 2
    assert engines.state_budget(EngineSection(device="cpu")) == 2 * GIB


@pytest.mark.parametrize(("free", "budget"), [(100, 25), (8, 2), (4, 2)])
def test_on_a_gpu_it_is_a_quarter_of_what_is_free(free: int, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * GIB, 141 * GIB))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)
    assert engines.state_budget(EngineSection()) == budget * GIB
    assert engines.state_budget(EngineSection(kind="processes")) == 2 * GIB  # runs on the CPU
    assert engines.state_budget(EngineSection(state_memory=1.0)) == GIB
