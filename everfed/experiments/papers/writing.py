"""Writes the results of a reproduction as tables, CSV and JSON, and sums them up in one line."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from everfed.experiments.papers.judging import NOT_JUDGED, REPRODUCED, VERDICTS, Judged, Paired
from everfed.experiments.papers.shortfall import not_stated
from everfed.experiments.papers.tables import Table
from everfed.reports.markdown import markdown_table
from everfed.store.files import write_atomic

Lines = tuple[list[str], list[list[str]]]
SHOWN_NAMES = 6  # of methods and columns that a reason is spelled out for


@dataclass(frozen=True)
class Found:
    """The results of a reproduction. problems: runs that failed, with their errors."""

    table: Table
    scale: float
    judged: Sequence[Judged]
    problems: Sequence[str]

    @property
    def measured(self) -> list[Judged]:
        return [one for one in self.judged if not one.cell.missing]


def cells(found: Sequence[Judged]) -> Lines:
    """(columns, lines) of cells."""
    settings = len({one.cell.setting for one in found}) > 1
    metrics = len({one.cell.metric for one in found}) > 1
    head = ["Data", *(["Setting"] if settings else []), "Method", *(["Metric"] if metrics else [])]
    lines = []
    for one in found:
        cell = one.cell
        names = [cell.dataset, *([cell.setting] if settings else []), cell.method, *([cell.metric] if metrics else [])]
        numbers = [_ours(one), _paper(one), _with_band(one), _paired(one.paired), _seeds(one)]
        lines.append([*names, *numbers, one.verdict])
    return [*head, "Ours", "Paper", "Difference (band)", "To the baseline", "Seeds (paper)", "Verdict"], lines


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


def summary(found: Found) -> str:
    """The outcome in one line."""
    judged = [one for one in found.judged if one.verdict in VERDICTS]
    unjudged = sum(one.verdict.startswith(NOT_JUDGED) for one in found.judged)
    claims = [one.paired.agrees for one in judged if one.paired and one.paired.agrees is not None]
    absent = sum(bool(one.cell.missing) for one in found.judged)
    parts = [f"{sum(one.verdict == REPRODUCED for one in judged)} of {len(judged)} judged cells reproduced"]
    if claims:
        parts.append(f"{sum(claims)} of {len(claims)} claimed differences have the paper's sign")
    if unjudged:
        parts.append(f"{unjudged} cells not judged")
    if absent:
        parts.append(f"{absent} of {len(found.judged)} cells missing")
    if found.problems:
        parts.append(f"{len(found.problems)} runs failed")
    return "; ".join(parts)


def as_dict(found: Found) -> dict[str, Any]:
    """The content of the JSON file."""
    return {
        "table": found.table.name,
        "paper": found.table.paper.title,
        "about": found.table.item.about,
        "note": found.table.item.note or None,
        "scale": found.scale,
        "summary": summary(found),
        "cells": [_cell(one) for one in found.judged],
        "problems": list(found.problems),
    }


def write(folder: Path, found: Found) -> list[Path]:
    """PAPER-TABLE.json, .md and .csv in `folder`."""
    stem = found.table.name.replace("/", "-")
    texts = {
        "json": json.dumps(as_dict(found), indent=2) + "\n",
        "md": markdown(found),
        "csv": _csv([_row(one) for one in found.judged]),
    }
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{stem}.{kind}" for kind in texts]
    for path, text in zip(paths, texts.values(), strict=True):
        write_atomic(path, text.encode(), shared=True)
    return paths


def markdown(found: Found) -> str:
    item = found.table.item
    parts = [f"# {found.table.name}: {item.about}", found.table.paper.title + "."]
    parts += [f"Note: {item.note}."] if item.note else []
    parts += [f"**{summary(found)}.**"]
    for title, (columns, lines) in (
        ("Cells", cells(found.measured)),
        ("Missing", missing(found.judged)),
    ):
        if lines:
            parts += [f"## {title}", markdown_table(columns, lines)]
    parts += ["## Failed runs", *(f"* {problem}" for problem in found.problems)] if found.problems else []
    parts.append(RULE)
    return "\n\n".join(parts) + "\n"


RULE = (
    "Ours: mean ± population deviation over seeds. Band: max(2 (deviation of ours + the paper's), 3 points). To the "
    "baseline: the mean difference over the same seeds with its 95 % interval. A cell is reproduced when the "
    "difference to the paper lies in the band and, where the paper's difference to the baseline exceeds 2 points, ours "
    "has its sign."
)


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
        "paper": one.paper,
        "paper_deviation": target.std if target else None,
        "paper_seeds": cell.seeds,
        "difference": one.difference,
        "band": one.band,
        "paired": asdict(one.paired) if one.paired else None,
        "lacking": list(one.lacking) if one.values else [],
        "not_stated": not_stated(cell.stated) if cell.stated else [],
        "verdict": one.verdict,
    }


def _row(one: Judged) -> dict[str, Any]:
    """The cell for CSV: one value per column."""
    found, ours = _cell(one), one.paired.ours if one.paired else None
    flat = {
        "baseline": one.paired.baseline if one.paired else None,
        "to_baseline": ours.mean if ours else None,
        "to_baseline_low": ours.low if ours else None,
        "to_baseline_high": ours.high if ours else None,
        "to_baseline_paper": one.paired.paper if one.paired else None,
    }
    verdict = found.pop("verdict")
    return {
        **{k: v for k, v in found.items() if k not in ("paired", "lacking", "not_stated")},
        **flat,
        "verdict": verdict,
    }


def _csv(rows: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else ["dataset"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _ours(one: Judged) -> str:
    if one.spread is None:
        return "-"
    spread = f" ± {one.spread.deviation:.2f}" if one.spread.count > 1 else ""
    return f"{one.spread.mean:.2f}{spread}"


def _paper(one: Judged) -> str:
    target = one.cell.target
    if one.paper is None:
        return target.text if target else "-"
    deviation = "" if target is None or target.std is None else f" ± {target.std:g}"
    return f"{one.paper:.2f}{deviation}"


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.2f}"


def _with_band(one: Judged) -> str:
    return _signed(one.difference) + ("" if one.band is None else f" (± {one.band:.2f})")


def _paired(paired: Paired | None) -> str:
    if paired is None:
        return "-"
    ours = paired.ours
    interval = "one seed" if ours.low is None or ours.high is None else f"{ours.low:+.2f}, {ours.high:+.2f}"
    paper = "" if paired.paper is None else f" (paper {paired.paper:+.2f})"
    return f"{ours.mean:+.2f} [{interval}] over {paired.baseline}{paper}"


def _seeds(one: Judged) -> str:
    return f"{len(one.values)} ({one.cell.seeds or '?'})"


def _names(names: Iterable[str]) -> str:
    unique = list(dict.fromkeys(names))
    more = f" and {len(unique) - SHOWN_NAMES} more" if len(unique) > SHOWN_NAMES else ""
    return ", ".join(unique[:SHOWN_NAMES]) + more
