"""Output of commands: results and tables to stdout, everything else to stderr; and what ctrl-C ends with."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from everfed.reports.formats import markdown_table


def stdout() -> Console:
    return Console()


def print_result(folder: Path, result: dict[str, Any], as_json: bool) -> None:
    """Print the main metrics of a run and its folder."""
    from everfed.reports.result import headline, scope_of

    metrics = result["metrics"]
    if as_json:
        typer.echo(json.dumps({"event": "result", "folder": str(folder), "metrics": metrics}))
        return
    for line in (headline(result), scope_of(result)):
        if line:
            typer.echo(line)
    typer.echo(f"run folder: {folder}")


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: drawn on a terminal, Markdown elsewhere."""
    console = stdout()
    if not console.is_terminal:
        typer.echo(markdown_table(columns, rows))
        return
    table = Table(*columns)
    for row in rows:
        table.add_row(*row)
    console.print(table)


# ctrl-C --------------------------------------------------------------------------------------------------------------

INTERRUPTED = 130  # what shells give a command that ctrl-C ended


class Interrupts:
    """Remembers ctrl-C. As an observer of a run it raises KeyboardInterrupt at the next event if nothing else has.

    Python prints an exception that is raised in a destructor or in a weakref callback and goes on, KeyboardInterrupt
    included, and every import ends with such a callback: without this a ctrl-C at that moment would have no effect.
    """

    def __init__(self) -> None:
        self.pending = False

    def arrived(self, number: int, frame: object) -> None:
        """The signal handler."""
        self.pending = True
        raise KeyboardInterrupt

    def __call__(self, event: dict[str, Any]) -> None:
        if self.pending and event["event"] != "fault":  # a fault is how the interruption itself is reported
            self.pending = False
            raise KeyboardInterrupt


@contextmanager
def interrupt_message(remedy: Callable[[], str]) -> Iterator[Interrupts]:
    """Ctrl-C ends the command with `remedy`, a sentence on how to go on. Yields an observer for the run inside."""
    interrupts, before = Interrupts(), signal.getsignal(signal.SIGINT)
    # elsewhere than in the main thread there are no signals; where ctrl-C is ignored it stays so
    heeds = before is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    if heeds:
        signal.signal(signal.SIGINT, interrupts.arrived)
    try:
        yield interrupts
    except KeyboardInterrupt:
        typer.echo(f"interrupted; {remedy()}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    finally:
        if heeds:
            signal.signal(signal.SIGINT, before)


def same_command() -> str:
    """The remedy of commands that find what is done already."""
    return "the same command goes on where it stopped"
