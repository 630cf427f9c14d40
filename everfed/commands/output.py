"""What commands say: results and tables to stdout, everything else to stderr."""

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


def tell_result(folder: Path, result: dict[str, Any], as_json: bool) -> None:
    """The end of a run: its main numbers and where it lies."""
    metrics = result["metrics"]
    if as_json:
        typer.echo(json.dumps({"event": "result", "folder": str(folder), "metrics": metrics}))
        return
    score = score_of(result["score"])
    shown = {METRICS[key].named(score): metrics.get(key) for key in (score.main, score.lost)}
    numbers = "  ".join(f"{name} {score.text(value)}" for name, value in shown.items() if value is not None)
    typer.echo(f"{result['method']} seed {result['seed']}: {numbers}")
    typer.echo(f"run folder: {folder}")


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table: drawn on a terminal, Markdown elsewhere."""
    console = stdout()
    if not console.is_terminal:
        typer.echo(markdown_table(columns, rows))
        return
    table = Table(*columns)
    for row in rows:
        table.add_row(*row)
    console.print(table)
