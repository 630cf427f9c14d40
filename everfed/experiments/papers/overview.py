"""Every table: what can be run of it and what that costs, from the recipes alone; how far the records
are: the cells they give, their verdicts, what remains, and which of it is planned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from everfed.experiments.papers import shortfall
from everfed.experiments.papers.judging import DIVERGED, NOT_JUDGED, Judged, Runs, judge, lacking, runs_of
from everfed.experiments.papers.planning import Experiment, TableCell, experiments, plan
from everfed.experiments.papers.records import Record, read_all
from everfed.experiments.papers.reproducing import seeds_of
from everfed.experiments.papers.shortfall import SETS, domains_of
from everfed.experiments.papers.tables import PaperTable, Planned, find, notes, papers, tables
from everfed.metrics.statistics import EFFECTS, LEVELS, UNCLAIMED
from everfed.recipe import ModelSection, Recipe, read

Seeds = Callable[[str], list[int]]  # those of a recipe, by its name
LISTED = ["table", "about", "cells", "runs", "samples", "missing", "not judged"]


@dataclass(frozen=True)
class Overview:
    """cells, runnable: how many there are, and how many can be run. runs: over all seeds. samples: processed in
    training, None where it is not known. missing, not_judged: the reasons, with how many cells each concerns.
    nothing: why there is nothing to run."""

    table: str
    about: str
    cells: int
    runnable: int
    runs: int
    samples: float | None
    missing: dict[str, int]
    not_judged: dict[str, int]
    nothing: str

    def line(self) -> list[str]:
        if self.nothing:
            return [self.table, self.about, "-", "-", "-", f"nothing to run: {self.nothing}", ""]
        samples = "?" if self.samples is None else f"{self.samples / 1e6:,.1f} M"
        counts = [f"{self.runnable}/{self.cells}", str(self.runs), samples]
        return [self.table, self.about, *counts, _joined(self.missing), _joined(self.not_judged)]


def overview(prefix: str, seeds: Seeds, scale: float) -> list[Overview]:
    """Every table whose name begins with `prefix`."""
    remembered = cache(seeds)
    return [_overview(table, remembered, scale) for name, table in tables().items() if name.startswith(prefix)]


def _overview(table: PaperTable, seeds: Seeds, scale: float) -> Overview:
    cells = plan(table)
    wanted = experiments(cells)
    runs = sum(len(seeds(experiment.recipe)) for experiment in wanted)
    costs = [_cost(experiment, len(seeds(experiment.recipe)), scale) for experiment in wanted]
    known = [cost for cost in costs if cost is not None]
    return Overview(
        table.name,
        table.item.about,
        len(cells),
        sum(not cell.missing for cell in cells),
        runs,
        sum(known) if len(known) == len(costs) else None,
        _by_reason(cell.missing for cell in cells),
        _by_reason(cell.not_judged or _lacking(cell) for cell in cells),
        table.item.nothing,
    )


def _cost(experiment: Experiment, seeds: int, scale: float) -> float | None:
    one = training_samples(experiment_recipe(experiment), experiment.method, scale)
    return None if one is None else one * seeds


def _lacking(cell: TableCell) -> str:
    """What the recipe itself lacks of the experiment that the paper states."""
    if cell.missing or cell.stated is None:
        return ""
    return "; ".join(shortfall.of_settings(cell.stated, experiment_recipe(cell.experiment).model_dump()))


def experiment_recipe(experiment: Experiment) -> Recipe:
    """The recipe with what the cells set in its stream and its training, which is what a cost depends on."""
    relevant = tuple(entry for entry in experiment.sets if entry.startswith(("stream.", "train.")))
    return _read(experiment.recipe, relevant)


@cache
def _read(name: str, sets: tuple[str, ...]) -> Recipe:
    return read(name, sets=sets)


def _by_reason(reasons: Iterable[str]) -> dict[str, int]:
    return dict(Counter(reason for reason in reasons if reason))


def _joined(reasons: dict[str, int]) -> str:
    return "; ".join(f"{reason} ({count})" for reason, count in reasons.items())


# what a run costs --------------------------------------------------------------------------------------------------


def training_samples(recipe: Recipe, method: str, scale: float = 1.0) -> float | None:
    """Samples that one run processes, each counted whenever it is trained on; None where it is not known.

    Replayed, generated and reference samples of a method are not counted; `ideal` trains on all tasks so far.
    """
    per_round = _samples_per_epoch(recipe)
    if per_round is None:
        return None
    stream, train = recipe.stream.model_extra or {}, recipe.train
    tasks, share = stream.get("tasks", 5), stream.get("participation", 1.0)
    rounds = max(1, round(train.rounds_per_task * scale))
    history = (tasks + 1) / 2 if method == "ideal" else 1.0
    return per_round * scale * rounds * train.local_epochs * share * history


def _samples_per_epoch(recipe: Recipe) -> float | None:
    """Training samples of all clients, summed over the tasks."""
    stream = recipe.stream.model_extra or {}
    size = _size(recipe.stream.dataset, stream.get("max_train"))
    if recipe.stream.scenario == "periods":
        limit = stream.get("max_train")  # counts per client and period
        return None if limit is None else limit * stream.get("clients", 10) * stream.get("tasks", 5)
    if size is None:
        return None
    kept = size * (1 - stream.get("validation", 0.0))
    if recipe.stream.scenario == "domain-incremental":
        return kept * stream.get("tasks", 5)
    if recipe.stream.scenario == "task-pool" and stream.get("sample_split", "shared") == "shared":
        return kept * stream.get("clients", 10)
    return kept


def _size(dataset: str, most: int | None) -> float | None:
    """Training samples of a set, or of a list of domains, of which each has at most `most`."""
    domains = domains_of(dataset)
    if any(domain not in SETS for domain in domains):
        return None
    return sum(min(SETS[domain].train, most or SETS[domain].train) for domain in domains)


# how far the records are -------------------------------------------------------------------------------------------

STATUS = ["table", "cells with records", "levels", "effects", "runs left", "samples left", "device hours left"]
PLANNED = ["planned", "runs done", "GPU minutes left", "command"]


@dataclass(frozen=True)
class SampleRates:
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


def measured_rates(records: Iterable[Record]) -> SampleRates:
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
    return SampleRates(of=found)


@dataclass(frozen=True)
class Status:
    """cells, recorded: all that can be run, and those with a number from records. levels, effects: the verdicts,
    counted. unjudged: cells with records whose level is not judged. runs, samples, hours: of the runs that no record
    stands for which can be judged; without_rate: how many of them `hours` leaves out."""

    table: str
    cells: int
    recorded: int
    levels: dict[str, int]
    effects: dict[str, int]
    unjudged: int
    runs: int
    samples: float | None
    hours: float
    without_rate: int

    def line(self) -> list[str]:
        samples = "?" if self.samples is None else f"{self.samples / 1e6:,.1f} M"
        counts = [_counted({**self.levels, NOT_JUDGED: self.unjudged}), _counted(self.effects)]
        return [self.table, f"{self.recorded}/{self.cells}", *counts, str(self.runs), samples, self._hours()]

    def _hours(self) -> str:
        if self.without_rate == self.runs:
            return "?" if self.runs else "0.0"
        return f"{self.hours:,.1f}" + (f" + {self.without_rate} runs without a rate" if self.without_rate else "")


@dataclass(frozen=True)
class Plan:
    """A planned group of runs. done, runs: those with a record that can be judged, and all; None where what is to be
    run is no table's. minutes: of a GPU, for what is left."""

    what: str
    command: str
    done: int | None
    runs: int | None
    minutes: float

    def line(self) -> list[str]:
        count = "-" if self.runs is None else f"{self.done}/{self.runs}"
        return [self.what, count, f"{self.minutes:,.0f}", self.command]


