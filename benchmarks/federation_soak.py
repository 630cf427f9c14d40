"""A federation that runs for long, with a fault every few rounds: does anything grow, does anything go wrong?

python -m benchmarks.federation_soak [--rounds 200] [--clients 2] [--every 5] [--seed 0] [--out FILE]

Every few rounds one of these is killed: a SuperNode, a worker, the SuperLink. At the end the model must be
the simulation's, byte for byte, and the memory and open files of every long-lived process, noted after each round, must
be flat: the last quarter against the second.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import everfed
from benchmarks.federation import _free
from everfed.federation.joining import Joining, children
from everfed.federation.superlink import Settings, running
from everfed.federation.supervisor import Child
from everfed.recipe import Recipe, from_table

GROWTH = 1.10  # memory of a process in the last quarter over the second


def recipe(rounds: int, clients: int) -> Recipe:
    return from_table(
        {
            "stream": {
                "dataset": "digits",
                "transform": "rotate",
                "tasks": 2,
                "clients": clients,
                "max_train": 40 * clients,
                "max_test": 40,
            },
            "model": {"kind": "mlp", "hidden": [12]},
            "train": {"rounds_per_task": max(1, rounds // 2), "batch_size": 10},
            "method": {"name": "der", "memory": {"size": 10}},
            "engine": {"kind": "eager", "device": "cpu"},
        }
    )


class Soak:
    """The processes of a federation, a thread that tends them, and notes of what they use."""

    def __init__(self, folder: Path, port: int, clients: int) -> None:
        self.children = {
            (client, child.name.removeprefix("the ")): child
            for client in range(clients)
            for child in _children(folder, port, client)
        }
        self.notes: dict[str, list[tuple[int, int]]] = {}  # process -> (resident bytes, open files) by round
        self.faults: list[str] = []
        self._ended = threading.Event()
        self._tender = threading.Thread(target=self._tend, daemon=True)
        self._tender.start()

    def _tend(self) -> None:
        while not self._ended.wait(0.2):
            for child in self.children.values():
                child.check(lambda line: None)

    def note(self, link: Path) -> None:
        """What every process uses now."""
        pids = {f"{name}-{client}": child.process for (client, name), child in self.children.items()}
        found = {name: process.pid for name, process in pids.items() if process is not None}
        found |= {"server": os.getpid(), "superlink": int((link / "superlink.pid").read_text())}
        for name, pid in found.items():
            try:
                files = len(os.listdir(f"/proc/{pid}/fd"))
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            except (OSError, IndexError):
                continue  # it was just killed
            self.notes.setdefault(name, []).append((pages * os.sysconf("SC_PAGE_SIZE"), files))

    def strike(self, rng: random.Random, link: Path) -> None:
        """One fault, drawn; nothing when what was drawn is not running just now."""
        name = rng.choice(["supernode", "worker", "superlink"])
        client = rng.choice(sorted({client for client, _ in self.children}))
        try:
            if name == "superlink":
                os.kill(int((link / "superlink.pid").read_text()), signal.SIGKILL)
            else:
                name, process = f"{name}-{client}", self.children[client, name].process
                if process is None:
                    return
                os.kill(process.pid, signal.SIGKILL)
        except (OSError, ValueError):
            return
        self.faults.append(name)

    def close(self) -> None:
        self._ended.set()
        self._tender.join()
        for child in self.children.values():
            child.stop(1.0)


def _children(folder: Path, port: int, client: int) -> list[Child]:
    joining = Joining(f"127.0.0.1:{port}", folder / f"c{client}", f"site-{client}", client, poll=0.3)
    joining.folder.mkdir(parents=True, exist_ok=True)
    return children(joining)


def soak(folder: Path, rounds: int, clients: int, every: int, seed: int) -> dict[str, Any]:
    """Run it; returns what was seen."""
    from everfed.federation.flower.link import Address, open_grid
    from everfed.federation.serving import Serving, serve

    chosen, rng = recipe(rounds, clients), random.Random(seed)
    settings = Settings("127.0.0.1", _free(), folder / "link")
    began = time.monotonic()
    with running(settings, lambda line: None):
        field = Soak(folder, settings.port, clients)
        try:
            watch = _watcher(field, settings.folder, every, rounds, rng)
            serving = Serving(chosen, folder / "run", checkpoint_every=1.0)
            serve(serving, lambda: open_grid(Address("127.0.0.1", settings.port)), [watch])
        finally:
            field.close()
    everfed.run(chosen, folder / "reference")
    models = [(folder / name / "model.safetensors").read_bytes() for name in ("run", "reference")]
    return {
        "rounds": rounds,
        "clients": clients,
        "seconds": time.monotonic() - began,
        "faults": field.faults,
        "same_bits": models[0] == models[1],
        "growth": {name: _growth(notes) for name, notes in field.notes.items() if len(notes) >= 8},
        "client_files": len(list(folder.glob("c0/*/steps/*"))) + len(list(folder.glob("c0/*/once/*"))),
    }


def _watcher(field: Soak, link: Path, every: int, rounds: int, rng: random.Random) -> Callable[[dict[str, Any]], None]:
    def watch(event: dict[str, Any]) -> None:
        if event["event"] == "phase" and event["phase"] == "train":
            field.note(link)
            if (event["round"] + 1) % every == 0 and event["round"] + 1 < rounds:
                threading.Timer(rng.uniform(0.0, 2.0), field.strike, (rng, link)).start()

    return watch


def _growth(notes: list[tuple[int, int]]) -> dict[str, float]:
    """The last quarter over the second: memory, and open files."""
    quarter = len(notes) // 4
    early, late = notes[quarter : 2 * quarter], notes[-quarter:]
    memory = statistics.median(m for m, _ in late) / statistics.median(m for m, _ in early)
    return {"memory": round(memory, 3), "files": max(f for _, f in late) - max(f for _, f in early)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--every", type=int, default=5, help="rounds between two faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = soak(Path(folder), chosen.rounds, chosen.clients, chosen.every, chosen.seed)
    result["flat"] = all(one["memory"] <= GROWTH and one["files"] <= 5 for one in result["growth"].values())
    text = json.dumps(result, indent=2)
    if chosen.out:
        chosen.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
