"""Seconds a round on one GPU: everfed's graphs engine beside a bare PyTorch loop, interleaved, in one run.

Rounds are timed when the engine has found its number of slots and captures nothing any more; short ones often enough
for a second of each.

python -m benchmarks.gpu_rounds [--only resnet18-b32,...] [--slots 10] [--threads 1] [--compile] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks import synthetic
from benchmarks.bare_loop import BareFedAvg
from everfed import engines, models
from everfed.core.evaluate import EvalOptions
from everfed.core.server import Runner
from everfed.engines.eager import Eager
from everfed.engines.graphs import Graphs
from everfed.recipe import Recipe
from everfed.session import Run, assemble
from everfed.store.clients import ClientStore

SLOW = ("bare loop", "everfed eager")
ROUNDS = 100_000  # of the stream: more than are run
QUIET = 3  # rounds without a capture after which none is expected
WARM_SECONDS, TIMED_SECONDS = 2.0, 1.0  # at least, of each contender
LIMIT = 60.0  # seconds after which a contender counts as warm in any case

CASES: dict[str, dict[str, Any]] = {
    "resnet18-b32": dict(shape="cifar", model="resnet18", per_client=500, batch=32, epochs=5),
    "resnet18-b128": dict(shape="cifar", model="resnet18", per_client=500, batch=128, epochs=5),
    "mcmahan-b32": dict(shape="mnist", model="mcmahan-cnn", per_client=600, batch=32, epochs=1),
    "small-b32": dict(shape="mnist", model="small-cnn", per_client=6000, batch=32, epochs=1, precision="fp32"),
}


def set_precision(case: Mapping[str, Any], wanted: str | None = None) -> str:
    """Prepare torch for a case, as for a run; returns the engine's precision. Small networks are trained in float32."""
    precision: str = wanted or case.get("precision", "bf16")
    if torch.cuda.is_available():
        engines._set_precision(precision)
    return precision


def build(case: dict[str, Any], method: str, rounds: int) -> Run:
    recipe = Recipe.model_validate(
        {
            "method": {"name": method, **case.get("method", {})},
            "model": {"kind": case["model"]},
            "train": {
                "rounds_per_task": rounds,
                "local_epochs": case["epochs"],
                "batch_size": case["batch"],
                "optimizer": {"lr": 0.01},
            },
            "engine": {"memory_format": "channels-last"},
        }
    )
    clients, options = case.get("clients", 10), case.get("stream", {})
    return assemble(recipe, stream=synthetic.stream(case["shape"], clients, case["per_client"], rounds, **options))


def seconds(work: Any) -> float:
    wait_for_device()
    started = time.perf_counter()
    work()
    wait_for_device()
    return time.perf_counter() - started


def warm_up(work: Any, engine: Any, rounds: int, least: float = WARM_SECONDS) -> float:
    """Run rounds until there were `rounds`, `least` seconds have passed, and the engine neither captured anything in
    the last ones nor looks for a number of slots. Returns the seconds of the last round."""
    done, passed, quiet, captures = 0, 0.0, 0, -1
    while passed < LIMIT and (done < rounds or passed < least or quiet < QUIET):
        last = seconds(work)
        before, captures = captures, engine.describe().get("captures", 0)
        searching = getattr(getattr(engine, "tuner", None), "searching", False)
        quiet = quiet + 1 if captures == before and not searching else 0
        done, passed = done + 1, passed + last
    return last


def turns(rounds: int, shortest: float, least: float = TIMED_SECONDS) -> int:
    """How many rounds to time: `rounds`, or as many as the shortest ones need for `least` seconds."""
    return max(rounds, math.ceil(least / shortest))


def wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(name: str, rounds: int, arguments: argparse.Namespace) -> dict[str, Any]:
    case = CASES[name]
    precision = set_precision(case, arguments.precision)
    runs: dict[str, Any] = {}
    by_method: dict[str, Any] = {}
    for method in ("fedavg", "fedgp+der"):
        run = build(case, method, ROUNDS)
        engine = Graphs(
            run.setup,
            ClientStore(),
            run.build_module,
            precision=precision,
            slots=arguments.slots,
            compiled=arguments.compile,
            host_threads=arguments.threads,
        )
        by_method[method] = engine
        runs[method] = round_of(run, engine)
    plain = build(case, "fedavg", ROUNDS)
    module = models.build(case["model"], plain.stream.input_shape, 10, 0, {}, channels_last=True)
    bare = BareFedAvg(plain.stream, module, 0.01, case["batch"], case["epochs"], "cuda", precision == "bf16")
    runs["bare loop"] = bare.round
    if arguments.eager:
        runs["everfed eager"] = round_of(
            plain, Eager(plain.setup, ClientStore(), plain.build_module, "cuda", precision)
        )
    times: dict[str, list[float]] = {key: [] for key in runs}
    last: dict[str, float] = {}
    for key, work in runs.items():
        # everfed captures graphs and tries numbers of slots first; the loops only need their kernels loaded
        last[key] = seconds(work) if key in SLOW else warm_up(work, by_method[key], arguments.warmup)
        print(f"  {name} {key}: warm, last {last[key]:.4f} s", flush=True)
    for turn in range(turns(rounds, min(last.values()))):
        for key, work in runs.items():
            if key not in SLOW or turn < rounds:
                times[key].append(seconds(work))
    report = {key: run.describe() for key, run in by_method.items()}
    images = 10 * case["per_client"] * case["epochs"]
    return {
        key: {
            "median_s": statistics.median(values),
            "spread_s": [min(values), max(values)],
            "rounds": len(values),
            "images_per_s": images / statistics.median(values),
            "engine": report.get(key, {}),
        }
        for key, values in times.items()
    }


def round_of(run: Run, engine: Any) -> Any:
    """A function that runs the next round, scoring apart."""
    model = {k: v.to(engine.trainer.device) for k, v in run.first_model().items()}
    runner = Runner(run.setup, engine, model, EvalOptions())
    return runner.round


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--rounds", type=int, default=5, help="that are timed at least")
    parser.add_argument("--warmup", type=int, default=8, help="rounds at least")
    parser.add_argument("--slots", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--precision", help="not the case's own")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cases": {}}
    for name in arguments.only.split(","):
        result["cases"][name] = measure(name, arguments.rounds, arguments)
        for key, row in result["cases"][name].items():
            print(f"{name:15} {key:14} {row['median_s']:8.4f} s  {row['images_per_s']:10.0f} img/s", flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
