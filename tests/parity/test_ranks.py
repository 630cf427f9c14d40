"""Two ranks of torch.distributed (gloo) as real processes: the eager result, and resuming on other numbers of ranks.

One run starts as a user starts it, by torchrun. The ranks of the others are forked from this process, which has
imported torch already, and find each other by the variables that torchrun would set.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import TCPStore
from typer.testing import CliRunner

import everfed
from everfed.cli import app
from tests.support.waiting import HANG

OPTIONS = [
    "stream.tasks=2", "stream.clients=5", "train.rounds_per_task=3", "train.local_epochs=1",
]  # fmt: skip
# sums of ranks are added in float64; what may differ is the last rounding to float32
TOLERANCE = {"rtol": 1e-6, "atol": 1e-7}
# sums over some hundred weights and inputs, each with that difference
TOLERANCE_OF_LOGITS = {"rtol": 1e-5, "atol": 1e-5}


def arguments(out: Path, method: str, engine: str, *more: str) -> list[str]:
    sets = [*OPTIONS, f"engine.kind={engine}", *more]
    words = ["run", "demo", "--method", method, "--out", str(out), "--checkpoint-every", "0"]
    return words + [word for one in sets for word in ("--set", one)]


def torchrun(ranks: int, words: list[str]) -> str:
    """What it prints."""
    rendezvous = ["--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, "-m", "torch.distributed.run", *rendezvous, "-m", "everfed", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@contextmanager
def forked_ranks(ranks: int, words: list[str], log: Path) -> Iterator[list[BaseProcess]]:
    """The processes of a run; what still runs at the end of the block is killed."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # torchrun's own part of the rendezvous
    shared = {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    fork = multiprocessing.get_context("fork")
    started = [
        fork.Process(target=_rank, args=(words, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, log))
        for rank in range(ranks)
    ]
    for process in started:
        process.start()
    try:
        yield list(started)
    finally:
        for process in started:
            process.kill()
            process.join()


def _rank(words: list[str], environment: dict[str, str], log: Path) -> None:
    """One rank, in a process of its own; what it prints goes into a file."""
    os.environ.update(environment)
    sys.stdout = sys.stderr = log.open("a")
    app(words, prog_name="everfed")


def run_ranks(ranks: int, words: list[str], log: Path) -> None:
    with forked_ranks(ranks, words, log) as processes:
        for process in processes:
            process.join(HANG)
            assert process.exitcode == 0, log.read_text()[-3000:]


def run_eager(out: Path, method: str, *more: str) -> Path:
    """In this process, which has imported torch already."""
    done = CliRunner().invoke(app, arguments(out, method, "eager", *more))
    assert done.exit_code == 0, done.output
    return out


def same(a: Path, b: Path) -> None:
    ours, theirs = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], **TOLERANCE)
    torch.testing.assert_close(logits(a), logits(b), **TOLERANCE_OF_LOGITS)
    left, right = (json.loads((folder / "result.json").read_text()) for folder in (a, b))
    for key in ("bytes_up", "bytes_down", "bytes_by_part", "samples", "client_state_bytes"):
        assert left["cost"][key] == right["cost"][key]
    # counts of right answers: a rounding of the weights could change one only at an exact tie of two logits
    for key in ("n_test", "accuracy_matrix", "metrics", "by_logits", "curves"):
        assert left[key] == right[key], key


def logits(folder: Path) -> Tensor:
    """What the network of a finished run says to images of the digits, read as a user reads it."""
    images = torch.linspace(0.0, 1.0, 50 * 64).reshape(50, 1, 8, 8)
    with torch.no_grad():
        return everfed.load(folder).model(images)  # type: ignore[no-any-return]


