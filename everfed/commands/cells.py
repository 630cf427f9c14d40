"""The runs of a comparison: each cell is an ordinary run folder, which is run, resumed, or kept if finished."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from everfed.commands import tracking
from everfed.commands.interrupts import interrupt_message, same_command
from everfed.commands.output import stdout
from everfed.errors import FAULT, RecipeError, UserError, exit_code
from everfed.recipe import Places, Recipe, placed, read, read_placed, settled, to_toml
from everfed.recipe.places import Key
from everfed.recipe.reading import parse_set
from everfed.store.run import RunFolder


@dataclass(frozen=True)
class Cell:
    """row: its name in the table. recipe: settled. folder: its run folder."""

    row: str
    recipe: Recipe
    folder: Path
    places: Places


@dataclass(frozen=True)
class Outcome:
    """result: the content of result.json, or None when the run diverged; `problem` is then the error."""

    cell: Cell
    result: dict[str, Any] | None
    problem: str = ""


@dataclass(frozen=True)
class Settings:
    """How the cells are run."""

    data: Path | None
    scale: float
    checkpoint_every: float
    as_json: bool
    track: Sequence[str] = ()


def new_cell(row: str, source: str, folder: Path, *, method: str | None, seed: int, sets: Sequence[str]) -> Cell:
    """A cell of the recipe `source` with `method`, `seed` and `sets` on top. Raises RecipeError."""
    reading = read_placed(source, method=method, seed=seed, sets=sets)
    with placed(reading.places):
        own = settled(reading.recipe).model_copy(update={"compare": None})
    return Cell(row, own, folder, reading.places)


def parse_seeds(text: str) -> list[int]:
    """`0,1,2`. Raises RecipeError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise RecipeError(f"--seeds {text}: write whole numbers of at least 0 with commas between, such as 0,1,2")
    return list(dict.fromkeys(int(part) for part in parts))


def key_of_set(entry: str) -> Key:
    """The key that a `--set` names."""
    return parse_set(entry).key


def check(cells: Sequence[Cell], settings: Settings) -> None:
    """Raises the error of any cell that would be refused, before the first one runs; checks one cell per row and one
    per seed."""
    check_folders(cells, settings)
    for cell in _representatives(cells):
        check_run(cell, settings)


def check_folders(cells: Iterable[Cell], settings: Settings) -> None:
    """Raises UserError for existing folders of other runs."""
    for cell in cells:
        _check_folder(cell, settings)


def check_run(cell: Cell, settings: Settings) -> None:
    """Raises the error with which the run of a cell would be refused."""
    from everfed import api

    with placed(cell.places):
        api.check(cell.recipe, settings.data, settings.scale)


def run(cells: Sequence[Cell], settings: Settings) -> list[Outcome]:
    """Run every cell that is not finished, one after the other."""
    return [_run_one(cell, settings, f"[{i}/{len(cells)}] ") for i, cell in enumerate(cells, start=1)]


def _representatives(cells: Sequence[Cell]) -> list[Cell]:
    first_of_row = _first_by(cells, lambda cell: cell.row)
    first_of_seed = _first_by(cells, lambda cell: cell.recipe.seed)
    return [*first_of_row, *(cell for cell in first_of_seed if cell not in first_of_row)]


def _first_by(cells: Iterable[Cell], key: Callable[[Cell], Any]) -> list[Cell]:
    first: dict[Any, Cell] = {}
    for cell in cells:
        first.setdefault(key(cell), cell)
    return list(first.values())


def _check_folder(cell: Cell, settings: Settings) -> None:
    """An existing folder must belong to the same run, begun by this command or by `everfed run`."""
    run = RunFolder(cell.folder)
    if not run.recipe.exists():
        return
    scale = run.read_settings().get("scale", 1.0)
    stored = settled(read(str(run.recipe))).model_copy(update={"compare": None})
    if to_toml(stored) != to_toml(cell.recipe) or scale != settings.scale:
        raise UserError(
            f"{cell.folder} belongs to another recipe or --scale; nothing was overwritten. "
            "Choose another --out, or remove the folder"
        )


def _run_one(cell: Cell, settings: Settings, number: str) -> Outcome:
    from everfed import api
    from everfed.progress import watching

    title = f"{number}{cell.row} seed {cell.recipe.seed}"
    showing = watching(stdout(), settings.as_json, title)
    with interrupt_message(same_command) as interrupts, showing as observer:
        display = _with_folder(observer, cell.folder) if settings.as_json else observer
        trackers = tracking.observers(settings.track, cell.folder, cell.recipe)
        observers = [display, *trackers, interrupts]
        how: dict[str, Any] = {"observers": observers, "checkpoint_every": settings.checkpoint_every}
        try:
            if RunFolder(cell.folder).recipe.exists():
                return Outcome(cell, api.resume(cell.folder, **how).data)
            result = api.run(cell.recipe, cell.folder, data_dir=settings.data, scale=settings.scale, **how)
            return Outcome(cell, result.data)
        except Exception as error:
            if exit_code(error) != FAULT:
                raise
            # a cell that diverges is a result; the others go on
            typer.echo(f"{title}: {error}", err=True)
            return Outcome(cell, None, str(error))


def _with_folder(observer: Callable[[dict[str, Any]], None], folder: Path) -> Callable[[dict[str, Any]], None]:
    return lambda event: observer({"run": str(folder), **event})
