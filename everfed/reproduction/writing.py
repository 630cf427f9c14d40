"""What a reproduction found, as tables for reading, CSV and JSON for computing, and one line."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from everfed.markdown import markdown_table
from everfed.metrics import PairedDifference
from everfed.reproduction.judging import REPRODUCED, SCALED, VERDICTS, Difference, Judged
from everfed.reproduction.tables import Table
from everfed.store.files import write_atomic

Lines = tuple[list[str], list[list[str]]]
SHOWN_NAMES = 6  # of methods and columns that a reason is spelled out for


@dataclass(frozen=True)
class Found:
    """All that a reproduction found. problems: runs that failed, with what they said."""

    table: Table
    scale: float
    judged: Sequence[Judged]
    differences: Sequence[Difference]
    problems: Sequence[str]

    @property
    def measured(self) -> list[Judged]:
        return [one for one in self.judged if not one.cell.missing]


def cells(found: Found) -> Lines:
    """(columns, lines) of the cells that were run."""
    settings = len({one.cell.setting for one in found.measured}) > 1
    metrics = len({one.cell.metric for one in found.measured}) > 1
    head = ["Data", *(["Setting"] if settings else []), "Method", *(["Metric"] if metrics else [])]
    lines = []
    for one in found.measured:
        cell = one.cell
        names = [cell.dataset, *([cell.setting] if settings else []), cell.method, *([cell.metric] if metrics else [])]
        lines.append([*names, _ours(one), _paper(one), _signed(one.difference), str(len(one.values)), one.verdict])
    return [*head, "Ours", "Paper", "Difference", "Runs", "Verdict"], lines


def paired(found: Found) -> Lines:
    """(columns, lines) of the differences to the baselines, with their intervals over seeds."""
    lines = [
        [
            " ".join(part for part in (one.dataset, one.setting, one.metric) if part),
            f"{one.method} - {one.baseline}",
            _interval(one.ours),
            _signed(one.paper),
            {True: "agrees", False: "disagrees", None: "-"}[one.agrees],
        ]
        for one in found.differences
    ]
    return ["Where", "Difference", "Ours, 95 % interval over seeds", "Paper", "Sign"], lines


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
    """What it comes to, in a line."""
    judged = [one for one in found.judged if one.verdict in VERDICTS]
    claims = [one for one in found.differences if one.agrees is not None]
    absent = sum(bool(one.cell.missing) for one in found.judged)
    parts = [f"{sum(one.verdict == REPRODUCED for one in judged)} of {len(judged)} judged cells reproduced"]
    if found.scale < 1:
        parts = [f"{SCALED} (--scale {found.scale:g})"]
    elif claims:
        agreeing = sum(bool(one.agrees) for one in claims)
        parts.append(f"{agreeing} of {len(claims)} claimed differences have the paper's sign")
    if absent:
        parts.append(f"{absent} of {len(found.judged)} cells missing")
    if found.problems:
        parts.append(f"{len(found.problems)} runs failed")
    return "; ".join(parts)


def as_dict(found: Found) -> dict[str, Any]:
    """The same as JSON has it."""
    return {
        "table": found.table.name,
        "paper": found.table.paper.title,
        "about": found.table.item.about,
        "note": found.table.item.note or None,
        "scale": found.scale,
        "comparable": found.scale == 1,
        "summary": summary(found),
        "cells": [_cell(one) for one in found.judged],
        "differences": [asdict(one) for one in found.differences],
        "problems": list(found.problems),
    }


def write(folder: Path, found: Found) -> list[Path]:
    """PAPER-TABLE.json, .md and .csv in `folder`."""
    stem = found.table.name.replace("/", "-")
    texts = {
        "json": json.dumps(as_dict(found), indent=2) + "\n",
        "md": markdown(found),
        "csv": _csv([_cell(one) for one in found.judged]),
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
        ("Cells", cells(found)),
        ("Differences over the same seeds", paired(found)),
        ("Missing", missing(found.judged)),
    ):
        if lines:
            parts += [f"## {title}", markdown_table(columns, lines)]
    parts += ["## Failed runs", *(f"* {problem}" for problem in found.problems)] if found.problems else []
    parts.append(RULE)
    return "\n\n".join(parts) + "\n"


RULE = (
    "Ours: mean ± population deviation over seeds. A cell counts as reproduced when |ours - paper| is at most "
    "max(2 (deviation of ours + the paper's), 3 points); a difference is claimed where the paper's exceeds 2 points."
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
        "runs": len(one.values),
        "paper": one.paper,
        "paper_deviation": target.std if target else None,
        "difference": one.difference,
        "verdict": one.verdict,
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


def _interval(ours: PairedDifference) -> str:
    if ours.low is None or ours.high is None:
        return f"{ours.mean:+.2f} (one seed)"
    return f"{ours.mean:+.2f} [{ours.low:+.2f}, {ours.high:+.2f}]"


def _names(names: Iterable[str]) -> str:
    unique = list(dict.fromkeys(names))
    more = f" and {len(unique) - SHOWN_NAMES} more" if len(unique) > SHOWN_NAMES else ""
    return ", ".join(unique[:SHOWN_NAMES]) + more
