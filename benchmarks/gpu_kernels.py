"""Where a training step's time on a GPU goes, by kind of kernel, and how much of the GPU each kernel takes.

One client on one slot, every kernel alone on the GPU. Beside its microseconds stands what it takes from clients on
other slots: its microseconds times the share of the GPU's places for blocks that it fills. Were these packed without
gaps, a step would take their sum.

`--case mfcl` is a round of MFCL after its first task at the paper's size, of one client and of all five at once on five
slots, and a step of its generator. Of all at once it says how much of the time the GPU had anything to do.

python -m benchmarks.gpu_kernels [--case resnet18-b32] [--methods fedavg,fedgp+der] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measure import machine, write

STEPS = 10  # of the profiled client
RESERVED = 1024  # bytes of shared memory that every block takes beside its own (compute capability 9.0)
MOST_BLOCKS, REGISTERS = 32, 65536  # of a multiprocessor

# a kernel belongs to the first kind of which its name contains a piece
KINDS = {
    "BatchNorm, ReLU and residual sums": ("_moments", "_normalise", "_gradient_sums", "_gradient_out", "_small_"),
    "SGD, projection, cast": ("_descend", "_products"),
    "weight gradients of convolutions": ("wgrad", "_partial_weights", "_sum_", "_weights_gradient"),
    "input gradients of convolutions": ("dgrad", "_input_gradient"),
    "forward convolutions, everfed's input gradients too": ("fprop", "_of_few_", "_convolve"),
    "pooling, dense layers": ("_forward", "_backward"),  # everfed's own
}
REST = "rest"


@dataclass(frozen=True)
class Multiprocessors:
    """How many the GPU has, and what each holds."""

    count: int
    threads: int
    registers: int
    shared_memory: int

    @staticmethod
    def here() -> Multiprocessors:
        import torch

        gpu = torch.cuda.get_device_properties(0)
        return Multiprocessors(
            gpu.multi_processor_count,
            gpu.max_threads_per_multi_processor,
            REGISTERS,
            gpu.shared_memory_per_multiprocessor,
        )

    def fit(self, threads: int, registers: int, shared_memory: int) -> int:
        """How many blocks of a kernel fit on one multiprocessor. registers: of a thread, given out by eights."""
        by_registers = self.registers // (threads * max(8, math.ceil(registers / 8) * 8))
        by_memory = self.shared_memory // (shared_memory + RESERVED)
        return max(1, min(self.threads // threads, by_registers, by_memory, MOST_BLOCKS))

    def share(self, kernel: Mapping[str, Any]) -> float:
        """The share of all places for its blocks that a kernel fills, at most 1. kernel: of the profiler's trace."""
        threads = math.prod(kernel["block"])
        fit = self.fit(threads, kernel["registers per thread"], kernel["shared memory"])
        return min(1.0, math.prod(kernel["grid"]) / (self.count * fit))


def kind_of(name: str) -> str:
    return next((kind for kind, pieces in KINDS.items() if any(piece in name for piece in pieces)), REST)


def by_kind(events: Iterable[Mapping[str, Any]], gpu: Multiprocessors, steps: int) -> dict[str, dict[str, float]]:
    """{kind: kernels, microseconds, and those times the kernels' shares}, of one step."""
    found = {kind: {"kernels": 0.0, "us": 0.0, "us_of_gpu": 0.0} for kind in ("all", *KINDS, REST)}
    for event in events:
        if event.get("cat") != "kernel":
            continue
        for row in (found["all"], found[kind_of(event["name"])]):
            row["kernels"] += 1 / steps
            row["us"] += event["dur"] / steps
            row["us_of_gpu"] += event["dur"] * gpu.share(event["args"]) / steps
    return found


