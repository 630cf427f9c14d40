"""What a comparison or a sweep came to, for Python and notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everfed.experiments import summary
from everfed.reports.result import Result, as_frame, html_table, plot


@dataclass(frozen=True, repr=False)
class Comparison:
    """Finished runs by row, the best first. folder: of all run folders and the written tables. heading: what a row is.
    note: about the scores."""

    folder: Path
    rows: Sequence[summary.TableRow]
    heading: str
    note: str = ""

    @property
    def results(self) -> dict[str, list[Result]]:
        """The finished runs of every row, by seed."""
        return {
            row.name: [Result(outcome.job.folder, outcome.result) for outcome in row.outcomes if outcome.result]
            for row in self.rows
        }

    @property
    def problems(self) -> dict[Path, str]:
        """Run folders of runs that failed, with the error."""
        failed = (outcome for row in self.rows for outcome in row.outcomes if outcome.result is None)
        return {outcome.job.folder: outcome.problem for outcome in failed}

    @property
    def best(self) -> str:
        """The name of the best row; empty where no run finished."""
        return self.rows[0].name if self.rows and self.rows[0].spreads else ""

    @property
    def table(self) -> Any:
        """Every number as mean and deviation over seeds; a pandas frame, or a list of dicts without pandas."""
        rows = [
            {self.heading.lower(): row.name}
            | {f"{key}_{part}": spread[part] for key, spread in row.spreads.items() for part in ("mean", "deviation")}
            for row in self.rows
        ]
        return as_frame(rows)

    def plot(self) -> Any:
        """A matplotlib figure: every row's mean score over the tasks, of its first seed."""
        first = [(name, runs[0]) for name, runs in self.results.items() if runs]
        return plot([(name, run.folder, run.data) for name, run in first])

    def report(self, out: str | Path | None = None, *, figures: bool | None = None) -> Path:
        """Write the report of all runs (`everfed.report`)."""
        from everfed.reports import write

        folders = [run.folder for runs in self.results.values() for run in runs]
        return write(folders, out or self.folder / "report.html", figures=figures)

    def __repr__(self) -> str:
        from everfed.reports.formats import markdown_table

        return f"{markdown_table(*summary.table(self.rows, self.heading))}\n{self._note()}"

    def _repr_html_(self) -> str:
        return html_table(*summary.table(self.rows, self.heading), self._note())

    def _note(self) -> str:
        return "; ".join(part for part in (self.note, f"in {self.folder}") if part)
