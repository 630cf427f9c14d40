"""Does replay of diverse samples help on text that drifts? The question of coordinated replay (2023), Sect. 5.2.

Users are active in every period; a period is a corpus, so that the text drifts. Users are made: each prefers some
classes of every corpus (Dirichlet, 0.3). The model is pretrained on users that are left out, masks are drawn anew in
every epoch. Compared: no replay, random replay, diverse replay (alone and coordinated), the opposite (most aligned),
and random replay with as many tokens as diverse replay has.

    python -m benchmarks.coordinated_text --data DIR --work FOLDER --jobs 16 [--set train.optimizer.lr=0.0003]

With many users who each train once a period on average, no kept text is visited often:

    python -m benchmarks.coordinated_text --data DIR --work FOLDER --users 190 --sizes 20 --seeds 3 \\
        --set stream.clients=170 --set stream.participation=0.1 --set train.rounds_per_task=10 \\
        --set train.local_epochs=1

The command is a queue like `everfed compare`: repeated, it goes on. It writes FOLDER/coordinated_text.json and prints a
table. If plain averaging forgets nothing, nothing can be learned from it, and it says so.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from everfed import streams
from everfed.data.tokens import PAD, mask_tokens, token_loss
from everfed.experiments.jobs import GridJob, JobSettings, Outcome, new_job, run_all
from everfed.methods.replay.diversity import Candidates, select
from everfed.methods.replay.memory import Policy, Pool
from everfed.models.tinybert import TinyBERT
from everfed.recipe import read
from everfed.reports.formats import markdown_table

RECIPE = Path(__file__).with_suffix(".toml")
CORPORA = ("snips7", "banking77", "dbpedia14", "agnews", "clinc150")  # in the order of the periods
USERS, TEXTS, ALPHA = 60, 50, 0.3  # texts of a user in every period
EPOCHS, RATE, BATCH = 15, 1e-3, 32  # of pretraining
SIZES, SEEDS = (5, 20), (0, 1, 2, 3, 4)
OWN = "benchmarks.coordinated_text"
STRATEGIES = {
    "random": '"naive-uniform"',
    "diverse, alone": '"uncoordinated"',
    "diverse, coordinated": '"coordinated"',
    "most aligned": f'"{OWN}:MostAligned"',
    "random, as many tokens": f'"{OWN}:TokenMatched"',
}


class Pretrained(TinyBERT):
    """TinyBERT from a file of weights; without one from random weights."""

    def __init__(self, input_shape: tuple[int, ...], classes: int, weights: str = "", **options: Any) -> None:
        super().__init__(input_shape, classes, **options)
        if weights:
            self.load_state_dict(load_file(weights))


@dataclass(frozen=True)
class MostAligned(Policy):
    """The opposite of diverse: samples whose unit gradients have a long sum, chosen one after the other."""

    kind = "most-aligned"
    about = "samples whose gradients point in the same direction"

    def choose(self, pool: Pool, size: int) -> np.ndarray:
        if len(pool) <= size:
            return np.arange(len(pool))
        candidates = Candidates.of(pool.gradients())
        order = aligned(candidates.gram, size)
        return candidates.directed[order]


def aligned(gram: np.ndarray, size: int) -> np.ndarray:
    """Positions of `size` vectors: first the one nearest to all others, then whichever is nearest to those chosen."""
    chosen = [int(np.argmax(gram.sum(0)))]
    while len(chosen) < min(size, len(gram)):
        nearness = gram[chosen].sum(0)
        nearness[chosen] = -math.inf
        chosen.append(int(np.argmax(nearness)))
    return np.array(chosen)


@dataclass(frozen=True)
class TokenMatched(Policy):
    """Random samples, each as long as one that the diverse choice would keep: what is left of its effect is not due to
    the number of tokens."""

    kind = "token-matched"
    about = "random samples with as many tokens as the diverse ones"

    def choose(self, pool: Pool, size: int) -> np.ndarray:
        if len(pool) <= size:
            return np.arange(len(pool))
        lengths = (pool.x != PAD).sum(1).numpy(force=True)
        diverse = select(pool.gradients(), size, seed=pool.client.key("selection"))
        return matched(lengths, lengths[diverse], pool.rng("matched"))


def matched(lengths: np.ndarray, wanted: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Different positions, drawn at random among those whose length is nearest to each of the wanted ones."""
    free = np.ones(len(lengths), dtype=bool)
    chosen = []
    for length in rng.permutation(wanted):
        distance = np.where(free, np.abs(lengths - length), np.iinfo(np.int64).max)
        found = int(rng.choice(np.flatnonzero(distance == distance.min())))
        free[found] = False
        chosen.append(found)
    return np.array(chosen)


