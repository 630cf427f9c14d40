"""Where clients run. `build` chooses; every engine gives the same results (a GPU's rounding apart)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from everfed.core.context import Setup
from everfed.core.data import device_memory
from everfed.core.engine import Engine
from everfed.engines.eager import BuildModule, Eager
from everfed.engines.group import Group, launched, local_rank
from everfed.engines.slots import choose_queues
from everfed.errors import UserError
from everfed.store.clients import DEFAULT_BUDGET, ClientStore

if TYPE_CHECKING:
    from everfed.core.events import Observer
    from everfed.recipe import EngineSection


choose_queues()  # before CUDA starts


class EngineError(UserError):
    """An engine that this machine cannot run."""


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def device(section: EngineSection) -> torch.device:
    """The recipe's device; "auto" is a GPU when there is one, unless the engine is for the CPU."""
    if section.kind == "ranks" and section.device in ("auto", "cuda") and torch.cuda.is_available():
        return torch.device("cuda", local_rank())
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


def precision(section: EngineSection) -> str:
    """ "auto" is bf16 on a GPU (its matrix units are made for it) and fp32 on the CPU, where results are exact."""
    if section.precision == "auto":
        return "bf16" if device(section).type == "cuda" else "fp32"
    return section.precision


def memory_format(section: EngineSection) -> str:
    """ "channels-last" or "contiguous": channels-last is what GPUs want."""
    if section.memory_format == "auto":
        return "channels-last" if device(section).type == "cuda" else "contiguous"
    return section.memory_format


def state_budget(section: EngineSection) -> int:
    """Bytes of client state that are kept in memory. By itself 2 GiB; on a GPU, where states lie on the device and a
    page must cross to the host and back, a quarter of what is free there."""
    if section.state_memory:
        return int(section.state_memory * 2**30)
    chosen = device(section)
    free = device_memory(chosen)[0] if chosen.type == "cuda" else 0
    return max(DEFAULT_BUDGET, free // 4)


def check(section: EngineSection) -> None:
    """Refuse an engine that this machine cannot run."""
    chosen = device(section)
    if section.kind == "graphs" and chosen.type != "cuda":
        raise EngineError("engine.kind = 'graphs' needs a CUDA device; use auto, eager or processes")
    if section.kind == "ranks" and not launched():
        raise EngineError(
            "engine.kind = 'ranks' is started by torchrun: torchrun --nproc-per-node N -m everfed run RECIPE "
            "--set engine.kind=ranks"
        )
    if section.kind == "processes" and chosen.type != "cpu":
        raise EngineError("engine.kind = 'processes' runs on the CPU; set engine.device = 'cpu' or use graphs")


def join(section: EngineSection) -> Group | None:
    """Meet the other ranks of this run; None for an engine that is a single process."""
    check(section)
    return Group(device(section)) if section.kind == "ranks" else None


def build(
    section: EngineSection,
    setup: Setup,
    store: ClientStore,
    build_module: BuildModule,
    notify: Observer,
    group: Group | None = None,
) -> Engine:
    """The engine that `section` asks for; "auto" takes graphs on a GPU, else processes when they are faster."""
    check(section)
    if group is not None:
        return _ranks(section, setup, store, build_module, notify, group)
    where, kind = device(section), str(section.kind)
    if where.type == "cuda":
        _set_precision(precision(section))
        if where.index is not None:
            torch.cuda.set_device(where)  # Triton launches on the current device, wherever its tensors are
    if kind == "auto" and where.type == "cuda":
        kind = "eager" if setup.options.micro_batch else "graphs"  # what is computed again cannot be captured
    elif kind == "auto":
        kind = _faster_on_cpu(section, setup, build_module)
    if kind == "graphs":
        if setup.options.micro_batch:
            raise EngineError("engine.kind = 'graphs' takes no train.micro_batch; use auto or eager")
        from everfed.engines.graphs import Graphs

        how = (str(where), precision(section), section.slots, section.compile)
        return Graphs(setup, store, build_module, *how, notify=notify)
    if kind == "processes":
        from everfed.engines.forking import forks_can_train
        from everfed.engines.processes import Processes

        if not forks_can_train():
            raise EngineError(
                "engine.kind = 'processes' forks its workers, and PyTorch cannot train in them: on a machine with a "
                "GPU this process has computed gradients already. Run it in a new process, or use eager or graphs"
            )
        return Processes(setup, store, build_module, section.workers or cores())
    return Eager(setup, store, build_module, str(where), precision(section))


def _ranks(
    section: EngineSection, setup: Setup, store: ClientStore, build_module: BuildModule, notify: Observer, group: Group
) -> Engine:
    """Of several processes, each with the engine inside that suits its device."""
    from everfed.engines.ranks import Ranks

    inside = "graphs" if group.device.type == "cuda" else "eager"
    alone = section.model_copy(update={"kind": inside, "device": str(group.device)})
    return Ranks(build(alone, setup, store, build_module, notify), group)


def _faster_on_cpu(section: EngineSection, setup: Setup, build_module: BuildModule) -> str:
    workers = section.workers or cores()
    if workers < 2 or len(setup.stream.round(0).participants) < 2:
        return "eager"
    from everfed.engines.calibration import processes_pay
    from everfed.engines.forking import forks_can_train

    if not forks_can_train():
        return "eager"
    return "processes" if processes_pay(setup, build_module, workers) else "eager"


def _set_precision(chosen: str) -> None:
    """fp32 means fp32: TF32 only when it is asked for (bf16 leaves the rest in TF32, too)."""
    torch.backends.cuda.matmul.allow_tf32 = chosen != "fp32"
    torch.backends.cudnn.allow_tf32 = chosen != "fp32"
    torch.backends.cudnn.benchmark = chosen != "fp32"  # autotuned kernels may sum in another order
