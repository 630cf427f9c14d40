"""The runs of a comparison: each cell is an ordinary run folder, which is run, resumed, or kept if finished."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everfed import api
from everfed.api import Observer
from everfed.errors import FAULT, RecipeError, exit_code
from everfed.recipe import Reading, Recipe, Source, placed, read_placed, settled
from everfed.recipe.places import Key
from everfed.recipe.reading import parse_set
from everfed.store.run import RunFolder

if TYPE_CHECKING:
    from everfed.core.stream import Stream


@dataclass(frozen=True)
class Cell:
    """row: its name in the table. reading: its recipe, settled. folder: its run folder. stream: made in Python, or None
    for the recipe's."""

    row: str
    reading: Reading
    folder: Path
    stream: Stream | None = None

    @property
    def recipe(self) -> Recipe:
        return self.reading.recipe

    @property
    def finished(self) -> bool:
        return RunFolder(self.folder).result.exists()


@dataclass(frozen=True)
class Outcome:
    """result: the content of result.json, or None when the run diverged; `problem` is then the error."""

    cell: Cell
    result: dict[str, Any] | None
    problem: str = ""


Watch = Callable[[Cell, str], AbstractContextManager[Sequence[Observer]]]  # of a cell and its title in the output


@contextmanager
def _unwatched(cell: Cell, title: str) -> Iterator[Sequence[Observer]]:
    yield ()


@dataclass(frozen=True)
class Settings:
    """How the cells are run. watch: the observers of a cell. say: receives a line about one that is finished already,
    or that failed."""

    data: Path | None = None
    scale: float = 1.0
    checkpoint_every: float = api.CHECKPOINT_EVERY
    watch: Watch = _unwatched
    say: Callable[[str], None] = lambda line: None


def new_cell(
    row: str,
    source: Source,
    folder: Path,
    *,
    method: str | None,
    seed: int,
    sets: Sequence[str],
    stream: Stream | None = None,
    scale: float = 1.0,
) -> Cell:
    """A cell of the recipe `source` with `method`, `seed` and `sets` on top. Raises RecipeError."""
    reading = api.fitted(read_placed(source, method=method, seed=seed, sets=sets), stream, scale)
    with placed(reading.places):
        own = settled(reading.recipe).model_copy(update={"compare": None})
    return Cell(row, Reading(own, reading.places), folder, stream)


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
        if RunFolder(cell.folder).recipe.exists():
            api.require_same(RunFolder(cell.folder), cell.recipe, settings.scale)


def check_run(cell: Cell, settings: Settings) -> None:
    """Raises the error with which the run of a cell would be refused."""
    api.check(cell.reading, settings.data, settings.scale, cell.stream)


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


def _run_one(cell: Cell, settings: Settings, number: str) -> Outcome:
    title = f"{number}{cell.row} seed {cell.recipe.seed}"
    if cell.finished:
        settings.say(f"{title}: already finished")
    with settings.watch(cell, title) as observers:
        try:
            result = api.run(
                cell.reading,
                cell.folder,
                data_dir=settings.data,
                scale=settings.scale,
                stream=cell.stream,
                resume_or_run=True,
                progress=False,
                observers=observers,
                checkpoint_every=settings.checkpoint_every,
            )
            return Outcome(cell, result.data)
        except Exception as error:
            if exit_code(error) != FAULT:
                raise
            # a cell that diverges is a result; the others go on
            settings.say(f"{title}: {error}")
            return Outcome(cell, None, str(error))
