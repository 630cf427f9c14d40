"""What generative replay costs beside FedAvg: seconds per round on clients, in the first task and later, and seconds
per task on the server; bytes to a client per task.

Run as `python benchmarks/generative_cost.py [--dataset cifar100 --data DIR --model resnet18]`. All methods see the same
stream in one process and take turns, a round each, so that a busy machine slows all alike; the engine is the one that
`everfed run` would take. The first round of every task, in which steps may be captured, is left out. The MFCL paper
prints, for a round of five clients: FedAvg 1.2 s in every task; FedLwF-2T 1.2 s, then 3.4 s; MFCL 1.2 s, then 3.7 s,
and 330 s on the server once per task.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from everfed import engines, session
from everfed.core.fit import on_device
from everfed.core.runner import EvalOptions, Runner
from everfed.recipe import Recipe
from everfed.store.clients import ClientStore

METHODS = ("fedavg", "fedlwf2t", "mfcl")
PAPER = {  # client seconds in the first task and later, relative to FedAvg's 1.2 s
    "fedavg": (1.0, 1.0),
    "fedprox": (1.98 / 1.2, 1.98 / 1.2),
    "fedcil": (17.8 / 1.2, 24.5 / 1.2),
    "fedlwf2t": (1.0, 3.4 / 1.2),
    "mfcl": (1.0, 3.7 / 1.2),
}


@dataclass
class Entrant:
    """One method on its way through the stream, and what it told."""

    name: str
    events: list[dict[str, Any]] = field(default_factory=list)
    runner: Runner | None = None

    def advance(self) -> None:
        assert self.runner is not None
        self.runner.round()

    def clients(self, first: bool) -> float:
        """Median seconds of a training phase in the first task, or after it."""
        return median(
            e["seconds"] for e in self.events if _is(e, "train") and (e["task"] == 0) == first and not e["warm_up"]
        )

    def server(self) -> float:
        """Seconds of the server's own phases per task that has some."""
        by_task: dict[int, float] = defaultdict(float)
        for event in self.events:
            if event["event"] == "phase" and event["phase"] != "train" and event["clients"] in ([], 0):
                by_task[event["task"]] += event["seconds"]
        return sum(by_task.values()) / len(by_task) if by_task else 0.0

    def note(self, event: dict[str, Any]) -> None:
        if _is(event, "train"):
            event["warm_up"] = not any(_is(e, "train") and e["task"] == event["task"] for e in self.events)
        self.events.append(event)


def _is(event: dict[str, Any], phase: str) -> bool:
    return event["event"] == "phase" and event["phase"] == phase


def entrant(recipe: Recipe, data_dir: str | None) -> Entrant:
    assembly = session.assemble(recipe, data_dir)
    one = Entrant(assembly.method.name)
    engine = engines.build(recipe.engine, assembly.world, ClientStore(), assembly.build_module, one.note, None)
    model = on_device(assembly.first_model(), engines.device(recipe.engine))
    one.runner = Runner(assembly.world, engine, model, EvalOptions(logits="seen"), one.note)
    return one


def recipe_for(method: str, options: argparse.Namespace) -> Recipe:
    own = {"mfcl": {"gen_steps": options.gen_steps, "gen_batch": options.gen_batch}} if method == "mfcl" else {}
    return Recipe(
        method={"name": method, **own},
        stream={
            "dataset": options.dataset,
            "scenario": "class-incremental",
            "tasks": options.tasks,
            "clients": options.clients,
            "participation": options.participation,
            "partition": {"kind": "lda", "alpha": 1.0},
            "max_train": options.samples,
            "max_test": 100,  # evaluation is not what is measured
        },
        train={
            "rounds_per_task": options.rounds,
            "local_epochs": options.epochs,
            "batch_size": 32,
            "logits": "seen",
            "optimizer": {"kind": "sgd", "lr": 0.01},
        },
        model={"kind": options.model},
        engine={"kind": options.engine},
    )


def compare(options: argparse.Namespace) -> None:
    entrants = [entrant(recipe_for(name, options), options.data) for name in options.methods]
    for _ in range(options.rounds * options.tasks):
        for one in entrants:
            one.advance()
    base = entrants[0]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, engine {options.engine}"
    print(f"{options.model} on {options.dataset}, {options.tasks} tasks of {options.rounds} rounds; {device}")
    print(f"seconds of a round on clients, times {base.name}'s (the paper's in brackets); of the server per task")
    print(f"{'method':10} {'first task':>22} {'later tasks':>22} {'server s/task':>14} {'down bytes':>11}")
    for one in entrants:
        print(row(one, base))


def row(one: Entrant, base: Entrant) -> str:
    assert one.runner is not None and base.runner is not None
    printed = PAPER.get(one.name)
    cells = []
    for index, first in enumerate((True, False)):
        seconds, ratio = one.clients(first), one.clients(first) / base.clients(first)
        cells.append(f"{seconds:.3f} s x{ratio:.2f} ({f'{printed[index]:.2f}' if printed else '-'})")
    down = one.runner.state.traffic.as_dict()["bytes_down"] / base.runner.state.traffic.as_dict()["bytes_down"]
    return f"{one.name:10} {cells[0]:>22} {cells[1]:>22} {one.server():14.2f} {f'x{down:.2f}':>11}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=METHODS, help="the first one is what the others are divided by")
    parser.add_argument("--rounds", type=int, default=6, help="per task, at least 2")
    parser.add_argument("--tasks", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--participation", type=float, default=0.5)
    parser.add_argument("--samples", type=int, default=1000, help="of the training data")
    parser.add_argument("--gen-steps", type=int, default=100)
    parser.add_argument("--gen-batch", type=int, default=128)
    parser.add_argument("--model", default="small-cnn")
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--engine", default="auto", choices=("auto", "eager", "graphs"))
    parser.add_argument("--data", default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    compare(options)


if __name__ == "__main__":
    main()
