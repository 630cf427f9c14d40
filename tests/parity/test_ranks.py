"""Two ranks of torch.distributed (gloo) as real processes: the eager result, and resuming on other numbers of ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

OPTIONS = [
    "stream.tasks=2", "stream.clients=5", "train.rounds_per_task=3", "train.local_epochs=1",
]  # fmt: skip
# sums of ranks are added in float64; what may differ is the last rounding to float32
TOLERANCE = {"rtol": 1e-6, "atol": 1e-7}


def command(out: Path, method: str, ranks: int, *more: str) -> list[str]:
    sets = [*OPTIONS, "engine.kind=ranks" if ranks else "engine.kind=eager", *more]
    arguments = ["run", "demo", "--method", method, "--out", str(out), "--checkpoint-every", "0"]
    return launcher(ranks) + arguments + [word for one in sets for word in ("--set", one)]


def launcher(ranks: int) -> list[str]:
    if not ranks:
        return [sys.executable, "-m", "everfed"]
    rendezvous = ["--standalone", "--nproc-per-node", str(ranks)]
    return [sys.executable, "-m", "torch.distributed.run", *rendezvous, "-m", "everfed"]


def finish(words: list[str]) -> str:
    """What it prints."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=dict(os.environ, OMP_NUM_THREADS="1"))
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def same(a: Path, b: Path) -> None:
    ours, theirs = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], **TOLERANCE)
    left, right = (json.loads((folder / "result.json").read_text()) for folder in (a, b))
    for key in ("bytes_up", "bytes_down", "bytes_by_part", "samples", "client_state_bytes"):
        assert left["cost"][key] == right["cost"][key]
    # counts of right answers: a rounding of the weights could change one only at an exact tie of two logits
    for key in ("n_test", "accuracy_matrix", "metrics", "by_logits", "curves"):
        assert left[key] == right[key], key


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("eager") / "run"
    finish(command(out, "fedgp+der", 0))
    return out


def test_two_ranks_equal_one_process(eager: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    printed = finish(command(out, "fedgp+der", 2))
    assert printed.count("run folder:") == 1  # a rank that follows prints nothing
    same(out, eager)
    facts = json.loads((out / "result.json").read_text())["environment"]
    assert (facts["engine"], facts["inner"], facts["ranks"]) == ("ranks", "eager", 2)


@pytest.mark.parametrize(
    "reducer",
    [
        "trimmed-mean",
        pytest.param("median", marks=pytest.mark.slow),
        pytest.param("norm-clipping", marks=pytest.mark.slow),
        pytest.param("geometric-median", marks=pytest.mark.slow),
    ],
)
def test_robust_reducers_see_the_clients_of_all_ranks(reducer: str, tmp_path: Path) -> None:
    for ranks, name in ((0, "eager"), (2, "ranks")):
        more = ("train.rounds_per_task=1", f"method.fedavg.reducer={reducer}", "method.fedavg.norm=0.5")
        finish(command(tmp_path / name, "fedavg", ranks, *more))
    same(tmp_path / "ranks", tmp_path / "eager")


def test_a_run_killed_on_two_ranks_goes_on_with_three(eager: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = subprocess.Popen(
        command(out, "fedgp+der", 2), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    events = out / "events.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if events.exists() and '"checkpoint"' in events.read_text():
            break
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if not (out / "result.json").exists():  # it may have been quicker than we are
        finish([*launcher(3), "resume", str(out)])
    same(out, eager)


def test_without_torchrun_it_says_how(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "everfed", "run", "demo", "--set", "engine.kind=ranks", "--out", str(tmp_path / "r")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "torchrun" in done.stderr
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("mfcl", ("gen_steps=4", "gen_chunk=2", "gen_batch=8", "gen_light=true", "syn_batch=4")),
        pytest.param(
            "fedcil", ("server_steps=3", "server_chunk=2", "server_batch=4", "width=8"), marks=pytest.mark.slow
        ),
    ],
)
def test_one_rank_does_the_servers_own_work_for_all(method: str, more: tuple[str, ...], tmp_path: Path) -> None:
    small = [f"method.{method}.{option}" for option in more]
    for ranks, name in ((0, "eager"), (2, "ranks")):
        finish(command(tmp_path / name, method, ranks, "train.rounds_per_task=1", "stream.max_train=60", *small))
    same(tmp_path / "ranks", tmp_path / "eager")
