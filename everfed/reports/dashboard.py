"""The dashboard: the runs below a folder while they are written, and what the page shows of them. `server` serves it.

It reads only inside the folder, and writes nothing but the readers' notes on runs (`NOTES`): run ids are keys of a
table of folders that were found, never parts of a path, and a link that leads outside is not followed. Events are read
from the byte where reading stopped last time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import stat
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter

from everfed.errors import UserError
from everfed.metrics.scores import PERCENT, score_of
from everfed.reports import charts, figures, html, series, sweeps
from everfed.reports.charts import PieceColours
from everfed.reports.colours import Colours, variables
from everfed.reports.figures import View
from everfed.reports.formats import Html, join, tag
from everfed.reports.groups import SeedGroup, assigned, dataset, differing, facts, grouped, short_key
from everfed.reports.read import DEPTH, LoggedRun, StoredResult, read_recipe, read_result, read_run
from everfed.store.event_log import Tail
from everfed.store.files import write_atomic
from everfed.store.run import RECIPE, RESULT, RunError, RunFolder

SLICE = 4 << 20  # bytes of one run's events that are read in one poll
QUIET_AFTER = 60.0  # seconds without an event after which, at the earliest, an unfinished run counts as silent
MOST_FOLDERS = 20_000  # folders that are searched


class FolderGuard:
    """Opens regular files inside `root`, and nothing else."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()

    def inside(self, path: Path) -> bool:
        """Does the path, with all links followed, lead into the root?"""
        return path.resolve().is_relative_to(self.root)

    def open(self, path: Path) -> BinaryIO:
        """The file for reading. Raises RunError for what leads outside or is no regular file."""
        if not self.inside(path):
            raise RunError(f"{path.name} is a link that leads out of {self.root}; it is not read")
        # not blocking, so that a pipe in place of a file cannot block the page
        descriptor = os.open(path.resolve(), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise RunError(f"{path.name} is not a regular file; it is not read")
        return os.fdopen(descriptor, "rb")


class Watched:
    """One run folder. `summary` is replaced as a whole, so it can be read without a lock."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.tail = Tail(folder)
        self.recipe_text = ""
        self.recipe: dict[str, Any] = {}
        self.settings: dict[str, Any] = {}
        self.result: StoredResult | None = None
        self.problem = ""
        self.summary: dict[str, Any] = {}
        self.version = 0
        self._seen: dict[str, tuple[int, int, int] | None] = {}

    @property
    def run(self) -> LoggedRun:
        """The run in the form that reports use."""
        return LoggedRun(
            self.name, self.folder, self.recipe, self.recipe_text, self.settings, self.result, self.tail.log
        )

    def poll(self, guard: FolderGuard, now: float) -> bool:
        """Read what is new; True when the summary changed."""
        try:
            moved, problem = self._read(guard), ""
        except UserError as error:
            moved, problem = True, str(error)
        except OSError as error:
            moved, problem = True, f"cannot be read: {error.strerror or error}"
        if problem:
            self._seen.clear()  # read every file again next time, until all can be read
        self.problem = problem
        if not moved and self.summary and status(self, now) == self.summary["status"]:
            return False
        fresh = summary(self, now)
        changed = fresh != self.summary
        self.summary = fresh
        return changed

    def _read(self, guard: FolderGuard) -> bool:
        moved = self._changed(RECIPE)
        if moved:
            self.recipe_text, self.recipe = read_recipe(self.folder, guard.open)
            self.settings = RunFolder(self.folder, guard.open).read_settings()
        if self._changed(RESULT):
            self.result, moved = read_result(self.folder, guard.open), True
        return self.tail.poll(SLICE, guard.open) or moved

    def _changed(self, name: str) -> bool:
        """Has the file changed since the last poll?"""
        try:
            found = os.stat(self.folder / name)
            mark = (found.st_ino, found.st_size, found.st_mtime_ns)
        except FileNotFoundError:
            mark = None
        if name in self._seen and self._seen[name] == mark:
            return False
        known, self._seen[name] = name in self._seen, mark
        return known or mark is not None


def status(watched: Watched, now: float) -> str:
    """finished, running, silent (no event for long), failed, diverged, stopped (by its sweep), interrupted, waiting
    (no event yet) or unreadable."""
    log = watched.tail.log
    if watched.problem:
        return "unreadable"
    if watched.result is not None:
        return "finished"
    if log.failed or log.interrupted:
        ended = "diverged" if watched.run.diverged else "stopped" if watched.run.stopped else ""
        return ended or ("failed" if log.failed else "interrupted")
    if log.last_time is None:
        return "waiting"
    return "running" if now - log.last_time <= max(QUIET_AFTER, 5 * log.slowest) else "silent"


def summary(watched: Watched, now: float) -> dict[str, Any]:
    """The run's line in the table of runs, JSON-ready."""
    run, log = watched.run, watched.tail.log
    stream = run.recipe.get("stream")
    facts = stream if isinstance(stream, dict) else {}
    return {
        "id": watched.name,
        "folder": watched.name.rpartition("/")[0] or ".",
        "method": run.method,
        "recipe": str(run.recipe.get("name", "")),
        "dataset": str(facts.get("dataset", "")),
        "scenario": str(facts.get("scenario", "")),
        "seed": run.seed,
        "status": status(watched, now),
        "problem": watched.problem,
        "rounds": run.rounds,
        "done": run.rounds_done,
        "score": run.score if run.scored else "",
        **_how_scored(run),
        "acc": run.last_score,
        "forgetting": _last_forgetting(run),
        "loss": log.loss,
        "faults": len(log.faults),
        "skipped": log.skipped,
        "unreadable_lines": log.unreadable,
        "sent": log.bytes_up + log.bytes_down,
        "duration": run.seconds,
        "left": run.seconds_left if status(watched, now) == "running" else None,
        "started": log.first_time,
        "updated": log.last_time,
    }


def _how_scored(run: LoggedRun) -> dict[str, Any]:
    """How the table prints the scores: a heading, and whether they are fractions."""
    score = score_of(run.score)
    return {"heading": score.short, "percent": score.kind == PERCENT}


def _last_forgetting(run: LoggedRun) -> float | None:
    if run.result is not None:
        return run.result.metrics.get(score_of(run.score).lost)
    found = series.forgetting_by_task(run)
    return found[max(found)] if found else None


NOTES = "dashboard.json"  # beside the runs: {run: {"name": ..., "tags": [...], "hidden": true}}
LONGEST_NAME, MOST_TAGS, LONGEST_TAG = 120, 12, 40


Tag = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=LONGEST_TAG)]


