"""A campaign against a federation of real processes on loopback: dishonest requests and replies, and faults.

python -m benchmarks.campaign [PIECE ...] [--seed 0] [--share 1.0] [--out benchmarks/results/campaign.json]

Each piece is a run of its own:

    outsiders  requests without a key, with other clients' names, as another user of the machine, while a run goes on
    liars      one of three registered clients sends malformed and false replies
    secure     one of five does so in the steps of secure aggregation
    faults     kills, stops, cuts, full disks, lost files, wrong clocks; no client may be left out
    stalls     one of three clients is stalled for longer than the deadline of a phase

No run may end before its last round, no phase may last longer than its deadline, and the model must be the
simulation's, bit for bit, without those replies that the server refused or did not wait for (they are in its events).
--share runs a part of each piece. Results are merged into the file of --out, by piece and seed.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.campaign_faults import FAULTS, STALLS, Federation, drawn, federation
from benchmarks.campaign_lies import PLAIN, SECURE, sent_path
from benchmarks.campaign_requests import Target, is_refusal, requests
from everfed import privacy
from everfed.core.client import Reply
from everfed.core.context import Place
from everfed.core.engine import Absent, Engine, Replies
from everfed.core.evaluate import EvalOptions, EvalSpec
from everfed.core.message import Message, Model
from everfed.core.phase import Phase
from everfed.core.server import Runner
from everfed.core.trainer import Trainer
from everfed.engines.eager import Eager
from everfed.federation.certificates import make_authority, make_client
from everfed.federation.local import entrance_file, socket_path
from everfed.recipe import Recipe
from everfed.session import assemble, saved_model
from everfed.store.clients import ClientStore
from everfed.store.run import RunFolder
from tests.federation.field import events

DEADLINE = 20.0
SLACK = 5.0  # seconds that a phase may take beyond its deadline: the server's own work, on a busy machine
LONGEST = 400.0  # seconds in which a round must end after a fault, on a machine with a load of 15 per core
Missing = dict[tuple[int, str, int], set[int]]  # (round, phase, repeat) -> the clients whose replies do not count


# the simulation without what was left out -----------------------------------------------------------------------------
class LeftOut(Engine):
    """An engine without some replies. before: these clients are not called at all, as under secure aggregation, where
    a reply cannot be taken out of a sum afterwards."""

    def __init__(self, inner: Engine, missing: Missing, before: bool) -> None:
        self.inner, self.missing, self.before, self.name = inner, missing, before, inner.name
        self._called = False

    def exchange(
        self, phase: Phase, clients: Sequence[int], message: Message | None, place: Place
    ) -> Iterator[tuple[int, Reply | Absent]]:
        gone = self.missing.get((place.round, phase.name, place.repeat), set())
        asked = [client for client in clients if not (self.before and client in gone)]
        self._called = bool(asked)
        found = dict(self.inner.exchange(phase, asked, message, place)) if asked else {}
        for client in clients:
            yield client, Absent("failed", "left out") if client in gone else found[client]

    def merge(self, replies: Replies) -> None:
        if self._called:
            self.inner.merge(replies)

    def workbench(self) -> Trainer:
        return self.inner.workbench()

    def evaluate(self, model: Model, spec: EvalSpec) -> Tensor:
        return self.inner.evaluate(model, spec)

    def describe(self) -> dict[str, Any]:
        return self.inner.describe()


def missing(out: Path) -> Missing:
    """What the events of a run name as absent. A phase that a resumed server repeated counts the last time."""
    found: Missing = {}
    for event in events(out, "phase"):
        found[event["round"], event["phase"], event["repeat"]] = {int(c) for c in event.get("absent", {})}
    return found


def simulated(recipe: Recipe, left_out: Missing, folder: Path) -> bytes:
    """The trained model of the same recipe in simulation, without the replies that were left out."""
    torch.set_num_threads(1)
    run = assemble(recipe, None, 1.0)
    setup, secure = run.setup, recipe.privacy.secure_aggregation
    inner = privacy.wrap(Eager(setup, ClientStore(), run.build_module), setup, "cpu", lambda event: None)
    scores = recipe.eval.as_options(EvalOptions)
    runner = Runner(setup, LeftOut(inner, left_out, secure), run.first_model(), scores)
    folder.mkdir()
    saved_model.save(RunFolder(folder), run, runner.run().model)
    return (folder / "model.safetensors").read_bytes()


# pieces ---------------------------------------------------------------------------------------------------------------
def finished(fed: Federation, limit: float) -> bool:
    """Did the run come to its end within so many seconds?"""
    end = time.monotonic() + limit
    while not fed.over() and time.monotonic() < end:
        time.sleep(0.2)
    return fed.server.poll() == 0


def verdict(fed: Federation, done: bool) -> dict[str, Any]:
    """What must hold of every piece."""
    left_out = missing(fed.out)
    model = fed.out / "model.safetensors"
    phases = events(fed.out, "phase")
    deadline = 0.0 if fed.recipe.privacy.secure_aggregation else fed.recipe.federation.deadline  # there: of each step
    over = [event["seconds"] - deadline for event in phases] if deadline else [0.0]
    return {
        "ended": done,
        "same_bits": done and model.read_bytes() == simulated(fed.recipe, left_out, fed.folder / "reference"),
        "phases": len(phases),
        "left_out": sum(map(len, left_out.values())),
        "longest_phase": round(max((event["seconds"] for event in phases), default=0.0), 1),
        "past_deadline": round(max([0.0, *over]), 1),
        "refusals": dict(Counter(_kind(event) for event in events(fed.out, "client")).most_common()),
    }


def _kind(event: dict[str, Any]) -> str:
    return f"{event['kind']}: {str(event.get('reason', '')).partition(':')[0][:60]}"


def outsiders(folder: Path, rng: random.Random, share: float) -> dict[str, Any]:
    with federation(folder, 2, max(2, round(40 * share)), keyed=True) as fed:
        make_authority(folder / "other")
        make_client(folder / "other", "stranger")
        (folder / "pki" / "secrets" / "stranger").write_bytes((folder / "other" / "secrets" / "stranger").read_bytes())
        _wait(fed, lambda: fed.rounds_done() >= 1)
        planned = requests(_target(fed), rng)
        chosen = planned[: max(1, round(share * len(planned)))]
        with ThreadPoolExecutor(4) as threads:
            answers = list(threads.map(lambda one: "" if fed.over() else one.send(), chosen))
        sent = [(one, answer) for one, answer in zip(chosen, answers, strict=True) if answer]
        done = finished(fed, 900)
        return {
            "requests": len(sent),
            "planned": len(planned),
            "answers": dict(Counter(answer for _, answer in sent).most_common()),
            "not_refused": [f"{one.name}: {answer}" for one, answer in sent if one.refused and not is_refusal(answer)],
            **verdict(fed, done),
        }


def _target(fed: Federation) -> Target:
    from everfed.federation.flower.link import Address, command

    pki = fed.folder / "pki"
    every = command(Address("127.0.0.1", fed.port).entrance(), "supernode", "list")["nodes"]
    nodes = [int(node["node-id"]) for node in every if node["status"] == "online"]
    sockets = [entrance_file(fed.port), *(socket_path(fed.folder / f"c{client}") for client in fed.clients)]
    files = [fed.out / "events.jsonl", fed.out / "audit.jsonl", fed.out / "federation.json", pki / "server.key"]
    files += [pki / "secrets" / "site-0", fed.folder / "c0" / "audit.jsonl", fed.folder / "run.superlink" / "link.db"]
    return Target(fed.port, pki, nodes, 1, sockets, files)


def liars(folder: Path, rng: random.Random, share: float) -> dict[str, Any]:
    plan = _shuffled(PLAIN, rng, share)
    options = [f"federation.deadline={DEADLINE}", "federation.silence=8", "federation.retry=0.1",
               "federation.longest_retry=0.5", "federation.tries=8"]  # fmt: skip
    with federation(folder, 3, max(2, round(share * 16)), *options, method="fedgp+der", liars=(0,)) as fed:
        return _lied(fed, fed.lie(0, plan), 3000 * share + 300)


def secure(folder: Path, rng: random.Random, share: float) -> dict[str, Any]:
    plan = _shuffled(tuple(SECURE), rng, share)
    options = ["federation.deadline=60", "federation.minimum=3", "federation.silence=8", "federation.retry=0.1",
               "federation.tries=3",
               "federation.longest_retry=0.5", "privacy.secure_aggregation=true", "privacy.threshold=0.6"]  # fmt: skip
    with federation(folder, 5, -(-len(plan) // 2) + 1, *options, liars=(0,)) as fed:
        return _lied(fed, fed.lie(0, plan), 3000 * share + 300)


def _shuffled(names: Sequence[str], rng: random.Random, share: float) -> list[str]:
    plan = list(names)
    rng.shuffle(plan)
    return plan[: max(1, round(share * len(plan)))]


def _lied(fed: Federation, plan: Path, limit: float) -> dict[str, Any]:
    done = finished(fed, limit)
    sent = [json.loads(line)["lie"] for line in sent_path(plan).read_text().splitlines()]
    return {"replies": len(sent), "planned": len(json.loads(plan.read_text())), **verdict(fed, done)}


def faults(folder: Path, rng: random.Random, share: float) -> dict[str, Any]:
    names = drawn(rng, max(2, round(share * len(FAULTS))))
    with federation(folder, 2, -(-len(names) // 2) + 2, "federation.silence=20", small_disk=0) as fed:
        return _struck(fed, names, rng)


def stalls(folder: Path, rng: random.Random, share: float) -> dict[str, Any]:
    names = drawn(rng, max(1, round(share * 2 * len(STALLS))), STALLS)
    with federation(folder, 3, len(names) + 2, f"federation.deadline={DEADLINE}", "federation.silence=6") as fed:
        return _struck(fed, names, rng)


def _struck(fed: Federation, names: list[str], rng: random.Random) -> dict[str, Any]:
    """One fault after each round. What takes longer than it may is in `hung`."""
    struck: list[str] = []
    hung: list[str] = []

    def strike() -> None:
        for number, name in enumerate(names):
            if not _wait(fed, lambda number=number: fed.rounds_done() > number):
                hung.append(f"after {struck[-1] if struck else 'the start'}: round {number}")
                return
            time.sleep(rng.uniform(0.0, 1.0))
            if not fed.over() and FAULTS[name](fed, rng.choice(sorted(fed.clients))):
                struck.append(name)

    thread = threading.Thread(target=strike, daemon=True)
    thread.start()
    thread.join()
    done = not hung and finished(fed, LONGEST)
    return {"faults": len(struck), "by_kind": dict(Counter(struck)), "hung": hung, **verdict(fed, done)}


def _wait(fed: Federation, true: Callable[[], bool]) -> bool:
    """Until it is true, the server ends, or LONGEST seconds have passed."""
    end = time.monotonic() + LONGEST
    while not true():
        if fed.over() or time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


PIECES: dict[str, Callable[[Path, random.Random, float], dict[str, Any]]] = {
    "outsiders": outsiders,
    "liars": liars,
    "secure": secure,
    "faults": faults,
    "stalls": stalls,
}


def run(piece: str, folder: Path, seed: int, share: float = 1.0) -> dict[str, Any]:
    """One piece; `holds` says whether everything that must hold did."""
    began = time.monotonic()
    seen = PIECES[piece](folder / piece, random.Random(f"{piece} {seed}"), share)
    held = seen["ended"] and seen["same_bits"] and seen["past_deadline"] <= SLACK and not seen.get("not_refused")
    return {"holds": held and not seen.get("hung"), "seconds": round(time.monotonic() - began), **seen}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pieces", nargs="*", default=list(PIECES), help=", ".join(PIECES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--keep", type=Path, help="folder to work in, which is kept")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    for piece in chosen.pieces:
        with tempfile.TemporaryDirectory(prefix="ef") as name:
            seen = run(piece, chosen.keep or Path(name), chosen.seed, chosen.share)
        print(json.dumps({f"{piece}, seed {chosen.seed}": seen}, indent=2), flush=True)
        if chosen.out:
            known = json.loads(chosen.out.read_text()) if chosen.out.exists() else {}
            known[f"{piece}, seed {chosen.seed}"] = seen
            chosen.out.write_text(json.dumps(known, indent=2) + "\n")


if __name__ == "__main__":
    main()
