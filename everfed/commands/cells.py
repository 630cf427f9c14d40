"""How commands run the cells of a comparison: shown on stdout, with trackers, ended by ctrl-C with a remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from everfed.commands import tracking
from everfed.commands.interrupts import interrupt_message, same_command
from everfed.commands.output import stdout

if TYPE_CHECKING:
    from everfed.comparison.cells import Cell, Settings, Watch

Observer = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Running:
    """The options of a command that runs cells."""

    data: Path | None
    scale: float
    checkpoint_every: float
    as_json: bool
    track: Sequence[str] = ()

    def settings(self, cells: Sequence[Cell]) -> Settings:
        """How these cells are run."""
        from everfed.comparison.cells import Settings

        watch = _watch(cells, self.as_json, self.track)
        return Settings(self.data, self.scale, self.checkpoint_every, watch, _say)


def _watch(cells: Sequence[Cell], as_json: bool, track: Sequence[str]) -> Watch:
    from everfed.progress import Several, watching

    several = Several(sum(not cell.finished for cell in cells))

    @contextmanager
    def watch(cell: Cell, title: str) -> Iterator[Sequence[Observer]]:
        if cell.finished:
            yield ()
            return
        several.begin()
        showing = watching(stdout(), as_json, title, several=several)
        with interrupt_message(same_command) as interrupts, showing as observer:
            display = _with_folder(observer, cell.folder) if as_json else observer
            yield display, *tracking.observers(track, cell.folder, cell.recipe), interrupts
        several.finished += 1

    return watch


def _with_folder(observer: Observer, folder: Path) -> Observer:
    return lambda event: observer({"run": str(folder), **event})


def _say(line: str) -> None:
    typer.echo(line, err=True)
