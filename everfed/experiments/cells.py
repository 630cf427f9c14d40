"""The runs of a comparison: each cell is an ordinary run folder, which is run, resumed, or kept if finished.

Several processes, or machines with a common disk, may work through one table: a cell that another one holds is left to
it and taken up again at the end, if it is unfinished then.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everfed import api
from everfed.api import Observer
from everfed.errors import FAULT, RecipeError, UserError, exit_code
from everfed.experiments import jobs
from everfed.experiments.choice import choose
from everfed.metrics.scores import SCORES
from everfed.recipe import Places, Reading, Recipe, Source, placed, read, read_placed, settled, to_toml
from everfed.recipe.places import Key
from everfed.recipe.reading import parse_set
from everfed.store.event_log import read_log
from everfed.store.run import Held, RunFolder, SameRun

if TYPE_CHECKING:
    from everfed.core.stream import Stream

MOST_NAMED = 8  # finished cells in one line
_MAIN = sorted({score.main for score in SCORES.values()})


@dataclass(frozen=True)
class Cell:
    """row: its name in the table. recipe: settled. folder: its run folder. stream: made in Python, or None for the
    recipe's."""

    row: str
    recipe: Recipe
    folder: Path
    places: Places
    stream: Stream | None = None

    @property
    def reading(self) -> Reading:
        return Reading(self.recipe, self.places)

    @property
    def title(self) -> str:
        return f"{self.row} seed {self.recipe.seed}"

    @property
    def finished(self) -> bool:
        return RunFolder(self.folder).result.exists()


@dataclass(frozen=True)
class Outcome:
    """result: the content of result.json, or None when the run failed; `problem` is then the error."""

    cell: Cell
    result: dict[str, Any] | None
    problem: str = ""


More = Callable[[Outcome], Iterable[Cell]]


@dataclass(frozen=True)
class Settings:
    """How the cells are run. jobs: how many side by side, 0 for what is fastest. keep_going: any error of a cell is its
    outcome; else only those of the run itself (it diverged), and others end the command. limit: seconds after which a
    cell that runs beside others is given up, 0 for never."""

    data: str | Path | None = None
    scale: float = 1.0
    checkpoint_every: float = api.CHECKPOINT_EVERY
    as_json: bool = False
    track: Sequence[str] = ()
    jobs: int = 0
    keep_going: bool = False
    limit: float = 0.0


class Output:
    """What is shown of cells while they run: nothing; commands and notebooks derive from it."""

    def begin(self, cells: Sequence[Cell]) -> None:
        """Before the first of them runs."""

    def say(self, line: str) -> None:
        """A line about how they are run."""

    def fault(self, line: str) -> None:
        """A line about a cell that failed."""

    def held(self, cell: Cell) -> None:
        """The cell that was watched last was not run: another process holds it."""

    def watch(self, cell: Cell, title: str) -> AbstractContextManager[Sequence[Observer]]:
        """The observers of a cell that runs alone."""
        return nullcontext(())

    def beside(self) -> AbstractContextManager[object]:
        """Around cells that run side by side."""
        return nullcontext()

    def event(self, cell: Cell, event: dict[str, Any], number: str) -> None:
        """An event of a cell that runs beside others; number: how many have ended, of how many."""


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
    return Cell(row, own, folder, reading.places, stream)


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
    api.check(cell.reading, settings.data, settings.scale, cell.stream)


class Queue:
    """The cells of a table in the order in which they are run; those that other processes hold come last, again and
    again. more: further cells that follow from an outcome. say: a line for the user about a cell that is held or whose
    process died."""

    def __init__(
        self, cells: Iterable[Cell], more: More | None = None, say: Callable[[str], None] = lambda line: None
    ) -> None:
        self.say = say
        self.outcomes: dict[Path, Outcome] = {}
        self._open, self._held, self._deaths = deque(cells), deque[Cell](), Counter[Path]()
        self._order = [cell.folder for cell in self._open]
        self._more = more or (lambda outcome: ())
        self._look_again = 0.0
        self._were_held: set[Path] = set()

    @property
    def done(self) -> bool:
        """Has every cell an outcome?"""
        return len(self.outcomes) == len(self._order)

    @property
    def waiting(self) -> bool:
        """Is there a cell that could begin?"""
        return bool(self._open)

    @property
    def total(self) -> int:
        return len(self._order)

    def take(self) -> Cell | None:
        """The next cell to try; None while there is none."""
        if self._open:
            return self._open.popleft()
        if self._held and time.monotonic() >= self._look_again:
            return self._held.popleft()
        return None

    def hold(self, cell: Cell) -> None:
        """Another process has it: wait before it is tried again."""
        if not self.was_held(cell):
            self.say(f"{cell.title}: another process runs it; it is tried again after the others")
        self._held.append(cell)
        self._were_held.add(cell.folder)
        self._look_again = time.monotonic() + jobs.POLL

    def was_held(self, cell: Cell) -> bool:
        """Had another process this cell, when it was tried before?"""
        return cell.folder in self._were_held

    def again(self, cell: Cell) -> None:
        """Its process died: it is the next to be tried."""
        self._open.appendleft(cell)

    def died(self, cell: Cell) -> int:
        """Count a process that died with this cell."""
        self._deaths[cell.folder] += 1
        return self._deaths[cell.folder]

    def finish(self, outcome: Outcome) -> None:
        self.outcomes[outcome.cell.folder] = outcome
        for cell in self._more(outcome):
            if cell.folder not in self._order:  # it may follow from several outcomes
                self._open.append(cell)
                self._order.append(cell.folder)

    def in_order(self) -> list[Outcome]:
        return [self.outcomes[folder] for folder in self._order]


