"""`everfed report`: what runs found, as one page, tables and figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders that hold some.")],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE|DIR", help="The page, or a folder for report.html (default: report.html in the first folder)."
        ),
    ] = None,
    figures: Annotated[
        bool, typer.Option("--figures/--no-figures", help="Also write the plots as PNG and PDF (needs matplotlib).")
    ] = True,
) -> None:
    """Write a report of one run, or of several side by side; runs that differ only in their seed are averaged.

    The page is one file that works offline. Beside NAME.html a folder NAME holds the tables as Markdown, CSV and LaTeX
    and the figures as PNG and PDF. Unfinished runs are reported as far as they came.

    \b
    Examples:
      everfed report runs/demo-fedgp+der-0
      everfed report runs/demo --out demo.html
      everfed report runs/a runs/b --out reports --no-figures
    """
    from everfed.report import write

    typer.echo(f"report: {write(runs, out or runs[0] / 'report.html', figures=figures)}")
