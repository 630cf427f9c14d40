"""What the leaderboard runs: methods, streams and tries (tuning.toml), and the jobs that follow from the records."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from everfed.experiments.jobs import GridJob, JobSettings, Outcome, Output, new_job, run_all
from everfed.experiments.leaderboard import records
from everfed.experiments.leaderboard.records import Record
from everfed.experiments.papers.records import recipe_hash, settings_of
from everfed.methods import registry as methods
from everfed.recipe import read
from everfed.recipe import shipped as recipes
from everfed.store.event_log import read_log

RECIPES = "leaderboard/"  # what the recipes of the streams begin with
RATE = "train.optimizer.lr"
TUNING_SEED = 100  # of the tries; tests have the seeds 0, 1, 2, ...
WITH_FEDGP = ("fedgp", "fedgp+er", "fedgp+der", "fedgp+agem")  # of all combinations with FedGP, these


def streams() -> list[str]:
    """The streams, digits first."""
    found = [name.removeprefix(RECIPES) for name in recipes.names() if name.startswith(RECIPES)]
    return sorted(found, key=lambda name: list(table()["learning_rates"]).index(name))


def compared() -> list[str]:
    """The methods: all that `everfed list methods` shows, of the combinations with FedGP only four."""
    return [name for name in methods.names() if not name.startswith("fedgp") or name in WITH_FEDGP]


def slowest_first(names: Sequence[str]) -> list[str]:
    """The same methods, those that take long first, so that no core waits for them at the end."""
    slow = table()["slowest"]
    return sorted(names, key=lambda name: slow.index(name) if name in slow else len(slow))


def tries(method: str, stream: str, count: int) -> list[tuple[str, ...]]:
    """The first `count` tries of a method, each as `--set` entries."""
    rates = table()["learning_rates"][stream]
    weight = weight_of(method)
    found = []
    for rate, place in table()["pairs"][:count]:
        own = () if weight is None else (f"method.{_quoted(weight['option'])}={weight['values'][place]}",)
        found.append((f"{RATE}={rates[rate]}", *own))
    return found


def weight_of(method: str) -> dict[str, Any] | None:
    """{option, values} of a method's main weight; None where it has none."""
    found: dict[str, Any] | None = table()["weights"].get(method)
    return found


def _quoted(option: str) -> str:
    """A dotted key whose part may have a name that TOML quotes, such as der++."""
    part, _, name = option.partition(".")
    return f'"{part}".{name}' if "+" in part else option


@cache
def table() -> dict[str, Any]:
    return tomllib.loads(
        resources.files("everfed.experiments.leaderboard").joinpath("tuning.toml").read_text(encoding="utf-8")
    )


# what is run --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Board:
    """What is run: tries, then tests, of methods on streams. out: of the run folders. folder: of the records. seeds: of
    the tests. device: where it is not the recipe's."""

    out: Path
    folder: Path
    tries: int
    seeds: Sequence[int]
    device: str | None

    def run(
        self, streams: Sequence[str], methods: Sequence[str], settings: JobSettings, output: Output | None = None
    ) -> None:
        """Run what has no record yet, and keep it."""
        places = [(stream, method) for stream in streams for method in slowest_first(methods)]
        run_all(list(self.first_jobs(places)), settings, self.then, output)

    def first_jobs(self, places: Iterable[tuple[str, str]]) -> Iterator[GridJob]:
        """Every try that has no record, and the tests of methods whose tries all have one."""
        for stream, method in places:
            record = self._record(stream, method)
            missing = [number for number in range(self.tries) if not _has(record["tries"], "number", number)]
            yield from (self._try(stream, method, number) for number in missing)
            if not missing:
                yield from self._tests(record)

    def then(self, outcome: Outcome) -> list[GridJob]:
        """Keep a finished run; after the last try of a method come its tests."""
        stream, method, kind, number, *rest = outcome.job.row.split(" ")
        known = self._hash(stream)
        entry = records.measured(outcome.result, outcome.problem, _kept_samples(outcome))
        if kind == "test":
            of_try = {"seed": int(number), "try": int(rest[-1])}
            records.add(self.folder, known, stream, method, "tests", {**of_try, **entry})
            return []
        sets = tries(method, stream, int(number) + 1)[int(number)]
        about = {"number": int(number), "seed": TUNING_SEED, "sets": list(sets)}
        record = records.add(self.folder, known, stream, method, "tries", {**about, **entry})
        whole = all(_has(record["tries"], "number", one) for one in range(self.tries))
        return list(self._tests(record)) if whole else []

    def _record(self, stream: str, method: str) -> Record:
        return records.opened(self.folder, stream, method, self._hash(stream))

    def _hash(self, stream: str) -> str:
        """Of the stream's recipe, as it is without a method's settings."""
        return recipe_hash(settings_of(read(f"{RECIPES}{stream}")))[:16]

    def _try(self, stream: str, method: str, number: int) -> GridJob:
        sets = ["eval.split=validation", *tries(method, stream, number + 1)[number]]
        return self._job(stream, method, f"try {number}", TUNING_SEED, sets)

    def _tests(self, record: Record) -> Iterator[GridJob]:
        """The tests that have no record, with the best of the tries; none where no try finished."""
        best = records.best_try(record)
        if best is None:
            return
        for seed in self.seeds:
            if not _has(records.tests_of_best(record), "seed", seed):
                name = f"test {seed} try {best['number']}"  # after other tries it would be another run
                yield self._job(record["stream"], record["method"], name, seed, best["sets"])

    def _job(self, stream: str, method: str, name: str, seed: int, sets: Sequence[str]) -> GridJob:
        kind = "eager" if self.device == "cpu" else "auto"  # on a CPU runs are side by side, not clients
        where = [f"engine.device={self.device}", f"engine.kind={kind}"] if self.device else []
        folder = self.out / stream / method / name.replace(" ", "-")
        row = f"{stream} {method} {name}"
        return new_job(row, f"{RECIPES}{stream}", folder, method=method, seed=seed, sets=[*where, *sets])


def _has(entries: Iterable[Mapping[str, Any]], key: str, value: int) -> bool:
    return any(entry[key] == value for entry in entries)


def _kept_samples(outcome: Outcome) -> float | None:
    """Samples in a client's buffer at the end, on average; None where the method has no buffer."""
    buffers = read_log(outcome.job.folder).buffers
    if outcome.result is None or not buffers:
        return None
    return sum(buffers[max(buffers)]) / outcome.result["stream"]["clients"]
