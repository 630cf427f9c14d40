"""What the methods of the FedSSI family cost beside FedAvg: time, traffic and state, and the memory of OGD and FOT.

Run as `python -m benchmarks.fedssi_cost [--rounds 40] [--tasks 3] [--model small-cnn] [--dataset digits]`. All methods
see the same stream in one process and take turns, a round each, so that a busy machine slows all alike. The FedSSI
paper gives, on CIFAR-10: LwF 1.42, EWC 1.84, OGD 2.27, FedSSI 1.20 times FedAvg.

`--memory` runs one task boundary of OGD and FOT on ResNet-18 instead and reports the bytes that their options lead to.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from benchmarks.entrants import EAGER, compare, entrant, parser_of, take_turns
from everfed import streams
from everfed.core.tree import tensor_bytes
from everfed.recipe import Recipe

METHODS = ("fedavg", "fedprox", "lwf", "ewc", "ogd", "si", "fedlwf2t", "fedssi", "fot", "fedweit")


def recipe_for(method: str, options: argparse.Namespace) -> Recipe:
    return Recipe(
        method={"name": method, **({"fedweit": {"retention": 1.0}} if method == "fedweit" else {})},
        stream={
            "dataset": options.dataset,
            "scenario": "class-incremental",
            "tasks": options.tasks,
            "clients": 5,
            "participation": 0.4,
            "max_train": options.samples,
            "max_test": 50,  # evaluation is not what is measured
        },
        train={
            "rounds_per_task": options.rounds,
            "local_epochs": options.epochs,
            "batch_size": 64,
            "logits": "seen",
            "optimizer": {"kind": "adam", "lr": 0.001, "schedule": "linear"},
        },
        model={"kind": options.model},
        engine=EAGER,
    )


def warm_up(options: argparse.Namespace) -> None:
    """Two short tasks of every method, so that no import or first call is counted."""
    for name in options.methods:
        one = entrant(recipe_for(name, argparse.Namespace(**{**vars(options), "rounds": 1, "tasks": 2})), options.data)
        take_turns([one], 2)


def memory() -> None:
    """One boundary on ResNet-18 with CIFAR-sized noise: what is kept and sent."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (64, 3, 32, 32), dtype=np.uint8), np.arange(64) % 10
    for method, options in (
        ("ogd", {"vectors": 20}),
        ("ogd", {"vectors": 20, "storage": "float16"}),
        ("ogd", {"vectors": 20, "storage": "float16", "max_vectors": 10}),
        ("fot", {"sketch_cols": 256, "samples": 32}),
        ("fot", {"sketch_cols": 64, "samples": 32, "max_rank": 32}),
    ):
        stream = streams.from_arrays(
            x, y, x[:20], y[:20], scenario="domain-incremental", tasks=2, clients=1, rounds_per_task=1
        )
        recipe = Recipe(
            method={"name": method, method: options},
            train={"rounds_per_task": 1, "batch_size": 64},
            model={"kind": "resnet18"},
            engine=EAGER,
        )
        one = entrant(recipe, stream=stream)
        one.advance()
        own = one.runner.state.server.get(method, {})
        traffic = one.runner.state.traffic
        print(
            f"{method:4} {options}: client {one.state_bytes():,} bytes, server {tensor_bytes(own):,} bytes, "
            f"sent at the task's end {traffic.up[method]:,} bytes, {one.seconds[0]:.1f} s"
        )


def main() -> None:
    parser = parser_of(__doc__, METHODS)
    parser.add_argument("--rounds", type=int, default=40, help="per task")
    parser.add_argument("--tasks", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=1000, help="of the training data")
    parser.add_argument("--model", default="small-cnn")
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--data", default=None)
    parser.add_argument("--memory", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory:
        memory()
        return
    warm_up(options)
    entrants = [entrant(recipe_for(name, options), options.data) for name in options.methods]
    compare(entrants, options.rounds * options.tasks, options.rounds)


if __name__ == "__main__":
    main()
