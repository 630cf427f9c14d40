"""What the drift monitor finds, by loss and by features: changes found, and alarms without a change.

Run as `python -m benchmarks.drift_monitor [--seeds 4] [--method fedavg]`: digits, an MLP, four clients, three tasks of
12 rounds. A change counts as found when it is suspected at the round in which a client's task changes or in one of the
two after it, or while it drifts towards it; an alarm at any other round is false.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import everfed
from everfed import streams
from everfed.core.stream import Stream

ROUNDS, LATE = 12, 2
STREAMS: dict[str, dict[str, Any]] = {
    "new classes": {"scenario": "class-incremental"},
    "new classes, by clocks of their own": {"scenario": "class-incremental", "asynchronous": {"kind": "jitter"}},
    "new classes, gradually": {"scenario": "class-incremental", "drift": 4},
    "rotations": {"scenario": "domain-incremental"},
    "rotations, by clocks of their own": {"scenario": "domain-incremental", "asynchronous": {"kind": "jitter"}},
    "no change": {"scenario": "class-incremental", "tasks": 1},
}


def recipe(stream: dict[str, Any], method: str, seed: int) -> dict[str, Any]:
    shared = {"dataset": "digits", "tasks": 3, "clients": 4, "max_train": 600, "boundaries": False}
    return {
        "seed": seed,
        "stream": {**shared, **stream},
        "model": {"kind": "mlp", "hidden": [32]},
        "train": {"rounds_per_task": ROUNDS, "optimizer": {"lr": 0.1}},
        "method": {"name": method},
        "engine": {"kind": "eager"},
        "monitor": {"kind": "page-hinkley", "watch": "both"},
    }


def changes(stream: Stream, client: int) -> list[int]:
    """The rounds in which a client's task is another one than before."""
    tasks = [stream.round(index).tasks[client] for index in range(stream.rounds)]
    return [index for index in range(1, len(tasks)) if tasks[index] != tasks[index - 1]]


def tally(table: dict[str, Any], folder: Path) -> Iterator[tuple[str, int]]:
    """(what, how many) of one run."""
    suspected = everfed.run(table, folder).data["drift_suspected"]
    stream, drift = streams.build(table["stream"], table["seed"], ROUNDS), table["stream"].get("drift", 0)
    yield "client rounds", stream.rounds * stream.clients
    for client in range(stream.clients):
        true = changes(stream, client)
        yield "changes", len(true)
        for signal in ("loss", "features"):
            rounds = [one["round"] for one in suspected if client in one["by"].get(signal, ())]
            due = {change: [index for index in rounds if change - drift <= index <= change + LATE] for change in true}
            yield f"found by {signal}", sum(map(bool, due.values()))
            yield f"false by {signal}", len(set(rounds) - {index for indices in due.values() for index in indices})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--method", default="fedavg")
    options = parser.parse_args()
    for name, stream in STREAMS.items():
        counts: Counter[str] = Counter()
        with tempfile.TemporaryDirectory() as folder:
            for seed in range(options.seeds):
                for what, count in tally(recipe(stream, options.method, seed), Path(folder) / str(seed)):
                    counts[what] += count
        print(json.dumps({"stream": name, **counts}), flush=True)


if __name__ == "__main__":
    main()
