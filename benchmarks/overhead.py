"""What everfed's machinery costs: FedAvg in the eager engine beside a bare PyTorch loop, one thread, interleaved.

python -m benchmarks.overhead [--rounds 15] [--cases mcmahan,demo] [--out FILE]

The goal is at most 1.15 on the McMahan CNN. The ratio of CPU times is what the machinery costs; that of clock times
says the same on a quiet machine only.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from benchmarks import cases, measure

GOAL = 1.15


def compare(name: str, rounds: int) -> dict[str, Any]:
    """Both competitors of one case."""
    case = cases.CASES[name]
    run = case.assemble(100_000)
    contenders = {
        "everfed eager": measure.Contender(cases.rounds_of(run, cases.eager(run))),
        "bare loop": measure.Contender(case.bare(run).round),
    }
    repeat = measure.repeats(contenders)
    timings = measure.interleave(contenders, rounds, repeat)
    ours, bare = timings["everfed eager"], timings["bare loop"]
    return {
        "case": case.about,
        "rounds_per_timing": repeat,
        "ratio_cpu": measure.ratios(ours, bare, "cpu"),
        "ratio_clock": measure.ratios(ours, bare),
        **{name: measure.summary(found) for name, found in timings.items()},
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    lines = [f"{'case':9} {'everfed':>9} {'bare':>9}   CPU time everfed/bare        clock everfed/bare"]
    for name, result in results.items():
        ours, bare = (result[key]["cpu_seconds"]["median"] for key in ("everfed eager", "bare loop"))
        ratio = "  ".join(_ratio(result[key]) for key in ("ratio_cpu", "ratio_clock"))
        lines.append(f"{name:9} {ours:7.3f} s {bare:7.3f} s   {ratio}")
    return "\n".join(lines)


def _ratio(found: dict[str, float]) -> str:
    return f"{found['median']:.3f} ({found['q1']:.3f} to {found['q3']:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cases", default=",".join(cases.CASES))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {name: compare(name, options.rounds) for name in options.cases.split(",")}
    print("seconds of CPU time a round, median; ratios: median (quartiles)")
    print(table(results))
    measure.write({"goal": GOAL, "machine": measure.machine(), "cases": results}, options.out)


if __name__ == "__main__":
    main()