def timeline(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Of kernels on several streams: microseconds in all, those in which at least one ran, and from first to last."""
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "kernel")
    busy, end = 0.0, -math.inf
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return {"us": sum(stop - start for start, stop in spans), "busy_us": busy, "first_to_last_us": end - spans[0][0]}


def profiled(case_name: str, method: str) -> list[dict[str, Any]]:
    """The events of one warm round of one client."""
    from benchmarks.gpu_rounds import CASES, ROUNDS

    case = {**CASES[case_name], "clients": 1, "epochs": 1}
    case["per_client"] = STEPS * case["batch"]
    return profiled_round(case, method, ROUNDS, 1, 0)[0]


def profiled_round(
    case: Mapping[str, Any], method: str, rounds: int, slots: int, first: int
) -> tuple[list[dict[str, Any]], list[float]]:
    """The events of one warm round after `first` ones, and the seconds of five more. rounds: of a task."""
    from benchmarks.gpu_rounds import build, round_of, seconds, set_precision, warm_up
    from everfed.engines.graphs import Graphs
    from everfed.store.clients import ClientStore

    run = build(dict(case), method, rounds)
    how = ("cuda", set_precision(case), slots)
    engine = Graphs(run.setup, ClientStore(), run.build_module, *how, host_threads=slots)
    work = round_of(run, engine)
    for _ in range(first):
        work()
    warm_up(work, engine, 4)
    times = [seconds(work) for _ in range(5)]
    events = events_of(work)
    engine.close()
    return events, times


def events_of(work: Callable[[], object]) -> list[dict[str, Any]]:
    """What the profiler saw of it on the GPU."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as place:
        trace = Path(place) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events: list[dict[str, Any]] = json.loads(trace.read_text())["traceEvents"]
    return events


# MFCL ---------------------------------------------------------------------------------------------------------
MFCL = dict(
    shape="cifar",
    model="resnet18",
    per_client=100,
    batch=32,
    epochs=10,
    method={"mfcl": {"z_dim": 1000, "gen_steps": 100}},
    stream={"classes": 20, "tasks": 2, "augment": "crop-flip"},
)
ROUNDS_A_TASK = 40


def mfcl_round(method: str, clients: int) -> dict[str, Any]:
    """A round on as many slots as clients; of MFCL one of the second task."""
    case = {**MFCL, "clients": clients}
    first = ROUNDS_A_TASK
    if method != "mfcl":
        case, first = {**case, "method": {}}, 0
    events, times = profiled_round(case, method, ROUNDS_A_TASK, clients, first)
    steps = clients * case["epochs"] * -(-case["per_client"] // case["batch"])
    kinds = by_kind(events, Multiprocessors.here(), steps)
    return {"kinds": kinds, "timeline": timeline(events), "round_s": times, "names": by_name(events, steps)}


def generator_step(steps: int = 100) -> dict[str, Any]:
    """Of the server's generator training: milliseconds a step, and its kernels."""
    from benchmarks.gpu_rounds import seconds
    from benchmarks.gpu_table import generator_training

    run = partial(generator_training("cuda", toy=False), steps)
    run()  # captures
    times = [1000 * seconds(run) / steps for _ in range(5)]
    events = events_of(run)
    return {"kinds": by_kind(events, Multiprocessors.here(), steps), "ms": times, "names": by_name(events, steps)}


def by_name(events: Iterable[Mapping[str, Any]], steps: int, most: int = 60) -> list[tuple[str, float, float]]:
    """(kernel, how often, microseconds) a step, those that take longest first."""
    found: dict[str, list[float]] = {}
    for event in events:
        if event.get("cat") == "kernel":
            row = found.setdefault(event["name"][:120], [0.0, 0.0])
            row[0] += 1 / steps
            row[1] += event["dur"] / steps
    rows = sorted(((name, *row) for name, row in found.items()), key=lambda row: -row[2])
    return [(name, round(often, 2), round(us, 1)) for name, often, us in rows[:most]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="resnet18-b32")
    parser.add_argument("--methods", default="fedavg,fedgp+der")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    from everfed import engines

    engines._set_precision("bf16")  # as for every run on a GPU
    found: dict[str, Any] = {"machine": machine(), "case": given.case}
    if given.case == "mfcl":
        found |= {f"{method}, {n} at once": mfcl_round(method, n) for method in ("fedavg", "mfcl") for n in (1, 5)}
        found["generator"] = generator_step()
    else:
        for method in given.methods.split(","):
            found[method] = {"kinds": by_kind(profiled(given.case, method), Multiprocessors.here(), STEPS)}
    for name, rows in found.items():
        if isinstance(rows, dict) and "kinds" in rows:
            show(name, rows)
    write(found, given.out)


def show(name: str, found: Mapping[str, Any]) -> None:
    for kind, row in found["kinds"].items():
        times = f"{row['us']:.0f} us, {row['us_of_gpu']:.0f} us of the GPU"
        print(f"{name}, {kind}: {row['kernels']:.1f} kernels, {times}")
    for key in ("timeline", "round_s", "ms"):
        if key in found:
            print(f"{name}, {key}: {json.dumps(found[key])}")


if __name__ == "__main__":
    main()
