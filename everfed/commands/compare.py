"""`everfed compare`: several methods and seeds on the same stream, one table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from everfed.commands import options

if TYPE_CHECKING:
    from everfed.experiments import Comparison
    from everfed.experiments.jobs import JobSettings


def compare(
    recipe: options.Recipe,
    methods: Annotated[
        str | None,
        typer.Option(metavar="M,M,...", help="Methods, or package.module:Name (default: those the recipe compares)."),
    ] = None,
    seeds: options.Seeds = None,
    sets: options.Sets = [],  # noqa: B006 (typer copies it)
    data: options.Data = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the run folders (default: runs/RECIPE-compare).")
    ] = None,
    scale: options.Scale = 1.0,
    checkpoint_every: options.CheckpointEvery = 5.0,
    jobs: options.Jobs = 0,
    track: options.Track = [],  # noqa: B006 (typer copies it)
    as_json: options.Json = False,
) -> None:
    """Run several methods over several seeds and print one table, the best first.

    Every cell is an ordinary run folder DIR/METHOD-SEED. When the command is
    repeated, finished cells are kept and interrupted ones resumed; several
    processes may work through one DIR, each taking cells that no other has.
    Other methods or seeds in the same DIR are added to the table. The first
    method is what the others are compared with, seed by seed. A method of your
    own is package.module:Name, a part or a list of parts, or a table
    [methods.NAME] of the recipe. The table is also written as compare.json, compare.md and compare.csv. An
    option of a part (--set method.PART.OPTION=...) applies to the methods that
    have that part.

    \b
    Examples:
      everfed compare demo --methods fedavg,er,fedgp+er --seeds 0,1,2
      everfed compare fedgp/table1-rotated-mnist --data ~/data
      everfed compare my.toml --methods fedavg,fedprox --set method.fedprox.mu=0.1
      everfed compare my.toml --methods fedavg,my_part:Clip
    """
    from everfed.experiments.jobs import JobSettings

    settings = JobSettings(options.absolute(data), scale, checkpoint_every, as_json, track, jobs)
    comparison = compared(recipe, methods, seeds, sets, out, settings)
    print_comparison(comparison, as_json)
    if comparison.problems:
        raise typer.Exit(1)


def compared(
    recipe: str,
    methods: str | None,
    seeds: str | None,
    sets: Sequence[str],
    out: Path | None,
    settings: JobSettings,
) -> Comparison:
    """Run the comparison and write its table."""
    from everfed.commands.terminal import Terminal
    from everfed.experiments.grid import plan_comparison

    return plan_comparison(recipe, methods, options.parse_seeds(seeds), out, sets=sets).run(
        settings, Terminal(settings.as_json)
    )


def print_comparison(comparison: Comparison, as_json: bool) -> None:
    """Print the table, and where it was written."""
    from everfed.commands.output import show_table
    from everfed.experiments import comparison as tables

    folder, rows = comparison.folder, comparison.rows
    if as_json:
        typer.echo(json.dumps({"event": "comparison", "folder": str(folder), "rows": tables.as_dict(rows)}))
        return
    show_table(*tables.table(rows, comparison.heading, comparison.baseline))
    if comparison.note:
        typer.echo(comparison.note)
    typer.echo(f"written to {folder}: compare.json, compare.md, compare.csv")
