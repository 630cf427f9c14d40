"""The command line. Each command is a file in everfed/commands; torch is imported only inside them."""

from __future__ import annotations

import contextlib
import os
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from everfed.commands.bench import bench
from everfed.commands.compare import compare
from everfed.commands.demo import demo
from everfed.commands.doctor import doctor
from everfed.commands.export import export
from everfed.commands.federation import federation
from everfed.commands.join import join
from everfed.commands.leaderboard import leaderboard
from everfed.commands.listing import listing
from everfed.commands.near_optimality import near_optimality
from everfed.commands.record import record
from everfed.commands.report import report
from everfed.commands.reproduce import reproduce
from everfed.commands.resume import resume
from everfed.commands.run import run
from everfed.commands.samples import samples
from everfed.commands.serve import serve
from everfed.commands.sweep import sweep
from everfed.commands.ui import ui
from everfed.errors import exit_code, sentence


class Commands(TyperGroup):
    """Turns errors that need no traceback into one message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            code = exit_code(error)
            if code is None:
                raise
            typer.echo(f"error: {sentence(error)}", err=True)
            raise typer.Exit(code) from error


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
COMMANDS = (
    *(run, resume, compare, sweep, reproduce, record, leaderboard),
    *(demo, report, samples, export, ui, bench, near_optimality, doctor),
)
FEDERATION = (serve, join)
for command in (*COMMANDS, *FEDERATION):
    app.command()(command)
app.command("list")(listing)
app.add_typer(federation, name="federation")


def _version(asked: bool) -> None:
    if asked:
        from everfed import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def everfed(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Continual federated learning: train one model across many clients whose data never stops changing.

    \b
    Start here:
      everfed demo                            three methods on rotated digits
      everfed list methods                    what can be run
      everfed run demo --method fedgp+der     one run, one run folder
      everfed resume runs/demo-fedgp+der-0    go on after an interruption
      everfed compare demo --methods fedavg,der --seeds 0,1,2
      everfed sweep demo --grid train.optimizer.lr=0.01,0.1
      everfed reproduce --list                the papers' tables, what they cost
      everfed doctor                          versions, device, data found

    Every command explains itself with examples: everfed COMMAND --help.
    """


def main() -> None:
    """The console entry. Of the processes that torchrun starts, the first prints results; all may print errors."""
    if os.environ.get("RANK", "0") == "0":
        app(prog_name="everfed")
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        app(prog_name="everfed")
