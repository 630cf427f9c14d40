"""Ours against the paper's: the difference, the paired difference to the baseline over seeds, and the verdict.

A cell is reproduced when its number lies in the band around the paper's and, where the paper's difference to the
baseline exceeds 2 points, ours has the same sign. A run that is not the paper's experiment is not judged.
All numbers are in the unit of their cell; bands and signs are judged in points.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from everfed.experiments.papers import shortfall
from everfed.experiments.papers.measures import Sample, measure
from everfed.experiments.papers.planning import Cell, Experiment
from everfed.metrics import PairedDifference, Spread, cell_reproduced, mean_and_deviation, paired_difference
from everfed.metrics.acceptance import SIGN_MARGIN, cell_tolerance

REPRODUCED, NOT_REPRODUCED, NOT_JUDGED = "reproduced", "not reproduced", "not judged"
VERDICTS = {REPRODUCED, NOT_REPRODUCED}
Runs = Mapping[Experiment, Mapping[int, Sample]]
"""experiment -> seed -> finished run."""


@dataclass(frozen=True)
class Paired:
    """A method less its baseline, seed by seed. paper: the difference of the printed numbers. agrees: whether ours has
    its sign; None where the paper claims nothing, that is 2 points or less."""

    baseline: str
    ours: PairedDifference
    paper: float | None
    agrees: bool | None


@dataclass(frozen=True)
class Judged:
    """A cell with its number over seeds. paper: in the cell's unit, a ratio for ratios. band: how far ours may be from
    the paper's. lacking: why its runs are not the paper's experiment. verdict: REPRODUCED, NOT_REPRODUCED, or
    NOT_JUDGED and other words with the reason."""

    cell: Cell
    values: Mapping[int, float]
    spread: Spread | None
    paper: float | None
    band: float | None = None
    lacking: tuple[str, ...] = ()
    paired: Paired | None = None
    verdict: str = ""

    @property
    def difference(self) -> float | None:
        return None if self.spread is None or self.paper is None else self.spread.mean - self.paper


def judge(cells: Iterable[Cell], runs: Runs) -> list[Judged]:
    """Every cell with its number and its verdict."""
    found = list(cells)
    printed = {(cell.place, cell.method): cell.target.value for cell in found if cell.target}
    measured = [_measured(cell, runs, _paper(cell, printed)) for cell in found]
    by_place = {(one.cell.place, one.cell.method): one for one in measured}
    return [_judged(one, by_place.get((one.cell.place, one.cell.baseline))) for one in measured]


def _measured(cell: Cell, runs: Runs, paper: float | None) -> Judged:
    values = {} if cell.missing else _values(cell, runs)
    spread = mean_and_deviation(list(values.values())) if values else None
    in_points = spread is not None and paper is not None and cell.measured.unit == "points"
    band = cell_tolerance(spread.deviation, cell.target.std) if in_points and spread and cell.target else None
    used = [run for run in (cell.experiment, cell.against) if run is not None]
    return Judged(
        cell, values, spread, paper, band, _lacking(cell, [run for e in used for run in runs.get(e, {}).values()])
    )


def _lacking(cell: Cell, runs: Sequence[Sample]) -> tuple[str, ...]:
    """Why these runs are not the experiment whose number is printed, each reason once."""
    if cell.target is None:
        return ()
    if cell.stated is None:
        return ("tables.toml holds nothing that the paper states about this experiment",)
    reasons = [reason for run in runs for reason in shortfall.of_run(cell.stated, run.result, run.differs)]
    return tuple(dict.fromkeys(reasons))


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
    return replace(run, task=cell.task, logits=cell.logits, against=against)


def _paper(cell: Cell, printed: Mapping[tuple[tuple[str, str, str], str], float | None]) -> float | None:
    """The printed number; of a ratio, that of the method over that of the other one."""
    value = cell.target.value if cell.target else None
    if cell.measured.unit != "ratio" or value is None:
        return value
    other = printed.get((cell.place, cell.measured.against))
    return value / other if other else None


def _judged(one: Judged, baseline: Judged | None) -> Judged:
    paired = _paired(one, baseline)
    return replace(one, paired=paired, verdict=_verdict(one, baseline, paired))


def _paired(one: Judged, baseline: Judged | None) -> Paired | None:
    """The difference to the baseline over the seeds that both have; None where there is none, or no points."""
    seeds = sorted(set(one.values) & set(baseline.values)) if baseline else []
    if baseline is None or not seeds or one.cell.measured.unit != "points":
        return None
    ours = paired_difference([one.values[s] for s in seeds], [baseline.values[s] for s in seeds])
    claimed = one.cell.claimed
    agrees = ours.mean * claimed > 0 if claimed is not None and _claims(one.cell) else None
    return Paired(one.cell.baseline, ours, claimed, agrees)


def _claims(cell: Cell) -> bool:
    """Whether the paper has a difference to the baseline whose sign counts."""
    return cell.claimed is not None and abs(cell.claimed) > SIGN_MARGIN + 1e-9


def _verdict(one: Judged, baseline: Judged | None, paired: Paired | None) -> str:
    cell = one.cell
    if cell.missing:
        return f"missing: {cell.missing}"
    if one.spread is None:
        return "not measured"
    why = cell.not_judged or "; ".join(one.lacking) or _without_baseline(cell, baseline, paired)
    if why or cell.target is None or cell.target.value is None:
        return f"{NOT_JUDGED}: {why}"
    close = cell_reproduced(one.spread.mean, cell.target.value, one.spread.deviation, cell.target.std)
    return REPRODUCED if close and (paired is None or paired.agrees is not False) else NOT_REPRODUCED


def _without_baseline(cell: Cell, baseline: Judged | None, paired: Paired | None) -> str:
    """Why the sign of a claimed difference cannot be judged."""
    if not _claims(cell):
        return ""
    if paired is None or baseline is None:
        return f"needs {cell.baseline} with the same seeds, for the sign of the difference"
    return f"{cell.baseline}: {'; '.join(baseline.lacking)}" if baseline.lacking else ""
