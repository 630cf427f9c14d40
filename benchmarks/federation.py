"""What a federation on loopback costs beside the processes engine: bytes on the wire, seconds a round, where they go.

python -m benchmarks.federation [--model mlp|resnet18] [--clients N] [--rounds 6] [--poll S] [--out FOLDER]

Without --model both are measured, and each result is written to FOLDER (benchmarks/results) and printed. Both engines
run the same recipe on the same cores, one round each in turn. The wire is counted by a relay in front of the SuperLink,
bytes in both directions, everything included (HTTP, records, polling). The engine's time of a phase is a round of the
federation less the same round of the processes engine. Where a round's time goes is noted by the processes themselves
(benchmarks/federation_trace.py); the CPU time of each process is the kernel's account.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import federation_trace as trace
from everfed.core.evaluate import EvalOptions
from everfed.core.server import Runner
from everfed.engines.processes import Processes
from everfed.federation.engine import Federated, RunIdentity
from everfed.federation.joining import Joining, children
from everfed.federation.phase_options import PhaseOptions
from everfed.federation.superlink import PID, Settings, running
from everfed.recipe import Recipe, from_table, to_toml
from everfed.session import Run, assemble
from everfed.store.clients import ClientStore

GOAL_BYTES, GOAL_SECONDS = 1.05, 5.0
CLIENTS = {"mlp": 3, "resnet18": 2}


def recipe(model: str, clients: int) -> Recipe:
    shape = {"kind": "mlp", "hidden": [100, 100]} if model == "mlp" else {"kind": "resnet18"}
    return from_table(
        {
            "stream": {
                "dataset": "digits",
                "transform": "rotate",
                "tasks": 1,
                "clients": clients,
                "max_train": 60 * clients,
                "max_test": 50,
            },
            "model": shape,
            "train": {"rounds_per_task": 100, "batch_size": 30},
            "method": {"name": "fedavg"},
            "engine": {"kind": "eager", "device": "cpu"},
        }
    )


class Relay:
    """Counts what passes between the clients and the SuperLink."""

    def __init__(self, target: int) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self.listener.getsockname()[1])
        self.target, self.up, self.down = target, 0, 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                far = socket.create_connection(("127.0.0.1", self.target))
                for source, sink, way in ((near, far, "up"), (far, near, "down")):
                    threading.Thread(target=self._pump, args=(source, sink, way), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        """Through a pipe within the kernel: what is measured should not pay for copies that only the relay makes."""
        out, into = os.pipe()
        with suppress(OSError):
            while count := os.splice(source.fileno(), into, 1 << 16):
                setattr(self, way, getattr(self, way) + count)
                while count:
                    count -= os.splice(out, sink.fileno(), count)
        os.close(out), os.close(into)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


@dataclass(frozen=True)
class TracedLink(Settings):
    """A SuperLink whose calls are noted."""

    def command(self) -> list[str]:
        return traced(super().command())


def traced(command: Sequence[str]) -> list[str]:
    """The command of one of our processes, `python ... -m MODULE ...`, with its calls noted. Options of Python go: this
    folder must be importable."""
    module = command.index("-m") + 1
    return [command[0], "-m", trace.__name__, f"{command[module]}:main", *command[module + 1 :]]


@contextmanager
def clients(folder: Path, port: int, count: int, poll: float) -> Iterator[dict[str, list[int]]]:
    """The clients' processes, by what they are."""
    every = [
        child
        for client in range(count)
        for child in children(Joining(f"127.0.0.1:{port}", folder / f"c{client}", f"site-{client}", client, poll=poll))
    ]
    try:
        for child in every:
            child.log.parent.mkdir(parents=True, exist_ok=True)
            child.command = traced(child.command)
            child.start()
        names = {child.name for child in every}
        yield {name: [one.process.pid for one in every if one.name == name and one.process] for name in sorted(names)}
    finally:
        for child in every:
            child.stop(1.0)


