"""What STAMP, FedOMG and the personalised methods cost beside FedAvg: time, traffic and client state.

Run as `python benchmarks/stamp_cost.py [--classes-per-task 20] [--per-class 38 --exemplars 1] [--model two-conv-cnn]`.
Random images in the shape of CIFAR in a task pool: 38 images and one exemplar of a class are CIFAR-100's 500 and 13.
All methods see the same stream in one process and take turns, a round each. On a CPU it is the time of this process on
one thread that counts, which other work on the machine changes little. Evaluation is counted in, and is one image a
class. The paper has, for STAMP and FedOMG beside FedAvg, 2.0 and 1.2 times the seconds a round at 20 classes a task and
2.8 and 1.2 at 2; its code replays whole earlier tasks, not exemplars (`--exemplars 38`).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from time import perf_counter, process_time

import numpy as np
import torch

from everfed import session, streams
from everfed.core.runner import EvalOptions, Runner
from everfed.core.stream import Stream
from everfed.core.tree import tensor_bytes
from everfed.engines.eager import Eager
from everfed.recipe import Recipe
from everfed.store.clients import ClientStore

METHODS = ("fedavg", "fedomg", "stamp-temporal", "stamp")
CLASSES = 100


@dataclass
class Entrant:
    """One method on its way through the stream."""

    name: str
    runner: Runner
    store: ClientStore
    seconds: list[float] = field(default_factory=list)

    def advance(self) -> None:
        clock = perf_counter if torch.cuda.is_available() else process_time
        start = clock()
        self.runner.round()
        self.seconds.append(clock() - start)

    def state_bytes(self) -> int:
        """The largest client state."""
        return max(tensor_bytes(self.store.get(client) or {}) for client in self.store.clients())


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


def entrant(method: str, options: argparse.Namespace, stream: Stream) -> Entrant:
    own = {"stamp": {"exemplars": options.exemplars}} if method.startswith("stamp") else {}
    recipe = Recipe(
        method={"name": method, **own},
        train={
            "rounds_per_task": options.rounds,
            "local_epochs": options.epochs,
            "batch_size": 128,
            "optimizer": {"kind": "adam", "lr": 0.001},
        },
        model={"kind": options.model},
    )
    assembly, store = session.assemble(recipe, None, stream=stream), ClientStore()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    engine = Eager(assembly.world, store, assembly.build_module, device)
    return Entrant(method, Runner(assembly.world, engine, assembly.first_model(), EvalOptions()), store)


def compare(options: argparse.Namespace) -> None:
    stream = pool(options)
    entrants = [entrant(name, options, stream) for name in options.methods]
    entrant(options.methods[0], options, stream).advance()  # so that no first call is counted
    for _ in range(stream.rounds):
        for one in entrants:
            one.advance()
    first = entrants[0]
    plain = first.runner.state.traffic.as_dict()
    size = first.runner.world.facts.layout.size
    print(
        f"{options.model}, {size} parameters, {stream.tasks} tasks of {options.rounds} rounds; ratios to {first.name}"
    )
    print(f"{'method':15} {'time':>6} {'last task':>10} {'up':>6} {'down':>6} {'client state':>13}")
    for one in entrants:
        traffic = one.runner.state.traffic.as_dict()
        up, down = (traffic[key] / plain[key] for key in ("bytes_up", "bytes_down"))
        time = sum(one.seconds) / sum(first.seconds)
        last = sum(one.seconds[-options.rounds :]) / sum(first.seconds[-options.rounds :])
        print(f"{one.name:15} {time:6.2f} {last:10.2f} {up:6.2f} {down:6.2f} {one.state_bytes():13,}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=METHODS)
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
    compare(options)


if __name__ == "__main__":
    main()
