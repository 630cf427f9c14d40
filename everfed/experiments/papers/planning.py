"""Every cell of a table: the runs that give its number, or the reason why there are none."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from everfed.errors import UserError
from everfed.experiments.papers.tables import CellGroup, PaperTable, PrintedCell, Stated, TableMetric, printed
from everfed.metrics.statistics import never_compared
from everfed.recipe import read
from everfed.recipe.problems import suggestion
from everfed.recipe.schema import Logits


@dataclass(frozen=True)
class Experiment:
    """One recipe with one method, run over seeds. method: everfed's name, empty where `sets` lists the parts."""

    recipe: str
    method: str
    sets: tuple[str, ...] = ()


@dataclass(frozen=True)
class TableCell:
    """One cell in the paper's words, and how to get its number.

    target: what the paper prints, if it does. experiment: the run that gives it; against: the other one it needs.
    missing: why it cannot be run, empty when it can. not_judged: why its number is not held against the paper's.
    stated: what the paper states about the experiment. seeds: how many the paper's number is a mean over. over_seeds:
    whether the printed deviation is over these. baseline: the paper's method that this one is compared with, "" for the
    baseline itself. claimed: the printed difference to it.
    """

    dataset: str
    setting: str
    method: str
    metric: str
    measured: TableMetric
    logits: Logits | None
    target: PrintedCell | None
    experiment: Experiment
    against: Experiment | None
    missing: str
    not_judged: str
    stated: Stated | None = None
    seeds: int = 0
    over_seeds: bool = True
    baseline: str = ""
    claimed: float | None = None

    @property
    def task(self) -> int | None:
        """The task or period, from 1, that it is about; None where it is about all."""
        found = re.search(r"(?:after task |period=)(\d+)$", self.setting)
        return int(found[1]) if found else None

    @property
    def place(self) -> tuple[str, str, str]:
        """Equal for cells that can be compared with each other."""
        return self.dataset, self.setting, self.metric


def plan(table: PaperTable, methods: Sequence[str] = (), columns: Sequence[str] = ()) -> list[TableCell]:
    """Every cell of `table`, in the file's order; only those of `methods` (everfed's names or the paper's) and of the
    columns whose name contains one of `columns`, where any are given. Raises UserError for a name that fits nothing."""
    found = _with_claims(table, [_cell(table, *place) for place in _places(table)])
    wanted = _wanted_methods(table, methods)
    chosen = [cell for cell in found if cell.method in wanted and _in(cell.dataset, columns)]
    if found and not chosen:
        listed = ", ".join(dict.fromkeys(cell.dataset for cell in found))
        raise UserError(f"no cell of {table.name} is left; its columns are: {listed}")
    return chosen


def experiments(cells: Iterable[TableCell]) -> list[Experiment]:
    """The experiments of the cells that can be run, each once, in order."""
    needed = [run for cell in cells if not cell.missing for run in (cell.experiment, cell.against) if run]
    return list(dict.fromkeys(needed))


_Place = tuple[CellGroup, str, str, str, PrintedCell | None]


def _places(table: PaperTable) -> Iterator[_Place]:
    """(block, setting, method, metric, target) of every cell: those the paper prints, then those it does not."""
    item = table.item
    targets = [t for t in printed() if (t.paper, t.table) == (table.paper.name, item.table)]
    taken = set()
    for block in item.blocks:
        for target in targets:
            key = (target.dataset, target.setting, target.method, target.metric)
            if key not in taken and _fits(block, target):
                taken.add(key)
                yield block, target.setting, target.method, target.metric, target
        for setting, method, metric in _declared(table, block):
            if (block.dataset, setting, method, metric) not in taken:
                yield block, setting, method, metric, None


def _fits(block: CellGroup, target: PrintedCell) -> bool:
    return (
        block.dataset == target.dataset
        and block.setting in (None, target.setting)
        and (block.methods is None or target.method in block.methods)
    )


def _declared(table: PaperTable, block: CellGroup) -> Iterator[tuple[str, str, str]]:
    methods = table.paper.methods if block.methods is None else block.methods
    for setting in block.declared():
        for metric in block.metrics:
            yield from ((setting, method, metric) for method in methods)


def _cell(
    table: PaperTable, block: CellGroup, setting: str, method: str, metric: str, target: PrintedCell | None
) -> TableCell:
    measured = table.paper.metrics[metric]
    own = _experiment(table, block, method, block.sets_of(setting))
    against = _experiment(table, block, measured.against, tuple(block.sets)) if measured.against else None
    return TableCell(
        block.dataset,
        setting,
        method,
        metric,
        measured,
        block.logits,
        target,
        own,
        against,
        measured.missing,
        _why_not_judged(table, measured, target),
        table.stated(block.dataset),
        table.paper.seeds,
        table.paper.deviations == "seeds",
    )


def _with_claims(table: PaperTable, cells: Sequence[TableCell]) -> list[TableCell]:
    """The cells with the methods that they are compared with, and by how much these differ in the paper."""
    printed = {(cell.place, cell.method): cell.target.value for cell in cells if cell.target}
    found = []
    for cell in cells:
        baseline = table.baseline_of(cell.method)
        ours, theirs = (printed.get((cell.place, method)) for method in (cell.method, baseline))
        claimed = None if ours is None or theirs is None or cell.method == baseline else ours - theirs
        found.append(replace(cell, baseline="" if cell.method == baseline else baseline, claimed=claimed))
    return found


def _experiment(table: PaperTable, block: CellGroup, method: str, sets: tuple[str, ...]) -> Experiment:
    """The recipe's own settings for a method in a comparison come first, as in `everfed compare`."""
    sets = (*sets, *block.sets_of_method.get(method, ()), *table.paper.options.get(method, ()))
    if any(entry.startswith("method.parts=") for entry in sets):
        return Experiment(block.recipe, "", sets)
    ours = table.methods[method]
    own = _compared_with(block.recipe).get(ours, ())
    return Experiment(block.recipe, ours, tuple(dict.fromkeys((*own, *sets))))


@cache
def _compared_with(recipe: str) -> dict[str, list[str]]:
    """A shipped recipe's settings by method."""
    compare = read(recipe).compare
    return compare.options if compare else {}


def _why_not_judged(table: PaperTable, measured: TableMetric, target: PrintedCell | None) -> str:
    if target is None:
        return table.item.no_target
    if target.value is None:
        return f"printed as {target.text!r}"
    if table.item.unusable:
        return table.item.unusable
    if measured.unit == "ratio":
        return "a ratio on one machine; the rule is for points"
    never = never_compared(table.paper.name, table.item.table, target.metric)
    return never or ("" if measured.unit == "points" else f"in {measured.unit}; the rule is for points")


def _wanted_methods(table: PaperTable, chosen: Sequence[str]) -> set[str]:
    """The paper's names of the chosen methods."""
    mapping = table.methods
    if not chosen:
        return set(mapping)
    wanted = set()
    for name in chosen:
        fitting = {theirs for theirs, ours in mapping.items() if name.lower() in (theirs.lower(), ours)}
        if not fitting:
            allowed = [*mapping.values(), *mapping]
            listed = ", ".join(dict.fromkeys(mapping.values()))
            raise UserError(f"--methods {name}: not in {table.name}.{suggestion(name, allowed)} Allowed: {listed}")
        wanted |= fitting
    return wanted


def _in(dataset: str, columns: Sequence[str]) -> bool:
    return not columns or any(column.lower() in dataset.lower() for column in columns)
