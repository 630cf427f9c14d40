"""A campaign against the real code of server and clients in one process: lies, dishonest requests and faults.

python -m benchmarks.campaign_loop [--seed 0] [--share 1.0] [--out benchmarks/results/campaign-loop.json]

`benchmarks.campaign` does the same to processes. Modes: plain, under local noise, under secure aggregation, under both.

    lies      one client of five sends a lie of `benchmarks.campaign_lies` in each round
    requests  a client is sent requests that no honest server sends, between those of a run
    faults    kills, lost and late answers, lost files and full disks, one in each round; no client may be left out

No run may end before its last round, and its model must be the simulation's, bit for bit, without the replies that were
left out.
"""

from __future__ import annotations

import argparse
import errno
import io
import json
import logging
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks.campaign import LeftOut, Missing
from benchmarks.campaign_lies import CONTENTS, LIES, PACKETS, SECURE, Liar, Raw
from everfed.core.engine import Engine
from everfed.core.server import Runner, RunState
from everfed.federation import packet as wire
from everfed.federation.client import Identity, RealClient
from everfed.federation.engine import Federated, RunIdentity
from everfed.federation.packet import Packet, PacketError
from everfed.federation.phase_options import PhaseOptions
from everfed.federation.request import REPLY, Request
from everfed.federation.transport import Failure
from everfed.method import Method
from everfed.methods import registry as methods
from everfed.privacy.differential import private
from everfed.privacy.secure_client import secured
from everfed.privacy.secure_server import Secured
from everfed.store.clients import ClientStore
from everfed.store.ledger import LedgerFile
from tests.federation.loop import Loop, framed, loop_of, runtime
from tests.support.toy import Bench, Toy

CLIENTS, LIAR, ROUNDS = 5, 4, 10
MODES = ("plain", "local noise", "secure aggregation", "both")


class Killed(Exception):
    """The server's process ends here."""


def bench_of(mode: str, rounds: int) -> Bench:
    """The noise has a seed here, so that the simulation's is the same."""

    def method() -> Method:
        found = methods.build("fedavg")
        if mode in ("local noise", "both"):
            found = private(found, kind="local", noise=0.01, clip=1.0, seed=3)
        return secured(found, threshold=0.6) if mode in ("secure aggregation", "both") else found

    return Bench(method, stream=Toy(clients=CLIENTS, tasks=1, rounds_per_task=rounds, samples=6))


@dataclass
class Run:
    """A run over `loop`, which a fault may end and which is resumed then."""

    bench: Bench
    loop: Loop
    folder: Path
    epoch: int = 0
    state: RunState | None = None

    def __post_init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def to_the_end(self) -> RunState:
        while True:
            try:
                return self._once()
            except Killed:
                continue

    def _once(self) -> RunState:
        setup, self.epoch = self.bench.setup(), self.epoch + 1
        identity, options = (
            RunIdentity("a1", self.epoch, "# no recipe\n"),
            PhaseOptions(retry=0.0, tries=2, silence=0.1),
        )
        reached = lambda: (0, 0, 0, 0) if self.state is None else self.state.place  # noqa: E731
        inner = Federated(setup, self.bench.build_module, self.loop, identity, options, reached, self.events.append)
        ledger = LedgerFile(self.folder / "server.jsonl")
        is_secure = any(part.per_epoch for part in setup.method.protections)
        engine: Engine = Secured(inner, setup, notify=self.events.append, ledger=ledger) if is_secure else inner

        def save(state: RunState, task_end: bool) -> None:
            self.state = RunState.from_tree(state.to_tree())

        first = None if self.state is None else RunState.from_tree(self.state.to_tree())
        runner = Runner(setup, engine, self.bench.model(), self.bench.evaluation, self.events.append, save, first)
        return runner.run()

    @property
    def missing(self) -> Missing:
        """The clients that each phase went on without; of a phase that was repeated, the last time."""
        phases = [event for event in self.events if event["event"] == "phase"]
        return {(one["round"], one["phase"], one["repeat"]): {int(c) for c in one.get("absent", {})} for one in phases}


