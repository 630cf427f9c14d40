"""`everfed submit`: identical workers for a table, on a cluster or on this machine."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from everfed.errors import UserError

TABLES = ("compare", "sweep", "reproduce", "leaderboard")


class On(StrEnum):
    """Where workers run."""

    slurm = "slurm"
    kubernetes = "kubernetes"
    local = "local"


def submit(
    system: Annotated[On, typer.Argument(metavar="SYSTEM", help="slurm, kubernetes or local.")],
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND ...", help=f"One of {', '.join(TABLES)}, with its --out.")
    ] = None,
    workers: Annotated[int, typer.Option(metavar="N", min=1, help="How many workers.")] = 1,
    now: Annotated[bool, typer.Option("--now", help="Submit it, too.")] = False,
    template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A template of your site instead of the shipped one.")
    ] = None,
    show_template: Annotated[
        bool, typer.Option("--show-template", help="Print the shipped template and exit.")
    ] = False,
) -> None:
    """Write a script that starts N identical workers for a table.

    Each worker is the command itself. Workers share its folder, and each takes
    runs that no other has, so that N of them fill one table. A worker may be
    stopped and started again at any moment. The script lies in the folder, in
    submit/, beside the workers' outputs.

    \b
    Examples:
      everfed submit slurm --workers 8 -- compare demo --seeds 0,1,2 --out runs/table
      everfed submit slurm --workers 8 --now -- reproduce fedgp/table1 --data ~/data --out runs/table1
      everfed submit local --workers 2 --now -- compare demo --jobs 1 --out runs/table
      everfed submit slurm --show-template > site.sbatch
    """
    from everfed.experiments import submit as workers_of

    if show_template:
        typer.echo(workers_of.template_of(system), nl=False)
        return
    words = list(command or ())
    folder = _folder(words)
    text = None if template is None else _read(template)
    script = workers_of.write_script(system, words, folder, workers, template=text, here=Path.cwd())
    typer.echo(f"written: {script}")
    if not now:
        typer.echo(f"submit it with: {' '.join(workers_of.SYSTEMS[system].submit)} {script}")
    elif code := workers_of.submit(system, script):
        raise typer.Exit(code)


def _folder(words: list[str]) -> Path:
    """The folder of the table's runs. The command is parsed as it will be, so a misspelt option is found now."""
    from everfed.cli import PLACES, Loaded

    if not words or words[0] not in TABLES:
        given = f"not {words[0]!r}" if words else "and there is none"
        raise UserError(f"after -- comes the command of a table, one of {', '.join(TABLES)}, {given}")
    context = Loaded(PLACES)[words[0]].make_context(words[0], words[1:])
    folder = context.params.get("out")
    if folder is None:
        raise UserError(f"{words[0]} needs --out DIR here: the folder of the runs, which the workers share")
    return Path(folder).expanduser().absolute()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"--template {path}: cannot be read ({error.strerror})") from error
