"""The command line. Each command is a file in everfed/commands; torch is imported only inside them."""

from __future__ import annotations

import contextlib
import os
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from everfed.errors import FAULT, exit_code, in_own_code, sentence

# in the order of the help page: name -> place in everfed/commands
PLACES = {
    **{
        name: f"{name}:{name}"
        for name in ("init", "run", "resume", "forget", "compare", "sweep", "reproduce", "submit", "record")
    },
    **{name: f"{name}:{name}" for name in ("leaderboard", "demo", "show", "report", "samples", "export", "ui")},
    "bench": "bench:bench",
    "near-optimality": "near_optimality:near_optimality",
    "doctor": "doctor:doctor",
    "serve": "serve:serve",
    "join": "join:join",
    "list": "listing:listing",
    "data": "data:data",
    "federation": "federation:federation",
}
WHOLE = "EVERFED_TRACEBACK"  # a variable of the environment
LOOK: dict[str, Any] = {
    "pretty_exceptions_enable": False,
    "rich_markup_mode": "rich",
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


class Loaded(dict[str, Any]):
    """Commands by name; the file of one is imported when it is asked for."""

    def __getitem__(self, name: str) -> Any:
        module, _, attribute = super().__getitem__(name).partition(":")
        found = getattr(import_module(f"everfed.commands.{module}"), attribute)
        alone = found
        if not isinstance(found, typer.Typer):
            alone = typer.Typer(add_completion=False, **LOOK)
            alone.command(name)(found)
        command = typer.main.get_command(alone)
        command.name = name
        return command

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 (dict's own would not load it)


class Commands(TyperGroup):
    """Turns errors that need no traceback into one message and an exit code."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = Loaded(PLACES)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            code = exit_code(error)
            own = in_own_code(error) if code is None and not os.environ.get(WHOLE) else ""
            if code is None and not own:
                raise
            said = f"{own}; {WHOLE}=1 shows everfed's lines, too" if own else f"error: {sentence(error)}"
            typer.echo(said, err=True)
            raise typer.Exit(FAULT if code is None else code) from error


app = typer.Typer(cls=Commands, no_args_is_help=True, **LOOK)


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
      everfed init                            a folder with a recipe, a network and a part of your own
      everfed list methods                    what can be run
      everfed show fedgp+der                  what it does, its options, what the server sees
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
