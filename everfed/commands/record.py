"""`everfed record`: finished runs as small records, and the pages that are made of records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from everfed.errors import UserError

RECORDS = Path("results")
Records = Annotated[Path, typer.Option("--records", metavar="DIR", help="Folder of the records.")]


def record(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN...]", help="Run folders, folders of some, or a result.json."),
    ] = None,
    records: Records = RECORDS,
    shared: Annotated[
        bool, typer.Option("--shared", help="Other programs used the device: the seconds are no measure of speed.")
    ] = False,
    remark: Annotated[str, typer.Option(metavar="TEXT", help="What a reader of the numbers must know.")] = "",
    pages: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Also write REPRODUCIBILITY.md and docs/results/ in this folder, from all records."
        ),
    ] = None,
) -> None:
    """Keep finished runs as small records, and write the pages that are made of records.

    A record holds a run's recipe, method, seed, engine, hardware, metrics,
    accuracy matrix, seconds and samples: what a table needs, without the run
    folder. A run that diverged is recorded, too. everfed reproduce --status
    shows the tables that records fill.

    \b
    Examples:
      everfed record runs/reproduce --pages .
      everfed record runs/mine-fedavg-0 --shared --remark "two runs on one GPU"
      everfed record --pages .
    """
    from everfed.experiments.papers import pages as written
    from everfed.experiments.papers import records as kept

    if not runs and pages is None:
        raise UserError("name run folders to record, or a folder for the pages with --pages")
    made = [kept.write(kept.of_run(run, shared=shared, remark=remark), records) for run in kept.folders(runs or [])]
    made += written.write(pages, records) if pages is not None else []
    for path in made:
        typer.echo(str(path))
