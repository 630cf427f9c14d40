"""`everfed report`: what runs found, as one page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from everfed.errors import UserError


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders of a comparison.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The page to write (default: report.html in the first folder)."),
    ] = None,
) -> None:
    """Write a report of one run, or of several side by side.

    \b
    Examples:
      everfed report runs/demo-fedgp+der-0
      everfed report runs/demo --out demo.html
    """
    folders = finished(runs)
    from everfed.report import write

    typer.echo(f"report: {write(folders, out or runs[0] / 'report.html')}")


def finished(named: Sequence[Path]) -> list[Path]:
    """The finished runs among the folders named and directly below them. Raises UserError where there is none."""
    found = []
    for folder in named:
        inside = sorted(path.parent for path in folder.glob("*/result.json"))
        runs = [folder] if (folder / "result.json").is_file() else inside
        if not runs:
            raise UserError(
                f"{folder} is not a finished run and holds none; `everfed resume {folder}` ends a started one"
            )
        found += runs
    return found
