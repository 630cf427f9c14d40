"""A round on the cores of this machine: everfed's engines, a bare loop and Flower's simulation, interleaved.

python -m benchmarks.cpu_rounds [--cases mcmahan,demo] [--workers 2] [--timings 9] [--flower DIR] [--out FILE]

Steady rounds are timed in turn, the first of each left out. Whole runs, from starting the interpreter to its end, are
timed apart, also in turn. --flower names an environment with Flower's simulation; without one the rest is measured.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from contextlib import ExitStack, closing
from functools import partial
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import torch

from benchmarks import cases, measure
from benchmarks.flower_driver import Flower, how_to_install, installed

WHOLE_ROUNDS = {"mcmahan": 5, "demo": 50}  # the demo has 50 rounds
MANY = 1_000_000


def steady(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Rounds in a process that is warm."""
    case = cases.CASES[name]
    with ExitStack() as stack:
        run = case.assemble(MANY)
        pool = stack.enter_context(closing(cases.processes(run, options.workers)))
        contenders = {
            "bare loop": measure.Contender(case.bare(run).round),
            "eager": measure.Contender(cases.rounds_of(run, cases.eager(run))),
            "processes": measure.Contender(
                cases.rounds_of(run, pool), lambda: [child.pid or 0 for child in active_children()]
            ),
        }
        repeat = measure.repeats(contenders)
        if options.flower:
            flower = stack.enter_context(closing(Flower(options.flower, name, options.workers, MANY)))
            contenders["flower"] = measure.Contender(flower.round, flower.processes)
            flower.round()
        timings = measure.interleave(contenders, options.timings, repeat, options.wait)
    return {"rounds_per_timing": repeat, **_compared(timings, options.workers)}


def _compared(timings: dict[str, list[measure.Timing]], cores: int) -> dict[str, Any]:
    """Ratios of interest. ideal: what all clients cost on one core (the bare loop's CPU time), over the cores.

    On a busy machine a process waits for a core, so the clock says little of two workers against one loop; the CPU time
    of a contender, over the cores, is what it would take at best on a machine of its own.
    """
    ours = timings["processes"]
    ideal = [t.cpu / cores for t in timings["bare loop"]]
    found: dict[str, Any] = {name: measure.summary(values) for name, values in timings.items()}
    found["processes over ideal"] = measure.spread([a.seconds / b for a, b in zip(ours, ideal, strict=True)])
    found["processes over ideal, CPU"] = measure.spread([a.cpu / cores / b for a, b in zip(ours, ideal, strict=True)])
    for name, values in timings.items():
        if name != "processes":
            found[f"{name} over processes"] = measure.ratios(values, ours)
            found[f"{name} over processes, CPU"] = measure.ratios(values, ours, "cpu")
    return found | _quiet(found, cores)


def _quiet(found: dict[str, Any], cores: int) -> dict[str, Any]:
    """Ratios of the medians of those timings in which others left the machine alone."""
    middle = {name: row["quiet_seconds"]["median"] for name, row in found.items() if "quiet_seconds" in row}
    if "processes" not in middle:
        return {}
    ours = middle.pop("processes")
    ratios = {f"{name} over processes, quiet": value / ours for name, value in middle.items()}
    if "bare loop" in middle:
        ratios["processes over ideal, quiet"] = ours * cores / middle["bare loop"]
    return {name: {"median": value, "q1": value, "q3": value} for name, value in ratios.items()}


def whole(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Runs in fresh processes, start-up and end included."""
    rounds = WHOLE_ROUNDS[name]
    contenders = {
        engine: measure.Contender(partial(_fresh, name, engine, options.workers, rounds))
        for engine in ("eager", "processes")
    }
    if options.flower:
        contenders["flower"] = measure.Contender(partial(_fresh_flower, options.flower, name, options.workers, rounds))
    timings = measure.interleave(contenders, options.whole, wait=options.wait)
    ours = timings["processes"]
    others = {f"{key} over processes": measure.ratios(v, ours) for key, v in timings.items() if key != "processes"}
    return {"rounds": rounds, **{key: measure.summary(values) for key, values in timings.items()}, **others}


def _fresh(name: str, engine: str, workers: int, rounds: int) -> None:
    arguments = ["--inside", name, engine, str(workers), str(rounds)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "benchmarks.cpu_rounds", *arguments], check=True, env=environment)


def _fresh_flower(folder: Path, name: str, workers: int, rounds: int) -> None:
    flower = Flower(folder, name, workers, rounds)
    flower.ask(rounds)
    if flower.process.wait():
        raise RuntimeError(f"Flower's simulation ended with code {flower.process.returncode}")


def run_inside(name: str, engine: str, workers: int, rounds: int) -> None:
    """What a fresh process of `whole` does."""
    torch.set_num_threads(1)
    run = cases.CASES[name].assemble(rounds)
    chosen = cases.processes(run, workers) if engine == "processes" else cases.eager(run)
    with closing(chosen):
        play = cases.rounds_of(run, chosen)
        for _ in range(rounds):
            play()


def table(results: dict[str, dict[str, Any]]) -> str:
    lines = []
    for name, parts in results.items():
        for part, found in parts.items():
            lines.append(f"{name}, {part}:")
            lines += [f"  {key:32} {_line(value)}" for key, value in found.items() if isinstance(value, dict)]
    return "\n".join(lines)


def _line(found: dict[str, Any]) -> str:
    if "seconds" not in found:
        return f"{found['median']:8.3f}   ({found['q1']:.3f} to {found['q3']:.3f})"
    clock, cpu, others = (found[key] for key in ("seconds", "cpu_seconds", "cores_used_by_others"))
    quartiles = f"({clock['q1']:.3f} to {clock['q3']:.3f})"
    line = f"{clock['median']:8.3f} s {quartiles:20} CPU {cpu['median']:.3f} s, others {others['median']:.2f} cores"
    quiet = found.get("quiet_seconds")
    return line + (f"; {quiet['n']} quiet: {quiet['median']:.3f} s" if quiet else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(cases.CASES))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--timings", type=int, default=9, help="of steady rounds, each contender")
    parser.add_argument("--whole", type=int, default=3, help="of whole runs, each contender")
    parser.add_argument("--flower", type=Path, help="environment in which flwr[simulation] is installed")
    parser.add_argument("--wait", type=float, default=0.0, help="seconds to wait for a quiet machine before a timing")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--inside", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        run_inside(*options.inside[:2], *map(int, options.inside[2:]))
        return
    if options.flower is None or not installed(options.flower):
        print(how_to_install(options.flower or Path("flower-env")), file=sys.stderr)
        options.flower = None
    torch.set_num_threads(1)
    results = {}
    for name in options.cases.split(","):
        results[name] = {"steady rounds": steady(name, options)}
        if options.whole:
            results[name]["whole runs"] = whole(name, options)
        print(table({name: results[name]}), flush=True)
    measure.write({"machine": measure.machine(), "workers": options.workers, "cases": results}, options.out)


if __name__ == "__main__":
    main()
