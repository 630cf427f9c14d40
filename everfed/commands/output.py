"""Output of commands: results and tables to stdout, everything else to stderr."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from everfed.markdown import markdown_table
from everfed.scores import METRICS, score_of


def stdout() -> Console:
    return Console()


def print_result(folder: Path, result: dict[str, Any], as_json: bool) -> None:
    """Print the main metrics of a run and its folder."""
    metrics = result["metrics"]
    if as_json:
        typer.echo(json.dumps({"event": "result", "folder": str(folder), "metrics": metrics}))
        return
    score = score_of(result["score"])
    shown = {METRICS[key].named(score): metrics.get(key) for key in (score.main, score.lost)}
    numbers = "  ".join(f"{name} {score.text(value)}" for name, value in shown.items() if value is not None)
    typer.echo(f"{result['method']} seed {result['seed']}: {numbers}")
    if (scale := result.get("scale", 1.0)) < 1:
        typer.echo(f"at --scale {scale:g} of the work: fewer rounds, less data; it does not compare with full runs")
    typer.echo(f"run folder: {folder}")


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: drawn on a terminal, Markdown elsewhere."""
    console = stdout()
    if not console.is_terminal:
        typer.echo(markdown_table(columns, rows))
        return
    table = Table(*columns)
    for row in rows:
        table.add_row(*row)
    console.print(table)
