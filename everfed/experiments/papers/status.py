"""How far the papers' tables are: the cells that records give, their verdicts, and what the remaining runs cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from everfed.experiments.papers.cost import training_samples
from everfed.experiments.papers.judging import Runs, judge
from everfed.experiments.papers.listing import experiment_recipe
from everfed.experiments.papers.planning import Experiment, experiments, plan
from everfed.experiments.papers.records import Record
from everfed.experiments.papers.tables import Table, tables
from everfed.recipe import ModelSection

COLUMNS = ["table", "cells with records", "verdicts", "runs left", "samples left", "device hours left"]
Seeds = Callable[[str], list[int]]


@dataclass(frozen=True)
class Rates:
    """Training samples per second. given: for every run; else `of` has the records' fastest run by (recipe, method), by
    (recipe, "") and by (data set, model)."""

    given: float | None = None
    of: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def find(self, experiment: Experiment) -> float | None:
        """That of the same recipe and method, else of the recipe, else of its model on the same data set."""
        if self.given is not None:
            return self.given
        recipe = experiment_recipe(experiment)
        alike = (recipe.stream.dataset, recipe.model.kind)
        keys = [(experiment.recipe, experiment.method), (experiment.recipe, ""), alike]
        return next((self.of[key] for key in keys if key in self.of), None)


def measured_rates(records: Iterable[Record]) -> Rates:
    """The rates of recorded runs. Runs that shared their device are slower, so the fastest of each kind counts."""
    found: dict[tuple[str, str], float] = {}
    for one in records:
        samples, seconds = one["cost"].get("samples"), one["cost"].get("seconds")
        if samples and seconds:
            alike = (
                one["stream"].get("dataset", ""),
                one["settings"].get("model", {}).get("kind", ModelSection().kind),
            )
            for key in ((one["recipe"], one["method"]), (one["recipe"], ""), alike):
                found[key] = max(samples / seconds, found.get(key, 0.0))
    return Rates(of=found)


@dataclass(frozen=True)
class Status:
    """cells, recorded: all that can be run, and those with a number from records. verdicts: their first words, counted.
    runs, samples, hours: of the runs without a record; without_rate: how many of them `hours` leaves out."""

    table: str
    cells: int
    recorded: int
    verdicts: dict[str, int]
    runs: int
    samples: float | None
    hours: float
    without_rate: int

    def line(self) -> list[str]:
        verdicts = ", ".join(f"{count} {verdict}" for verdict, count in self.verdicts.items())
        samples = "?" if self.samples is None else f"{self.samples / 1e6:,.1f} M"
        return [self.table, f"{self.recorded}/{self.cells}", verdicts or "-", str(self.runs), samples, self._hours()]

    def _hours(self) -> str:
        if self.without_rate == self.runs:
            return "?" if self.runs else "0.0"
        return f"{self.hours:,.1f}" + (f" + {self.without_rate} runs without a rate" if self.without_rate else "")


def status(prefix: str, runs: Runs, seeds: Seeds, rates: Rates) -> list[Status]:
    """Every table with something to run whose name begins with `prefix`. seeds: those of a recipe, by its name."""
    chosen = [table for name, table in tables().items() if name.startswith(prefix) and not table.item.nothing]
    return [_status(table, runs, seeds, rates) for table in chosen]


def _status(table: Table, runs: Runs, seeds: Seeds, rates: Rates) -> Status:
    cells = plan(table)
    recorded = [one for one in judge(cells, runs) if one.values]
    left = [e for e in experiments(cells) for seed in seeds(e.recipe) if seed not in runs.get(e, {})]
    samples = [training_samples(experiment_recipe(e), e.method) for e in left]
    seconds = [_seconds(count, rates.find(e)) for count, e in zip(samples, left, strict=True)]
    return Status(
        table.name,
        sum(not cell.missing for cell in cells),
        len(recorded),
        dict(Counter(one.verdict.partition(":")[0] for one in recorded)),
        len(left),
        _total(samples),
        sum(one for one in seconds if one is not None) / 3600,
        sum(one is None for one in seconds),
    )


def _seconds(samples: float | None, rate: float | None) -> float | None:
    return None if samples is None or rate is None else samples / rate


def _total(samples: Sequence[float | None]) -> float | None:
    known = [count for count in samples if count is not None]
    return sum(known) if len(known) == len(samples) else None
