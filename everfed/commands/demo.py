"""`everfed demo`: a comparison on embedded data, with its table and report."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from everfed.commands import options
from everfed.commands.compare import compared, print_comparison


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the run folders.")] = Path("runs/demo"),
    scale: options.Scale = 1.0,
    as_json: options.Json = False,
) -> None:
    """Compare three methods on rotated digits, print the table, write the report. Needs no download.

    Ten clients learn handwritten digits that are rotated differently in every
    task. fedavg forgets, der replays, and fedgp+der also projects gradients
    that conflict with any client's buffer. When the command is repeated,
    finished runs are kept.

    \b
    Example:
      everfed demo
    """
    from everfed.experiments.jobs import JobSettings

    found = compared("demo", None, None, [], out, JobSettings(None, scale, 5.0, as_json))
    print_comparison(found, as_json)
    figures = find_spec("matplotlib") is not None
    report = found.report(figures=figures)
    if not as_json:
        without = "" if figures else " (no figures as files: pip install 'everfed[plots]')"
        typer.echo(f"report: {report}{without}")
