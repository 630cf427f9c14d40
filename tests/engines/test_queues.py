"""A queue of the GPU for every stream, where that is safe: under MPS a process with many of them does not start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from everfed.comparison import jobs
from everfed.engines.queues import choose_queues

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the control pipe of an MPS daemon would lie."""
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    return tmp_path / "control"


@pytest.mark.parametrize(
    ("before", "under_mps", "after"),
    [
        (None, False, "32"),
        ("4", False, "4"),
        (None, True, None),
        ("32", True, None),  # inherited from a process that is not under MPS
        ("4", True, "4"),
    ],
)
def test_how_many(monkeypatch, daemon: Path, before: str | None, under_mps: bool, after: str | None) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if before is not None:
        monkeypatch.setenv(VARIABLE, before)
    if under_mps:
        daemon.touch()
    choose_queues()
    assert os.environ.get(VARIABLE) == after


def test_they_are_chosen_before_cuda_starts(daemon: Path) -> None:
    """By the import of the engines, which asks nothing of CUDA."""
    code = f"import os, torch, everfed.engines; print(os.environ['{VARIABLE}'], torch.cuda.is_initialized())"
    clean = {name: value for name, value in os.environ.items() if name != VARIABLE}
    ended = subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["32", "False"]


def test_a_worker_under_mps_has_cudas_own_number(monkeypatch, daemon: Path) -> None:
    """The command that starts it is not under MPS, and has many."""
    where = {"CUDA_MPS_PIPE_DIRECTORY": os.environ["CUDA_MPS_PIPE_DIRECTORY"]}
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY")
    monkeypatch.setenv(VARIABLE, "32")
    monkeypatch.setattr(jobs.signal, "signal", lambda *_: None)
    daemon.touch()
    seen: list[str | None] = []
    monkeypatch.setattr(jobs, "_limit_gpu_memory", lambda _: seen.append(os.environ.get(VARIABLE)))

    class Closed:
        def recv(self) -> None:
            raise EOFError

    jobs._work(Closed(), None, jobs.Share(None, 0.5, where))
    assert seen == [None]
