"""Live progress of a run: a bar on a terminal, plain lines elsewhere, JSON lines for machines."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task
from rich.text import Text

from everfed.metrics.scores import score_of
from everfed.reports.formats import clock, size

if TYPE_CHECKING:
    from everfed.core.events import Event, Observer

    Stamp = Callable[[str, Event], str]  # the line of an event -> the line to print

Write = Callable[[str], None]

# Plain lines come at task ends and at most this often in between.
SECONDS_BETWEEN_LINES = 5.0
BAR = 8  # columns
SECONDS_BETWEEN_UPDATES = 0.2  # of a notebook's line


@dataclass
class ProgressState:
    """The progress of a run, from its events. Rounds and tasks count from 0; times come from `clock`, in seconds."""

    title: str = ""
    clock: Callable[[], float] = time.monotonic
    rounds: int = 0
    tasks: int = 0
    first_round: int = 0
    done: int = 0
    task: int = 0
    loss: float | None = None
    acc: float | None = None
    score: str = "accuracy"
    bytes_up: int = 0
    bytes_down: int = 0
    began: float = 0.0
    work: str = ""  # the current phase if it has several repeats, and the number of the repeat
    measured: str = ""  # the last measurements
    scoring_since: float | None = None
    scores_slowly: bool = False  # did the last scores take longer than a reader would wait for a line?
    several: Several | None = None  # the comparison that this run belongs to

    def update(self, event: Event) -> None:
        """Process an event; unknown ones are ignored."""
        kind = event["event"]
        if kind == "start":
            self.title = self.title or f"{event['method']} seed {event.get('seed', 0)}"
            self.task = min(event.get("round", 0) * event["tasks"] // max(1, event["rounds"]), event["tasks"] - 1)
            self.rounds, self.tasks = event["rounds"], event["tasks"]
            self.first_round = self.done = event.get("round", 0)
            self.bytes_up, self.bytes_down = event.get("bytes_up", 0), event.get("bytes_down", 0)
            self.began = self.clock()
        elif kind == "phase":
            self._phase(event)
        elif kind == "measure":
            values = {k: v for k, v in event.items() if isinstance(v, float) and k != "time"}
            self.measured = ", ".join(f"{name} {value:.3g}" for name, value in values.items())
        elif kind == "scoring":
            self.task, self.scoring_since = event["task"], self.clock()
        elif kind == "evaluation":
            self._end_scoring()
            self.task, self.acc, self.work = event["task"], event["acc"], ""
            self.score = event.get("score", "accuracy")

    def _phase(self, event: Event) -> None:
        self.task = event["task"]
        self.bytes_up += event["bytes_up"]
        self.bytes_down += event["bytes_down"]
        self.loss = event.get("loss", self.loss)
        if event["phase"] == "train":
            self.done = event["round"] + 1
        repeats, now = event.get("repeats", 1), event.get("repeat", 0) + 1
        self.work = f"{event['phase']} {now}/{repeats}" if repeats > 1 else ""

    def _end_scoring(self) -> None:
        since = self.scoring_since
        self.scores_slowly = since is not None and self.clock() - since >= SECONDS_BETWEEN_LINES
        self.scoring_since = None

    @property
    def elapsed(self) -> float:
        return self.clock() - self.began

    @property
    def left(self) -> float | None:
        """Seconds to the end at the pace so far; None before the first round is done and after the last."""
        worked = self.done - self.first_round
        if worked <= 0 or self.done >= self.rounds:
            return None
        return self.elapsed / worked * (self.rounds - self.done)

    @property
    def left_in_all(self) -> float | None:
        """Seconds to the end of the comparison; None for a run of its own and for the last one."""
        if self.several is None or not self.rounds:
            return None
        return self.several.left(self.share)

    @property
    def share(self) -> float:
        """Of the rounds that were left when the run began or was resumed, those that are done."""
        return (self.done - self.first_round) / max(1, self.rounds - self.first_round)

    def facts(self) -> str:
        """Loss, accuracy, time left and bytes in one line; during a phase of several repeats its measurements in place
        of the loss."""
        return ", ".join(self._facts().values())

    def _facts(self) -> dict[str, str]:
        known = {
            "measured": self.measured if self.work else None,
            "loss": None if self.loss is None or self.work else f"loss {self.loss:.3f}",
            "score": None if self.acc is None else self._scored(self.acc),
            "left": None if self.left is None else f"{clock(self.left)} left",
            "in all": None if self.left_in_all is None else f"{clock(self.left_in_all)} left in all",
            "bytes": f"{size(self.bytes_up)} up {size(self.bytes_down)} down",
        }
        return {name: fact for name, fact in known.items() if fact}

    def fitted(self, width: int) -> str:
        """Title, place and facts in at most `width` columns: what matters least is left out first."""
        facts = self._facts() if self.rounds else {}
        for dropped in (None, "bytes", "measured", "loss", "in all", "score", "left"):
            facts.pop(dropped or "", None)
            line = "  ".join(part for part in (self.title, self.place(), ", ".join(facts.values())) if part)
            if len(line) <= width:
                return line
        return f"{line[: width - 1]}…"

    def _scored(self, value: float) -> str:
        score = score_of(self.score)
        return f"{score.word} {score.text(value, digits=1)}"

    def place(self) -> str:
        if not self.rounds:
            return "starting"
        place = f"task {self.task + 1}/{self.tasks}, round {self.done}/{self.rounds}"
        work = self.work if self.scoring_since is None else "scoring"
        return f"{place}, {work}" if work else place

    def line(self) -> str:
        return f"{self.title}: {self.place()}, {self.facts()}"


@dataclass
class Several:
    """The pace of runs one after the other. runs: how many are to be run; finished: how many of them are."""

    runs: int
    clock: Callable[[], float] = time.monotonic
    finished: int = 0
    began: float | None = None

    def begin(self) -> None:
        """Start the clock, once."""
        self.began = self.clock() if self.began is None else self.began

    def left(self, share: float) -> float | None:
        """Seconds to the end of all, `share` of the current run being done; None where it is the last."""
        worked = self.finished + share
        if self.began is None or worked <= 0 or self.finished + 1 >= self.runs:
            return None
        return (self.clock() - self.began) / worked * (self.runs - worked)


def message_for(event: Event, state: ProgressState) -> str | None:
    """The line to print for an event, or None. A fault has none: it ends the run with an error, which is printed."""
    kind = event["event"]
    if kind == "start":
        clients = f", {event['clients']} clients" if "clients" in event else ""
        return f"{state.title}: {event['tasks']} tasks, {event['rounds']} rounds{clients}"
    if kind == "resume":
        return f"{state.title}: going on from round {event['round']}".removeprefix(": ")
    if (kind == "evaluation" and event["task_end"]) or (kind == "scoring" and state.scores_slowly):
        return state.line()
    if kind == "client":
        client = f"client {event['client']}" if event["client"] >= 0 else "a client"
        return f"{client} {event['kind']}: {event['reason']}"
    if kind == "waiting":
        return f"{event['connected']} of {event['clients']} clients are connected"
    if kind == "warning":
        return f"warning: {event['message']}"
    return None


def _plain(line: str, event: Event) -> str:
    return line


class PlainLines:
    """One line per task and warning, and one every few seconds in between."""

    def __init__(self, write: Write, state: ProgressState, stamp: Stamp = _plain) -> None:
        self._write, self._state, self._stamp, self._last = write, state, stamp, state.clock()

    def __call__(self, event: Event) -> None:
        self._state.update(event)
        line = message_for(event, self._state)
        now = self._state.clock()
        if line is None and event["event"] == "phase" and now - self._last >= SECONDS_BETWEEN_LINES:
            line = self._state.line()
        if line is not None:
            self._write(self._stamp(line, event))
            self._last = now


class JsonLines:
    """Every event as one line of JSON."""

    def __init__(self, write: Write) -> None:
        self._write = write

    def __call__(self, event: Event) -> None:
        self._write(json.dumps(event))


class LiveBar:
    """A bar that moves with every phase; the lines of `message_for` are printed above it."""

    def __init__(self, progress: Progress, state: ProgressState, stamp: Stamp = _plain) -> None:
        self._progress, self._state, self._stamp = progress, state, stamp
        self._bar = progress.add_task(state.title, total=None, state=state)

    def __call__(self, event: Event) -> None:
        self._state.update(event)
        line = message_for(event, self._state)
        if line is not None:
            self._progress.console.print(self._stamp(line, event), highlight=False, markup=False)
        total = self._state.rounds or None
        self._progress.update(self._bar, completed=self._state.done, total=total)


class NotebookBar:
    """One line of a notebook's output that is replaced as the run goes on. display: IPython's."""

    def __init__(self, display: Callable[..., Any], state: ProgressState) -> None:
        self._state, self._last = state, -float("inf")
        self._handle = display(_Html(self._html()), display_id=True)

    def __call__(self, event: Event) -> None:
        self._state.update(event)
        due = self._state.clock() - self._last >= SECONDS_BETWEEN_UPDATES
        if due or event["event"] in ("start", "end", "fault", "warning"):
            self._last = self._state.clock()
            self._handle.update(_Html(self._html(event)))

    def _html(self, event: Event | None = None) -> str:
        state = self._state
        note = f"<br>warning: {escape(str(event['message']))}" if event and event["event"] == "warning" else ""
        bar = f'<progress value="{state.done}" max="{max(1, state.rounds)}"></progress>'
        return f"{bar} {escape(state.line() if state.rounds else state.title or 'starting')}{note}"


@dataclass(frozen=True)
class _Html:
    """What IPython shows as HTML, or as text where it cannot."""

    html: str

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return re.sub("<[^>]+>", "", self.html).strip()


def notebook_display() -> Callable[..., Any] | None:
    """IPython's `display` inside a Jupyter kernel; None elsewhere."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is None or not hasattr(shell, "kernel"):
        return None
    from IPython.display import display

    return display


