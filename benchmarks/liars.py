"""How far two of seven lying clients get, by reducer: the demo's recipe at small size, simulated.

python -m benchmarks.liars [--seeds 0,1,2] [--rounds 6] [--out benchmarks/results/liars.json]

Clients 5 and 6 train like the others and then lie. "checked" applies what a federation's server does to every reply
(everfed.federation.checking): outliers are refused, claims of samples are capped; the other rows are reducers alone.
Each number is the accuracy over both tasks at the end, as the median of the seeds with the lowest and the highest. Once
with digits divided among the clients at random, once as in the demo, with two digits at each client: there honest
updates differ so much that a liar hardly stands out, and what the two liars' digits would have added is missing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

from everfed.core.client import Reply
from everfed.core.context import Place
from everfed.core.engine import Absent
from everfed.core.evaluate import EvalOptions
from everfed.core.events import Diverged
from everfed.core.message import MODEL, Message, unwrap
from everfed.core.phase import TRAIN, Phase
from everfed.core.random import key
from everfed.core.server import Runner
from everfed.engines.eager import Eager
from everfed.federation.checking import check_reply, expected_reply, uploaded_tensors
from everfed.federation.cross_checks import SampleClaims, find_outliers
from everfed.federation.engine import OUTLIER
from everfed.recipe import read
from everfed.session import assemble
from everfed.store.clients import ClientStore

LIARS = (5, 6)
SMALL = ["stream.clients=7", "stream.tasks=2", "train.local_epochs=2", "engine.kind=eager"]
PARTITIONS = {"equal": '{kind="iid"}', "two digits each": '{kind="shards",per_client=2}'}
Lie = Callable[[Tensor, Tensor, int], Tensor]  # the trained vector, the one that was sent, a seed -> what is sent back


def flipped(trained: Tensor, sent: Tensor, seed: int) -> Tensor:
    """The update with its sign changed."""
    return 2 * sent - trained


def flipped_tenfold(trained: Tensor, sent: Tensor, seed: int) -> Tensor:
    """The same ten times as long, as who wants to outvote five others would send it."""
    return sent - 10 * (trained - sent)


def huge(trained: Tensor, sent: Tensor, seed: int) -> Tensor:
    """9.9e7 everywhere, below the largest number that a reply may hold."""
    return torch.full_like(trained, 9.9e7)


def noise(trained: Tensor, sent: Tensor, seed: int) -> Tensor:
    """Normal numbers of standard deviation 1 on top of the model."""
    return sent + torch.randn(trained.shape, generator=torch.Generator().manual_seed(seed))


def claimed(trained: Tensor, sent: Tensor, seed: int) -> Tensor:
    """The update with its sign changed, and a claim of 1e9 samples beside it."""
    return flipped(trained, sent, seed)


LIES: dict[str, Lie | None] = {
    "none": None,
    "sign flip": flipped,
    "sign flip x 10": flipped_tenfold,
    "9.9e7": huge,
    "noise": noise,
    "1e9 samples, sign flip": claimed,
}


@dataclass(frozen=True)
class Row:
    """A reducer with its options; checked: as a federation's server would."""

    name: str
    options: dict[str, Any]
    checked: bool = False


ROWS = [
    Row("mean", {}),
    Row("mean, checked", {}, checked=True),
    Row('mean, weighting = "samples"', {"weighting": "samples"}),
    Row('mean, weighting = "samples", checked', {"weighting": "samples"}, checked=True),
    Row("norm-clipping, norm = 10", {"reducer": "norm-clipping", "norm": 10.0}),
    Row("norm-clipping (median of norms)", {"reducer": "norm-clipping"}),
    Row("trimmed-mean, trim = 2", {"reducer": "trimmed-mean", "trim": 2}),
    Row("median", {"reducer": "median"}),
    Row("geometric-median", {"reducer": "geometric-median"}),
    Row("geometric-median, liars = 2", {"reducer": "geometric-median", "liars": 2}),
]


