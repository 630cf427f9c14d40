"""Every table with what can be run of it and what that costs: the training samples processed, from the recipes alone,
before any data is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

from everfed.experiments.papers import shortfall
from everfed.experiments.papers.planning import Cell, Experiment, experiments, plan
from everfed.experiments.papers.shortfall import SETS, domains_of
from everfed.experiments.papers.tables import PaperTable, tables
from everfed.recipe import Recipe, read

COLUMNS = ["table", "about", "cells", "runs", "samples", "missing", "not judged"]


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


def overview(prefix: str, seeds: Callable[[str], list[int]], scale: float) -> list[Overview]:
    """Every table whose name begins with `prefix`. seeds: those of a recipe, by its name."""
    remembered = cache(seeds)
    return [_overview(table, remembered, scale) for name, table in tables().items() if name.startswith(prefix)]


def _overview(table: PaperTable, seeds: Callable[[str], list[int]], scale: float) -> Overview:
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
        _counted(cell.missing for cell in cells),
        _counted(cell.not_judged or _lacking(cell) for cell in cells),
        table.item.nothing,
    )


def _cost(experiment: Experiment, seeds: int, scale: float) -> float | None:
    one = training_samples(experiment_recipe(experiment), experiment.method, scale)
    return None if one is None else one * seeds


def _lacking(cell: Cell) -> str:
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


def _counted(reasons: Iterable[str]) -> dict[str, int]:
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
