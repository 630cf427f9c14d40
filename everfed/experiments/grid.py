"""The runs of a comparison or a sweep, and how they become its table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from everfed.errors import UserError
from everfed.experiments import summary
from everfed.experiments.jobs import GridJob, JobSettings, Output, check, run_all
from everfed.experiments.result import Comparison
from everfed.reports.progress import Several, shown

if TYPE_CHECKING:
    from everfed.core.events import Observer
    from everfed.core.stream import Stream

Streams = Callable[[int], "Stream"]  # the stream of a seed


@dataclass(frozen=True)
class Grid:
    """The runs of a comparison or a sweep. folder: where the tables are written, as `stem`.json, .md and .csv.
    heading: what a row is. note: about the scores."""

    jobs: list[GridJob]
    folder: Path
    seeds: list[int]
    recipe: str

    stem: ClassVar[str]
    heading: ClassVar[str]
    note: ClassVar[str] = ""

    def facts(self, result: Comparison) -> dict[str, Any]:
        """Further entries of the JSON file."""
        return {}

    def run(self, settings: JobSettings, output: Output) -> Comparison:
        """Check all runs, run those that are not finished, and write the table."""
        check(self.jobs, settings)
        rows = summary.rows(run_all(self.jobs, settings, output=output))
        result = Comparison(self.folder, rows, self.heading, self.note)
        facts = {"recipe": self.recipe, "scale": settings.scale, "seeds": self.seeds, **self.facts(result)}
        summary.write(self.folder, self.stem, rows, self.heading, facts)
        return result


def streams_of(stream: Stream | Streams | None) -> Callable[[int], Stream | None]:
    """The stream of every seed: the same for all, made by a function of the seed, or the recipe's own (None)."""
    from everfed.core.stream import Stream

    if stream is None or isinstance(stream, Stream):
        return lambda seed: stream
    return stream


def checked_jobs(jobs: int, stream: Stream | Streams | None) -> int:
    """Raises UserError for runs side by side on a stream that other processes do not have."""
    if jobs != 1 and stream is not None:
        raise UserError("jobs must be 1 with a stream of your own: other processes do not have it")
    return jobs


class Shown(Output):
    """Shows the runs of a comparison from Python, with the time that is left in all. observers: of every run."""

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