def test_two_ranks_equal_one_process(tmp_path: Path) -> None:
    eager, out = run_eager(tmp_path / "eager", "fedgp+der"), tmp_path / "run"
    printed = torchrun(2, arguments(out, "fedgp+der", "ranks"))
    assert printed.count("run folder:") == 1  # a rank that follows prints nothing
    same(out, eager)
    assert logits(out).std() > 0.1  # so that the comparison says something
    assert everfed.load(out).recipe.engine.kind == "ranks"  # though here are no ranks to run it on
    facts = json.loads((out / "result.json").read_text())["environment"]
    assert (facts["engine"], facts["inner"], facts["ranks"]) == ("ranks", "eager", 2)


@pytest.mark.slow
def test_squared_errors_on_two_ranks_equal_those_of_one_process(tmp_path: Path) -> None:
    """A table with numbers to predict."""
    rows = np.random.default_rng(0).normal(size=(80, 3))
    lines = ["a,b,c,target", *(f"{a},{b},{c},{a + 2 * b - c}" for a, b, c in rows)]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    more = (f"stream.dataset={tmp_path / 't.csv'}", "stream.transform=permute", "model.kind=mlp")
    run_ranks(2, arguments(tmp_path / "ranks", "fedgp+er", "ranks", *more), tmp_path / "log")
    run_eager(tmp_path / "eager", "fedgp+er", *more)
    ours, theirs = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("ranks", "eager"))
    assert ours["score"] == "mse" and ours["n_test"] == theirs["n_test"]
    # a task that was not scored yet is null, here not a number
    left, right = (np.array(result["accuracy_matrix"], dtype=float) for result in (ours, theirs))
    np.testing.assert_allclose(left, right, rtol=1e-6)


@pytest.mark.parametrize("reducer", ["median", "norm-clipping", "geometric-median"])
def test_robust_reducers_see_the_clients_of_all_ranks(reducer: str, tmp_path: Path) -> None:
    """The trimmed mean: below."""
    more = ("train.rounds_per_task=1", f"method.fedavg.reducer={reducer}", "method.fedavg.norm=0.5")
    run_ranks(2, arguments(tmp_path / "ranks", "fedavg", "ranks", *more), tmp_path / "log")
    same(tmp_path / "ranks", run_eager(tmp_path / "eager", "fedavg", *more))


def test_a_run_killed_on_two_ranks_goes_on_with_three(tmp_path: Path) -> None:
    """With a reducer that needs the replies of all ranks at once."""
    out, more = tmp_path / "run", "method.fedavg.reducer=trimmed-mean"
    eager = run_eager(tmp_path / "eager", "fedgp+der", more)
    events = out / "events.jsonl"
    deadline = time.monotonic() + HANG
    with forked_ranks(2, arguments(out, "fedgp+der", "ranks", more), tmp_path / "log") as processes:
        while time.monotonic() < deadline and all(process.is_alive() for process in processes):
            if events.exists() and '"checkpoint"' in events.read_text():
                break
            time.sleep(0.005)
    if not (out / "result.json").exists():  # it may have been quicker than we are
        run_ranks(3, ["resume", str(out)], tmp_path / "log")
    same(out, eager)


def test_without_torchrun_it_says_how(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["run", "demo", "--set", "engine.kind=ranks", "--out", str(tmp_path / "r")])
    assert done.exit_code == 2
    assert "torchrun" in done.stderr
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("method", "more"),
    [
        pytest.param(
            "mfcl",
            ("gen_steps=4", "gen_chunk=2", "gen_batch=8", "gen_light=true", "syn_batch=4"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "fedcil", ("server_steps=3", "server_chunk=2", "server_batch=4", "width=8"), marks=pytest.mark.slow
        ),
    ],
)
def test_one_rank_does_the_servers_own_work_for_all(method: str, more: tuple[str, ...], tmp_path: Path) -> None:
    small = ("train.rounds_per_task=1", "stream.max_train=60", *(f"method.{method}.{option}" for option in more))
    run_ranks(2, arguments(tmp_path / "ranks", method, "ranks", *small), tmp_path / "log")
    same(tmp_path / "ranks", run_eager(tmp_path / "eager", method, *small))
