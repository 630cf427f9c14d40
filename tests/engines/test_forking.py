"""Worker processes on machines with a GPU, where a fork after a backward pass cannot train."""

from __future__ import annotations

import os

import pytest

from everfed import engines
from everfed.engines import calibration, forking
from everfed.engines.forking import forks_can_train, in_fork
from everfed.errors import UserError
from everfed.recipe import Recipe
from everfed.session import assemble
from everfed.store.clients import ClientStore


def test_a_fork_returns_what_its_work_returns() -> None:
    assert in_fork(os.getpid) != os.getpid()


def test_its_error_is_ours() -> None:
    def fails() -> int:
        raise ValueError("no such client")

    with pytest.raises(RuntimeError, match="ValueError: no such client"):
        in_fork(fails)


def test_one_that_ends_without_an_answer_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="without an answer"):
        in_fork(lambda: os._exit(3))


def test_without_a_gpu_forks_can_train() -> None:
    assert forks_can_train()


@pytest.mark.parametrize("can", [True, False])
def test_processes_where_there_is_a_gpu(can: bool, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """A GPU is pretended; tests/gpu/test_forking.py has the real one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(forking, "gpu", lambda: True)
    monkeypatch.setattr("everfed.engines.calibration.gpu", lambda: True)
    monkeypatch.setattr(forking, "_trains", lambda: can)
    recipe = Recipe.model_validate(
        {
            "stream": {"dataset": "digits", "tasks": 2, "clients": 3},
            "engine": {"kind": "auto", "device": "cpu", "workers": 2},
            "method": {"name": "fedavg"},
        }
    )
    made = assemble(recipe)

    def build(kind: str):
        section = recipe.engine.model_copy(update={"kind": kind})
        return engines.build(section, made.setup, ClientStore(), made.build_module, lambda event: None)

    if can:
        engine = build("processes")
        assert engine.name == "processes"
        engine.close()
        assert calibration.one_client(made.setup, made.build_module) is not None  # measured in a fork
    else:
        assert build("auto").name == "eager"
        with pytest.raises(UserError, match="has computed gradients already"):
            build("processes")
