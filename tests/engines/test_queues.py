"""A queue of the GPU for every stream, where that is safe: under MPS a process with many of them does not start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from everfed.engines.slots import choose_queues
from everfed.experiments import workers

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the control pipe of an MPS daemon would lie."""
    monkeypatch.setattr(os, "environ", {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)})
    for name in (VARIABLE, "EVERFED_CHOSE_CONNECTIONS"):
        os.environ.pop(name, None)
    return tmp_path / "control"


@pytest.mark.parametrize(
    ("before", "under_mps", "after"),
    [
        (None, False, "32"),
        ("4", False, "4"),
        (None, True, None),
        ("4", True, "4"),
        ("32", True, "32"),  # by the user, who will see
    ],
)
def test_how_many(daemon: Path, monkeypatch, before: str | None, under_mps: bool, after: str | None) -> None:
    if before is not None:
        monkeypatch.setenv(VARIABLE, before)
    if under_mps:
        daemon.touch()
    choose_queues()
    assert os.environ.get(VARIABLE) == after


def test_what_was_inherited_from_a_process_that_is_not_under_mps(daemon: Path) -> None:
    choose_queues()
    assert os.environ[VARIABLE] == "32"
    daemon.touch()
    choose_queues()
    assert VARIABLE not in os.environ


def test_a_daemons_folder_that_may_not_be_read_is_none_of_ours(daemon: Path, monkeypatch) -> None:
    """As that of another user. `stat` is refused, whoever runs this test."""

    def refused(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "stat", refused)
    choose_queues()
    monkeypatch.undo()


def test_they_are_chosen_before_cuda_starts(daemon: Path) -> None:
    """By the import of the engines, which asks nothing of CUDA."""
    code = f"import os, torch, everfed.engines; print(os.environ['{VARIABLE}'], torch.cuda.is_initialized())"
    ended = subprocess.run(
        [sys.executable, "-c", code], env=dict(os.environ), capture_output=True, text=True, check=True
    )
    assert ended.stdout.split() == ["32", "False"]


def test_a_worker_under_mps_has_cudas_own_number(monkeypatch, daemon: Path) -> None:
    """The command that starts it is not under MPS, and has many."""
    where = {"CUDA_MPS_PIPE_DIRECTORY": os.environ["CUDA_MPS_PIPE_DIRECTORY"]}
    choose_queues()
    assert os.environ[VARIABLE] == "32"
    monkeypatch.setattr(workers.signal, "signal", lambda *_: None)
    daemon.touch()
    seen: list[str | None] = []
    monkeypatch.setattr(workers, "_limit_gpu_memory", lambda _: seen.append(os.environ.get(VARIABLE)))

    class Closed:
        def recv(self) -> None:
            raise EOFError

    workers._work(Closed(), None, workers.Share(None, 0.5, where))
    assert seen == [None]
