"""`everfed leaderboard`: every method on the same streams, tuned with the same number of tries."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from everfed.commands import options
from everfed.errors import RecipeError
from everfed.naming import split_names

if TYPE_CHECKING:
    from everfed.experiments.jobs import GridJob, Outcome
    from everfed.experiments.leaderboard.records import Record

RECORDS = Path("results") / "leaderboard"
TUNING_SEED = 100  # of the tries; tests have the seeds 0, 1, 2, ...


def leaderboard(
    streams: Annotated[str | None, typer.Option(metavar="S,S,...", help="Only these streams (default: all).")] = None,
    methods: Annotated[str | None, typer.Option(metavar="M,M,...", help="Only these methods (default: all).")] = None,
    tries: Annotated[int, typer.Option(metavar="N", min=1, max=5, help="Tries of every method.")] = 5,
    seeds: Annotated[int, typer.Option(metavar="N", min=1, help="Seeds of the test.")] = 3,
    device: Annotated[str | None, typer.Option(metavar="D", help="cpu, cuda or cuda:N, not the recipe's.")] = None,
    jobs: options.Jobs = 0,
    limit: Annotated[
        float, typer.Option(metavar="S", min=0.0, help="Give a run up after so many seconds; 0: never.")
    ] = 0.0,
    again: Annotated[bool, typer.Option("--again", help="Run tries and tests that failed again.")] = False,
    data: options.Data = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the run folders.")] = Path("runs/leaderboard"),
    records: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the records.")] = RECORDS,
    page: Annotated[Path | None, typer.Option(metavar="FILE", help="Renew the tables of this Markdown page.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the sortable report.")] = None,
    only_page: Annotated[bool, typer.Option("--only-page", help="Run nothing: use the records there are.")] = False,
    as_json: options.Json = False,
) -> None:
    """Compare all methods on three streams, each tuned with the same number of tries, and write the page.

    A try is a pair of learning rate and main weight, scored on validation data
    with a seed of its own; the best one is tested on the test data of other
    seeds. Every finished run is kept as data below DIR of --records: when the
    command is repeated, or several processes run it on one folder, only what
    is missing is run. Methods that fail are listed with the reason.

    \b
    Examples:
      everfed leaderboard --streams rotated-digits --methods fedavg,er
      everfed leaderboard --streams cifar100 --device cuda --jobs 12 --data ~/data
      everfed leaderboard --only-page --page docs/leaderboard.md --html leaderboard.html
    """
    from everfed.commands.terminal import Terminal
    from everfed.experiments.jobs import JobSettings, run_all
    from everfed.experiments.leaderboard import tuning
    from everfed.experiments.leaderboard.records import forget_failures

    chosen = _named("--streams", streams, tuning.streams()), _named("--methods", methods, tuning.compared())
    board = Board(out, records, tries, range(seeds), device)
    if page is not None:
        from everfed.experiments.leaderboard.page import marked_page

        marked_page(page)  # not after hours of runs
    if not only_page:
        if again:
            forget_failures(records, *chosen)
        places = [(stream, method) for stream in chosen[0] for method in tuning.slowest_first(chosen[1])]
        settings = JobSettings(
            options.absolute(data), 1.0, 1e9 if limit else 30.0, as_json, jobs=jobs, keep_going=True, limit=limit
        )
        run_all(list(board.first_jobs(places)), settings, board.then, Terminal(as_json))
    _print_summary(records, _write_pages(records, page, html), as_json)


@dataclass(frozen=True)
class Board:
    """What is run: tries, then tests, of methods on streams."""

    out: Path
    records: Path
    tries: int
    seeds: Sequence[int]
    device: str | None

    def first_jobs(self, places: Iterable[tuple[str, str]]) -> Iterator[GridJob]:
        """Every try that has no record, and the tests of methods whose tries all have one."""
        for stream, method in places:
            record = self._record(stream, method)
            missing = [number for number in range(self.tries) if not _has(record["tries"], "number", number)]
            yield from (self._try(stream, method, number) for number in missing)
            if not missing:
                yield from self._tests(record)

    def then(self, outcome: Outcome) -> list[GridJob]:
        """Keep a finished run; after the last try of a method come its tests."""
        from everfed.experiments.leaderboard import records

        stream, method, kind, number, *rest = outcome.job.row.split(" ")
        known = self._hash(stream)
        entry = records.measured(outcome.result, outcome.problem, _kept_samples(outcome))
        if kind == "test":
            of_try = {"seed": int(number), "try": int(rest[-1])}
            records.add(self.records, known, stream, method, "tests", {**of_try, **entry})
            return []
        about = {"number": int(number), "seed": TUNING_SEED, "sets": list(self._sets(stream, method, int(number)))}
        record = records.add(self.records, known, stream, method, "tries", {**about, **entry})
        whole = all(_has(record["tries"], "number", one) for one in range(self.tries))
        return list(self._tests(record)) if whole else []

    def _record(self, stream: str, method: str) -> Record:
        from everfed.experiments.leaderboard import records

        return records.opened(self.records, stream, method, self._hash(stream))

    def _hash(self, stream: str) -> str:
        """Of the stream's recipe, as it is without a method's settings."""
        from everfed.experiments.papers.records import recipe_hash, settings_of
        from everfed.recipe import read

        return recipe_hash(settings_of(read(_recipe(stream))))[:16]

    def _sets(self, stream: str, method: str, number: int) -> tuple[str, ...]:
        from everfed.experiments.leaderboard import tuning

        return tuning.tries(method, stream, number + 1)[number]

    def _try(self, stream: str, method: str, number: int) -> GridJob:
        sets = ["eval.split=validation", *self._sets(stream, method, number)]
        return self._job(stream, method, f"try {number}", TUNING_SEED, sets)

    def _tests(self, record: Record) -> Iterator[GridJob]:
        """The tests that have no record, with the best of the tries; none where no try finished."""
        from everfed.experiments.leaderboard.records import best_try, tests_of_best

        best = best_try(record)
        if best is None:
            return
        for seed in self.seeds:
            if not _has(tests_of_best(record), "seed", seed):
                name = f"test {seed} try {best['number']}"  # after other tries it would be another run
                yield self._job(record["stream"], record["method"], name, seed, best["sets"])

    def _job(self, stream: str, method: str, name: str, seed: int, sets: Sequence[str]) -> GridJob:
        from everfed.experiments.jobs import new_job

        kind = "eager" if self.device == "cpu" else "auto"  # on a CPU runs are side by side, not clients
        where = [f"engine.device={self.device}", f"engine.kind={kind}"] if self.device else []
        folder = self.out / stream / method / name.replace(" ", "-")
        row = f"{stream} {method} {name}"
        return new_job(row, _recipe(stream), folder, method=method, seed=seed, sets=[*where, *sets])


def _recipe(stream: str) -> str:
    from everfed.experiments.leaderboard.tuning import RECIPES

    return f"{RECIPES}{stream}"


def _has(entries: Iterable[Mapping[str, Any]], key: str, value: int) -> bool:
    return any(entry[key] == value for entry in entries)


def _named(option: str, text: str | None, allowed: Sequence[str]) -> list[str]:
    if text is None:
        return list(allowed)
    wanted = split_names(text)
    for name in wanted:
        if name not in allowed:
            raise RecipeError(f"{option} {name}: use some of {', '.join(allowed)}")
    return [name for name in allowed if name in wanted]


def _kept_samples(outcome: Outcome) -> float | None:
    """Samples in a client's buffer at the end, on average; None where the method has no buffer."""
    from everfed.store.event_log import read_log

    buffers = read_log(outcome.job.folder).buffers
    if outcome.result is None or not buffers:
        return None
    return sum(buffers[max(buffers)]) / outcome.result["stream"]["clients"]


def _write_pages(records: Path, page: Path | None, html: Path | None) -> list[str]:
    """The files that were written."""
    if page is None and html is None:
        return []
    from everfed.experiments.leaderboard import page as pages

    return [str(path) for path in pages.write(records, page, html)]


def _print_summary(records: Path, written: Sequence[str], as_json: bool) -> None:
    from everfed.experiments.leaderboard.records import finished_tests, problem, read_all

    found = read_all(records)
    tested = sum(bool(finished_tests(record)) for record in found)
    failed = {f"{record['stream']} {record['method']}": problem(record) for record in found if problem(record)}
    if as_json:
        counts = {"records": len(found), "tested": tested, "failed": failed, "written": written}
        typer.echo(json.dumps({"event": "leaderboard", **counts}))
        return
    for path in written:
        typer.echo(path)
    typer.echo(f"{tested} of {len(found)} records in {records} have test numbers")
    for name, reason in failed.items():
        typer.echo(f"no number: {name}: {reason}")
    if tested and not written:
        typer.echo("the table: everfed leaderboard --only-page --html FILE")