# data and weights ------------------------------------------------------------------------------------------------


def make_users(data: Path, place: Path, users: int = USERS) -> None:
    """Write the utterances of all users: in every period texts of one corpus, of the classes that a user prefers."""
    rng = np.random.default_rng(0)
    lines = []
    for period, corpus in enumerate(CORPORA):
        rows = [json.loads(line) for line in (data / "text" / f"{corpus}.jsonl").read_text().splitlines()]
        pools = {label: [row["text"] for row in rows if row["label"] == label] for label in {r["label"] for r in rows}}
        for texts in pools.values():
            rng.shuffle(texts)
        for user in range(users):
            for label in _classes(rng, pools):
                lines.append({"user": f"user {user:02}", "time": period, "text": pools[label].pop()[:400]})
    place.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _classes(rng: np.random.Generator, pools: dict[int, list[str]]) -> list[int]:
    """The classes of a user's texts; a class that is used up is left out."""
    open_ = [label for label, texts in sorted(pools.items()) if len(texts) >= TEXTS]
    shares = rng.dirichlet([ALPHA] * len(open_))
    return [open_[i] for i in rng.choice(len(open_), size=TEXTS, p=shares)]


def pretrain(stream: Any, options: dict[str, Any], place: Path) -> float:
    """Train the model on the users that are left out; returns the last epoch's perplexity."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    model = TinyBERT(stream.input_shape, stream.classes, **options)
    optimizer = torch.optim.Adam(model.parameters(), RATE)
    tokens, losses = stream.left_out_tokens(), []
    for _ in range(EPOCHS):
        x, y = (torch.from_numpy(part.astype(np.int64)) for part in mask_tokens(tokens, 0.15, stream.classes, rng))
        losses = [_step(model, optimizer, x[rows], y[rows]) for rows in torch.randperm(len(x)).split(BATCH)]
    save_file(model.state_dict(), place)
    return math.exp(statistics.fmean(losses))


def _step(model: TinyBERT, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    optimizer.zero_grad()
    loss = token_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


# the queue -------------------------------------------------------------------------------------------------------


def sets_of(work: Path) -> list[str]:
    return [f'stream.dataset="{work / "users.jsonl"}"', f'model.weights="{work / "pretrained.safetensors"}"']


def prepare(data: Path, work: Path, users: int) -> None:
    """Make users and weights, where they are not there yet."""
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "users.jsonl").exists():
        make_users(data, work / "users.jsonl", users)
    if not (work / "pretrained.safetensors").exists():
        recipe = read(RECIPE, sets=sets_of(work))
        stream = streams.build(recipe.stream.model_dump(), 0, recipe.train.rounds_per_task)
        options = {key: value for key, value in (recipe.model.model_extra or {}).items() if key != "weights"}
        perplexity = pretrain(stream, options, work / "pretrained.safetensors")
        print(f"pretrained on {recipe.stream.model_extra['left_out']} users: perplexity {perplexity:.1f}", flush=True)


def grid(work: Path, sizes: Sequence[int], seeds: Sequence[int], more: Sequence[str] = ()) -> list[GridJob]:
    """No replay, and every strategy with every size. more: settings for all of them."""
    cells = [_cell(work, "no replay", "fedavg", 0, seed, [*more]) for seed in seeds]
    for size in sizes:
        for name, policy in STRATEGIES.items():
            sets = [*more, f"method.memory.policy={policy}", f"method.memory.size={size}"]
            cells += [_cell(work, name, "naive-uniform", size, seed, sets) for seed in seeds]
    return cells


def _cell(work: Path, name: str, method: str, size: int, seed: int, sets: list[str]) -> GridJob:
    folder = work / "runs" / f"{name.replace(', ', '-').replace(' ', '-')}-{size}-{seed}"
    return new_job(f"{name}|{size}", str(RECIPE), folder, method=method, seed=seed, sets=[*sets_of(work), *sets])


# the table -------------------------------------------------------------------------------------------------------

STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # 97.5 % quantile of t by the number of seeds


def rows(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """A row for every strategy and size: perplexity, RCP, forgetting factor, and the paired difference to random."""
    found: dict[tuple[str, int], dict[int, dict[str, float]]] = {}
    for outcome in outcomes:
        name, size = outcome.job.row.split("|")
        if outcome.result is not None:
            found.setdefault((name, int(size)), {})[outcome.job.recipe.seed] = outcome.result["metrics"]
    base = {seed: one["perplexity"] for seed, one in found["no replay", 0].items()}
    lines = []
    for (name, size), runs in found.items():
        seeds = sorted(seed for seed in runs if seed in base)
        perplexity = {seed: runs[seed]["perplexity"] for seed in seeds}
        random = found.get(("random", size), {})
        paired = [perplexity[seed] - random[seed]["perplexity"] for seed in seeds if seed in random]
        lines.append(
            {
                "strategy": name,
                "size": size,
                "seeds": len(seeds),
                "perplexity": _spread(list(perplexity.values())),
                "rcp": _spread([perplexity[seed] / base[seed] - 1 for seed in seeds]),
                "forgetting_factor": _spread([runs[seed]["forgetting_factor"] for seed in seeds]),
                "minus_random": _interval(paired) if name != "random" and len(paired) > 1 else None,
            }
        )
    return lines


def _spread(values: list[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.pstdev(values)


def _interval(differences: list[float]) -> tuple[float, float]:
    """(mean, half the width of its 95 % interval)."""
    half = STUDENT[len(differences)] * statistics.stdev(differences) / math.sqrt(len(differences))
    return statistics.fmean(differences), half


def as_table(lines: Sequence[dict[str, Any]]) -> str:
    columns = ["strategy", "N", "perplexity", "RCP in %", "forgetting factor", "perplexity minus random's (95 %)"]
    written = []
    for line in lines:
        pairs = [line["perplexity"], tuple(100 * value for value in line["rcp"]), line["forgetting_factor"]]
        numbers = [f"{mean:.2f} ± {deviation:.2f}" for mean, deviation in pairs]
        other = "" if line["minus_random"] is None else "{:+.2f} ± {:.2f}".format(*line["minus_random"])
        written.append([line["strategy"], str(line["size"]), *numbers, other])
    return markdown_table(columns, written)


def verdict(lines: Sequence[dict[str, Any]]) -> str:
    """Is there anything to be seen, and does diverse replay beat random replay?"""
    mean, deviation = next(line["forgetting_factor"] for line in lines if line["strategy"] == "no replay")
    if mean - deviation <= 0:
        return f"Plain averaging forgets {mean:.2f} ± {deviation:.2f}: without forgetting, replay cannot be judged."
    better = [
        f"{line['strategy']} N = {line['size']}"
        for line in lines
        if line["minus_random"] is not None and sum(line["minus_random"]) < 0
    ]
    found = ", ".join(better) or "none"
    return f"Plain averaging forgets {mean:.2f} ± {deviation:.2f}. Better than random (95 % interval): {found}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of data sets, with text/*.jsonl")
    parser.add_argument("--work", type=Path, required=True, help="folder of users, weights and runs")
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=len(SEEDS))
    parser.add_argument("--users", type=int, default=USERS, help="those that are left out included")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="samples that a client keeps")
    parser.add_argument("--set", action="append", default=[], dest="sets", metavar="KEY=VALUE", help="for all runs")
    given = parser.parse_args()
    work = given.work.absolute()
    prepare(given.data, work, given.users)
    cells = grid(work, given.sizes, SEEDS[: given.seeds], given.sets)
    lines = rows(run_all(cells, JobSettings(None, 1.0, 60.0, False, jobs=given.jobs, keep_going=True)))
    (work / "coordinated_text.json").write_text(json.dumps(lines, indent=2) + "\n")
    print(f"{as_table(lines)}\n\n{verdict(lines)}")


if __name__ == "__main__":
    main()