def simulated(bench: Bench, missing: Missing) -> torch.Tensor:
    """The model of the simulation without these replies."""
    setup, store = bench.setup(), ClientStore()
    inner: Engine = bench.eager(setup, store)
    is_secure = any(part.per_epoch for part in setup.method.protections)
    engine = LeftOut(Secured(inner, setup) if is_secure else inner, missing, is_secure)
    return Runner(setup, engine, bench.model(), bench.evaluation).run().model["params"]


def verdict(run: Run) -> dict[str, Any]:
    try:
        reached = run.to_the_end()
    except Exception as error:
        return {"ended": False, "same_bits": False, "left_out": 0, "error": f"{type(error).__name__}: {error}"[:300]}
    same = torch.equal(reached.model["params"], simulated(run.bench, run.missing))
    return {"ended": True, "same_bits": same, "left_out": sum(map(len, run.missing.values()))}


# lies -----------------------------------------------------------------------------------------------------------------
class Line:
    """A connection that holds some bytes and then ends."""

    def __init__(self, data: bytes) -> None:
        self.data = io.BytesIO(data)

    def recv(self, count: int) -> bytes:
        return self.data.read(count)


def arrives(answer: Packet) -> Packet | Failure:
    """What comes through the worker's socket."""
    try:
        return wire.receive(cast(Any, Line(answer.pieces[""]))) if isinstance(answer, Raw) else framed(answer)
    except (PacketError, EOFError, OSError) as error:
        return Failure(str(error), own=True)


def lies_of(mode: str) -> list[str]:
    """Under secure aggregation a reply holds keys, and lies about its values are those of the protocol's steps."""
    packets = [name for name in PACKETS if "six seconds" not in name]
    return [*packets, *(SECURE if mode in ("secure aggregation", "both") else CONTENTS)]


def lying(loop: Loop, names: list[str], rng: random.Random) -> None:
    """In round k the liar tells lie k: to every train request, or at the step that the lie is made for."""
    liar = Liar.__new__(Liar)
    liar.rng, liar.earlier = rng, []

    def after(client: int, packet: Packet) -> Packet | Failure | None:
        step = Request.of(loop.sent[-1][1]).steps[0]
        if client != LIAR or packet.header["kind"] != REPLY or step.place[0] >= len(names):
            return packet
        liar.earlier.append(packet)
        name = names[step.place[0]]
        return arrives(LIES[name](liar, packet)) if step.phase == SECURE.get(name, "train") else packet

    loop.after = after


def lies(mode: str, rng: random.Random, share: float) -> Iterator[tuple[list[str], dict[str, Any]]]:
    names = lies_of(mode)
    rng.shuffle(names)
    names = names[: max(2, round(share * len(names)))]
    for start in range(0, len(names), ROUNDS):
        group = names[start : start + ROUNDS]
        with tempfile.TemporaryDirectory(prefix="ef") as folder:
            bench = bench_of(mode, len(group) + 1)
            loop = loop_of(bench, Path(folder))
            lying(loop, group, rng)
            yield group, verdict(Run(bench, loop, Path(folder)))


# requests -------------------------------------------------------------------------------------------------------------
HOSTILE: tuple[Any, ...] = (
    *(None, "", "..", "flwr", "a1/../b", "\u0661", "\0", "x" * 100_000, "[]", "{}", "[[]]", "[" * 3000, "null"),
    *(-1, 2**70, 1.5, True, float("nan")),
)


