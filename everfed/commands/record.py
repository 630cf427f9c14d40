"""`everfed record`: finished runs as small records, and the tables that are made of records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from everfed.errors import UserError

RECORDS = Path("results")
Records = Annotated[Path, typer.Option("--records", metavar="DIR", help="Folder of the records.")]


def record(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="[RUN...]", help="Run folders, or folders that hold some.")
    ] = None,
    records: Records = RECORDS,
    shared: Annotated[
        bool, typer.Option("--shared", help="Other programs used the device: the seconds are no measure of speed.")
    ] = False,
    remark: Annotated[str, typer.Option(metavar="TEXT", help="What a reader of the numbers must know.")] = "",
    page: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also renew the tables of this page, REPRODUCIBILITY.md.")
    ] = None,
) -> None:
    """Keep finished runs as small records, and renew the tables that are made of them.

    A record holds a run's recipe, method, seed, engine, hardware, metrics,
    accuracy matrix, seconds and samples: what a table needs, without the run
    folder. everfed reproduce --status shows the tables that records fill.

    \b
    Examples:
      everfed record runs/reproduce
      everfed record runs/mine-fedavg-0 --shared --remark "two runs on one GPU"
      everfed record --page REPRODUCIBILITY.md
    """
    from everfed.experiments.papers import page as tables
    from everfed.experiments.papers import records as kept
    from everfed.store.files import write_atomic
    from everfed.store.marked import read_page

    if not runs and page is None:
        raise UserError("name run folders to record, or a page to renew with --page")
    for folder in _folders(runs or []):
        typer.echo(str(kept.write(kept.of_run(folder, shared=shared, remark=remark), records)))
    if page is not None:
        write_atomic(page, tables.renewed(read_page(page), kept.read_all(records)).encode())
        typer.echo(str(page))


def _folders(given: list[Path]) -> list[Path]:
    """Run folders, themselves or below the folders given; only finished ones of those below."""
    from everfed.store.run import RECIPE, RESULT

    found: list[Path] = []
    for path in given:
        if not path.exists():
            raise UserError(f"there is no folder {path}")
        inside = sorted(result.parent for result in path.rglob(RESULT)) if not (path / RECIPE).exists() else [path]
        if not inside:
            raise UserError(f"{path} holds no finished run")
        found += inside
    return found
