"""Which of the tables' runs a record is: the one with its recipe and method whose settings are nearest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from everfed.experiments.papers import shortfall
from everfed.experiments.papers.judging import Runs
from everfed.experiments.papers.measures import Sample
from everfed.experiments.papers.planning import Experiment, experiments, plan
from everfed.experiments.papers.records import Record, differences, settings_of
from everfed.experiments.papers.tables import Stated, tables
from everfed.recipe import read

_EXACTNESS = {"fp32": 0, "tf32": 1, "bf16": 2}  # lowest first


def runs_of(records: Iterable[Record]) -> Runs:
    """The records by experiment and seed. Of several for one place that which lacks least of the paper's experiment is
    taken, then that whose settings differ least, then that with the most exact arithmetic, then the last one. A record
    of a recipe and method that no table uses is left out."""
    found: dict[Experiment, dict[int, Sample]] = {}
    ranks: dict[tuple[Experiment, int], tuple[int, int, int]] = {}
    for record in records:
        candidates = [e for e in _stated() if e.recipe == record["recipe"] and e.method in (record["method"], "")]
        if not candidates:
            continue
        experiment, differs = _nearest(record["settings"], candidates)
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


def _nearest(settings: dict[str, Any], candidates: Sequence[Experiment]) -> tuple[Experiment, tuple[str, ...]]:
    compared = [(experiment, differences(settings, _settings(experiment))) for experiment in candidates]
    return min(compared, key=lambda one: len(one[1]))


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
