"""What commands show of the cells of a comparison: on stdout, ended by ctrl-C with a remedy."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import typer

from everfed.commands.interrupts import interrupt_message, same_command
from everfed.commands.output import stdout
from everfed.comparison.cells import Cell, Observer, Output
from everfed.progress import Several, watching
from everfed.scores import score_of


class Terminal(Output):
    """A bar or plain lines for a cell that runs alone, one line at the end of every cell that runs beside others, or
    JSON lines."""

    def __init__(self, as_json: bool) -> None:
        self._as_json, self._several = as_json, Several(0)

    def begin(self, cells: Sequence[Cell]) -> None:
        self._several = Several(sum(not cell.finished for cell in cells))

    def say(self, line: str) -> None:
        if not self._as_json:
            typer.echo(line)

    def fault(self, line: str) -> None:
        typer.echo(line, err=True)

    @contextmanager
    def watch(self, cell: Cell, title: str) -> Iterator[Sequence[Observer]]:
        was_finished = cell.finished
        self._several.begin()
        showing = watching(stdout(), self._as_json, title, several=self._several)
        with interrupt_message(same_command) as interrupts, showing as observer:
            yield (_with_folder(observer, cell.folder) if self._as_json else observer), interrupts
        self._several.finished += not was_finished

    def beside(self) -> AbstractContextManager[object]:
        return interrupt_message(same_command)

    def event(self, cell: Cell, event: dict[str, Any], number: str) -> None:
        if self._as_json:
            typer.echo(json.dumps({"run": str(cell.folder), **event}))
        elif event["event"] in ("end", "fault"):
            typer.echo(f"{number} {cell.title}: {_ending(event)}")


def _ending(event: dict[str, Any]) -> str:
    if event["event"] == "fault":
        return str(event["message"])
    score = score_of(event.get("score", "accuracy"))
    value = event["metrics"].get(score.main)
    scored = "" if value is None else f"{score.word} {value:.3f}"
    return f"{scored} after {event['seconds']:.1f} s"


def _with_folder(observer: Observer, folder: Path) -> Observer:
    return lambda event: observer({"run": str(folder), **event})