def hostile(packet: Packet, rng: random.Random) -> Iterator[tuple[str, Packet]]:
    """Changes of an honest request: every value of the header, its steps, its pieces."""
    for name in packet.header:
        for value in HOSTILE:
            changed = {**packet.header, name: value}
            yield (
                f"{name} = {str(value)[:20]!r}",
                Packet({n: v for n, v in changed.items() if v is not None}, packet.pieces),
            )
    steps = json.loads(str(packet.header["steps"]))
    for at in range(len(steps[0])):
        for value in (None, "", "..", -1, 2**70, [], {}, [[1, 2, 3]], "secure-unmask", [2**70, 0, 0, 0], [0, 0, 0]):
            wrong = [[*steps[0][:at], value, *steps[0][at + 1 :]]]
            yield f"step[{at}] = {value!r}", Packet({**packet.header, "steps": json.dumps(wrong)}, packet.pieces)
    for name, data in packet.pieces.items():
        for what, other in (("none", b""), ("half", data[: len(data) // 2]), ("random", rng.randbytes(len(data)))):
            yield f"piece {what}", Packet(packet.header, {**packet.pieces, name: other})
            yield f"piece {what} under its own name", Packet(packet.header, {wire.digest(other): other})
    yield "a hundred steps", Packet({**packet.header, "steps": json.dumps(steps * 100)}, packet.pieces)
    yield "no pieces", Packet(packet.header)


def requests(mode: str, rng: random.Random, share: float) -> tuple[dict[str, int], dict[str, Any]]:
    """(kinds of answers, the verdict on the run between whose requests they were sent). What counts as an answer to an
    honest request of another time (a later epoch, say) is sent to a copy of the client."""
    with tempfile.TemporaryDirectory(prefix="ef") as name:
        folder, kinds = Path(name), Counter[str]()
        bench = bench_of(mode, 3)
        loop = loop_of(bench, folder / "run")
        seen: set[str] = set()

        def before(client: int, packet: Packet) -> Packet:
            phase = Request.of(packet).steps[0].phase
            if client == LIAR and phase not in seen:
                seen.add(phase)
                made = list(hostile(packet, rng))
                for what, wrong in rng.sample(made, max(3, round(share * len(made)))):
                    copy = folder / "copy"
                    shutil.copytree(folder / "run" / str(LIAR), copy)
                    others = set(folder.rglob("*"))
                    answer = RealClient(copy, Identity("site-4", LIAR), lambda *recipe: runtime(bench)).answer(wrong)
                    kinds[str(answer.header["kind"])] += 1
                    outside = [path for path in set(folder.rglob("*")) - others if copy not in path.parents]
                    assert not outside, f"{what}: wrote {outside}"
                    shutil.rmtree(copy)
            return packet

        loop.before = before
        found = verdict(Run(bench, loop, folder))
        return dict(kinds), found


# faults ---------------------------------------------------------------------------------------------------------------
Fault = Callable[["Struck", int, Packet], Packet | Failure | None]


@dataclass
class Struck:
    """What a fault can reach."""

    loop: Loop
    bench: Bench
    folder: Path
    rng: random.Random

    def restart(self, client: int) -> None:
        """A client's process ends and begins again."""
        self.loop.sites[client] = loop_of(self.bench, self.folder).sites[client]

    def answer(self, client: int, packet: Packet) -> Packet:
        return framed(self.loop.sites[client].answer(packet))


def killed_server(struck: Struck, client: int, packet: Packet) -> None:
    raise Killed


def killed_after(struck: Struck, client: int, packet: Packet) -> None:
    struck.answer(client, packet)
    raise Killed


def restarted(struck: Struck, client: int, packet: Packet) -> Packet:
    struck.restart(client)
    return packet


def lost_request(struck: Struck, client: int, packet: Packet) -> None:
    return None


def lost_answer(struck: Struck, client: int, packet: Packet) -> None:
    struck.answer(client, packet)


def doubled(struck: Struck, client: int, packet: Packet) -> Packet:
    struck.answer(client, packet)
    return packet


def unreachable(struck: Struck, client: int, packet: Packet) -> Failure:
    return Failure("the connection broke")


def disk_full(struck: Struck, client: int, packet: Packet) -> Packet:
    """The first file that the client writes does not fit; it says so and is asked again."""
    honest = os.replace

    def full(*paths: Any, **more: Any) -> None:
        os.replace = honest  # type: ignore[assignment]
        raise OSError(errno.ENOSPC, "no space")

    os.replace = full  # type: ignore[assignment]
    try:
        return struck.answer(client, packet)
    finally:
        os.replace = honest  # type: ignore[assignment]


def damaged(pattern: str) -> Fault:
    """Half of a file is left, and the process ends."""

    def fault(struck: Struck, client: int, packet: Packet) -> Packet:
        for path in sorted((struck.folder / str(client)).rglob(pattern))[-1:]:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        struck.restart(client)
        return packet

    return fault


def half_line(struck: Struck, client: int, packet: Packet) -> Packet:
    for path in (struck.folder / str(client)).glob("*.jsonl"):
        with open(path, "ab") as file:
            file.write(b'["half')
    struck.restart(client)
    return packet


FAULTS: dict[str, Fault] = {
    "server killed before a request": killed_server,
    "server killed before an answer": killed_after,
    "client restarted": restarted,
    "request lost": lost_request,
    "answer lost": lost_answer,
    "request sent twice": doubled,
    "connection broken": unreachable,
    "disk full": disk_full,
    "payload damaged": damaged("once/*"),
    "recipe damaged": damaged("recipe.toml"),
    "half a line in ledgers": half_line,
}


def faults(mode: str, rng: random.Random, share: float) -> tuple[list[str], dict[str, Any]]:
    """One in each round, at a request drawn at random."""
    names = [name for _ in range(2) for name in rng.sample(sorted(FAULTS), len(FAULTS))]
    names = names[: max(2, round(share * len(names)))]
    struck_ones: list[str] = []
    with tempfile.TemporaryDirectory(prefix="ef") as name:
        bench = bench_of(mode, len(names) + 1)
        loop = loop_of(bench, Path(name))
        struck = Struck(loop, bench, Path(name), rng)
        waits = rng.randrange(CLIENTS)

        def before(client: int, packet: Packet) -> Packet | Failure | None:
            nonlocal waits
            round_index = Request.of(packet).steps[0].place[0]
            if round_index < len(struck_ones) or len(struck_ones) == len(names):
                return packet
            waits -= 1
            if waits >= 0:
                return packet
            waits = rng.randrange(CLIENTS)
            struck_ones.append(names[len(struck_ones)])
            return FAULTS[struck_ones[-1]](struck, client, packet)

        loop.before = before
        run = Run(bench, loop, Path(name))
        return struck_ones, verdict(run)


# all ------------------------------------------------------------------------------------------------------------------
def campaign(mode: str, seed: int, share: float) -> dict[str, Any]:
    rng = random.Random(f"{mode} {seed}")
    tried = list(lies(mode, rng, share))
    kinds, asked = requests(mode, rng, share)
    struck, hit = faults(mode, rng, share)
    bad = [{"lies": names, **found} for names, found in tried if not (found["ended"] and found["same_bits"])]
    bad += [{what: found} for what, found in (("requests", asked), ("faults", hit)) if not found["same_bits"]]
    return {
        "lies": sum(len(names) for names, _ in tried),
        "replies left out": sum(found["left_out"] for _, found in tried),
        "requests": sum(kinds.values()),
        "answers": kinds,
        "faults": len(struck),
        "clients left out by faults": hit["left_out"],
        "does not hold": bad,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--modes", nargs="*", default=MODES)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    logging.disable(logging.CRITICAL)
    os.fsync = lambda descriptor: None  # nothing here outlives the process
    found = {mode: campaign(mode, chosen.seed, chosen.share) for mode in chosen.modes}
    print(json.dumps(found, indent=2))
    if chosen.out:
        chosen.out.write_text(json.dumps({"seed": chosen.seed, **found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
