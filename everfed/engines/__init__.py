"""Where clients run. `build` chooses; every engine gives the same results (a GPU's rounding apart)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from everfed.core.engine import Engine
from everfed.core.world import World
from everfed.engines.base import BuildModule
from everfed.engines.eager import Eager
from everfed.errors import UserError
from everfed.recipe import EngineSection
from everfed.store.clients import ClientStore


class EngineError(UserError):
    """An engine that this machine cannot run."""


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def device(section: EngineSection) -> torch.device:
    """The recipe's device; "auto" is a GPU when there is one, unless the engine is for the CPU."""
    if section.device == "auto":
        wants_gpu = section.kind != "processes" and torch.cuda.is_available()
        return torch.device("cuda" if wants_gpu else "cpu")
    try:
        chosen = torch.device(section.device)
    except RuntimeError as error:
        raise EngineError(f"engine.device must be auto, cpu, cuda or cuda:N; got {section.device!r}") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise EngineError(f"engine.device = {section.device!r}, but this machine has no CUDA device; use cpu or auto")
    return chosen


def memory_format(section: EngineSection) -> str:
    """ "channels-last" or "contiguous": channels-last is what GPUs want."""
    if section.memory_format == "auto":
        return "channels-last" if device(section).type == "cuda" else "contiguous"
    return section.memory_format


def build(
    section: EngineSection,
    world: World,
    store: ClientStore,
    build_module: BuildModule,
    notify: Callable[[dict[str, Any]], None],
) -> Engine:
    """The engine that `section` asks for."""
    return Eager(world, store, build_module, str(device(section)))
