"""`everfed report`: one page about one run or several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders of a comparison.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The page to write (default: report.html in the first folder)."),
    ] = None,
    title: Annotated[str, typer.Option(metavar="TEXT", help="The page's heading (default: methods and data).")] = "",
    figures: Annotated[
        bool, typer.Option("--figures/--no-figures", help="Also draw PNG and PDF files (needs everfed\\[plots]).")
    ] = True,
) -> None:
    """Write a report of one run, or of several side by side.

    RUN is a run folder, or a folder of several, such as that of everfed
    compare. Tables and figures are written to a folder beside the page.

    \b
    Examples:
      everfed report runs/demo-fedgp+der-0
      everfed report runs/demo --out demo.html --title "Rotated digits"
    """
    from everfed.reports.html import write

    typer.echo(f"report: {write(runs, out, figures=figures, title=title)}")
