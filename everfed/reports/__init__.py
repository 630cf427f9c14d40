"""Reports of runs: tables, plots, one HTML file, and a live page.

everfed.report(["runs/a", "runs/b"], "report.html")
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from everfed.errors import UserError
from everfed.reports import paper
from everfed.reports.groups import by_stream
from everfed.reports.html import render, the_tables
from everfed.reports.paper import file_name
from everfed.reports.read import read_runs
from everfed.reports.tables import ReportTable, to_csv, to_latex, to_markdown
from everfed.store.files import write_atomic


def write(
    runs: str | Path | Sequence[str | Path],
    out: str | Path | None = None,
    *,
    figures: bool | None = None,
    title: str = "",
) -> Path:
    """Write a report of runs (run folders, or folders that hold some) and return its HTML file.

    out: the HTML file, or a folder in which it is called report.html; by default report.html in the first folder.
    Beside NAME.html a folder NAME gets tables/ (Markdown, CSV, LaTeX) and, unless `figures` is False, figures/ (PNG and
    PDF, which need matplotlib; None: where it is installed); of runs on several streams, each of them has a folder for
    each stream. title: the page's heading, instead of a list of methods.
    Raises UserError: no run, a damaged one, matplotlib missing, a place that cannot be written to.
    """
    folders = [Path(runs)] if isinstance(runs, str | Path) else [Path(run) for run in runs]
    if not folders:
        raise UserError("there is no run to report; name run folders, or folders that hold some")
    if figures is None:
        figures = find_spec("matplotlib") is not None
    if figures:
        paper.check()
    out = folders[0] / "report.html" if out is None else Path(out)
    page = out if out.suffix.lower() in (".html", ".htm") else out / "report.html"
    found = read_runs(folders)
    streams = by_stream(found)
    beside = page.with_suffix("")
    try:
        _write_text(page, render(found, title))
        for stream in streams:
            own = Path(file_name(stream.name)) if len(streams) > 1 else Path()
            _write_tables(the_tables(stream.runs, stream.groups), beside / "tables" / own)
            if figures:
                paper.write(stream.groups, beside / "figures" / own)
    except OSError as error:
        raise UserError(f"cannot write the report to {page}: {error.strerror or error}") from error
    return page


def _write_tables(tables: Sequence[ReportTable], folder: Path) -> None:
    for table in tables:
        for suffix, text in (("md", to_markdown), ("csv", to_csv), ("tex", to_latex)):
            _write_text(folder / f"{table.name}.{suffix}", text(table))


def _write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text.encode(), shared=True)


__all__ = ["write"]
