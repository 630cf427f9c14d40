"""Judged cells and records as tables, CSV and JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, cast

from everfed.errors import UserError
from everfed.experiments.papers.judging import NOT_JUDGED, Effect, Judged
from everfed.experiments.papers.measures import MEASURES, Sample
from everfed.experiments.papers.records import Record, complete, settings_of
from everfed.experiments.papers.shortfall import not_stated
from everfed.experiments.papers.tables import PaperTable
from everfed.methods import registry as methods
from everfed.metrics.statistics import EFFECTS, LEVELS, UNCLAIMED
from everfed.recipe import parse_set, read
from everfed.recipe.schema import Logits
from everfed.reports.formats import csv_text, markdown_table
from everfed.store.files import write_atomic

Lines = tuple[list[str], list[list[str]]]
SHOWN_NAMES = 6  # of methods and columns that a reason is spelled out for
RULE = (
    "Ours: mean ± population deviation over seeds. Level: equivalent where two one-sided tests place the difference "
    "to the paper within 3 points, differs where Welch's test with Holm's correction over the table says so, else "
    "unresolved. Effect: the mean difference to the baseline over the same seeds with its 95 % interval; confirmed "
    "where that excludes 0 on the paper's side, contradicted on the other side, else unresolved. Both need three seeds."
)


@dataclass(frozen=True)
class Reproduction:
    """A table of a paper, run and judged. folder: of the run folders. judged: its cells. problems: runs that failed,
    with their errors."""

    table: PaperTable
    scale: float
    folder: Path
    judged: Sequence[Judged]
    problems: Sequence[str]

    @property
    def measured(self) -> list[Judged]:
        return [one for one in self.judged if not one.cell.missing]

    @property
    def summary(self) -> str:
        """The outcome in one line."""
        levels = Counter(one.level for one in self.judged if one.level)
        effects = Counter(one.effect.verdict for one in self.judged if one.effect)
        claimed = sum(effects[verdict] for verdict in EFFECTS)
        unjudged = sum(one.why.startswith(NOT_JUDGED) for one in self.judged)
        absent = sum(bool(one.cell.missing) for one in self.judged)
        counted = ", ".join(f"{levels[level]} {level}" for level in [*LEVELS, *sorted(set(levels) - set(LEVELS))])
        parts = [f"{sum(levels.values())} cells judged: {counted}"]
        if claimed:
            parts.append(f"{effects[EFFECTS[0]]} of {claimed} effects {EFFECTS[0]}, {effects[EFFECTS[1]]} {EFFECTS[1]}")
        if effects[UNCLAIMED]:
            parts.append(f"{effects[UNCLAIMED]} effects {UNCLAIMED}")
        if unjudged:
            parts.append(f"{unjudged} cells not judged")
        if absent:
            parts.append(f"{absent} of {len(self.judged)} cells missing")
        if self.problems:
            parts.append(f"{len(self.problems)} runs failed")
        return "; ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """The content of the JSON file."""
        return {
            "table": self.table.name,
            "paper": self.table.paper.title,
            "about": self.table.item.about,
            "note": self.table.item.note or None,
            "scale": self.scale,
            "summary": self.summary,
            "cells": [_cell(one) for one in self.judged],
            "problems": list(self.problems),
        }

    def write(self, folder: Path | None = None) -> list[Path]:
        """PAPER-TABLE.json, .md and .csv in `folder`, by default that of the run folders."""
        folder = folder or self.folder
        stem = self.table.name.replace("/", "-")
        rows = [_row(one) for one in self.judged]
        texts = {
            "json": json.dumps(self.as_dict(), indent=2) + "\n",
            "md": self.markdown(),
            "csv": csv_text([list(rows[0]) if rows else ["dataset"], *(row.values() for row in rows)]),
        }
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{stem}.{kind}" for kind in texts]
        for path, text in zip(paths, texts.values(), strict=True):
            write_atomic(path, text.encode(), shared=True)
        return paths

    def markdown(self) -> str:
        item = self.table.item
        parts = [f"# {self.table.name}: {item.about}", self.table.paper.title + "."]
        parts += [f"Note: {item.note}."] if item.note else []
        parts += [f"**{self.summary}.**"]
        for title, (columns, lines) in (
            ("Cells", cells(self.measured)),
            ("Missing", missing(self.judged)),
        ):
            if lines:
                parts += [f"## {title}", markdown_table(columns, lines)]
        parts += ["## Failed runs", *(f"* {problem}" for problem in self.problems)] if self.problems else []
        parts.append(RULE)
        return "\n\n".join(parts) + "\n"


def cells(found: Sequence[Judged], effects: bool = True) -> Lines:
    """(columns, lines) of cells, with or without their effects over the baseline."""
    settings = len({one.cell.setting for one in found}) > 1
    metrics = len({one.cell.metric for one in found}) > 1
    head = ["Data", *(["Setting"] if settings else []), "Method", *(["Metric"] if metrics else [])]
    lines = []
    for one in found:
        cell = one.cell
        names = [cell.dataset, *([cell.setting] if settings else []), cell.method, *([cell.metric] if metrics else [])]
        numbers = [ours(one), paper(one), _signed(one.difference), one.verdict]
        lines.append([*names, *numbers, *(effect(one.effect) if effects else []), _seeds(one)])
    over = ["To the baseline", "Effect"] if effects else []
    return [*head, "Ours", "Paper", "Difference", "Level", *over, "Seeds (paper)"], lines


def missing(judged: Iterable[Judged]) -> Lines:
    """(columns, lines) of the cells that were not run, by reason."""
    by_reason: dict[str, list[Judged]] = {}
    for one in judged:
        if one.cell.missing:
            by_reason.setdefault(one.cell.missing, []).append(one)
    lines = [
        [
            reason,
            str(len(group)),
            _names(one.cell.method for one in group),
            _names(one.cell.dataset for one in group),
        ]
        for reason, group in by_reason.items()
    ]
    return ["Missing because", "Cells", "Methods", "Data"], lines


def ours(one: Judged) -> str:
    if one.spread is None:
        return "-"
    spread = f" ± {one.spread.deviation:.2f}" if one.spread.count > 1 else ""
    return f"{one.spread.mean:.2f}{spread}"


def paper(one: Judged) -> str:
    target = one.cell.target
    if one.paper is None:
        return target.text if target else "-"
    deviation = "" if target is None or target.std is None else f" ± {target.std:g}"
    return f"{one.paper:.2f}{deviation}"


def effect(found: Effect | None) -> list[str]:
    """The difference to the baseline, and the verdict on it."""
    if found is None:
        return ["-", "-"]
    paper = "" if found.paper is None else f" (paper {found.paper:+.2f})"
    return [f"{interval(found)} over {found.baseline}{paper}", found.verdict or f"{NOT_JUDGED}: {found.why}"]


def interval(found: Effect) -> str:
    low, high = found.ours.low, found.ours.high
    ends = "one seed" if low is None or high is None else f"{low:+.2f}, {high:+.2f}"
    return f"{found.ours.mean:+.2f} [{ends}]"


def _cell(one: Judged) -> dict[str, Any]:
    cell, target = one.cell, one.cell.target
    return {
        "dataset": cell.dataset,
        "setting": cell.setting,
        "method": cell.method,
        "metric": cell.metric,
        "unit": cell.measured.unit,
        "recipe": cell.experiment.recipe,
        "everfed_method": cell.experiment.method or None,
        "sets": " ".join(cell.experiment.sets),
        "ours": one.spread.mean if one.spread else None,
        "deviation": one.spread.deviation if one.spread else None,
        "seeds": len(one.values),
        "diverged": list(one.diverged),
        "paper": one.paper,
        "paper_deviation": target.std if target else None,
        "paper_seeds": cell.seeds,
        "difference": one.difference,
        "level": one.level or None,
        "verdict": one.verdict,
        "effect": asdict(one.effect) if one.effect else None,
        "lacking": list(one.lacking) if one.measured else [],
        "not_stated": not_stated(cell.stated) if cell.stated else [],
    }


def _row(one: Judged) -> dict[str, Any]:
    """The cell for CSV: one value per column."""
    found, effect = _cell(one), one.effect
    flat = {
        "baseline": effect.baseline if effect else None,
        "to_baseline": effect.ours.mean if effect else None,
        "to_baseline_low": effect.ours.low if effect else None,
        "to_baseline_high": effect.ours.high if effect else None,
        "to_baseline_paper": effect.paper if effect else None,
        "effect": effect.verdict if effect else None,
    }
    plain = {key: value for key, value in found.items() if not isinstance(value, (list, dict)) and key != "effect"}
    return {**plain, **flat}


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.2f}"


def _seeds(one: Judged) -> str:
    return f"{len(one.values)} ({one.cell.seeds or '?'})"


def _names(names: Iterable[str]) -> str:
    unique = list(dict.fromkeys(names))
    more = f" and {len(unique) - SHOWN_NAMES} more" if len(unique) > SHOWN_NAMES else ""
    return ", ".join(unique[:SHOWN_NAMES]) + more


# records -----------------------------------------------------------------------------------------------------------

PRECISION = "engine.precision"
OPTION = "method."  # what the key of a method's option begins with
# titles of columns: which logits, "" for the recipe's own, and the measure
_SCORES = {
    "learning accuracy": ("", "learning_accuracy"),
    "final accuracy": ("", "acc"),
    "forgetting": ("", "forgetting"),
}
_TASK_IL = {"final accuracy, task-IL": ("task", "acc")}  # where it says something else than the final accuracy
_PERPLEXITY = "perplexity"  # in place of accuracies
_WHERE_MEASURED = {
    "learning accuracy, last pass": ("", "learning_accuracy_last_pass"),
    "forgetting, last pass": ("", "forgetting_last_pass"),
    "accuracy of the clients' own models": ("", "local_accuracy"),
    _PERPLEXITY: ("", "perplexity"),
    "forgetting factor": ("", "forgetting_factor"),
}


def every_run(recipe: str, records: Iterable[Record]) -> str:
    """A line for every method of a recipe and every choice of its settings, in per cent, and what made them."""
    own = sorted((one for one in records if one["recipe"] == recipe), key=lambda one: (one["method"], one["seed"]))
    if not own:
        return "No records."
    differing = _differing(own)
    options = [key for key in differing if key.startswith(OPTION)]
    keys = [key for key in differing if key not in options]
    lines: dict[tuple[str, ...], list[Record]] = {}
    for one in own:
        line = (one["method"], *_options(one, options), *(_setting(one, key) for key in keys))
        lines.setdefault(line, []).append(one)
    task_il = any(_score(one, "task", "acc") not in (None, _score(one, "", "acc")) for one in own)
    more = {name: of for name, of in _WHERE_MEASURED.items() if any(_score(one, *of) is not None for one in own)}
    scores = {**({} if _PERPLEXITY in more else _SCORES), **(_TASK_IL if task_il else {}), **more}
    rows = [
        [*line, ", ".join(map(_seed, group)), *(_over_seeds(group, *of) for of in scores.values())]
        for line, group in sorted(lines.items())
    ]
    columns = ["method", *(["options"] if options else []), *keys, "seeds", *scores]
    return "\n\n".join([markdown_table(columns, rows), sources(own)])


def _seed(record: Record) -> str:
    return f"{record['seed']}{' (diverged)' if 'diverged' in record else ''}"


def _differing(records: Sequence[Record]) -> list[str]:
    """The settings, and the precision, in which records differ; options of methods only where those of one do. What the
    recipe itself gives a method is no difference."""
    values: dict[tuple[str, str], set[str]] = {}
    known = sorted({key for one in records for key in complete(one["settings"])})
    for one in records:
        own = _prescribed(one["recipe"], one["method"])
        for key in (PRECISION, *known):
            value = _setting(one, key)
            if own.get(key) != value:
                values.setdefault((one["method"] if key.startswith(OPTION) else "", key), set()).add(value)
    return sorted({key for (_, key), found in values.items() if len(found) > 1})


@cache
def _prescribed(recipe: str, method: str) -> dict[str, str]:
    """Settings that a recipe's [compare.options] gives a method; none where the recipe is not a shipped one."""
    try:
        compare = read(recipe).compare
    except UserError:
        return {}
    sets = compare.options.get(method, []) if compare else []
    named = [parse_set(entry).key for entry in sets]
    settings = complete(settings_of(read(recipe, method=method, sets=sets)))
    return {k: _text(v) for k, v in settings.items() if any(tuple(k.split("."))[: len(key)] == key for key in named)}


