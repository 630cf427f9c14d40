"""Draws FedGP's Figure 4b, mAP@0.5 by round, from the curves in a file, and sums up what the move changed.

python -m benchmarks.figure4 benchmarks/results/figure4-carla.json     # beside it: figure4-carla.png

The file: {"runs": {method: {seed: {"home": one score per round, "away": one per round after the move}}}}. A line is the
mean over seeds, the band goes from the lowest to the highest.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any

AROUND = 10  # rounds before and after the move that are compared

Runs = dict[str, dict[str, dict[str, list[float]]]]


def summary(runs: Runs) -> list[dict[str, Any]]:
    """Per method and seed, in per cent: home before and after the move, the change, away after it."""
    rows = []
    for method, seeds in runs.items():
        for seed, run in seeds.items():
            move = len(run["home"]) - len(run["away"])
            before, after = mean(run["home"][move - AROUND : move]), mean(run["home"][move : move + AROUND])
            scores = (before, after, after - before, mean(run["away"][:AROUND]))
            rows.append({"method": method, "seed": seed, "scores": [round(100 * one, 1) for one in scores]})
    return rows


def draw(runs: Runs, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5.8, 3.0), layout="constrained")
    for method, seeds in runs.items():
        by_round = list(zip(*(run["home"] for run in seeds.values()), strict=True))
        rounds = range(1, len(by_round) + 1)
        (line,) = axes.plot(rounds, [100 * mean(one) for one in by_round], label=f"{method} ({len(seeds)} seeds)")
        low, high = [100 * min(one) for one in by_round], [100 * max(one) for one in by_round]
        axes.fill_between(rounds, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
        move = len(by_round) - len(next(iter(seeds.values()))["away"])
    axes.axvline(move + 0.5, color="grey", linestyle="--", linewidth=0.8)
    axes.set(xlabel="round", ylabel="mAP@0.5 at home, %")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    chosen = parser.parse_args()
    runs: Runs = json.loads(chosen.file.read_text())["runs"]
    print(f"{'method':12} {'seed':4} {'before':>7} {'after':>7} {'change':>7} {'away':>7}")
    for row in summary(runs):
        print(f"{row['method']:12} {row['seed']:4} " + " ".join(f"{one:7.1f}" for one in row["scores"]))
    draw(runs, chosen.file.with_suffix(".png"))


if __name__ == "__main__":
    main()
