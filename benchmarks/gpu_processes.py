"""Several processes on one GPU, each with rounds of FedAvg: images a second of all together, by their number.

All processes are warm before the first measurement; those that are not counted wait. They compute at the same time
where a CUDA MPS daemon runs (`nvidia-cuda-mps-control -d`), else they take turns.

python -m benchmarks.gpu_processes [--case small-b32] [--numbers 1,4,8,16] [--slots 10] [--threads 10] [--seconds 3]
                                   [--device cpu] [--toy] [--out FILE]
CUDA_DEVICE_MAX_CONNECTIONS=2 python -m benchmarks.gpu_processes        # with so many queues a process
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.measure import machine, write

WARM = 3  # rounds


def serve(pipe: Connection, given: argparse.Namespace) -> None:
    """Warm up, then run rounds until each moment that comes through the pipe, and answer (rounds, seconds)."""
    from benchmarks.gpu_rounds import CASES, ROUNDS, build, round_of, seconds, set_precision, warm_up
    from benchmarks.gpu_table import TOY
    from everfed.engines.eager import Eager
    from everfed.engines.graphs import Graphs
    from everfed.engines.slots import VARIABLE
    from everfed.store.clients import ClientStore

    case = {**CASES[given.case], **(TOY if given.toy else {})}
    run = build(case, "fedavg", ROUNDS)
    engine: Any
    if given.device == "cpu":
        engine = Eager(run.setup, ClientStore(), run.build_module)
    else:
        how = (given.device, set_precision(case), given.slots)
        engine = Graphs(run.setup, ClientStore(), run.build_module, *how, host_threads=given.threads)
    work = round_of(run, engine)
    warm_up(work, engine, WARM, 0.0)
    pipe.send((case.get("clients", 10) * case["per_client"] * case["epochs"], os.environ.get(VARIABLE, "CUDA's own")))
    while (until := pipe.recv()) is not None:
        begun, rounds = time.time(), 0
        while time.time() < until:
            seconds(work)
            rounds += 1
        pipe.send((rounds, time.time() - begun))


def measure(given: argparse.Namespace, numbers: Sequence[int]) -> dict[str, Any]:
    """Queues of a process, and images a second, by the number of processes."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for _ in range(max(numbers)):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=serve, args=(theirs, given), daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    ((images, queues),) = {pipe.recv() for pipe in pipes}
    found = {}
    for number in numbers:
        until = time.time() + given.seconds
        for pipe in pipes[:number]:
            pipe.send(until)
        rates = [images * rounds / seconds for rounds, seconds in (pipe.recv() for pipe in pipes[:number])]
        found[str(number)] = sum(rates)
        print(f"{given.case}, {number} at a time: {found[str(number)]:.0f} images a second in all", flush=True)
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(None)
        process.join()
    return {"queues": queues, "images_per_s": found}


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="small-b32", help="of benchmarks/gpu_rounds.py")
    parser.add_argument("--numbers", default="1,4,8,16", help="of processes, with commas between")
    parser.add_argument("--slots", type=int, default=10)
    parser.add_argument("--threads", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    numbers = [int(number) for number in given.numbers.split(",")]
    about = {"case": given.case, "slots": given.slots, "threads": given.threads, "machine": machine()}
    found = {**about, **measure(given, numbers)}
    write(found, given.out)
    return found


if __name__ == "__main__":
    main()
