"""The runs of a comparison: each job is an ordinary run folder, which is run, resumed, or kept if finished.

Several processes, or machines with a common disk, may work through one table: a job that another one holds is left to
it and taken up again at the end, if it is unfinished then.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everfed import api
from everfed.errors import FAULT, UserError, exit_code
from everfed.experiments import workers
from everfed.experiments.concurrency import choose
from everfed.experiments.stopping import StoppedEarly, median_rule
from everfed.recipe import Places, Reading, Recipe, Source, placed, read, read_placed, settled, to_toml
from everfed.reports.progress import Several, shown
from everfed.store.event_log import read_log
from everfed.store.run import RunFolder, RunHeld, SameRun

if TYPE_CHECKING:
    from everfed.core.events import Observer
    from everfed.core.stream import Stream

MOST_NAMED = 8  # finished jobs in one line
DIVERGED = "Diverged"  # the class of the error, as the log of events has it


@dataclass(frozen=True)
class GridJob:
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
    """result: the content of result.json, or None when the run failed; `problem` is then the error. diverged: a loss
    was no longer finite. stopped: it was behind the others of a sweep."""

    job: GridJob
    result: dict[str, Any] | None
    problem: str = ""
    diverged: bool = False
    stopped: bool = False


More = Callable[[Outcome], Iterable[GridJob]]


@dataclass(frozen=True)
class JobSettings:
    """How the jobs are run. jobs: how many side by side, 0 for what is fastest. keep_going: any error of a job is its
    outcome; else only those of the run itself (it diverged), and others end the command. limit: seconds after which a
    job that runs beside others is given up, 0 for never. stop_early: a job ends that is behind the finished ones."""

    data: str | Path | None = None
    scale: float = 1.0
    checkpoint_every: float = api.CHECKPOINT_EVERY
    as_json: bool = False
    track: Sequence[str] = ()
    jobs: int = 0
    keep_going: bool = False
    limit: float = 0.0
    stop_early: bool = False


class Output:
    """What is shown of jobs while they run: nothing; commands and notebooks derive from it."""

    def begin(self, jobs: Sequence[GridJob]) -> None:
        """Before the first of them runs."""

    def say(self, line: str) -> None:
        """A line about how they are run."""

    def fault(self, line: str) -> None:
        """A line about a job that failed."""

    def held(self, job: GridJob) -> None:
        """The job that was watched last was not run: another process holds it."""

    def watch(self, job: GridJob, title: str) -> AbstractContextManager[Sequence[Observer]]:
        """The observers of a job that runs alone."""
        return nullcontext(())

    def beside(self) -> AbstractContextManager[object]:
        """Around jobs that run side by side."""
        return nullcontext()

    def event(self, job: GridJob, event: dict[str, Any], number: str) -> None:
        """An event of a job that runs beside others; number: how many have ended, of how many."""


class Shown(Output):
    """Shows the jobs of a script or a notebook, with the time that is left in all. observers: of every run."""

    def __init__(self, progress: bool | None, observers: Sequence[Observer]) -> None:
        self._progress, self._observers, self._several = progress, observers, Several(0)

    def begin(self, jobs: Sequence[GridJob]) -> None:
        self._several = Several(sum(not job.finished for job in jobs))

    @contextmanager
    def watch(self, job: GridJob, title: str) -> Iterator[Sequence[Observer]]:
        if job.finished:
            yield ()
            return
        self._several.begin()
        with shown(self._progress, title, self._several) as found:
            yield (*found, *self._observers)
        self._several.finished += 1

    def held(self, job: GridJob) -> None:
        self._several.finished -= 1

    def event(self, job: GridJob, event: dict[str, Any], number: str) -> None:
        for observer in self._observers:
            observer(event)


def new_job(
    row: str,
    source: Source,
    folder: Path,
    *,
    method: str | None,
    seed: int,
    sets: Sequence[str],
    stream: Stream | None = None,
    scale: float = 1.0,
) -> GridJob:
    """A job of the recipe `source` with `method`, `seed` and `sets` on top. Raises RecipeError."""
    reading = api.fitted(read_placed(source, method=method, seed=seed, sets=sets), stream, scale)
    with placed(reading.places):
        own = alone(reading.recipe)
    return GridJob(row, own, folder, reading.places, stream)


def alone(recipe: Recipe) -> Recipe:
    """The recipe of one run of a table, settled, without what it could be compared with."""
    return settled(recipe).model_copy(update={"compare": None, "methods": None})


def check(jobs: Sequence[GridJob], settings: JobSettings) -> None:
    """Raises the error of any job that would be refused, before the first one runs; checks one job per row and one
    per seed."""
    check_folders(jobs, settings)
    for job in _representatives(jobs):
        check_run(job, settings)


def check_folders(jobs: Iterable[GridJob], settings: JobSettings) -> None:
    """Raises UserError for existing folders of other runs."""
    for job in jobs:
        _check_folder(job, settings)


def check_run(job: GridJob, settings: JobSettings) -> None:
    """Raises the error with which the run of a job would be refused."""
    api.check(job.reading, settings.data, settings.scale, job.stream)


class Queue:
    """The jobs of a table in the order in which they are run; those that other processes hold come last, again and
    again. more: further jobs that follow from an outcome. say: a line for the user about a job that is held or whose
    process died."""

    def __init__(
        self, jobs: Iterable[GridJob], more: More | None = None, say: Callable[[str], None] = lambda line: None
    ) -> None:
        self.say = say
        self.outcomes: dict[Path, Outcome] = {}
        self._open, self._held, self._deaths = deque(jobs), deque[GridJob](), Counter[Path]()
        self._order = [job.folder for job in self._open]
        self._more = more or (lambda outcome: ())
        self._look_again = 0.0
        self._were_held: set[Path] = set()

    @property
    def done(self) -> bool:
        """Has every job an outcome?"""
        return len(self.outcomes) == len(self._order)

    @property
    def waiting(self) -> bool:
        """Is there a job that could begin?"""
        return bool(self._open)

    @property
    def total(self) -> int:
        return len(self._order)

    def take(self) -> GridJob | None:
        """The next job to try; None while there is none."""
        if self._open:
            return self._open.popleft()
        if self._held and time.monotonic() >= self._look_again:
            return self._held.popleft()
        return None

    def hold(self, job: GridJob) -> None:
        """Another process has it: wait before it is tried again."""
        if not self.was_held(job):
            self.say(f"{job.title}: another process runs it; it is tried again after the others")
        self._held.append(job)
        self._were_held.add(job.folder)
        self._look_again = time.monotonic() + workers.POLL

    def was_held(self, job: GridJob) -> bool:
        """Had another process this job, when it was tried before?"""
        return job.folder in self._were_held

    def again(self, job: GridJob) -> None:
        """Its process died: it is the next to be tried."""
        self._open.appendleft(job)

    def died(self, job: GridJob) -> int:
        """Count a process that died with this job."""
        self._deaths[job.folder] += 1
        return self._deaths[job.folder]

    def finish(self, outcome: Outcome) -> None:
        self.outcomes[outcome.job.folder] = outcome
        for job in self._more(outcome):
            if job.folder not in self._order:  # it may follow from several outcomes
                self._open.append(job)
                self._order.append(job.folder)

    def in_order(self) -> list[Outcome]:
        return [self.outcomes[folder] for folder in self._order]


def run_all(
    jobs: Sequence[GridJob], settings: JobSettings, more: More | None = None, output: Output | None = None
) -> list[Outcome]:
    """Run every job that is not finished, some side by side where that is faster or asked for. more: further jobs
    that follow from an outcome. output: shows how far they are."""
    output = output or Output()
    queue, choice = Queue(jobs, more, output.say), choose(jobs, settings)
    output.begin(jobs)
    if finished := [job.title for job in jobs if job.finished]:
        others = f" and {len(finished) - MOST_NAMED} more" if len(finished) > MOST_NAMED else ""
        output.say(f"already finished: {', '.join(finished[:MOST_NAMED])}{others}")
    if choice.why:
        output.say(choice.why)
    if choice.jobs > 1:
        with output.beside():
            workers.run(queue, settings, choice, lambda job, event: output.event(job, event, _number(queue)))
    else:
        _run_alone(queue, settings, output)
    return queue.in_order()


def _number(queue: Queue) -> str:
    return f"[{len(queue.outcomes) + 1}/{queue.total}]"


def attempt(
    job: GridJob, settings: JobSettings, observers: Sequence[Observer], was_held: bool = False
) -> Outcome | None:
    """Run a job, go on with it, or read its result; None while another process holds it. was_held: another one had it
    before; where it diverged there, that is the outcome: it would do so again. Raises UserError where its folder holds
    another run, even with keep_going: that is no outcome of this job."""
    _check_folder(job, settings)
    how: dict[str, Any] = {"observers": observers, "track": settings.track, "progress": False, "stream": job.stream}
    how["checkpoint_every"] = settings.checkpoint_every
    if was_held and (problem := _ended_by(job, DIVERGED)) is not None:
        return Outcome(job, None, problem, diverged=True)
    if settings.stop_early:
        if (problem := _ended_by(job, StoppedEarly.__name__)) is not None:
            return Outcome(job, None, problem, stopped=True)
        how["observers"] = [*observers, median_rule(job.folder, job.recipe.seed)]
    try:
        return Outcome(job, _begin_or_go_on(job, settings, how))
    except RunHeld:
        return None
    except Exception as error:
        code = exit_code(error)
        if code != FAULT and (not settings.keep_going or isinstance(error, OSError)):
            raise
        problem = str(error) if code is not None else f"{type(error).__name__}: {error}"
        return Outcome(job, None, problem, type(error).__name__ == DIVERGED, isinstance(error, StoppedEarly))


def _begin_or_go_on(job: GridJob, settings: JobSettings, how: dict[str, Any]) -> dict[str, Any]:
    if not RunFolder(job.folder).recipe.exists():
        try:
            return api.run(job.reading, job.folder, data_dir=settings.data, scale=settings.scale, **how).data
        except SameRun:  # another process has begun it since, and has finished it or died
            pass
    return api.resume(job.folder, data_dir=settings.data, **how).data


def _ended_by(job: GridJob, expected: str) -> str | None:
    """The message of the error with which an unfinished run ended, if it was of the expected class."""
    log = read_log(job.folder)
    if job.finished or not log.failed:
        return None
    kind, _, message = log.notes[-1].message.partition(": ")
    return message if kind == expected else None


def _run_alone(queue: Queue, settings: JobSettings, output: Output) -> None:
    """One job after the other, in this process."""
    waited = False
    while not queue.done:
        job = queue.take()
        if job is None:
            if not waited:
                output.say("waiting for runs that another process has begun")
            waited = True
            time.sleep(workers.POLL)
            continue
        outcome = _run_one(job, settings, _number(queue), queue.was_held(job), output)
        if outcome is None:
            output.held(job)
            queue.hold(job)
        else:
            queue.finish(outcome)


def _representatives(jobs: Sequence[GridJob]) -> list[GridJob]:
    first_of_row = _first_by(jobs, lambda job: job.row)
    first_of_seed = _first_by(jobs, lambda job: job.recipe.seed)
    return [*first_of_row, *(job for job in first_of_seed if job not in first_of_row)]


def _first_by(jobs: Iterable[GridJob], key: Callable[[GridJob], Any]) -> list[GridJob]:
    first: dict[Any, GridJob] = {}
    for job in jobs:
        first.setdefault(key(job), job)
    return list(first.values())


def _check_folder(job: GridJob, settings: JobSettings) -> None:
    """An existing folder must belong to the same run, begun by this command or by `everfed run`."""
    run = RunFolder(job.folder)
    if not run.recipe.exists():
        return
    scale = run.read_settings().get("scale", 1.0)
    stored = alone(read(str(run.recipe)))
    if to_toml(stored) != to_toml(job.recipe) or scale != settings.scale:
        raise UserError(
            f"{job.folder} belongs to another recipe or --scale; nothing was overwritten. "
            "Choose another --out, or remove the folder"
        )


def _run_one(job: GridJob, settings: JobSettings, number: str, was_held: bool, output: Output) -> Outcome | None:
    title = f"{number} {job.title}"
    with output.watch(job, title) as observers:
        outcome = attempt(job, settings, observers, was_held)
    if outcome is not None and outcome.problem:  # a job that failed is a result; the others go on
        (output.say if outcome.stopped else output.fault)(f"{title}: {outcome.problem}")
    return outcome
