"""What generative replay costs beside FedAvg: seconds a round on clients, in the first task and later, seconds per task
on the server, and bytes.

Run as `python -m benchmarks.generative_cost --data DIR [--recipe mfcl/family-cifar100-small] [--set KEY=VALUE] [--out
FILE]`. Stream, model, training and every method's own options are the recipe's; only the first tasks are run. All
methods see the same stream in one process and take turns, a round each; the engine is the one that `everfed run` would
take. The first two rounds of every task, in which steps may be captured, are left out; where a task has no more, the
last one counts. Without data and GPU: `--set stream.dataset=digits --set model.kind=small-cnn`.

The MFCL paper prints, for a round of five clients: FedAvg 1.2 s in every task; FedLwF-2T 1.2 s, then 3.4 s; MFCL 1.2 s,
then 3.7 s, and 330 s on the server once per task.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.entrants import Entrant, entrant, parser_of, take_turns
from benchmarks.measure import machine, write
from everfed.methods import registry as methods
from everfed.recipe import Recipe, parse_set, read, settled

METHODS = ("fedavg", "fedprox", "fedlwf2t", "mfcl", "target", "lander", "fedcil", "glfc", "af-fcl")
PAPER = {  # client seconds in the first task and later, relative to FedAvg's 1.2 s
    "fedavg": (1.0, 1.0),
    "fedprox": (1.98 / 1.2, 1.98 / 1.2),
    "fedcil": (17.8 / 1.2, 24.5 / 1.2),
    "fedlwf2t": (1.0, 3.4 / 1.2),
    "mfcl": (1.0, 3.7 / 1.2),
}
WARM_UP = 2  # rounds of a task


def client_rounds(one: Entrant) -> dict[int, list[float]]:
    """{task: seconds that clients took in each round}, in training and in phases of their own."""
    seconds: dict[tuple[int, int], float] = defaultdict(float)
    for event in one.events:
        if event["event"] == "phase" and not _alone(event):
            seconds[event["task"], event["round"]] += event["seconds"]
    by_task: dict[int, list[float]] = defaultdict(list)
    for (task, _), value in sorted(seconds.items()):
        by_task[task].append(value)
    return by_task


def client_seconds(one: Entrant, first: bool) -> float | None:
    """Median of a round in the first task, or after it; None when there is none."""
    kept = [
        value
        for task, rounds in client_rounds(one).items()
        if (task == 0) == first
        for value in rounds[min(WARM_UP, len(rounds) - 1) :]
    ]
    return median(kept) if kept else None


def server_seconds(one: Entrant) -> dict[int, float]:
    """{task: seconds of the server's own phases}, of tasks that have some."""
    by_task: dict[int, float] = defaultdict(float)
    for event in one.events:
        if event["event"] == "phase" and _alone(event):
            by_task[event["task"]] += event["seconds"]
    return dict(by_task)


def _alone(event: dict[str, Any]) -> bool:
    """Is it a phase of the server's, without clients?"""
    return not event["clients"]


def recipe_for(method: str, source: str, sets: list[str], rounds: int) -> Recipe:
    """The recipe for one method. Of the keys method.PART.OPTION in `sets` it takes those of its own parts."""
    others = {*methods.part_classes()} - {part.name for part in methods.build(method).parts}
    own = [entry for entry in sets if not (parse_set(entry).key[0] == "method" and parse_set(entry).key[1] in others)]
    return settled(read(source, method=method, sets=[*own, f"train.rounds_per_task={rounds}"]))


def costs(one: Entrant, base: Entrant) -> dict[str, Any]:
    """What a result file says of one method."""
    server = server_seconds(one)
    first, later = (client_seconds(one, which) for which in (True, False))
    plain = {which: client_seconds(base, which) for which in (True, False)}
    return {
        "method": one.name,
        "client_seconds": {"first_task": first, "later_tasks": later},
        "times_base": {"first_task": _over(first, plain[True]), "later_tasks": _over(later, plain[False])},
        "paper_times_fedavg": PAPER.get(one.name),
        "server_seconds_by_task": server,
        "server_seconds_per_task": sum(server.values()) / len(server) if server else 0.0,
        "rounds": {str(task): rounds for task, rounds in client_rounds(one).items()},
        **one.traffic,
        "client_state_bytes": one.state_bytes(),
    }


def _over(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def row(one: dict[str, Any], base: dict[str, Any]) -> str:
    cells = []
    for index, which in enumerate(("first_task", "later_tasks")):
        seconds, ratio, paper = one["client_seconds"][which], one["times_base"][which], one["paper_times_fedavg"]
        shown = "-" if seconds is None else f"{seconds:.3f} s x{ratio:.2f}"
        cells.append(f"{shown} ({f'{paper[index]:.2f}' if paper else '-'})")
    down, up = (f"x{one[key] / base[key]:.2f}" for key in ("bytes_down", "bytes_up"))
    server = f"{one['server_seconds_per_task']:.2f}"
    return f"{one['method']:10} {cells[0]:>22} {cells[1]:>22} {server:>14} {down:>8} {up:>8}"


def main() -> None:
    parser = parser_of(__doc__, METHODS)
    parser.add_argument("--recipe", default="mfcl/family-cifar100-small", help="a file or a shipped recipe")
    parser.add_argument("--tasks", type=int, default=3, help="how many of the recipe's are run")
    parser.add_argument("--rounds", type=int, default=6, help="per task, at least 2")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="set a key of the recipe")
    parser.add_argument("--data", default=None)
    parser.add_argument("--out", type=Path, default=None, help="a JSON file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    entrants = [
        entrant(recipe_for(name, options.recipe, options.set, options.rounds), options.data) for name in options.methods
    ]
    take_turns(entrants, options.rounds * options.tasks)
    facts = {"recipe": options.recipe, "sets": options.set, "tasks": options.tasks, "rounds_per_task": options.rounds}
    rows = [costs(one, entrants[0]) for one in entrants]
    engine = entrants[0].engine.describe()
    write({**facts, "machine": machine(), "engine": engine, "methods": rows}, options.out)
    print(f"{options.recipe}, {options.tasks} tasks of {options.rounds} rounds; {engine}")
    print(
        f"seconds of a round on clients, times {rows[0]['method']}'s (the paper's in brackets); of the server per task"
    )
    print(f"{'method':10} {'first task':>22} {'later tasks':>22} {'server s/task':>14} {'down':>8} {'up':>8}")
    for one in rows:
        print(row(one, rows[0]))
    for one in entrants:
        one.engine.close()


if __name__ == "__main__":
    main()