def _free() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cpu_seconds(pids: Sequence[int]) -> float:
    """CPU time of processes, and of those they started and that have ended."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def federation(run: Run, port: int, events: list[dict[str, Any]]) -> Federated:
    from everfed.federation.flower.link import Address, open_grid
    from everfed.federation.transport import GridTransport, Node

    def index(node: Node) -> int:
        return node.client

    transport = GridTransport(lambda: open_grid(Address("127.0.0.1", port)), index, events.append)
    engine = Federated(
        run.setup,
        run.build_module,
        transport,
        RunIdentity("b1", 1, to_toml(run.recipe)),
        PhaseOptions(),
        lambda: (0, 0, 0, 0),
        events.append,
    )
    while len(transport.connected()) < run.stream.clients:
        transport.receive()
    return engine


def one_round(runner: Runner, book: trace.Notebook | None = None) -> tuple[float, float]:
    """When it began and ended."""
    started = time.monotonic()
    if book is None:
        runner.round()
    else:
        with book.at(trace.REST, "round"):
            runner.round()
    return started, time.monotonic()


def install() -> trace.Notebook:
    """This process is the server: its calls are noted, too."""
    from everfed.federation import transport

    book = trace.install(Path(os.environ[trace.FOLDER]))
    book.replace(trace.WAITING, f"{transport.__name__}:GridTransport", "receive")
    return book


@dataclass
class Rounds:
    """What was seen: bounds of rounds, and accounts before and after them."""

    flower: list[tuple[float, float]]
    simulated: list[tuple[float, float]]
    wire: int
    sent: int
    cpu: dict[str, float]
    load: float
    same: bool


def watched(model: str, count: int, rounds: int, poll: float, folder: Path) -> tuple[Run, Rounds]:
    torch.set_num_threads(1)
    run = assemble(recipe(model, count))
    events: list[dict[str, Any]] = []
    settings = TracedLink("127.0.0.1", _free(), folder / "link")
    with running(settings, lambda line: None):
        relay = Relay(settings.port)
        with clients(folder, relay.port, count, poll) as processes:
            engine = federation(run, settings.port, events)
            pool = Processes(run.setup, ClientStore(), run.build_module, 2)
            first, options, book = run.first_model(), EvalOptions(), install()
            flower = Runner(run.setup, engine, first, options, events.append)
            simulated = Runner(run.setup, pool, first, options)
            one_round(flower), one_round(simulated)  # everything is built
            everybody = {"the server": [os.getpid()], "the SuperLink": [int((settings.folder / PID).read_text())]}
            everybody |= processes

            def accounts() -> tuple[int, int, dict[str, float]]:
                traffic = flower.state.traffic
                sent = sum(traffic.up.values()) + sum(traffic.down.values())
                return relay.up + relay.down, sent, {name: cpu_seconds(pids) for name, pids in everybody.items()}

            before, pairs, used = accounts(), [], dict.fromkeys(everybody, 0.0)
            for _ in range(rounds):
                start = accounts()[2]
                one = one_round(flower, book)
                used = {name: used[name] + now - start[name] for name, now in accounts()[2].items()}
                pairs.append((one, one_round(simulated)))
            wire, sent = (now - then for now, then in zip(accounts()[:2], before[:2], strict=True))
            same = torch.equal(flower.state.model["params"], simulated.state.model["params"])
            engine.close()
            pool.close()
    load = os.getloadavg()[0]
    return run, Rounds([a for a, _ in pairs], [b for _, b in pairs], wire, sent, used, load, same)


def measured(model: str, count: int, rounds: int, poll: float, folder: Path) -> dict[str, Any]:
    notes = folder / "notes"
    notes.mkdir()
    os.environ[trace.FOLDER] = str(notes)
    run, seen = watched(model, count, rounds, poll, folder)
    lengths = [(b - a, d - c) for (a, b), (c, d) in zip(seen.flower, seen.simulated, strict=True)]
    every = trace.read(notes)
    parts = [trace.partition(every, *bounds) for bounds in seen.flower]
    return {
        "model": model,
        "parameters": run.setup.facts.layout.size,
        "clients": count,
        "rounds": rounds,
        "poll": poll,
        "load": seen.load,
        "same_bits": seen.same,
        "payload_bytes_a_round": seen.sent // rounds,
        "wire_bytes_a_round": seen.wire // rounds,
        "wire_over_payload": seen.wire / seen.sent,
        "seconds_a_round": statistics.median(a for a, _ in lengths),
        "seconds_a_round_processes": statistics.median(b for _, b in lengths),
        "engine_seconds_a_phase": statistics.median(a - b for a, b in lengths),
        "engine_seconds_of_every_phase": [a - b for a, b in lengths],
        "breakdown_seconds_a_round": {kind: statistics.mean(one[kind] for one in parts) for kind in parts[0]},
        "cpu_seconds_a_round": {name: seconds / rounds for name, seconds in seen.cpu.items()},
        "goals": {"wire_over_payload": GOAL_BYTES, "engine_seconds_a_phase": GOAL_SECONDS},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(CLIENTS))
    parser.add_argument("--clients", type=int)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--poll", type=float, default=Joining.poll)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    chosen = parser.parse_args()
    for model in [chosen.model] if chosen.model else CLIENTS:
        count = chosen.clients or CLIENTS[model]
        with tempfile.TemporaryDirectory() as folder:
            result = measured(model, count, chosen.rounds, chosen.poll, Path(folder))
        text = json.dumps(result, indent=2)
        name = (
            f"federation-{model}.json"
            if chosen.poll == Joining.poll
            else f"federation-{model}-poll{chosen.poll:g}.json"
        )
        chosen.out.mkdir(parents=True, exist_ok=True)
        (chosen.out / name).write_text(text + "\n")
        print(text)


if __name__ == "__main__":
    main()
