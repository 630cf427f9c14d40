"""Final accuracy and virtual time: synchronous rounds beside FedBuff and FedAsync, where some clients are very slow.

Run as `python -m benchmarks.asynchronous --out benchmarks/results/asynchronous.json`: rotated digits, five tasks, 20
clients whose median times are log-normal with a deviation of 1.5: in three seeds the slowest needs 9 to 44 times the
median. Every way makes 200 local trainings: 40 synchronous rounds of 5 clients, 40 buffers of 5, 200 single replies. A
synchronous round lasts as long as its slowest client.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

import everfed
from everfed import streams
from everfed.streams.attendance import latencies
from everfed.streams.draws import generator

TASKS, CLIENTS, COHORT, TRACE = 5, 20, 5, {"latency": 10.0, "spread": 1.5, "noise": 0.2}
WAYS: dict[str, tuple[str, int, dict[str, Any]]] = {  # what is put behind the method's name, replies a round, stream
    "synchronous": ("", COHORT, {"participation": COHORT / CLIENTS}),
    "FedBuff": ("+fedbuff", COHORT, {"arrivals": {"buffer": COHORT, "concurrency": 10, **TRACE}}),
    "FedAsync": ("+fedasync", 1, {"arrivals": {"buffer": 1, "concurrency": 10, **TRACE}}),
}
METHODS = ("fedavg", "er", "fedgp+er")


def recipe(method: str, way: str, seed: int) -> dict[str, Any]:
    suffix, replies, own = WAYS[way]
    stream = {"dataset": "digits", "scenario": "domain-incremental", "transform": "rotate", "tasks": TASKS,
              "clients": CLIENTS, **own}  # fmt: skip
    return {
        "seed": seed,
        "stream": stream,
        "model": {"kind": "mlp", "hidden": [100]},
        "train": {"rounds_per_task": 40 // replies, "local_epochs": 2, "optimizer": {"lr": 0.1}},
        "method": {"name": method + suffix, "defaults": {"memory": {"size": 30}}},
    }


def seconds(table: dict[str, Any]) -> float:
    """The virtual time of a run."""
    rounds = table["train"]["rounds_per_task"]
    stream, seed = streams.build(table["stream"], table["seed"], rounds), table["seed"]
    if stream.stale:
        return float(stream.round(stream.rounds - 1).notes["seconds_simulated"])
    median, _ = latencies("arrivals", TRACE, CLIENTS, seed)
    total = 0.0
    for index in range(stream.rounds):
        takes = median * np.exp(TRACE["noise"] * generator(seed, "latency", index).standard_normal(CLIENTS))
        total += float(takes[list(stream.round(index).participants)].max())
    return total


def measured(method: str, way: str, seed: int, folder: Path) -> dict[str, Any]:
    table, ages = recipe(method, way, seed), list[float]()

    def note(event: dict[str, Any]) -> None:
        if event["event"] == "measure" and "staleness" in event:
            ages.append(event["staleness"])

    result = everfed.run(table, folder, progress=False, observers=[note])
    return {"method": method, "way": way, "seed": seed, "acc": 100 * result.metrics["acc"],
            "seconds": seconds(table), "staleness": mean(ages) if ages else 0.0}  # fmt: skip


def measure(record: Path, seeds: int) -> list[dict[str, Any]]:
    """All runs, those that `record` lacks made now."""
    rows: list[dict[str, Any]] = json.loads(record.read_text()) if record.exists() else []
    done = {(row["method"], row["way"], row["seed"]) for row in rows}
    for seed in range(seeds):
        for method in METHODS:
            for way in WAYS:
                if (method, way, seed) not in done:
                    with tempfile.TemporaryDirectory() as folder:
                        rows.append(measured(method, way, seed, Path(folder) / "run"))
                    record.write_text(json.dumps(rows, indent=1) + "\n")
    return rows


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Markdown: accuracy of every method, virtual time and staleness."""
    yield f"| | {' | '.join(METHODS)} | virtual seconds | staleness |"
    yield "|---|" + "---|" * (len(METHODS) + 2)
    for way in WAYS:
        own = [row for row in rows if row["way"] == way]
        cells = []
        for method in METHODS:
            found = [row["acc"] for row in own if row["method"] == method]
            cells.append(f"{mean(found):.1f} ± {stdev(found):.1f}" if len(found) > 1 else f"{mean(found):.1f}")
        yield (
            f"| {way} | {' | '.join(cells)} | {mean(row['seconds'] for row in own):.0f} "
            f"| {mean(row['staleness'] for row in own):.1f} |"
        )


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    """Every run: its final accuracy over its virtual time."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for way, mark in zip(WAYS, "os^", strict=True):
        for method, colour in zip(METHODS, ("C0", "C1", "C2"), strict=True):
            own = [row for row in rows if (row["way"], row["method"]) == (way, method)]
            axes.plot([row["seconds"] for row in own], [row["acc"] for row in own], mark, color=colour,
                      label=f"{method}, {way}")  # fmt: skip
    axes.set(xscale="log", xlabel="virtual seconds", ylabel="final accuracy (%)")
    axes.xaxis.set_minor_formatter("")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("asynchronous.json"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    rows = measure(options.out, options.seeds)
    print("\n".join(table(rows)))
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