class Note(BaseModel):
    """What a reader noted about a run: a name, tags, and whether it is hidden."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, StringConstraints(strip_whitespace=True, max_length=LONGEST_NAME)] = ""
    tags: Annotated[list[Tag], Field(max_length=MOST_TAGS)] = []
    hidden: bool = False


_NOTES = TypeAdapter(dict[str, Note])


class Index:
    """All runs below a folder. `lock` must be held to read or draw a run's log."""

    def __init__(self, root: Path, clock: Callable[[], float] = time.time) -> None:
        self.guard, self.clock = FolderGuard(root), clock
        self.lock = threading.Lock()
        self.runs: dict[str, Watched] = {}
        self.problems: tuple[str, ...] = ()
        self.notes: dict[str, Note] = {}
        self.version = 0

    def annotate(self, name: str, note: Note) -> None:
        """Keep a note on a run in the file beside the runs. Raises KeyError for an unknown run, and UserError where
        that file cannot be read: its other notes would be lost."""
        self.chosen([name])
        with self.lock:
            problems: list[str] = []
            notes = {**self._read_notes(problems), name: note}
            if problems:
                raise UserError(f"{problems[0]}; nothing was written. Mend or remove {self.guard.root / NOTES}")
            kept = {key: found.model_dump(exclude_defaults=True) for key, found in sorted(notes.items())}
            text = json.dumps({key: value for key, value in kept.items() if value}, indent=1)
            write_atomic(self.guard.root / NOTES, f"{text}\n".encode(), shared=True)
            self.notes = {key: notes[key] for key, value in kept.items() if value}  # for a page that is reloaded now
            self.version += 1

    def _read_notes(self, problems: list[str]) -> dict[str, Note]:
        try:
            with self.guard.open(self.guard.root / NOTES) as file:
                return _NOTES.validate_json(file.read())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RunError) as error:
            problems.append(f"{NOTES} cannot be read, so names and tags are not shown: {str(error).splitlines()[0]}")
            return {}

    def poll(self) -> bool:
        """Read everything once; True when something changed. Changed runs get a higher version."""
        before, problems = self.version, list[str]()
        found = dict(self._find(problems))
        with self.lock:
            notes = self._read_notes(problems)
            if tuple(problems) != self.problems or notes != self.notes or not set(self.runs) <= set(found):
                self.version += 1
            self.problems, self.notes = tuple(problems), notes
            self.runs = {name: self.runs.get(name) or Watched(name, found[name]) for name in sorted(found)}
        for watched in list(self.runs.values()):
            with self.lock:
                if watched.poll(self.guard, self.clock()):
                    self.version += 1
                    watched.version = self.version
        return self.version > before

    def chosen(self, names: Sequence[str]) -> list[Watched]:
        """Runs by id. Raises KeyError with the first unknown id."""
        return [self.runs[name] for name in names]

    def _find(self, problems: list[str]) -> Iterator[tuple[str, Path]]:
        """(id, folder) of every run; the id is the path below the root."""
        waiting, looked = [(self.guard.root, 0)], 0
        while waiting:
            folder, depth = waiting.pop()
            looked += 1
            if looked > MOST_FOLDERS:
                problems.append(f"More than {MOST_FOLDERS:,} folders: name a folder that holds runs only.")
                return
            if (folder / RECIPE).exists():
                yield folder.relative_to(self.guard.root).as_posix() if depth else folder.name, folder
            elif depth < DEPTH:
                waiting += [(inner, depth + 1) for inner in self._folders(folder, problems)]

    def _folders(self, folder: Path, problems: list[str]) -> Iterator[Path]:
        try:
            entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".") and entry.is_dir()]
        except FileNotFoundError:
            return
        except OSError as error:
            problems.append(f"{folder} cannot be read: {error.strerror or error}")
            return
        for entry in entries:
            if entry.is_symlink() and not self.guard.inside(Path(entry.path)):
                problems.append(f"{entry.name} is a link that leads out of {self.guard.root}; it is not followed.")
            else:
                yield Path(entry.path)


