"""How long other threads stand still while a checkpoint is written: by chunks, and as `safetensors.torch.save` does.

A thread spins meanwhile. Of its time by the clock, what it neither ran nor waited for a core (Linux's schedstat) it
waited for Python's lock. Both ways write the same 190 MB, the server's state of MFCL with ResNet-18, in turns.

python -m benchmarks.checkpoint_lock [--turns 5] [--scale 1.0] [--out FILE]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from benchmarks.measure import machine, write
from everfed.core import tree
from everfed.store.files import write_synced

SIZES = {"model": 11_220_132, "teacher": 11_220_132, "generator": 8_423_939, "m": 8_423_939, "v": 8_423_939}


class Spinner:
    """A thread that only wants to run. waited: seconds for which Python's lock kept it from that."""

    def __init__(self) -> None:
        self.waited, self._over = 0.0, False
        self._thread = threading.Thread(target=self._spin, daemon=True)

    def __enter__(self) -> Spinner:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over = True
        self._thread.join()

    def _spin(self) -> None:
        before = self._now()
        while not self._over:
            for _ in range(3000):
                pass
            now = self._now()
            self.waited += (now[0] - before[0]) - (now[1] - before[1])
            before = now

    @staticmethod
    def _now() -> tuple[float, float]:
        """(the clock, seconds that this thread ran or waited for a core)"""
        ran, queued, _ = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()
        return time.perf_counter(), (int(ran) + int(queued)) / 1e9


def by_chunks(state: tree.Tree, path: Path) -> None:
    write_synced(path, tree.to_chunks(state))


def as_safetensors_does(state: tree.Tree, path: Path) -> None:
    write_synced(path, [safetensors.torch.save({name: tensor.clone() for name, tensor in state.items()})])


WAYS: dict[str, Callable[[tree.Tree, Path], None]] = {"chunks": by_chunks, "safetensors": as_safetensors_does}


def measure(state: tree.Tree, path: Path, turns: int) -> dict[str, dict[str, list[float]]]:
    """{way: waited and taken, seconds of every turn}; the first turn of each warms up."""
    found: dict[str, dict[str, list[float]]] = {way: {"waited_s": [], "took_s": []} for way in WAYS}
    with Spinner() as spinner:
        for turn in range(turns + 1):
            for way, save in WAYS.items():
                before, started = spinner.waited, time.perf_counter()
                save(state, path)
                if turn:
                    found[way]["waited_s"].append(spinner.waited - before)
                    found[way]["took_s"].append(time.perf_counter() - started)
    return found


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="of the state's size")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    state = {name: torch.randn(int(size * given.scale)) for name, size in SIZES.items()}
    with tempfile.TemporaryDirectory() as place:
        found = measure(state, Path(place) / "state", given.turns)
    for way, row in found.items():
        waited, took = (statistics.median(row[name]) for name in ("waited_s", "took_s"))
        print(f"{way}: another thread waited {1000 * waited:.1f} ms of {1000 * took:.0f} ms")
    result = {"machine": machine(), "megabytes": sum(4 * len(t) for t in state.values()) / 1e6, **found}
    write(result, given.out)
    return result


if __name__ == "__main__":
    main()
