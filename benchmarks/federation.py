"""What a federation on loopback costs beside the processes engine: bytes on the wire, seconds a round, where they go.

python -m benchmarks.federation [--model mlp|resnet18] [--clients 3] [--rounds 6] [--out FILE]

Both run the same recipe on the same cores, one round each in turn. The wire is counted by a relay in front of the
SuperLink, bytes in both directions, everything included (HTTP, records, polling). The engine's time of a phase is a
round of the federation less the same round of the processes engine. Of it, the time the server takes to make and to
read packets is measured; how the rest divides between processes, transport and polling is not, but --poll changes one.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from everfed.core.runner import EvalOptions, Runner
from everfed.engines.processes import Processes
from everfed.federation.codec import Post
from everfed.federation.engine import Federated, RunIdentity
from everfed.federation.joining import Joining, children
from everfed.federation.patience import Patience
from everfed.federation.superlink import Settings, running
from everfed.recipe import Recipe, from_table, to_toml
from everfed.session import Assembly, assemble
from everfed.store.clients import ClientStore

GOAL_BYTES, GOAL_SECONDS = 1.05, 5.0


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
        with suppress(OSError):
            while data := source.recv(1 << 18):
                setattr(self, way, getattr(self, way) + len(data))
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


@contextmanager
def clients(folder: Path, port: int, count: int, poll: float) -> Iterator[None]:
    every = [
        child
        for client in range(count)
        for child in children(
            Joining(f"127.0.0.1:{port}", folder / f"c{client}", f"site-{client}", client, poll=poll), _free()
        )
    ]
    try:
        for child in every:
            child.log.parent.mkdir(parents=True, exist_ok=True)
            child.start()
        yield
    finally:
        for child in every:
            child.stop(1.0)


def _free() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Timed(Federated):
    """Notes how long the server itself is busy with packets."""

    busy = 0.0

    def _packet(self, *arguments: Any) -> Any:
        started = time.monotonic()
        packet = super()._packet(*arguments)
        self.busy += time.monotonic() - started
        return packet

    def _replies(self, *arguments: Any) -> Any:
        started = time.monotonic()
        reply = super()._replies(*arguments)
        self.busy += time.monotonic() - started
        return reply


def federation(assembly: Assembly, port: int, events: list[dict[str, Any]]) -> Timed:
    from everfed.federation.flower.grid import GridTransport, Node
    from everfed.federation.flower.link import Address, open_grid

    def index(node: Node) -> int:
        return node.client

    transport = GridTransport(lambda: open_grid(Address("127.0.0.1", port)), index, events.append)
    engine = Timed(
        assembly.world,
        assembly.build_module,
        transport,
        RunIdentity("b1", 1, to_toml(assembly.recipe)),
        Patience(),
        lambda: (0, 0, 0, 0),
        events.append,
    )
    while len(transport.connected()) < assembly.stream.clients:
        transport.receive()
    return engine


def one_round(runner: Runner) -> float:
    started = time.monotonic()
    runner.round()
    return time.monotonic() - started


def measured(model: str, count: int, rounds: int, poll: float, folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    assembly = assemble(recipe(model, count))
    events: list[dict[str, Any]] = []
    settings = Settings("127.0.0.1", _free(), folder / "link")
    with running(settings, lambda line: None):
        relay = Relay(settings.port)
        with clients(folder, relay.port, count, poll):
            engine = federation(assembly, settings.port, events)
            pool = Processes(assembly.world, ClientStore(), assembly.build_module, 2)
            first, options = assembly.first_model(), EvalOptions()
            flower = Runner(assembly.world, engine, first, options, events.append)
            simulated = Runner(assembly.world, pool, first, options)
            one_round(flower), one_round(simulated)  # worlds are built
            marks = (relay.up, relay.down, dict(flower.state.traffic.up), dict(flower.state.traffic.down), engine.busy)
            pairs = [(one_round(flower), one_round(simulated)) for _ in range(rounds)]
            wire = relay.up - marks[0] + relay.down - marks[1]
            sent = sum(flower.state.traffic.up.values()) - sum(marks[2].values())
            sent += sum(flower.state.traffic.down.values()) - sum(marks[3].values())
            same = torch.equal(flower.state.model["params"], simulated.state.model["params"])
            started = time.monotonic()
            Post({"model": {"params": flower.state.model["params"]}}).letter(0)
            encoding = time.monotonic() - started
            engine.close()
            pool.close()
    seconds = [pair[0] for pair in pairs]
    work = statistics.median(pair[1] for pair in pairs)
    return {
        "model": model,
        "parameters": assembly.world.facts.layout.size,
        "clients": count,
        "rounds": rounds,
        "poll": poll,
        "same_bits": same,
        "payload_bytes_a_round": sent // rounds,
        "wire_bytes_a_round": wire // rounds,
        "wire_over_payload": wire / sent,
        "seconds_a_round": statistics.median(seconds),
        "seconds_a_round_processes": work,
        "engine_seconds_a_phase": statistics.median(a - b for a, b in pairs),
        "server_packets_seconds_a_round": (engine.busy - marks[4]) / rounds,
        "encoding_seconds": encoding,
        "goals": {"wire_over_payload": GOAL_BYTES, "engine_seconds_a_phase": GOAL_SECONDS},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("mlp", "resnet18"), default="mlp")
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--poll", type=float, default=0.5)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measured(chosen.model, chosen.clients, chosen.rounds, chosen.poll, Path(folder))
    text = json.dumps(result, indent=2)
    if chosen.out:
        chosen.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
