"""Ours against the paper's: the difference, whether it is accepted, and paired differences over seeds.

All numbers are in the unit of their cell; acceptance and signs are judged in points.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from everfed.metrics import (
    PairedDifference,
    Spread,
    cell_reproduced,
    mean_and_deviation,
    paired_difference,
    sign_disagreements,
)
from everfed.metrics.acceptance import SIGN_MARGIN
from everfed.reproduction.cost import shortfall
from everfed.reproduction.measures import Sample, measure
from everfed.reproduction.planning import Cell, Experiment
from everfed.reproduction.tables import Table

REPRODUCED, NOT_REPRODUCED = "reproduced", "not reproduced"
VERDICTS = {REPRODUCED, NOT_REPRODUCED}
SCALED = "scaled run: not comparable"
Runs = Mapping[Experiment, Mapping[int, Sample]]
"""experiment -> seed -> finished run."""


@dataclass(frozen=True)
class Judged:
    """A cell with its number over seeds. paper: in the cell's unit, a ratio for ratios. verdict: REPRODUCED,
    NOT_REPRODUCED, or why there is none."""

    cell: Cell
    values: Mapping[int, float]
    spread: Spread | None
    paper: float | None
    verdict: str

    @property
    def difference(self) -> float | None:
        return None if self.spread is None or self.paper is None else self.spread.mean - self.paper


@dataclass(frozen=True)
class Difference:
    """A method less its baseline, seed by seed. paper: the same of the printed numbers. agrees: whether the signs do;
    None where the paper claims nothing, that is 2 points or less, or where ours must not be compared."""

    dataset: str
    setting: str
    metric: str
    method: str
    baseline: str
    ours: PairedDifference
    paper: float | None
    agrees: bool | None


def judge(cells: Iterable[Cell], runs: Runs, scaled: bool) -> list[Judged]:
    """Every cell that has an experiment with its number."""
    found = list(cells)
    printed = {(cell.place, cell.method): cell.target.value for cell in found if cell.target}
    return [_judge(cell, runs, _paper(cell, printed), scaled) for cell in found]


def _judge(cell: Cell, runs: Runs, paper: float | None, scaled: bool) -> Judged:
    values = {} if cell.missing else _values(cell, runs)
    spread = mean_and_deviation(list(values.values())) if values else None
    unlike = SCALED if scaled else _lacking(runs.get(cell.experiment, {}).values())
    return Judged(cell, values, spread, paper, _verdict(cell, spread, unlike))


def _lacking(runs: Iterable[Sample]) -> str:
    """Why these runs are not the paper's: they had only some of the data."""
    reasons = (shortfall(run.result["stream"]) for run in runs)
    return next((f"not comparable: {reason}" for reason in reasons if reason), "")


def _values(cell: Cell, runs: Runs) -> dict[int, float]:
    others = runs.get(cell.against, {}) if cell.against else {}
    found = {}
    for seed, run in runs.get(cell.experiment, {}).items():
        against = _as_seen(others[seed], cell) if seed in others else None
        value = measure(cell.measured.measure, cell.measured.unit, _as_seen(run, cell, against))
        if value is not None:
            found[seed] = value
    return found


def _as_seen(run: Sample, cell: Cell, against: Sample | None = None) -> Sample:
    return Sample(run.folder, run.result, cell.task, cell.logits, against)


def _paper(cell: Cell, printed: Mapping[tuple[tuple[str, str, str], str], float | None]) -> float | None:
    """The printed number; of a ratio, that of the method over that of the other one."""
    value = cell.target.value if cell.target else None
    if cell.measured.unit != "ratio" or value is None:
        return value
    other = printed.get((cell.place, cell.measured.against))
    return value / other if other else None


def _verdict(cell: Cell, spread: Spread | None, unlike: str) -> str:
    if cell.missing:
        return f"missing: {cell.missing}"
    if spread is None:
        return "not measured"
    if unlike:
        return unlike
    if cell.not_judged or cell.target is None or cell.target.value is None:
        return cell.not_judged
    accepted = cell_reproduced(spread.mean, cell.target.value, spread.deviation, cell.target.std)
    return REPRODUCED if accepted else NOT_REPRODUCED


def differences(table: Table, judged: Sequence[Judged]) -> list[Difference]:
    """Every method that has a number against its baseline, where both are counted in points."""
    by_place = {(one.cell.place, one.cell.method): one for one in judged if one.values}
    found = []
    for (place, method), ours in by_place.items():
        theirs = by_place.get((place, table.baseline_of(method)))
        if theirs is not None and theirs is not ours and ours.cell.measured.unit == "points":
            found += _difference(ours, theirs)
    return found


def _difference(ours: Judged, theirs: Judged) -> list[Difference]:
    seeds = sorted(set(ours.values) & set(theirs.values))
    if not seeds:
        return []
    paired = paired_difference([ours.values[s] for s in seeds], [theirs.values[s] for s in seeds])
    paper = None if ours.paper is None or theirs.paper is None else ours.paper - theirs.paper
    agrees = _agrees(ours, theirs, paired, paper) if {ours.verdict, theirs.verdict} <= VERDICTS else None
    cell = ours.cell
    return [Difference(*cell.place, cell.method, theirs.cell.method, paired, paper, agrees)]


def _agrees(ours: Judged, theirs: Judged, paired: PairedDifference, paper: float | None) -> bool | None:
    if paper is None or abs(paper) <= SIGN_MARGIN:
        return None
    method, baseline = ours.cell.method, theirs.cell.method
    mine, printed = {method: paired.mean, baseline: 0.0}, {method: paper, baseline: 0.0}
    return not sign_disagreements(mine, printed, baseline)