def run(
    cells: Sequence[Cell], settings: Settings, more: More | None = None, output: Output | None = None
) -> list[Outcome]:
    """Run every cell that is not finished, some side by side where that is faster or asked for. more: further cells
    that follow from an outcome. output: shows how far they are."""
    output = output or Output()
    queue, choice = Queue(cells, more, output.say), choose(cells, settings)
    output.begin(cells)
    if finished := [cell.title for cell in cells if cell.finished]:
        others = f" and {len(finished) - MOST_NAMED} more" if len(finished) > MOST_NAMED else ""
        output.say(f"already finished: {', '.join(finished[:MOST_NAMED])}{others}")
    if choice.why:
        output.say(choice.why)
    if choice.jobs > 1:
        with output.beside():
            jobs.run(queue, settings, choice, lambda cell, event: output.event(cell, event, _number(queue)))
    else:
        _run_alone(queue, settings, output)
    return queue.in_order()


def _number(queue: Queue) -> str:
    return f"[{len(queue.outcomes) + 1}/{queue.total}]"


def attempt(cell: Cell, settings: Settings, observers: Sequence[Observer], was_held: bool = False) -> Outcome | None:
    """Run a cell, go on with it, or read its result; None while another process holds it. was_held: another one had it
    before; where it diverged there, that is the outcome: it would do so again. Raises UserError where its folder holds
    another run, even with keep_going: that is no outcome of this cell."""
    _check_folder(cell, settings)
    how: dict[str, Any] = {"observers": observers, "track": settings.track, "progress": False, "stream": cell.stream}
    how["checkpoint_every"] = settings.checkpoint_every
    if was_held and (problem := _divergence(cell)) is not None:
        return Outcome(cell, None, problem)
    try:
        return Outcome(cell, _begin_or_go_on(cell, settings, how))
    except Held:
        return None
    except Exception as error:
        code = exit_code(error)
        if code != FAULT and (not settings.keep_going or isinstance(error, OSError)):
            raise
        return Outcome(cell, None, str(error) if code is not None else f"{type(error).__name__}: {error}")


def _begin_or_go_on(cell: Cell, settings: Settings, how: dict[str, Any]) -> dict[str, Any]:
    if not RunFolder(cell.folder).recipe.exists():
        try:
            return api.run(cell.reading, cell.folder, data_dir=settings.data, scale=settings.scale, **how).data
        except SameRun:  # another process has begun it since, and has finished it or died
            pass
    return api.resume(cell.folder, data_dir=settings.data, **how).data


def _divergence(cell: Cell) -> str | None:
    """The error with which an unfinished run ended, if it diverged."""
    log = read_log(cell.folder)
    if cell.finished or not log.failed:
        return None
    kind, _, message = log.notes[-1].message.partition(": ")
    return message if kind == "Diverged" else None


def _run_alone(queue: Queue, settings: Settings, output: Output) -> None:
    """One cell after the other, in this process."""
    waited = False
    while not queue.done:
        cell = queue.take()
        if cell is None:
            if not waited:
                output.say("waiting for runs that another process has begun")
            waited = True
            time.sleep(jobs.POLL)
            continue
        outcome = _run_one(cell, settings, _number(queue), queue.was_held(cell), output)
        if outcome is None:
            output.held(cell)
            queue.hold(cell)
        else:
            queue.finish(outcome)


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


def _run_one(cell: Cell, settings: Settings, number: str, was_held: bool, output: Output) -> Outcome | None:
    title = f"{number} {cell.title}"
    with output.watch(cell, title) as observers:
        outcome = attempt(cell, settings, observers, was_held)
    if outcome is not None and outcome.problem:  # a cell that failed is a result; the others go on
        output.fault(f"{title}: {outcome.problem}")
    return outcome
