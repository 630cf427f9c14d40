"""What commands show of the jobs of a comparison: on stdout, ended by ctrl-C with a remedy."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from everfed.commands.output import interrupt_message, same_command, stdout
from everfed.experiments.jobs import MOST_NAMED, GridJob, Output
from everfed.metrics.scores import score_of
from everfed.reports.formats import clock
from everfed.reports.progress import ProgressState, Several, watching

if TYPE_CHECKING:
    from everfed.core.events import Observer

SECONDS_BETWEEN_LINES = 15.0  # about runs side by side
ENDS = ("end", "fault")


class Terminal(Output):
    """A bar or plain lines for a job that runs alone; for jobs side by side one line at the end of each and now and
    then one about all; or JSON lines."""

    def __init__(self, as_json: bool) -> None:
        self._as_json, self._several = as_json, Several(0)
        self._beside = Beside(self._several)

    def begin(self, jobs: Sequence[GridJob]) -> None:
        self._several = Several(sum(not job.finished for job in jobs))

    def say(self, line: str) -> None:
        if not self._as_json:
            typer.echo(line)

    def fault(self, line: str) -> None:
        typer.echo(line, err=True)

    @contextmanager
    def watch(self, job: GridJob, title: str) -> Iterator[Sequence[Observer]]:
        was_finished = job.finished
        self._several.begin()
        showing = watching(stdout(), self._as_json, title, several=self._several)
        with interrupt_message(same_command) as interrupts, showing as observer:
            yield (_with_folder(observer, job.folder) if self._as_json else observer), interrupts
        self._several.finished += not was_finished

    def held(self, job: GridJob) -> None:
        self._several.finished -= 1

    def beside(self) -> AbstractContextManager[object]:
        self._several.begin()
        self._beside = Beside(self._several)
        return interrupt_message(same_command)

    def event(self, job: GridJob, event: dict[str, Any], number: str) -> None:
        if self._as_json:
            typer.echo(json.dumps({"run": str(job.folder), **event}))
            return
        self._beside.update(job, event)
        if event["event"] in ENDS:
            typer.echo(f"{number} {job.title}: {_ending(event)}")
        elif line := self._beside.line():
            typer.echo(f"{number} {line}")


class Beside:
    """Where the runs are that go on side by side, as one line that comes now and then."""

    def __init__(self, several: Several, clock: Callable[[], float] = time.monotonic) -> None:
        self._several, self._clock, self._last = several, clock, clock()
        self._runs: dict[Path, ProgressState] = {}

    def update(self, job: GridJob, event: dict[str, Any]) -> None:
        """Process an event of a run."""
        self._runs.setdefault(job.folder, ProgressState(job.title, self._clock)).update(event)
        if event["event"] in ENDS:
            del self._runs[job.folder]
            self._several.finished += 1

    def line(self) -> str:
        """Task and round of every run and the time that is left; empty where the last line is not long ago."""
        if self._clock() - self._last < SECONDS_BETWEEN_LINES:
            return ""
        self._last = self._clock()
        places = [f"{run.title} {run.place()}" for run in self._runs.values()]
        others = [f"{len(places) - MOST_NAMED} more"] if len(places) > MOST_NAMED else []
        left = self._several.left(sum(run.share for run in self._runs.values()))
        time_left = [] if left is None else [f"{clock(left)} left in all"]
        return "; ".join([*places[:MOST_NAMED], *others, *time_left])


def _ending(event: dict[str, Any]) -> str:
    if event["event"] == "fault":
        return str(event["message"])
    score = score_of(event.get("score", "accuracy"))
    value = event["metrics"].get(score.main)
    scored = "" if value is None else f"{score.word} {score.text(value, digits=1)} "
    return f"{scored}after {event['seconds']:.1f} s"


def _with_folder(observer: Observer, folder: Path) -> Observer:
    return lambda event: observer({"run": str(folder), **event})
