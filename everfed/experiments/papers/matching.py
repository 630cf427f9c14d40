"""Which of the tables' runs a record is: the one with its recipe and method whose settings are nearest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from everfed.experiments.papers.judging import Runs
from everfed.experiments.papers.measures import Sample
from everfed.experiments.papers.planning import Experiment, experiments, plan
from everfed.experiments.papers.records import Record, differences, settings_of
from everfed.experiments.papers.tables import tables
from everfed.recipe import read

_EXACTNESS = {"fp32": 0, "tf32": 1, "bf16": 2}  # lowest first


def runs_of(records: Iterable[Record]) -> Runs:
    """The records by experiment and seed. Of several for one place the one that differs least is taken, of equal ones
    that with the most exact arithmetic; a record of a recipe and method that no table uses is left out."""
    found: dict[Experiment, dict[int, Sample]] = {}
    wanted = _all_experiments()
    for record in sorted(records, key=_exactness):
        candidates = [e for e in wanted if e.recipe == record["recipe"] and e.method in (record["method"], "")]
        if candidates:
            experiment, differs = _nearest(record["settings"], candidates)
            taken = found.setdefault(experiment, {})
            if record["seed"] not in taken or len(differs) < len(taken[record["seed"]].differs):
                taken[record["seed"]] = Sample(record, differs=differs)
    return found


def _exactness(record: Record) -> int:
    return _EXACTNESS.get(record["environment"].get("precision", "fp32"), len(_EXACTNESS))


def _nearest(settings: dict[str, Any], candidates: Sequence[Experiment]) -> tuple[Experiment, tuple[str, ...]]:
    compared = [(experiment, differences(settings, _settings(experiment))) for experiment in candidates]
    return min(compared, key=lambda one: len(one[1]))


@cache
def _all_experiments() -> tuple[Experiment, ...]:
    return tuple(dict.fromkeys(run for table in tables().values() for run in experiments(plan(table))))


@cache
def _settings(experiment: Experiment) -> dict[str, Any]:
    return settings_of(read(experiment.recipe, method=experiment.method or None, sets=experiment.sets))