def _options(record: Record, keys: Sequence[str]) -> list[str]:
    """One cell with those of the keys that the record's method has, since each is of few methods; none without keys."""
    chosen = {key.removeprefix(OPTION): _setting(record, key) for key in keys}
    return [", ".join(f"{key} = {value}" for key, value in chosen.items() if value)] if keys else []


def _setting(record: Record, key: str) -> str:
    """Nothing for an option that the record's method does not have."""
    if key == PRECISION:
        return str(record["environment"].get("precision", "fp32"))
    settings = complete(record["settings"])
    return _text(settings[key] if key in settings else _default(record["method"], key))


def _text(value: Any) -> str:
    """10 and 10.0 are one value."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _default(method: str, key: str) -> Any:
    """The value of an option, `method.PART.OPTION`, that a recipe leaves to its part; of shipped methods."""
    if method not in methods.names():
        return ""
    part, _, option = key.removeprefix(OPTION).partition(".")
    parts = {one.name: one for one in methods.build(method).parts}
    return getattr(parts.get(part), option, "")


def _score(record: Record, logits: str, name: str) -> float | None:
    """A measure of a record. logits: "" for the recipe's own."""
    if logits and logits not in record.get("by_logits", {}):
        return None
    return MEASURES[name](Sample(record, logits=cast(Logits, logits) if logits else None))