# what the page shows -----------------------------------------------------------------------------------------------
MOST_DRAWN = 200  # runs in one comparison
MOST_REPORTED = 100  # runs in one report
POINTS_DRAWN = 40_000  # of all curves of a comparison together
HEARTBEAT = 15.0  # seconds after which a connection without updates gets a comment line
BY = ("method", "run")
OPTIONS = "options"  # of a sweep, in place of curves


class NoRun(LookupError):
    """There is no such run (any more)."""


def assets() -> dict[str, tuple[str, str]]:
    """name -> (media type, text) of the page's styles and scripts."""
    styles = {name: ("text/css", html.asset(name)) for name in ("page.css", "dashboard.css")}
    scripts = {name: ("text/javascript", html.asset(name)) for name in ("charts.js", "dashboard.js")}
    return {"theme.css": ("text/css", variables()), **styles, **scripts}


class Dashboard:
    """The runs below a folder. Every method keeps its colour for as long as the page is served."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise UserError(f"{root} is not a folder" if root.exists() else f"{root} does not exist")
        self.index, self.colours, self.pieces = Index(root), Colours(), PieceColours()

    def runs(self) -> dict[str, Any]:
        """Every run in short."""
        found = [run.summary for run in self.index.runs.values() if run.summary]
        return {"root": str(self.index.guard.root), "runs": found, **_others(self.index)}

    def options(self) -> dict[str, dict[str, Any]]:
        """{key: {run: value}} of the options in which the runs differ."""
        with self.index.lock:
            runs = [watched.run for watched in self.index.runs.values() if watched.recipe_text]
            return {short_key(key): {run.name: facts(run).get(key) for run in runs} for key in differing(runs)}

    def annotate(self, name: str, note: Note) -> None:
        """Keep a reader's note on a run. Raises NoRun."""
        self._chosen([name], 1)
        self.index.annotate(name, note)

    def compare(self, names: Sequence[str], kinds: Sequence[str], view: View, together: bool = False) -> str:
        """Curves of several runs as HTML, one figure for each of `kinds` (figures.CURVES).

        Each data set has axes of its own, unless `together`. Raises UserError and NoRun.
        """
        _check(kinds, view)
        watched = self._chosen(names, MOST_DRAWN)
        limit = max(50, min(600, POINTS_DRAWN // max(1, len(watched) * len(kinds))))
        view = replace(view, limit=limit)
        with self.index.lock:
            runs = [run.run for run in watched if not run.problem]
            self._assign_colours()
            parts = [("", runs)] if together else list(_by_data(runs).items())
            return join(*(self._drawn(name if len(parts) > 1 else "", own, kinds, view) for name, own in parts))

    def _drawn(self, name: str, runs: Sequence[LoggedRun], kinds: Sequence[str], view: View) -> Html:
        grouping = grouped(runs, self.colours)
        groups, notes = grouping.groups, [tag("p", note, class_="note") for note in grouping.notes]
        drawn = self._figures(kinds, groups, view)
        return tag("section", tag("h3", name, class_="data-name") if name else None, drawn, *notes, class_="data-set")

    def _figures(self, kinds: Sequence[str], groups: Sequence[SeedGroup], view: View) -> Html:
        if len(kinds) > 1:
            return figures.panels(kinds, groups, view)
        if kinds[0] != OPTIONS:
            return figures.curve(kinds[0], groups, view)
        found = sweeps.figures(groups, self.pieces)
        none = f"No method has {sweeps.FEWEST} runs here that differ in an option and have a score."
        return tag("div", *found, class_="two") if found else charts.missing("Options and score", none, OPTIONS)

    def run(self, name: str) -> dict[str, Any]:
        """One run in full: its summary, and sections of HTML by name, so that a page can replace what changed."""
        (watched,) = self._chosen([name], 1)
        with self.index.lock:
            return {"summary": watched.summary, "sections": self._sections(watched)}

    def report(self, names: Sequence[str]) -> str:
        """The report, read from the folders again: the lock of the live index is not held meanwhile."""
        watched = self._chosen(names, MOST_REPORTED)
        with self.index.lock:
            self._assign_colours()
        return html.render([read_run(run.folder, run.name, self.index.guard.open) for run in watched], "", self.colours)

    def _chosen(self, names: Sequence[str], most: int) -> list[Watched]:
        names = list(dict.fromkeys(names))
        if not 0 < len(names) <= most:
            raise UserError(f"{len(names)} runs are named; allowed: 1 to {most}")
        try:
            return self.index.chosen(names)
        except KeyError as error:
            raise NoRun(f"there is no run {error.args[0]}, or not any more") from error

    def _assign_colours(self) -> None:
        """Of all runs, so that a colour does not depend on the runs that are shown."""
        assigned([run.run for run in self.index.runs.values() if run.recipe_text], self.colours)

    def _sections(self, watched: Watched) -> dict[str, str]:
        """What is known of a run now; figures without data are left out while it goes on."""
        if watched.problem:
            return {"problem": html.problem(watched.problem)}
        self._assign_colours()
        run, groups = watched.run, grouped([watched.run], self.colours).groups
        sections = {
            "facts": html.facts(run, watched.summary["left"]),
            "happenings": html.happenings(run),
            "acc": figures.curve("acc", groups),
            "loss": figures.curve("loss", groups),
            "matrix": figures.accuracy_matrix(groups[0]),
            "forgetting": figures.curve("forgetting", groups),
            "who": figures.who_saw_what(run),
            "classes": figures.class_mix(run),
            "traffic": figures.traffic(groups, self.pieces),
            "time": figures.time(groups, self.pieces),
            "memory": figures.memory(groups, self.pieces),
            "buffers": figures.buffers(run),
            "measured": join(*figures.measured(groups)),
            "log": html.log(run, self.index.guard.open),
            "recipe": html.recipe(run),
        }
        return {name: text for name, text in sections.items() if text and not charts.is_missing(text)}


def _check(kinds: Sequence[str], view: View) -> None:
    whats = (*figures.CURVES, *([OPTIONS] if len(kinds) == 1 else []))
    allowed = (("what", kinds, whats), ("by", [view.by], BY), ("x", [view.along], figures.ALONG))
    for name, given, known in allowed:
        for value in given:
            if value not in known:
                raise UserError(f"{name} is one of {', '.join(known)}; got {value}")
    if not 0 <= view.smooth < 1:
        raise UserError(f"smooth is at least 0 and below 1; got {view.smooth}")


def _by_data(runs: Sequence[LoggedRun]) -> dict[str, list[LoggedRun]]:
    """Runs by data set and scenario."""
    found: dict[str, list[LoggedRun]] = {}
    for run in runs:
        scenario = facts(run).get("stream.scenario")
        found.setdefault(f"{dataset(run)}, {scenario}" if scenario else dataset(run), []).append(run)
    return found


def _others(index: Index) -> dict[str, Any]:
    """What there is beside runs."""
    notes = {name: note.model_dump(exclude_defaults=True) for name, note in index.notes.items()}
    return {"problems": list(index.problems), "notes": notes}


class Updates:
    """Polls the runs and sends changes to all listeners."""

    def __init__(self, index: Index, every: float) -> None:
        self.index, self.every = index, every
        self.closed = False  # when set, connections are closed at the next poll
        self._news = asyncio.Condition()

    async def watch(self) -> None:
        """Poll every `every` seconds, for ever, and wake the listeners."""
        sent = -1
        while True:
            await asyncio.to_thread(self.index.poll)
            if self.index.version > sent or self.closed:  # by a poll, or by a note since the one before
                sent = self.index.version
                async with self._news:
                    self._news.notify_all()
            await asyncio.sleep(self.every)

    async def listen(self) -> AsyncIterator[str]:
        """Server-sent events for one listener: all runs once, then changed and removed ones."""
        known: dict[str, int] = {}
        version = -1
        while not self.closed:
            if self.index.version > version:
                version = self.index.version
                yield f"event: runs\ndata: {json.dumps(self._difference(known))}\n\n"
            else:
                yield ": still here\n\n"
            await self._wait(version)

    async def _wait(self, version: int) -> None:
        """Wait for a newer version than `version`, at most for HEARTBEAT seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEARTBEAT), self._news:
                await self._news.wait_for(lambda: self.closed or self.index.version > version)

    def _difference(self, known: dict[str, int]) -> dict[str, Any]:
        """The changes for a listener that has the versions `known`, which is updated."""
        runs = dict(self.index.runs)
        fresh = [run for run in runs.values() if run.summary and known.get(run.name) != run.version]
        gone = [name for name in known if name not in runs]
        for name in gone:
            del known[name]
        known.update({run.name: run.version for run in fresh})
        return {"runs": [run.summary for run in fresh], "gone": gone, **_others(self.index)}
