"""What checkpoints cost a run of rounds of about 20 ms, and that such a run, killed, resumes to the same bits.

python -m benchmarks.checkpointing [--every 5] [--block 10] [--blocks 6] [--kills 3] [--out FILE]

Two runs of one recipe alternate in one process, blocks of seconds at a time: one saves its state every few seconds, the
other never. The share of time that checkpoints take is 1 - (a round without) / (a round with); it may be 0.05 at most.
Beside it stand what the run itself waits for, and the CPU time of the thread that writes: their sum is the same share
without the noise of two runs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import measure
from everfed.core.evaluate import EvalOptions
from everfed.core.server import Runner
from everfed.engines.eager import Eager
from everfed.recipe import Recipe, to_toml
from everfed.session import assemble
from everfed.store.checkpoint import Checkpoints
from everfed.store.clients import ClientStore

GOAL = 0.05
ROUNDS = 300  # of the run that is killed
RECIPE: dict[str, Any] = {
    "stream": {"dataset": "digits", "transform": "rotate", "tasks": 2, "clients": 3, "max_train": 420},
    "model": {"kind": "mlp", "hidden": [100, 100]},
    "method": {"name": "fedgp+der", "memory": {"size": 200}},
    "engine": {"kind": "eager", "device": "cpu"},
}


def recipe(rounds: int) -> Recipe:
    return Recipe.model_validate({**RECIPE, "train": {"rounds_per_task": rounds, "optimizer": {"lr": 0.1}}})


class Watched(Checkpoints):
    """Adds up what the run waits for, and the CPU time of the thread that writes."""

    waited = writer_cpu = 0.0

    def offer(self, *arguments: Any) -> bool:
        started = time.perf_counter()
        saved = super().offer(*arguments)
        self.waited += time.perf_counter() - started
        return saved

    def write(self, *arguments: Any) -> None:
        started = time.thread_time()
        super().write(*arguments)
        self.writer_cpu += time.thread_time() - started


def player(folder: Path, checkpoints: Checkpoints | None = None) -> Callable[[], None]:
    """The next round of a run whose states are kept as in a real one."""
    run = assemble(recipe(1_000_000))
    store = ClientStore(folder / "clients") if checkpoints is None else checkpoints.store
    save = (lambda state, task_end: None) if checkpoints is None else checkpoints.offer
    engine = Eager(run.setup, store, run.build_module)
    return Runner(run.setup, engine, run.first_model(), EvalOptions(), save=save).round


def share(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Rounds with and without checkpoints, in turn."""
    checkpoints = Watched(folder / "checkpoint", ClientStore(folder / "with"), options.every)
    without, saving = player(folder / "without"), player(folder, checkpoints)
    contenders = {"without": measure.Contender(without), "with": measure.Contender(saving)}
    repeat = measure.repeats(contenders, options.block)
    timings = measure.interleave(contenders, options.blocks, repeat)
    checkpoints.wait()
    clock, cpu = (
        [1 - getattr(a, of) / getattr(b, of) for a, b in zip(timings["without"], timings["with"], strict=True)]
        for of in ("seconds", "cpu")
    )
    spent = sum(t.seconds * repeat for t in timings["with"])
    return {
        "rounds_per_block": repeat,
        "checkpoints": checkpoints.written,
        "share_of_cpu_time": measure.spread(cpu),
        "share_of_clock_time": measure.spread(clock),
        "share_waited": checkpoints.waited / spent,
        "share_of_writer_cpu": checkpoints.writer_cpu / spent,
        **{name: measure.summary(found) for name, found in timings.items()},
    }


def resumes_exactly(folder: Path, kills: int) -> dict[str, Any]:
    """A run that is killed (SIGKILL) at random moments and resumed, beside one that is left alone."""
    (folder / "run.toml").write_text(to_toml(recipe(ROUNDS // 2)))
    whole, killed = folder / "whole", folder / "killed"
    started = time.perf_counter()
    _everfed("run", str(folder / "run.toml"), "--out", str(whole)).wait()
    seconds, draw = time.perf_counter() - started, random.Random(0)
    reached = []
    command = ["run", str(folder / "run.toml"), "--out", str(killed)]
    for _ in range(kills):
        process = _everfed(*command, "--checkpoint-every", "0.5")
        time.sleep(seconds * draw.uniform(0.3, 0.8))
        process.send_signal(signal.SIGKILL)
        process.wait()
        reached.append(_rounds(killed))
        command = ["resume", str(killed)]
    _everfed(*command, "--checkpoint-every", "0.5").wait()
    same = (whole / "model.safetensors").read_bytes() == (killed / "model.safetensors").read_bytes()
    return {
        "kills": kills,
        "rounds": ROUNDS,
        "events_reached": reached,
        "same_model": same,
        "same_scores": _same(whole, killed),
    }


def _everfed(*arguments: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", "everfed", *arguments], stdout=subprocess.DEVNULL, env=environment)


def _rounds(run: Path) -> int:
    """The furthest round in the events of a killed run."""
    events = run / "events.jsonl"
    lines = events.read_text().splitlines() if events.exists() else []
    return max((json.loads(line).get("round", 0) for line in lines if line.endswith("}")), default=0)


def _same(a: Path, b: Path) -> bool:
    left, right = (json.loads((run / "result.json").read_text()) for run in (a, b))
    return all(left[key] == right[key] for key in ("accuracy_matrix", "metrics", "curves"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between checkpoints")
    parser.add_argument("--block", type=float, default=10.0, help="seconds of a block")
    parser.add_argument("--blocks", type=int, default=6, help="of each kind")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        cost = share(Path(folder), options)
        (Path(folder) / "resume").mkdir()
        exact = resumes_exactly(Path(folder) / "resume", options.kills)
    rounds = {name: cost[name]["cpu_seconds"]["median"] for name in ("without", "with")}
    print(f"a round: {1e3 * rounds['without']:.1f} ms without, {1e3 * rounds['with']:.1f} ms with (CPU time, medians)")
    for name in ("share_of_cpu_time", "share_of_clock_time"):
        found = cost[name]
        print(f"{name}: {found['median']:.4f} ({found['q1']:.4f} to {found['q3']:.4f}); goal {GOAL}")
    print(f"waited for by the run: {cost['share_waited']:.4f}; CPU of the writer: {cost['share_of_writer_cpu']:.4f}")
    print(f"{cost['checkpoints']} checkpoints; resumed after {exact['kills']} kills: {exact}")
    measure.write({"goal": GOAL, "machine": measure.machine(), "cost": cost, "resume": exact}, options.out)


if __name__ == "__main__":
    main()