def _over_seeds(records: Sequence[Record], logits: str, name: str) -> str:
    """Mean ± population deviation, and in brackets the value of each seed, - where it has none."""
    values = [_score(one, logits, name) for one in records]
    known = [value for value in values if value is not None]
    each = " ".join("-" if value is None else f"{value:.1f}" for value in values)
    return each if len(values) < 2 or not known else f"{fmean(known):.1f} ± {pstdev(known):.1f} ({each})"


def sources(records: Iterable[Record]) -> str:
    """A line for all runs of one recipe that were made alike: methods, seeds, hardware, seconds, remark."""
    alike: dict[tuple[str, str], list[Record]] = {}
    for one in records:
        alike.setdefault((one["recipe"], _how(one)), []).append(one)
    return "\n".join(f"* {_line(recipe, how, group)}" for (recipe, how), group in alike.items())


def _how(record: Record) -> str:
    environment, remark = record["environment"], record.get("remark", "")
    device = environment.get("device_name") or f"{environment.get('cores', '?')} cores ({environment.get('machine')})"
    shared = " (shared)" if record.get("shared_device") else ""
    engine = f"{environment.get('engine')}, {environment.get('precision', 'fp32')}, torch {environment.get('torch')}"
    return f"{device}{shared}, {engine}{f'; {remark}' if remark else ''}"


def _line(recipe: str, how: str, group: Sequence[Record]) -> str:
    methods, seeds = (", ".join(dict.fromkeys(str(one[key]) for one in group)) for key in ("method", "seed"))
    seconds = sorted(one["cost"]["seconds"] for one in group if "seconds" in one["cost"])
    took = f"; {seconds[0]:,.0f} to {seconds[-1]:,.0f} s a run" if seconds else ""
    return f"`{recipe}`: {methods}; seeds {seeds}; {how}{took}"
