"""Worker processes on a machine with a GPU."""

from __future__ import annotations

import pytest
import torch

import everfed
from everfed.engines.forking import forks_can_train, in_fork

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TABLE = {
    "stream": {"dataset": "digits", "tasks": 2, "clients": 4},
    "train": {"rounds_per_task": 2, "local_epochs": 1},
    "engine": {"device": "cpu", "workers": 2},
    "method": {"name": "fedavg"},
}


def accuracy(kind: str, folder) -> float:
    table = {**TABLE, "engine": {**TABLE["engine"], "kind": kind}}
    return everfed.run(table, folder).metrics["acc"]


def test_auto_on_the_cpu_works_whether_or_not_forks_can_train(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert accuracy("auto", tmp_path / "a") == accuracy("eager", tmp_path / "b") == accuracy("auto", tmp_path / "c")


def test_after_a_backward_pass_forks_cannot_train_and_it_is_an_error() -> None:
    torch.ones((), requires_grad=True).square().backward()
    assert not forks_can_train()
    assert in_fork(lambda: 1) == 1
    with pytest.raises(everfed.UserError, match="has computed gradients already"):
        everfed.run({**TABLE, "engine": {**TABLE["engine"], "kind": "processes"}})
