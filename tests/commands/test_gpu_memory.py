"""Runs side by side on one GPU share its memory: each has its part, and gives back what it no longer needs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from everfed import engines
from everfed.core.data import device_memory
from everfed.engines import captured_steps
from everfed.engines.graphs import DeviceData
from everfed.engines.slots import Tuner
from everfed.experiments import workers
from everfed.experiments.concurrency import Concurrency
from everfed.experiments.jobs import JobSettings, Outcome, Queue
from everfed.recipe import EngineSection

GIB = 1 << 30


def test_every_run_has_the_same_share_of_the_gpu_and_all_together_leave_room_for_contexts() -> None:
    shares = workers._shares(Concurrency(4, pinned=False))
    assert [share.gpu_memory for share in shares] == [0.225] * 4
    assert all(share.cores is None for share in shares)


def test_a_worker_limits_itself_on_every_gpu_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: dict[int, float] = {}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, device: limits.update({device: share})
    )
    workers._limit_gpu_memory(0.225)
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
    tuner.measured(100.0, 60.0)
    assert (tuner.setting.slots if tuner.searching else None) == more


@pytest.mark.parametrize(("share", "free", "allowed"), [(1.0, 60, 100), (0.225, 14.5, 22.5), (0.05, 0, 5)])
def test_free_memory_is_what_the_process_may_still_have(
    monkeypatch: pytest.MonkeyPatch, share: float, free: float, allowed: float
) -> None:
    """8 of 100 GiB are this process's, 32 others'. Caches of data, test sets and states are parts of what is free."""
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 8 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * GIB, 100 * GIB))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", {0: share}.__getitem__)
    released: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: released.append(True))
    device = torch.device("cuda")
    assert device_memory(device) == (pytest.approx(free * GIB, abs=1), pytest.approx(allowed * GIB, abs=1))
    assert DeviceData(device)._kept.limit == pytest.approx(0.3 * free * GIB, abs=1)
    captured_steps.release_memory(device)
    assert bool(released) == (free < 0.2 * allowed)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert engines.state_budget(EngineSection()) == pytest.approx(max(2 * GIB, free * GIB / 4), abs=1)


@pytest.mark.parametrize(
    ("problem", "cores", "goes_on"), [("", None, True), ("CUDA error", None, False), ("nan", (0,), True)]
)
def test_after_an_error_on_a_gpu_the_next_run_has_a_new_process(
    problem: str, cores: tuple[int, ...] | None, goes_on: bool
) -> None:
    """An illegal access ends all that a process can do on a GPU; the next run in it would fail as well."""
    stopped: list[bool] = []
    cell = SimpleNamespace(folder="run")
    outcome = SimpleNamespace(job=cell, problem=problem)
    worker: Any = SimpleNamespace(
        job=cell, share=workers.Share(cores), stop=lambda: stopped.append(True),
        pipe=SimpleNamespace(recv=lambda: ("outcome", outcome)),
    )  # fmt: skip
    queue: Any = SimpleNamespace(finish=lambda given: None)
    pool = [worker]
    workers._receive(worker, queue, pool, JobSettings(), lambda cell, event: None)
    assert (worker in pool, stopped) == (goes_on, [] if goes_on else [True])


def lost(message: str) -> Any:
    """torch.cuda after a device-side assert: every call raises from then on."""

    def synchronize() -> None:
        raise RuntimeError(message)

    return synchronize


@pytest.mark.parametrize("raised", [True, False])
def test_a_run_that_lost_the_gpu_has_no_outcome(monkeypatch: pytest.MonkeyPatch, raised: bool) -> None:
    """Under CUDA MPS the fault may be another run's: this one must have another try, in a new process."""

    def attempt() -> Any:
        if raised:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return Outcome(SimpleNamespace(), None, "RuntimeError: CUDA error: device-side assert triggered")  # type: ignore[arg-type]

    assert workers._answer(attempt)[0] == ("bug" if raised else "outcome")  # no GPU was used
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert workers._answer(attempt)[0] == ("bug" if raised else "outcome")  # the GPU is well
    monkeypatch.setattr(torch.cuda, "synchronize", lost("CUDA error"))
    assert workers._answer(attempt) == ("lost", "RuntimeError: CUDA error: device-side assert triggered")


def test_a_run_that_lost_the_gpu_goes_on_once_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    cell: Any = SimpleNamespace(folder="run", title="ideal seed 3", finished=False)
    queue = Queue([cell])
    monkeypatch.setattr(workers, "JobWorker", lambda settings, share: started.append(share) or new_worker())

    def new_worker() -> Any:
        pipe = SimpleNamespace(recv=lambda: ("lost", "CUDA error: invalid program counter"))
        return SimpleNamespace(job=None, share=workers.Share(None), stop=lambda: None, pipe=pipe)

    for last in (False, True):
        worker = new_worker()
        worker.job = queue.take()
        assert worker.job is cell and not queue.done
        workers._receive(worker, queue, [worker], JobSettings(keep_going=True), lambda cell, event: None)
        assert queue.done == last
    assert len(started) == 2
    assert queue.in_order()[0].problem == "ideal seed 3, 2 times: CUDA error: invalid program counter"


def test_work_on_a_gpu_with_a_number_is_done_with_it_as_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device: scoring and the server's phases would run on the first one."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(engines, "_set_precision", lambda precision: None)
    monkeypatch.setattr(engines, "Eager", lambda *given: None)
    for device in ("cuda:1", "cuda"):
        engines.build(EngineSection(kind="eager", device=device), *[None] * 4)  # type: ignore[arg-type]
    assert chosen == [torch.device("cuda:1")]
