"""Ours against the paper's: the runs of a cell, its level, and the effect of a method over its baseline, seed by seed.

A run that is not the paper's experiment is not judged, nor are fewer than three seeds. A run that diverged is a result.
All numbers are in the unit of their cell; only points are judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from everfed.experiments.papers import shortfall
from everfed.experiments.papers.measures import Sample, measure
from everfed.experiments.papers.planning import Experiment, TableCell, experiments, plan
from everfed.experiments.papers.records import Record, differences, settings_of
from everfed.experiments.papers.tables import Stated, tables
from everfed.metrics import PairedDifference, Spread, covers, gap, levels, mean_and_deviation, paired_by_seed
from everfed.metrics import effect as verdict_on
from everfed.metrics.statistics import LEAST_SEEDS
from everfed.recipe import read

NOT_JUDGED, DIVERGED = "not judged", "diverged"
Runs = Mapping[Experiment, Mapping[int, Sample]]
"""experiment -> seed -> run."""


@dataclass(frozen=True)
class Effect:
    """A method less its baseline, seed by seed. paper: the difference of the printed numbers. verdict: of
    `statistics.effect`, "" where it is not judged: why. covers: whether our interval holds the paper's difference."""

    baseline: str
    ours: PairedDifference
    paper: float | None
    verdict: str = ""
    covers: bool | None = None
    why: str = ""


@dataclass(frozen=True)
class Judged:
    """A cell with its number over seeds. paper: in the cell's unit, a ratio for ratios. diverged: the seeds that did.
    lacking: why its runs are not the paper's experiment. level: of `statistics.levels` or DIVERGED, "" where it is not
    judged: why."""

    cell: TableCell
    values: Mapping[int, float]
    spread: Spread | None
    paper: float | None
    diverged: tuple[int, ...] = ()
    lacking: tuple[str, ...] = ()
    effect: Effect | None = None
    level: str = ""
    why: str = ""

    @property
    def difference(self) -> float | None:
        return None if self.spread is None or self.paper is None else self.spread.mean - self.paper

    @property
    def measured(self) -> bool:
        """Whether there is a run of it."""
        return bool(self.values or self.diverged)

    @property
    def verdict(self) -> str:
        """The level in words, or why there is none."""
        seeds = f"{DIVERGED} in {', '.join(map(str, self.diverged))}" if self.diverged else ""
        return "; ".join(filter(None, [self.level if self.level != DIVERGED else "", self.why, seeds]))


def judge(cells: Iterable[TableCell], runs: Runs) -> list[Judged]:
    """Every cell of a table with its number and its verdicts."""
    found = list(cells)
    printed = {(cell.place, cell.method): cell.target.value for cell in found if cell.target}
    measured = [_measured(cell, runs, _paper(cell, printed)) for cell in found]
    by_place = {(one.cell.place, one.cell.method): one for one in measured}
    baselines = [by_place.get((one.cell.place, one.cell.baseline)) for one in measured]
    pairs = zip(measured, baselines, strict=True)
    return _with_levels([replace(one, effect=_effect(one, baseline)) for one, baseline in pairs])


def _measured(cell: TableCell, runs: Runs, paper: float | None) -> Judged:
    own = {} if cell.missing else runs.get(cell.experiment, {})
    diverged = tuple(seed for seed, run in sorted(own.items()) if run.diverged)
    values = _values(cell, runs, own)
    spread = mean_and_deviation(list(values.values())) if values else None
    others = runs.get(cell.against, {}) if cell.against and own else {}
    one = Judged(cell, values, spread, paper, diverged, _lacking(cell, [*own.values(), *others.values()]))
    return replace(one, why=_why_not(one))


def _lacking(cell: TableCell, runs: Sequence[Sample]) -> tuple[str, ...]:
    """Why these runs are not the experiment whose number is printed, each reason once."""
    if cell.target is None:
        return ()
    if cell.stated is None:
        return ("tables.toml holds nothing that the paper states about this experiment",)
    reasons = [reason for run in runs for reason in shortfall.of_run(cell.stated, run.result, run.differs)]
    return tuple(dict.fromkeys(reasons))


def _values(cell: TableCell, runs: Runs, own: Mapping[int, Sample]) -> dict[int, float]:
    others = runs.get(cell.against, {}) if cell.against else {}
    found = {}
    for seed, run in sorted(own.items()):
        other = others.get(seed)
        if run.diverged or (other is not None and other.diverged):
            continue
        against = _as_seen(other, cell) if other is not None else None
        value = measure(cell.measured.measure, cell.measured.unit, _as_seen(run, cell, against))
        if value is not None:
            found[seed] = value
    return found


def _as_seen(run: Sample, cell: TableCell, against: Sample | None = None) -> Sample:
    return replace(run, task=cell.task, logits=cell.logits, against=against)


def _paper(cell: TableCell, printed: Mapping[tuple[tuple[str, str, str], str], float | None]) -> float | None:
    """The printed number; of a ratio, that of the method over that of the other one."""
    value = cell.target.value if cell.target else None
    if cell.measured.unit != "ratio" or value is None:
        return value
    other = printed.get((cell.place, cell.measured.against))
    return value / other if other else None


def _why_not(one: Judged) -> str:
    """Why the level of a cell is not judged; nothing where it is."""
    cell = one.cell
    if cell.missing:
        return f"missing: {cell.missing}"
    if not one.measured:
        return "not measured"
    why = cell.not_judged or "; ".join(one.lacking)
    if not why and not one.diverged:
        why = _too_few(len(one.values)) or ("" if _printed(one) else "the paper prints no deviation over seeds")
    return f"{NOT_JUDGED}: {why}" if why else ""


