"""The content of the dashboard: comparisons, single runs, reports, and updates. `server` serves it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from everfed.errors import UserError
from everfed.reports import charts, figures, html
from everfed.reports.charts import PieceColours
from everfed.reports.colours import variables
from everfed.reports.figures import View
from everfed.reports.groups import Colours, dataset, differing, facts, grouped, short_key, variant
from everfed.reports.live import Index, Note, Watched
from everfed.reports.markup import Html, join, tag
from everfed.reports.read import LoggedRun, read_run

MOST_DRAWN = 200  # runs in one comparison
MOST_REPORTED = 100  # runs in one report
POINTS_DRAWN = 40_000  # of all curves of a comparison together
HEARTBEAT = 15.0  # seconds after which a connection without updates gets a comment line
BY = ("method", "run")


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
        groups = grouped(runs, self.colours).groups
        drawn = figures.panels(kinds, groups, view) if len(kinds) > 1 else figures.curve(kinds[0], groups, view)
        return tag("section", tag("h3", name, class_="data-name") if name else None, drawn, class_="data-set")

    def run(self, name: str) -> dict[str, Any]:
        """One run in full: its summary, and sections of HTML by name, so that a page can replace what changed."""
        (watched,) = self._chosen([name], 1)
        with self.index.lock:
            return {"summary": watched.summary, "sections": self._sections(watched)}

    def report(self, names: Sequence[str]) -> str:
        """The report, read from the folders again: the lock of the live index is not held meanwhile."""
        watched = self._chosen(names, MOST_REPORTED)
        return html.render([read_run(run.folder, run.name, self.index.guard.open) for run in watched])

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
        self.colours.assign(variant(run.run) for run in self.index.runs.values() if run.recipe_text)

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
            "recipe": html.recipe(run),
        }
        return {name: text for name, text in sections.items() if text and not charts.is_missing(text)}


def _check(kinds: Sequence[str], view: View) -> None:
    allowed = (("what", kinds, figures.CURVES), ("by", [view.by], BY), ("x", [view.along], figures.ALONG))
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
