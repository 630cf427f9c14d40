"""`everfed data get`: published data sets, fetched into the data folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from everfed.errors import UserError

if TYPE_CHECKING:
    from rich.progress import Progress

data = typer.Typer(add_completion=False, no_args_is_help=True, help="Data sets: get those that are published.")


@data.callback()
def _group() -> None:
    """Data sets: get those that are published."""


@data.command()
def get(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Data sets, such as mnist or cifar10.")],
    folder: Annotated[
        Path | None, typer.Option("--data", metavar="DIR", help="Folder of data sets; else what EVERFED_DATA names.")
    ] = None,
    source: Annotated[
        str | None, typer.Option("--from", metavar="DIR|URL", help="A folder or an address that has the files.")
    ] = None,
) -> None:
    """Fetch data sets into the data folder, checked by their checksums.

    The folder is that of --data, else of EVERFED_DATA. Files that are there
    and whole are kept. Without a network, bring the files by hand and name
    their folder with --from. The sets' licences are their publishers'.

    \b
    Examples:
      everfed data get mnist --data ~/data
      everfed data get cifar10 cifar100
      everfed data get mnist --from /media/stick
    """
    from everfed.data.download import ARCHIVES, fetch
    from everfed.data.sources import VARIABLE, data_folder
    from everfed.naming import nearest

    root = data_folder(folder)
    if root is None:
        raise UserError(f"no data folder is named; use --data DIR, or set {VARIABLE}")
    for name in names:
        if name not in ARCHIVES:
            raise UserError(f"there is no address for a data set {name!r}.{nearest(name, ARCHIVES)}")
    for name in names:
        with _bar() as progress:
            place = fetch(name, root, source, _reporter(progress))
        typer.echo(f"{name}: {place}")
    typer.echo(f"runs find it with --data {root}, or with {VARIABLE}={root}")


def _bar() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(20), DownloadColumn(), TimeRemainingColumn()
    return Progress(*columns, console=Console(stderr=True))


def _reporter(progress: Progress) -> Callable[[str, int, int | None], None]:
    """A bar for every file."""
    bars: dict[str, Any] = {}

    def report(file: str, done: int, size: int | None) -> None:
        if file not in bars:
            bars[file] = progress.add_task(file, total=size)
        progress.update(bars[file], completed=done)

    return report