def _too_few(seeds: int) -> str:
    return "" if seeds >= LEAST_SEEDS else f"{seeds} of at least {LEAST_SEEDS} seeds"


def _printed(one: Judged) -> Spread | None:
    """What the paper prints, where it is a mean over seeds."""
    cell = one.cell
    if one.paper is None or cell.target is None or cell.target.std is None or not cell.over_seeds or cell.seeds < 2:
        return None
    return Spread(one.paper, cell.target.std, cell.seeds)


def _with_levels(found: Sequence[Judged]) -> list[Judged]:
    gaps = {
        index: gap(one.spread, printed)
        for index, one in enumerate(found)
        if not one.why and not one.diverged and one.spread and (printed := _printed(one))
    }
    verdicts = dict(zip(gaps, levels(list(gaps.values())), strict=True))
    return [
        replace(one, level=DIVERGED if one.diverged and not one.why else verdicts.get(index, ""))
        for index, one in enumerate(found)
    ]


def _effect(one: Judged, baseline: Judged | None) -> Effect | None:
    """The difference to the baseline over the seeds that both have; None where there is none, or no points."""
    ours = paired_by_seed(one.values, baseline.values) if baseline else None
    if baseline is None or ours is None or one.cell.measured.unit != "points":
        return None
    found = Effect(one.cell.baseline, ours, one.cell.claimed)
    why = _why_no_effect(one, baseline, ours.count)
    if why or found.paper is None:
        return replace(found, why=why or "the paper prints no difference")
    return replace(found, verdict=verdict_on(ours, found.paper), covers=covers(ours, found.paper))


def _why_no_effect(one: Judged, baseline: Judged, seeds: int) -> str:
    for side in (one, baseline):
        if why := side.cell.not_judged or "; ".join(side.lacking):
            return why if side is one else f"{baseline.cell.method}: {why}"
        if side.diverged:
            return f"{side.cell.method} {DIVERGED} in {', '.join(map(str, side.diverged))}"
    return "" if seeds >= LEAST_SEEDS else f"{_too_few(seeds)} that {baseline.cell.method} has, too"


# which record is which run -----------------------------------------------------------------------------------------

_EXACTNESS = {"fp32": 0, "tf32": 1, "bf16": 2}  # lowest first


def runs_of(records: Iterable[Record]) -> Runs:
    """The records by experiment and seed. Of several for one place that which lacks least of the paper's experiment is
    taken, then that whose settings differ least, then that with the most exact arithmetic, then the last one. A record
    that no table has a place for is left out."""
    found: dict[Experiment, dict[int, Sample]] = {}
    ranks: dict[tuple[Experiment, int], tuple[int, int, int]] = {}
    for record in records:
        nearest = _nearest(record)
        if nearest is None:
            continue
        experiment, differs = nearest
        run, place = Sample(record, differs=differs), (experiment, record["seed"])
        rank = len(lacking(experiment, run)), len(differs), _exactness(record)
        if place not in ranks or rank <= ranks[place]:
            ranks[place] = rank
            found.setdefault(experiment, {})[record["seed"]] = run
    return found


def lacking(experiment: Experiment, run: Sample) -> set[str]:
    """What a run lacks of an experiment that running its recipe again could give: other data, fewer rounds, other
    settings, but nothing in which the recipe itself departs from the paper."""
    settings = _settings(experiment)
    return {
        reason
        for stated in _stated()[experiment]
        for reason in shortfall.of_run(stated, run.result, run.differs)
        if reason not in shortfall.of_settings(stated, settings)
    }


def _exactness(record: Record) -> int:
    return _EXACTNESS.get(record["environment"].get("precision", "fp32"), len(_EXACTNESS))


def _nearest(record: Record) -> tuple[Experiment, tuple[str, ...]] | None:
    """The experiment that a record is of, and the keys in which its settings differ: the nearest of its recipe, or one
    of another recipe of the paper that has its very settings."""
    paper = record["recipe"].partition("/")[0]
    ours = [e for e in _stated() if e.recipe.startswith(f"{paper}/") and e.method in (record["method"], "")]
    named = _compared(record, [experiment for experiment in ours if experiment.recipe == record["recipe"]])
    if named and not named[1]:
        return named
    others = _compared(record, [experiment for experiment in ours if experiment.recipe != record["recipe"]])
    return others if others and not others[1] else named


def _compared(record: Record, candidates: Sequence[Experiment]) -> tuple[Experiment, tuple[str, ...]] | None:
    found = ((experiment, differences(record["settings"], _settings(experiment))) for experiment in candidates)
    return min(found, key=lambda one: len(one[1]), default=None)


@cache
def _stated() -> dict[Experiment, tuple[Stated, ...]]:
    """Every experiment of the tables with what the papers state about it; nothing is stated about some."""
    found: dict[Experiment, dict[str, Stated]] = {}
    for table in tables().values():
        for cell in plan(table):
            for experiment in experiments([cell]):
                stated = cell.stated or Stated()
                found.setdefault(experiment, {})[stated.model_dump_json(exclude={"columns"})] = stated
    return {experiment: tuple(stated.values()) for experiment, stated in found.items()}


@cache
def _settings(experiment: Experiment) -> dict[str, Any]:
    return settings_of(read(experiment.recipe, method=experiment.method or None, sets=experiment.sets))
