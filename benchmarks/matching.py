"""Time and memory of gradient matching, beside stacking all updates in float64.

Run as `python benchmarks/matching.py [--updates 10 50] [--entries 11220132] [--threads 2] [--repeats 5]`. The two take
turns in one process, so that a busy machine slows both alike. Peak memory is what a call holds above its inputs
(Linux: VmHWM of /proc, reset before each call).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from everfed.methods.project.matching import match_gradients, solve_gram

RESNET18 = 11_220_132  # trainable parameters with 100 classes


def stacked(updates: list[Tensor]) -> Tensor:
    """The plain way: one (T, d) float64 matrix, its Gram matrix, the same solve, one product."""
    G = torch.stack(updates).double()
    return (solve_gram(G @ G.T).weights @ G).float()


def draw(count: int, entries: int) -> list[Tensor]:
    """Updates that share a direction and differ by noise of the same size."""
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn(entries, generator=generator)
    return [torch.randn(entries, generator=generator).add_(shared) for _ in range(count)]


def resident(field: str) -> int:
    """Bytes of `field` (VmRSS now, VmHWM at the peak) of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def measured(work: Callable[[list[Tensor]], Tensor], updates: list[Tensor]) -> tuple[float, int, Tensor]:
    """Seconds, peak bytes above those held before, and the result of one call."""
    Path("/proc/self/clear_refs").write_text("5")
    before, start = resident("VmRSS"), perf_counter()
    result = work(updates)
    return perf_counter() - start, resident("VmHWM") - before, result


def compare(count: int, entries: int, repeats: int) -> str:
    """One row of the table: the best time and the largest peak of each over interleaved calls."""
    updates = draw(count, entries)
    match_gradients([u[:10_000] for u in updates])
    ours, naive = [], []
    for _ in range(repeats):
        ours.append(measured(match_gradients, updates))
        naive.append(measured(stacked, updates))
    difference = float((ours[0][2] - naive[0][2]).norm() / naive[0][2].norm())
    seconds, naive_seconds = min(s for s, _, _ in ours), min(s for s, _, _ in naive)
    peak, naive_peak = max(b for _, b, _ in ours), max(b for _, b, _ in naive)
    return (
        f"{count:4d} {entries:11d} {seconds:8.3f} {naive_seconds:9.3f} {naive_seconds / seconds:7.2f} "
        f"{peak / 2**20:9.0f} {naive_peak / 2**20:10.0f} {difference:11.1e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, nargs="+", default=[10, 50])
    parser.add_argument("--entries", type=int, default=RESNET18)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{options.threads} threads, best of {options.repeats}, interleaved; peaks in MiB above the inputs")
    print("   T           d  seconds   stacked   ratio      peak    stacked  difference")
    for count in options.updates:
        print(compare(count, options.entries, options.repeats), flush=True)


if __name__ == "__main__":
    main()