@dataclass(frozen=True)
class Overall:
    """What all records give. judged: cells with a level over all tables; distinct: those left when a number that
    several tables show counts once, with their levels and effects."""

    records: int
    judged: int
    distinct: int
    levels: dict[str, int]
    effects: dict[str, int]

    def text(self) -> str:
        return (
            f"{self.records} records; {self.judged} cells judged, {self.distinct} of them distinct: "
            f"{_counted(self.levels)}; effects: {_counted(self.effects)}."
        )


@dataclass(frozen=True)
class Progress:
    """How far the tables are. overall: of all that are shown."""

    tables: list[Status]
    overall: Overall
    planned: list[Plan]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def progress(prefix: str, folder: Path, rate: float | None = None, seeds: int | None = None) -> Progress:
    """What the records in `folder` give of the tables whose name begins with `prefix`. rate: training samples a second,
    by default those of the records. seeds: how many of each run are wanted, by default as many as the recipe has."""
    kept = read_all(folder)
    runs = runs_of(kept)
    rates = SampleRates(given=rate) if rate else measured_rates(kept)
    rows = status(prefix, runs, lambda recipe: seeds_of(recipe, seeds), rates)
    return Progress(rows, overall(prefix, kept, runs), planned(prefix, runs))


def status(prefix: str, runs: Runs, seeds: Seeds, rates: SampleRates) -> list[Status]:
    """Every table with something to run whose name begins with `prefix`."""
    return [_status(table, runs, seeds, rates) for table in _chosen(prefix)]