class Lying(Eager):
    """Some clients lie. checked: the replies go through a federation's checks."""

    lie: Lie | None = None
    claim: int | None = None
    checked = False

    def exchange(
        self, phase: Phase, clients: Sequence[int], message: Message | None, place: Place
    ) -> Iterator[tuple[int, Any]]:
        replies: dict[int, Reply | Absent] = dict(super().exchange(phase, clients, message, place))
        if phase.name != TRAIN or message is None:
            return iter(replies.items())
        model = unwrap({MODEL: message[MODEL]})[MODEL]
        for client in LIARS if self.lie else ():
            reply = replies[client]
            assert isinstance(reply, Reply)
            replies[client] = self._lied(reply, model, key(self.setup.seed, place.round, client) >> 1)
        return iter((self._checked(replies, model, phase, place) if self.checked else replies).items())

    def _lied(self, reply: Reply, model: dict[str, Tensor], seed: int) -> Reply:
        assert self.lie is not None
        (part,) = reply.values
        values, base = dict(reply.values[part]), model["params"]
        if "update" in values:
            values["update"] = self.lie(base + values["update"], base, seed) - base
        else:
            values["params"] = self.lie(values["params"], base, seed)
        return replace(reply, values={part: values}, samples=self.claim or reply.samples)

    def _checked(self, replies: dict[int, Any], model: dict[str, Tensor], phase: Phase, place: Place) -> dict[int, Any]:
        expected = expected_reply(self.setup, phase, place, model)
        kept = {c: reply for c, reply in replies.items() if check_reply(reply, expected) is None}
        unmoved = uploaded_tensors(self.setup, place, model)
        outliers = find_outliers(expected, unmoved, kept, OUTLIER)
        claims = {c: reply.samples for c, reply in kept.items() if c not in outliers}
        capped = SampleClaims(self.setup).capped(phase, place, claims)
        kept = {c: replace(reply, samples=capped.get(c, reply.samples)) for c, reply in kept.items()}
        return {c: kept[c] if c in claims else Absent("rejected", "refused") for c in replies}


def accuracy(row: Row, lie: str, partition: str, seed: int, rounds: int) -> float:
    """Over all tasks, after the last round; 0 where the run diverged."""
    options = [f"method.fedavg.{name}={value}" for name, value in row.options.items()]
    options += [f"stream.partition={PARTITIONS[partition]}", f"train.rounds_per_task={rounds}", f"seed={seed}"]
    recipe = read("demo", method="fedavg", sets=[*SMALL, *options])
    run = assemble(recipe, None, 1.0)
    engine = Lying(run.setup, ClientStore(), run.build_module)
    engine.lie, engine.checked = LIES[lie], row.checked
    engine.claim = 10**9 if LIES[lie] is claimed else None
    events: list[dict[str, Any]] = []
    try:
        Runner(run.setup, engine, run.first_model(), EvalOptions(), events.append).run()
    except Diverged:
        return 0.0
    scores = [event for event in events if event["event"] == "evaluation"][-1]["accuracy"]
    return mean(scores)


def measured(partition: str, seeds: Sequence[int], rounds: int) -> dict[str, dict[str, list[float]]]:
    """{reducer: {lie: accuracies by seed}}."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in ROWS:
        found[row.name] = {lie: [accuracy(row, lie, partition, seed, rounds) for seed in seeds] for lie in LIES}
    return found


def table(found: dict[str, dict[str, list[float]]]) -> str:
    lines = ["| reducer | " + " | ".join(LIES) + " |", "|---" * (len(LIES) + 1) + "|"]
    for name, by_lie in found.items():
        lines.append(f"| {name} | " + " | ".join(_cell(values) for values in by_lie.values()) + " |")
    return "\n".join(lines)


def _cell(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--rounds", type=int, default=6, help="of each of the two tasks")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    found = {}
    for partition in PARTITIONS:
        found[partition] = measured(partition, seeds, options.rounds)
        print(f"{partition}\n{table(found[partition])}", flush=True)
    if options.out:
        content = {"seeds": seeds, "rounds_per_task": options.rounds, "liars": list(LIARS), "accuracy": found}
        options.out.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
