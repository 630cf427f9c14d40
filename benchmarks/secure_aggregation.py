"""What secure aggregation costs beside adding replies up in the open: CPU seconds of a client and of the server, bytes.

python -m benchmarks.secure_aggregation [--clients 5 10 20 50] [--sizes 100000 11173962] [--repeats 3] [--most 3e10]

One phase with one vector of float32 per client, clients and server in one process, one after the other, the protocol as
every engine runs it. A tenth of the clients (at least one) shares its keys and is then gone, so that the server has to
take out what the others had shared with them: the dearest moment to go. Plain sums of the same replies take turns with
it. Seconds are CPU time, which a busy machine hardly changes. A run whose masks would have more than --most numbers in
all is left out; its client and server grow as clients x size and (clients + gone x clients) x size, as the others show.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from everfed.core.client import Reply
from everfed.core.context import Place
from everfed.core.engine import Absent
from everfed.core.handle import Client
from everfed.core.message import Message, addressed
from everfed.core.phase import Mean, Phase
from everfed.core.stream import RoundPlan
from everfed.privacy.secure_client import MASK, NAME, SecureAggregation
from everfed.privacy.secure_server import Secured

PATH = ("method", "vector")
PHASE = Phase("gradient", owner="method", reduce={"vector": Mean()})


class Room:
    """All clients, and what of an engine and of a setup secure aggregation asks for. gone: who is away from MASK on."""

    name = "room"

    def __init__(self, replies: Sequence[Reply], gone: frozenset[int]) -> None:
        self.part = SecureAggregation(weighing={PHASE.name: {"/".join(PATH): False}})
        self.method = SimpleNamespace(part=lambda name: self.part, phases=lambda position: self.part.phases())
        self.facts = SimpleNamespace(layout=SimpleNamespace(size=replies[0].values[PATH[0]][PATH[1]].numel()))
        self.replies, self.gone = replies, gone
        self.states: dict[int, Any] = {}
        self.seconds = [0.0] * len(replies)

    def server(self, phase: str, place: Place) -> Any:
        return SimpleNamespace(round=place.round, repeat=place.repeat)

    def exchange(
        self, phase: Phase, clients: Sequence[int], message: Message | None, place: Place
    ) -> Iterator[tuple[int, Reply | Absent]]:
        for client in clients:
            if phase.name == MASK and client in self.gone:
                yield client, Absent("failed", "gone")
                continue
            started = time.process_time()
            reply = self._answer(client, phase, message or {}, place)
            self.seconds[client] += time.process_time() - started
            yield client, reply

    def _answer(self, client: int, phase: Phase, message: Message, place: Place) -> Reply:
        where = {"round": place.round, "repeat": place.repeat, "facts": self.facts, "attempt": None}
        context, asked = cast(Any, SimpleNamespace(client=client, **where)), addressed(message, client)
        handle = Client(NAME, self.states.get(client, {}), context, asked, None, cast(Any, None))
        if phase is PHASE:
            reply = self.part.seal(handle, phase, self.replies[client])
        else:
            assert phase.run is not None
            reply = Reply({NAME: dict(phase.run(handle))})
        self.states[client] = handle.states
        return reply


def replies_of(clients: int, size: int) -> list[Reply]:
    generator = torch.Generator().manual_seed(clients)
    part, key = PATH
    return [Reply({part: {key: torch.randn(size, generator=generator)}}, 10, 1, 1.0) for _ in range(clients)]


def secure(replies: Sequence[Reply], gone: frozenset[int]) -> tuple[dict[str, float], torch.Tensor]:
    room = Room(replies, gone)
    engine = Secured(cast(Any, room), cast(Any, room))
    everybody = tuple(range(len(replies)))
    started = time.process_time()
    list(engine.exchange(PHASE, everybody, None, Place(0, RoundPlan(0, everybody, {}))))
    took = time.process_time() - started
    assert engine._sums is not None
    total, weight, _ = engine._sums.totals["/".join(PATH)]
    stayed = [seconds for client, seconds in enumerate(room.seconds) if client not in gone]
    traffic = engine._traffic
    found = {"client_seconds": statistics.median(stayed), "server_seconds": took - sum(room.seconds)}
    found |= {"bytes_up": sum(traffic.up.values()), "bytes_down": sum(traffic.down.values())}
    return found, cast(torch.Tensor, total) / weight


def plain(replies: Sequence[Reply], gone: frozenset[int]) -> tuple[dict[str, float], torch.Tensor]:
    """The same mean in the open, of those who stay."""
    part, key = PATH
    started, total = time.process_time(), PHASE.reduce[key].start()
    for client, reply in enumerate(replies):
        if client not in gone:
            total.add(client, reply.values[part][key], reply.samples)
    result = total.result()
    took = time.process_time() - started
    size = replies[0].values[part][key].numel() * 4
    return {"server_seconds": took, "bytes_up": size * (len(replies) - len(gone))}, cast(torch.Tensor, result)


def measured(clients: int, size: int, repeats: int) -> dict[str, Any]:
    replies, gone = replies_of(clients, size), frozenset(range(math.ceil(clients / 10)))
    turns = []
    for _ in range(repeats):
        (hidden, mean_hidden), (open_, mean_open) = secure(replies, gone), plain(replies, gone)
        furthest = float((mean_hidden - mean_open.double()).abs().max())
        turns.append((hidden, open_, furthest))
    middle = {key: statistics.median(turn[0][key] for turn in turns) for key in turns[0][0]}
    bare = {key: statistics.median(turn[1][key] for turn in turns) for key in turns[0][1]}
    return {
        "clients": clients,
        "gone": len(gone),
        "size": size,
        **middle,
        "plain": bare,
        "bytes_up_over_plain": middle["bytes_up"] / bare["bytes_up"],
        "furthest_from_the_plain_mean": max(turn[2] for turn in turns),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[5, 10, 20, 50])
    parser.add_argument("--sizes", type=int, nargs="+", default=[100_000, 11_173_962])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--most", type=float, default=3e10, help="masks' numbers in all above which a run is left out")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "secure-aggregation.json")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for size in chosen.sizes:
        for clients in chosen.clients:
            if clients * clients * size > chosen.most:
                print(f"{clients} clients, {size:,} numbers: left out (--most)")
                continue
            row = measured(clients, size, chosen.repeats if clients * clients * size < 1e9 else 1)
            rows.append(row)
            print(
                f"{clients:3d} clients ({row['gone']} gone), {size:,} numbers: client {row['client_seconds']:.3f} s, "
                f"server {row['server_seconds']:.3f} s (plain {row['plain']['server_seconds']:.3f} s), up "
                f"{row['bytes_up'] / 1e6:.2f} MB ({row['bytes_up_over_plain']:.3f} of plain), down "
                f"{row['bytes_down'] / 1e6:.2f} MB more, off by {row['furthest_from_the_plain_mean']:.1e}",
                flush=True,
            )
    chosen.out.write_text(json.dumps({"load": os.getloadavg()[0], "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
