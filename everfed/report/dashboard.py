"""The content of the dashboard: comparisons, single runs, reports, and updates. `server` serves it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from everfed.errors import UserError
from everfed.report import figures, html
from everfed.report.colours import variables
from everfed.report.figures import Window
from everfed.report.groups import Colours, Group, grouped
from everfed.report.live import Index, Watched
from everfed.report.markup import join
from everfed.report.read import read_run

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
    """The runs below a folder. Every run keeps its colour for as long as the page is served."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise UserError(f"{root} is not a folder" if root.exists() else f"{root} does not exist")
        self.index, self.colours = Index(root), Colours()

    def runs(self) -> dict[str, Any]:
        """Every run in short."""
        found = [run.summary for run in self.index.runs.values() if run.summary]
        return {"root": str(self.index.guard.root), "runs": found, "problems": list(self.index.problems)}

    def compare(self, names: Sequence[str], what: str, by: str, window: Window) -> str:
        """Curves of several runs as HTML. Raises UserError and NoRun."""
        if what not in figures.CURVES or by not in BY:
            raise UserError(f"what is one of {', '.join(figures.CURVES)}, by one of {', '.join(BY)}; got {what}, {by}")
        watched = self._chosen(names, MOST_DRAWN)
        limit = max(50, min(600, POINTS_DRAWN // max(1, len(watched))))
        with self.index.lock:
            return figures.curve(what, self._groups(watched), by, limit, window)

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

    def _groups(self, watched: Sequence[Watched]) -> tuple[Group, ...]:
        """Without runs that cannot be read. Methods are assigned colours before variants of them."""
        self.colours.assign({run.summary["method"] for run in self.index.runs.values() if run.summary})
        return grouped([run.run for run in watched if not run.problem], self.colours).groups

    def _sections(self, watched: Watched) -> dict[str, str]:
        if watched.problem:
            return {"problem": html.problem(watched.problem)}
        run, groups = watched.run, self._groups([watched])
        return {
            "facts": html.facts(run),
            "happenings": html.happenings(run),
            "acc": figures.curve("acc", groups),
            "loss": figures.curve("loss", groups),
            "matrix": figures.accuracy_matrix(groups[0]),
            "forgetting": figures.curve("forgetting", groups),
            "who": figures.who_saw_what(run),
            "classes": figures.class_mix(run),
            "traffic": figures.traffic(groups),
            "time": figures.time(groups),
            "memory": figures.memory(groups),
            "buffers": figures.buffers(run),
            "measured": join(*figures.measured(groups)),
            "recipe": html.recipe(run),
        }


class Feed:
    """Polls the runs and sends changes to all listeners."""

    def __init__(self, index: Index, every: float) -> None:
        self.index, self.every = index, every
        self.closed = False  # when set, connections are closed at the next poll
        self._news = asyncio.Condition()

    async def watch(self) -> None:
        """Poll every `every` seconds, for ever, and wake the listeners."""
        while True:
            if await asyncio.to_thread(self.index.poll) or self.closed:
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
        return {"runs": [run.summary for run in fresh], "gone": gone, "problems": list(self.index.problems)}
