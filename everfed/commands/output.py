"""Output of commands: results and tables to stdout, everything else to stderr."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from everfed.reports.formats import markdown_table
from everfed.reports.result import headline, scale_note


def stdout() -> Console:
    return Console()


def print_result(folder: Path, result: dict[str, Any], as_json: bool) -> None:
    """Print the main metrics of a run and its folder."""
    metrics = result["metrics"]
    if as_json:
        typer.echo(json.dumps({"event": "result", "folder": str(folder), "metrics": metrics}))
        return
    for line in (headline(result), scale_note(result)):
        if line:
            typer.echo(line)
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