def is_watched() -> bool:
    """Is the output shown in a terminal or a notebook?"""
    return sys.stdout.isatty() or notebook_display() is not None


class _Line(ProgressColumn):
    def __init__(self, width: int) -> None:
        super().__init__()
        self._width = width

    def render(self, task: Task) -> Text:
        return Text(task.fields["state"].fitted(self._width), no_wrap=True)


@contextmanager
def watching(
    console: Console,
    as_json: bool = False,
    title: str = "",
    stamp: Stamp = _plain,
    several: Several | None = None,
) -> Iterator[Observer]:
    """An observer of one run that writes to `console`: JSON lines, plain lines, or a bar on a terminal; in a notebook a
    bar in the cell's output. stamp: changes every line before it is printed."""
    state = ProgressState(title, several=several)
    write: Write = lambda line: console.out(line, highlight=False)  # noqa: E731
    display = notebook_display()
    if as_json:
        yield JsonLines(write)
    elif display is not None:
        yield NotebookBar(display, state)
    elif not console.is_terminal:
        yield PlainLines(write, state, stamp)
    else:
        with Progress(*_columns(console.width), console=console, transient=True) as progress:
            yield LiveBar(progress, state, stamp)


def _columns(width: int) -> tuple[ProgressColumn, ...]:
    """On a narrow terminal the words need the place of the bar."""
    bar = (BarColumn(BAR),) if width >= 100 else ()
    return *bar, _Line(width - (BAR + 1 if bar else 0))


@contextmanager
def shown(progress: bool | None, title: str = "", several: Several | None = None) -> Iterator[tuple[Observer, ...]]:
    """Observers that show a run from Python. progress: None for terminals and notebooks (`is_watched`)."""
    if not (is_watched() if progress is None else progress):
        yield ()
        return
    with watching(Console(), title=title, several=several) as observer:
        yield (observer,)
