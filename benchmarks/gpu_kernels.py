"""Where a training step's time on a GPU goes, by kind of kernel, and how much of the GPU each kernel takes.

One client on one slot, every kernel alone on the GPU. Beside its microseconds stands what it takes from clients on
other slots: its microseconds times the share of the GPU's places for blocks that it fills. Were these packed without
gaps, a step would take their sum.

python -m benchmarks.gpu_kernels [--case resnet18-b32] [--methods fedavg,fedgp+der] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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
    "weight gradients of convolutions": ("wgrad", "_partial_weights", "_sum_weights"),
    "input gradients of convolutions": ("dgrad",),
    "forward convolutions": ("fprop", "_forward"),  # the latter is the first one's own kernel
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


def profiled(case_name: str, method: str) -> list[dict[str, Any]]:
    """The events of one warm round of one client."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from benchmarks.gpu_rounds import CASES, ROUNDS, build, round_of, warm_up
    from everfed.engines.graphs import Graphs
    from everfed.store.clients import ClientStore

    case = {**CASES[case_name], "clients": 1, "epochs": 1}
    case["per_client"] = STEPS * case["batch"]
    assembly = build(case, method, ROUNDS)
    engine = Graphs(assembly.setup, ClientStore(), assembly.build_module, "cuda", slots=1, host_threads=1)
    work = round_of(assembly, engine)
    warm_up(work, engine, 4)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    engine.close()
    with tempfile.TemporaryDirectory() as place:
        trace = Path(place) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events: list[dict[str, Any]] = json.loads(trace.read_text())["traceEvents"]
    return events


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="resnet18-b32")
    parser.add_argument("--methods", default="fedavg,fedgp+der")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    from everfed import engines

    engines._set_precision("bf16")  # as for every run on a GPU
    found: dict[str, Any] = {"machine": machine(), "case": given.case}
    for method in given.methods.split(","):
        found[method] = by_kind(profiled(given.case, method), Multiprocessors.here(), STEPS)
        for kind, row in found[method].items():
            times = f"{row['us']:.0f} us, {row['us_of_gpu']:.0f} us of the GPU"
            print(f"{method}, {kind}: {row['kernels']:.1f} kernels, {times}")
    write(found, given.out)


if __name__ == "__main__":
    main()
