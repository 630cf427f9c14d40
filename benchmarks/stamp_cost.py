"""What STAMP, FedOMG and the personalised methods cost beside FedAvg: time, traffic and client state.

Run as `python -m benchmarks.stamp_cost [--classes-per-task 20] [--per-class 38 --exemplars 1] [--model two-conv-cnn]`.
Random images in the shape of CIFAR in a task pool: 38 images and one exemplar of a class are CIFAR-100's 500 and 13.
All methods see the same stream in one process and take turns, a round each. On a CPU it is the time of this process on
one thread that counts, which other work on the machine changes little. Evaluation is counted in, and is one image a
class. The paper has, for STAMP and FedOMG beside FedAvg, 2.0 and 1.2 times the seconds a round at 20 classes a task and
2.8 and 1.2 at 2; its code replays whole earlier tasks, not exemplars (`--exemplars 38`).
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from benchmarks.entrants import EAGER, compare, entrant, parser_of, take_turns
from everfed import streams
from everfed.core.stream import Stream
from everfed.recipe import Recipe

METHODS = ("fedavg", "fedomg", "stamp-temporal", "stamp")
CLASSES = 100


def pool(options: argparse.Namespace) -> Stream:
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(CLASSES), options.per_class)
    x = rng.integers(0, 256, (len(y), 3, 32, 32), dtype=np.uint8)
    tests = np.arange(CLASSES)
    return streams.from_arrays(
        x,
        y,
        x[:CLASSES],
        tests,
        scenario="task-pool",
        tasks=options.tasks or CLASSES // options.classes_per_task,
        classes_per_task=options.classes_per_task,
        clients=options.clients,
        rounds_per_task=options.rounds,
    )


def recipe_for(method: str, options: argparse.Namespace) -> Recipe:
    own = {"stamp": {"exemplars": options.exemplars}} if method.startswith("stamp") else {}
    return Recipe(
        method={"name": method, **own},
        train={
            "rounds_per_task": options.rounds,
            "local_epochs": options.epochs,
            "batch_size": 128,
            "optimizer": {"kind": "adam", "lr": 0.001},
        },
        model={"kind": options.model},
        engine=EAGER,
    )


def main() -> None:
    parser = parser_of(__doc__, METHODS)
    parser.add_argument("--classes-per-task", type=int, default=20)
    parser.add_argument("--tasks", type=int, default=0, help="0: until every class was seen once")
    parser.add_argument("--rounds", type=int, default=1, help="per task")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--per-class", type=int, default=38)
    parser.add_argument("--exemplars", type=int, default=1)
    parser.add_argument("--model", default="two-conv-cnn")
    options = parser.parse_args()
    torch.set_num_threads(1)
    stream = pool(options)
    entrants = [entrant(recipe_for(name, options), stream=stream, cpu_time=True) for name in options.methods]
    take_turns([entrant(recipe_for(options.methods[0], options), stream=stream)], 1)  # so that no first call is counted
    compare(entrants, stream.rounds, options.rounds)


if __name__ == "__main__":
    main()
