"""Follows a folder of runs while they are written: new runs, changed ones, removed ones.

It reads only inside the folder, and writes nothing but the readers' notes on runs (`NOTES`): run ids are keys of a
table of folders that were found, never parts of a path, and a link that leads outside is not followed. Events are read
from the byte where reading stopped last time.
"""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter

from everfed.errors import UserError
from everfed.metrics.scores import PERCENT, score_of
from everfed.reports import series
from everfed.reports.read import DEPTH, LoggedRun, StoredResult, read_recipe, read_result, read_settings
from everfed.store.event_log import Tail
from everfed.store.files import write_atomic
from everfed.store.run import RECIPE, RESULT, RunError

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
            self.settings = read_settings(self.folder, guard.open)
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
    """finished, running, silent (no event for long), failed, interrupted, waiting (no event yet) or unreadable."""
    log = watched.tail.log
    if watched.problem:
        return "unreadable"
    if watched.result is not None:
        return "finished"
    if log.failed or log.interrupted:
        return "failed" if log.failed else "interrupted"
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
        "acc": _last_score(run),
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


def _last_score(run: LoggedRun) -> float | None:
    if run.result is not None:
        return run.result.metrics.get(score_of(run.score).main)
    latest = max(run.log.evaluations, default=None)
    return None if latest is None else run.log.evaluations[latest].score


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
