"""`everfed leaderboard`: every method on the same streams, tuned with the same number of tries."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from everfed.commands import options
from everfed.errors import RecipeError
from everfed.naming import split_names

RECORDS = Path("results") / "leaderboard"


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
    from everfed.experiments.jobs import JobSettings
    from everfed.experiments.leaderboard import tuning
    from everfed.experiments.leaderboard.records import forget_failures

    chosen = _named("--streams", streams, tuning.streams()), _named("--methods", methods, tuning.compared())
    board = tuning.Board(out, records, tries, range(seeds), device)
    if page is not None:
        from everfed.experiments.leaderboard.page import marked_page

        marked_page(page)  # not after hours of runs
    if not only_page:
        if again:
            forget_failures(records, *chosen)
        settings = JobSettings(
            options.absolute(data), 1.0, 1e9 if limit else 30.0, as_json, jobs=jobs, keep_going=True, limit=limit
        )
        board.run(*chosen, settings, Terminal(as_json))
    _print_summary(records, _write_pages(records, page, html), as_json)


def _named(option: str, text: str | None, allowed: Sequence[str]) -> list[str]:
    if text is None:
        return list(allowed)
    wanted = split_names(text)
    for name in wanted:
        if name not in allowed:
            raise RecipeError(f"{option} {name}: use some of {', '.join(allowed)}")
    return [name for name in allowed if name in wanted]


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
