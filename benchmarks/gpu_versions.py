"""Rounds of two versions of everfed on one GPU, in turns: fedavg and fedgp+der, each version a process of its own.

BEFORE is a checkout of the older version, which must have benchmarks/gpu_rounds.py; the other one is this checkout.
What runs in both is in this file alone, as the older one may lack it.

git worktree add ../before COMMIT
python -m benchmarks.gpu_versions ../before [--case mcmahan-b32] [--turns 5] [--rounds 20] [--slots 10] [--threads 1]
                                  [--device cpu] [--toy] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

METHODS = ("fedavg", "fedgp+der")
WARM, WARM_SECONDS, QUIET = 4, 2.0, 2  # rounds and seconds at least, and rounds without a capture
LIMIT = 60.0  # seconds after which a version counts as warm in any case
TOY = {"clients": 2, "per_client": 6, "batch": 4, "epochs": 1, "model": "small-cnn"}


# one version --------------------------------------------------------------------------------------------------
def serve(name: str, device: str, slots: int, threads: int, toy: bool) -> None:
    """Warm up, then time as many rounds of every method as each line of standard input asks for."""
    from benchmarks.gpu_rounds import CASES, build, round_of, seconds
    from everfed.engines.eager import Eager
    from everfed.store.clients import ClientStore

    runs = {}
    for method in METHODS:
        run = build({**CASES[name], **(TOY if toy else {})}, method, 100_000)
        engine: Any
        if device == "cpu":
            engine = Eager(run.setup, ClientStore(), run.build_module)
        else:
            from everfed import engines
            from everfed.engines.graphs import Graphs

            engines._set_precision("bf16")  # as for every run on a GPU
            how = {"slots": slots, "host_threads": threads}
            engine = Graphs(run.setup, ClientStore(), run.build_module, device, **how)  # type: ignore[arg-type]
        runs[method] = round_of(run, engine)
        done, quiet, captures, begun = 0, 0, -1, time.monotonic()
        while (passed := time.monotonic() - begun) < LIMIT and not (
            toy or (done >= WARM and quiet >= QUIET and passed >= WARM_SECONDS)
        ):
            seconds(runs[method])
            before, captures = captures, engine.describe().get("captures", 0)
            done, quiet = done + 1, quiet + 1 if captures == before else 0
    print("warm", flush=True)
    for line in sys.stdin:
        print(json.dumps({key: [seconds(work) for _ in range(int(line))] for key, work in runs.items()}), flush=True)


# both ---------------------------------------------------------------------------------------------------------
def start(checkout: Path, arguments: argparse.Namespace) -> subprocess.Popen[str]:
    given = [arguments.case, arguments.device, str(arguments.slots), str(arguments.threads), str(int(arguments.toy))]
    paths = os.pathsep.join([str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": paths}
    command = [sys.executable, str(Path(__file__).resolve()), "serve", *given]
    return subprocess.Popen(command, cwd=checkout, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(process: subprocess.Popen[str], line: str = "") -> str:
    assert process.stdin is not None and process.stdout is not None
    if line:
        process.stdin.write(f"{line}\n")
        process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        raise SystemExit(f"a version ended with code {process.wait()}")
    return answer


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Median seconds of a round of every method of both versions. The first turn only ends the warm-up."""
    checkouts = {"before": arguments.before.resolve(), "after": Path(__file__).resolve().parents[1]}
    versions = {key: start(checkout, arguments) for key, checkout in checkouts.items()}
    try:
        for process in versions.values():
            ask(process)
        times: dict[str, list[float]] = {f"{method} {key}": [] for key in versions for method in METHODS}
        for turn in range(arguments.turns + 1):
            for key, process in versions.items():
                for method, own in json.loads(ask(process, str(arguments.rounds))).items():
                    times[f"{method} {key}"] += own if turn else []
    finally:
        for process in versions.values():
            process.kill()
            process.wait()
    found: dict[str, Any] = {
        key: {"median_s": statistics.median(own), "spread_s": [min(own), max(own)], "rounds": len(own)}
        for key, own in times.items()
    }
    for key, row in found.items():
        print(f"{arguments.case}, {key}: {row['median_s']:.4f} s", flush=True)
    for key in versions:
        found[f"ratio {key}"] = found[f"{METHODS[1]} {key}"]["median_s"] / found[f"{METHODS[0]} {key}"]["median_s"]
    return found


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    from benchmarks.measure import machine, write

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="a checkout of the older version")
    parser.add_argument("--case", default="mcmahan-b32", help="of benchmarks/gpu_rounds.py")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=1, help="of every method in a turn")
    parser.add_argument("--slots", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    if not (given.before / "benchmarks" / "gpu_rounds.py").exists():
        parser.error(f"{given.before} is no checkout with benchmarks/gpu_rounds.py")
    found = {"case": given.case, "slots": given.slots, "threads": given.threads, "machine": machine()}
    found["rounds"] = measure(given)
    write(found, given.out)
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), sys.argv[6] == "1")
    else:
        main()
