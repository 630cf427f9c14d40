"""`everfed reproduce`: a whole table of a paper, ours beside the paper's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from everfed.commands import options
from everfed.commands.record import RECORDS, Records
from everfed.errors import UserError

if TYPE_CHECKING:
    from everfed.experiments.papers.writing import Reproduction


def reproduce(
    table: Annotated[
        str | None, typer.Argument(metavar="[PAPER/TABLE]", help="A table or figure, such as fedgp/table1.")
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="Show every table with what it costs, and run nothing.")] = False,
    status: Annotated[
        bool, typer.Option("--status", help="Show the cells with records, verdicts, what is planned and what it costs.")
    ] = False,
    records: Records = RECORDS,
    rate: Annotated[
        float | None,
        typer.Option(metavar="N", min=1, help="For --status: training samples a second (default: the records')."),
    ] = None,
    methods: Annotated[
        str | None, typer.Option(metavar="M,M,...", help="Only these methods, by everfed's names or the paper's.")
    ] = None,
    columns: Annotated[
        str | None, typer.Option(metavar="C,C,...", help="Only columns whose name contains one of these.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="How many seeds (default: as many as the recipe compares).")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(metavar="E", help="How clients are run: auto, eager, processes, graphs or ranks.")
    ] = None,
    data: options.Data = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the run folders (default: runs/reproduce).")
    ] = None,
    scale: Annotated[
        str,
        typer.Option(metavar="F", help="Share of the rounds and the data, or small (0.05); not comparable below 1."),
    ] = "1",
    checkpoint_every: options.CheckpointEvery = 5.0,
    jobs: options.Jobs = 0,
    track: options.Track = [],  # noqa: B006 (typer copies it)
    as_json: options.Json = False,
) -> None:
    """Run a table of a paper and print our numbers, the paper's, and the verdicts on levels and effects.

    Every cell either runs or is listed with the reason why not. When the
    command is repeated, finished runs are kept and interrupted ones resumed;
    tables share their common runs. The result is also written to the folder,
    as JSON, Markdown and CSV.

    \b
    Examples:
      everfed reproduce --list
      everfed reproduce --status --rate 5000
      everfed reproduce fedgp/table1 --data ~/data
      everfed reproduce fedgp/table1 --data ~/data --scale small --seeds 1
      everfed reproduce fedgp/table7 --methods der,fedgp+der --columns MNIST
    """
    from everfed.commands.terminal import Terminal
    from everfed.experiments.papers import reproducing

    factor = reproducing.share(scale)
    if (show or status) and (methods or columns):
        raise UserError(f"--{'list' if show else 'status'} shows whole tables; leave --methods and --columns out")
    if show:
        return _show_list(table or "", seeds, factor, as_json)
    if status:
        return _show_status(table or "", records, rate, seeds, as_json)
    if table is None:
        raise UserError("name a table, such as fedgp/table1; `everfed reproduce --list` shows every one")
    found = reproducing.reproduce(
        table,
        methods,
        columns,
        seeds,
        out,
        engine=engine,
        data_dir=options.absolute(data),
        scale=factor,
        track=track,
        checkpoint_every=checkpoint_every,
        jobs=jobs,
        output=Terminal(as_json),
    )
    _print(found, as_json)
    if found.problems:
        raise typer.Exit(1)


def _print(found: Reproduction, as_json: bool) -> None:
    from everfed.commands.output import show_table
    from everfed.experiments.papers import writing

    written = found.write()
    if as_json:
        typer.echo(json.dumps({"event": "reproduction", **found.as_dict()}))
        return
    for columns, lines in (writing.cells(found.measured), writing.missing(found.judged)):
        if lines:
            show_table(columns, lines)
            typer.echo("")
    for problem in found.problems:
        typer.echo(f"failed: {problem}")
    if found.table.item.note:
        typer.echo(f"note: {found.table.item.note}")
    typer.echo(f"{found.table.name}: {found.summary}")
    typer.echo(f"written to {', '.join(map(str, written))}")


def _show_list(prefix: str, seeds: int | None, scale: float, as_json: bool) -> None:
    from everfed.commands.output import show_table
    from everfed.experiments.papers.overview import LISTED, overview
    from everfed.experiments.papers.reproducing import seeds_of
    from everfed.experiments.papers.tables import papers

    rows = overview(prefix.lower(), lambda recipe: seeds_of(recipe, seeds), scale)
    if not rows:
        raise UserError(f"no table begins with {prefix!r}; papers: {', '.join(papers())}")
    if as_json:
        typer.echo(json.dumps([vars(row) for row in rows], indent=2))
        return
    show_table(LISTED, [row.line() for row in rows])
    typer.echo("Samples: training samples processed, from the recipes; replayed and generated ones come on top.")


def _show_status(prefix: str, folder: Path, rate: float | None, seeds: int | None, as_json: bool) -> None:
    from everfed.commands.output import show_table
    from everfed.experiments.papers.overview import PLANNED, STATUS, progress
    from everfed.experiments.papers.tables import papers

    found = progress(prefix.lower(), folder, rate, seeds)
    if not found.tables:
        raise UserError(f"no table with runs begins with {prefix!r}; papers: {', '.join(papers())}")
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=2))
        return
    show_table(STATUS, [row.line() for row in found.tables])
    typer.echo(f"{found.overall.text()} Tables share runs: a run that several need is counted in each.")
    if found.planned:
        show_table(PLANNED, [row.line() for row in found.planned])