def overall(prefix: str, records: Sequence[Record], runs: Runs) -> Overall:
    """The verdicts of every table whose name begins with `prefix`."""
    chosen = _chosen(prefix)
    judged = sum(bool(one.level) for table in chosen for one in judge(plan(table), runs))
    once = [one for own in by_first_table(chosen, runs).values() for one in own]
    return Overall(len(records), judged, sum(bool(one.level) for one in once), levels_of(once), effects_of(once))


def by_first_table(chosen: Iterable[PaperTable], runs: Runs) -> dict[str, list[Judged]]:
    """The printed cells that have runs, by table; a number that several tables print is in the first of them."""
    found: dict[str, list[Judged]] = {}
    taken: set[object] = set()
    for table in chosen:
        own = [one for one in judge(plan(table), runs) if one.measured and one.cell.target is not None]
        if new := [one for one in own if identity(one.cell) not in taken]:
            found[table.name] = new
        taken |= {identity(one.cell) for one in own}
    return found


def planned(prefix: str, runs: Runs) -> list[Plan]:
    """What is planned for the papers whose tables' names begin with `prefix`, and not done."""
    groups = [group for key in papers() if key.startswith(prefix.partition("/")[0]) for group in notes(key).runs()]
    found = [_plan(group, runs) for group in groups]
    return [one for one in found if one.runs is None or one.done != one.runs]


def identity(cell: TableCell) -> tuple[object, ...]:
    """Equal for cells that show the same number of the same runs."""
    return cell.experiment, cell.against, cell.measured.measure, cell.measured.unit, cell.logits, cell.task


def levels_of(judged: Iterable[Judged]) -> dict[str, int]:
    found = Counter(one.level for one in judged)
    return {level: found[level] for level in (*LEVELS, DIVERGED) if found[level] or level in LEVELS}


def effects_of(judged: Iterable[Judged]) -> dict[str, int]:
    """The effects that the paper claims, and those that it has not."""
    found = Counter(one.effect.verdict for one in judged if one.effect)
    return {effect: found[effect] for effect in (*EFFECTS, UNCLAIMED)}


def _chosen(prefix: str) -> list[PaperTable]:
    return [table for name, table in tables().items() if name.startswith(prefix) and not table.item.nothing]


def _status(table: PaperTable, runs: Runs, seeds: Seeds, rates: SampleRates) -> Status:
    cells = plan(table)
    recorded = [one for one in judge(cells, runs) if one.measured]
    left = [e for e in experiments(cells) for seed in seeds(e.recipe) if not _stands(e, seed, runs)]
    samples = [training_samples(experiment_recipe(e), e.method) for e in left]
    seconds = [_seconds(count, rates.find(e)) for count, e in zip(samples, left, strict=True)]
    return Status(
        table.name,
        sum(not cell.missing for cell in cells),
        len(recorded),
        {level: count for level, count in levels_of(recorded).items() if count},
        {effect: count for effect, count in effects_of(recorded).items() if count},
        sum(not one.level for one in recorded),
        len(left),
        _total(samples),
        sum(one for one in seconds if one is not None) / 3600,
        sum(one is None for one in seconds),
    )


def _stands(experiment: Experiment, seed: int, runs: Runs) -> bool:
    """Whether a record stands for this run, so that another one would show no more."""
    run = runs.get(experiment, {}).get(seed)
    return run is not None and not lacking(experiment, run)


def _plan(group: Planned, runs: Runs) -> Plan:
    if not group.table:
        return Plan(group.what, group.command, None, None, group.minutes)
    cells = plan(find(group.table), group.methods, group.columns)
    wanted = [(e, seed) for e in experiments(cells) for seed in range(group.seeds)]
    done = sum(_stands(e, seed, runs) for e, seed in wanted)
    return Plan(group.what, group.command, done, len(wanted), group.minutes * (1 - done / len(wanted)))


def _counted(verdicts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items() if count) or "-"


def _seconds(samples: float | None, rate: float | None) -> float | None:
    return None if samples is None or rate is None else samples / rate


def _total(samples: Sequence[float | None]) -> float | None:
    known = [count for count in samples if count is not None]
    return sum(known) if len(known) == len(samples) else None
