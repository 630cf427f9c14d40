"""`everfed reproduce`: a whole table of a paper, ours beside the paper's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from everfed.commands import options, tracking
from everfed.commands.record import RECORDS, Records
from everfed.errors import UserError
from everfed.naming import split_names

if TYPE_CHECKING:
    from everfed.experiments.jobs import GridJob, JobSettings, Outcome
    from everfed.experiments.papers.judging import Runs
    from everfed.experiments.papers.planning import Cell as Place
    from everfed.experiments.papers.planning import Experiment
    from everfed.experiments.papers.tables import Table
    from everfed.experiments.papers.writing import Found

SMALL = 0.05  # `--scale small`: enough data for every recipe's division among clients


def reproduce(
    table: Annotated[
        str | None, typer.Argument(metavar="[PAPER/TABLE]", help="A table or figure, such as fedgp/table1.")
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="Show every table with what it costs, and run nothing.")] = False,
    status: Annotated[
        bool, typer.Option("--status", help="Show the cells with records, verdicts, and what the rest costs.")
    ] = False,
    records: Records = RECORDS,
    rate: Annotated[
        float | None,
        typer.Option(metavar="N", min=1, help="For --status: training samples a second (default: the records')."),
    ] = None,
    methods: Annotated[
        str | None, typer.Option(metavar="M,M,...", help="Only these methods, by everfed's names or the paper's.")
    ] = None,
    columns: Annotated[
        str | None, typer.Option(metavar="C,C,...", help="Only columns whose name contains one of these.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="How many seeds (default: as many as the recipe compares).")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(metavar="E", help="How clients are run: auto, eager, processes, graphs or ranks.")
    ] = None,
    data: options.Data = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the run folders (default: runs/reproduce).")
    ] = None,
    scale: Annotated[
        str,
        typer.Option(metavar="F", help="Share of the rounds and the data, or small (0.05); not comparable below 1."),
    ] = "1",
    checkpoint_every: options.CheckpointEvery = 5.0,
    jobs: options.Jobs = 0,
    track: tracking.Track = [],  # noqa: B006 (typer copies it)
    as_json: options.Json = False,
) -> None:
    """Run a table of a paper and print our numbers, the paper's, the difference and whether it is reproduced.

    Every cell either runs or is listed with the reason why not. When the
    command is repeated, finished runs are kept and interrupted ones resumed;
    tables share their common runs. The result is also written to the folder,
    as JSON, Markdown and CSV.

    \b
    Examples:
      everfed reproduce --list
      everfed reproduce --status --rate 5000
      everfed reproduce fedgp/table1 --data ~/data
      everfed reproduce fedgp/table1 --data ~/data --scale small --seeds 1
      everfed reproduce fedgp/table7 --methods der,fedgp+der --columns MNIST
    """
    from everfed.experiments.jobs import JobSettings
    from everfed.experiments.papers.tables import find

    factor = _scale(scale)
    selection = Selection(split_names(methods), split_names(columns), seeds, engine, out or _default_folder(factor))
    settings = JobSettings(options.absolute(data), factor, checkpoint_every, as_json, track, jobs)
    if show:
        if methods or columns:
            raise UserError("--list shows whole tables; leave --methods and --columns out")
        _show_list(table or "", selection, settings)
        return
    if status:
        if methods or columns:
            raise UserError("--status shows whole tables; leave --methods and --columns out")
        _show_status(table or "", records, rate, seeds, as_json)
        return
    if table is None:
        raise UserError("name a table, such as fedgp/table1; `everfed reproduce --list` shows every one")
    chosen = find(table)
    if chosen.item.nothing:
        raise UserError(f"{chosen.name} ({chosen.item.about}): there is nothing to run; {chosen.item.nothing}")
    found = _reproduced(chosen, selection, settings)
    _print_result(found, selection.out, as_json)
    if found.problems:
        raise typer.Exit(1)


@dataclass(frozen=True)
class Selection:
    """The options of the command line beside the table. out: the folder of all run folders."""

    methods: Sequence[str]
    columns: Sequence[str]
    seeds: int | None
    engine: str | None
    out: Path


def _scale(text: str) -> float:
    try:
        return SMALL if text == "small" else float(text)
    except ValueError as error:
        raise UserError(f"--scale must be a number above 0 and at most 1, or small; got {text!r}") from error


def _default_folder(scale: float) -> Path:
    """Scaled runs have a folder of their own."""
    return Path("runs") / ("reproduce" if scale == 1 else f"reproduce-{scale:g}")


# running ---------------------------------------------------------------------------------------------------------


def _reproduced(table: Table, selection: Selection, settings: JobSettings) -> Found:
    """Run what can be run and judge it."""
    from everfed.commands.terminal import Terminal
    from everfed.experiments import jobs
    from everfed.experiments.papers import judging, planning
    from everfed.experiments.papers.writing import Found

    places = planning.plan(table, selection.methods, selection.columns)
    grid, refused = _grid(planning.experiments(places), selection, settings)
    places = [_with_refusal(place, refused) for place in places]
    wanted = {experiment: grid[experiment] for experiment in planning.experiments(places)}
    runs = [cell for own in wanted.values() for cell in own]
    _announce(places, runs, settings)
    outcomes = {
        outcome.job.folder: outcome for outcome in jobs.run_all(runs, settings, output=Terminal(settings.as_json))
    }
    judged = judging.judge(places, _finished(wanted, outcomes))
    return Found(table, settings.scale, judged, _problems(outcomes.values()))


def _finished(wanted: dict[Experiment, list[GridJob]], outcomes: dict[Path, Outcome]) -> Runs:
    from everfed.experiments.papers import records
    from everfed.experiments.papers.measures import Sample

    found: dict[Experiment, dict[int, Sample]] = {}
    for experiment, cells in wanted.items():
        done = [cell for cell in cells if outcomes[cell.folder].result is not None]
        found[experiment] = {cell.recipe.seed: Sample(records.of_run(cell.folder)) for cell in done}
    return found


def _grid(
    wanted: Sequence[Experiment], selection: Selection, settings: JobSettings
) -> tuple[dict[Experiment, list[GridJob]], dict[Experiment, str]]:
    """(runs by experiment, why experiments cannot be run). Raises UserError for a folder that holds other runs."""
    from everfed.errors import is_user_error
    from everfed.experiments import jobs

    grid: dict[Experiment, list[GridJob]] = {}
    refused: dict[Experiment, str] = {}
    for experiment in wanted:
        try:
            grid[experiment] = _cells(experiment, selection)
            unfinished = [cell for cell in grid[experiment] if not (cell.folder / "result.json").exists()]
            if unfinished:
                jobs.check_run(unfinished[0], settings)
        except Exception as error:
            if not is_user_error(error):
                raise
            refused[experiment] = str(error)
    jobs.check_folders([cell for e, own in grid.items() if e not in refused for cell in own], settings)
    if refused and len(refused) == len(wanted):
        raise UserError("nothing can be run:\n" + "\n".join(dict.fromkeys(refused.values())))
    return grid, refused


def _cells(experiment: Experiment, selection: Selection) -> list[GridJob]:
    from everfed.experiments.jobs import new_job
    from everfed.experiments.sweeping import folder_name

    sets = [*experiment.sets, *([f"engine.kind={selection.engine}"] if selection.engine else [])]
    base = experiment.recipe.replace("/", "-")
    parent = selection.out / (f"{base},{folder_name(experiment.sets)}" if experiment.sets else base)
    name = experiment.method or "parts"
    return [
        new_job(
            f"{experiment.recipe} {name}",
            experiment.recipe,
            parent / f"{name}-{seed}",
            method=experiment.method or None,
            seed=seed,
            sets=sets,
        )
        for seed in _seeds(experiment.recipe, selection.seeds)
    ]


def _seeds(recipe: str, count: int | None) -> list[int]:
    """The first `count` seeds of those the recipe compares, and further ones when it has fewer."""
    from everfed.recipe import read

    base = read(recipe)
    own = base.compare.seeds if base.compare else [base.seed]
    if count is None or count <= len(own):
        return own[:count]
    further = [seed for seed in range(count + len(own)) if seed not in own]
    return [*own, *further][:count]


def _with_refusal(place: Place, refused: dict[Experiment, str]) -> Place:
    reason = next((refused[run] for run in (place.experiment, place.against) if run in refused), "")
    return replace(place, missing=place.missing or reason)


def _problems(outcomes: Iterable[Outcome]) -> list[str]:
    return [f"{one.job.folder}: {one.problem}" for one in outcomes if one.result is None]


# output ----------------------------------------------------------------------------------------------------------


def _announce(places: Sequence[Place], runs: Sequence[GridJob], settings: JobSettings) -> None:
    if settings.as_json:
        return
    done = sum((cell.folder / "result.json").exists() for cell in runs)
    typer.echo(f"{len(runs)} runs ({done} finished already); {_missing_count(places)}{_warning(settings.scale)}")


def _missing_count(places: Sequence[Place]) -> str:
    absent = sum(bool(place.missing) for place in places)
    return f"{len(places) - absent} of {len(places)} cells can be run"


def _warning(scale: float) -> str:
    return "" if scale == 1 else f"; --scale {scale:g}: the numbers are not comparable with the paper's"


def _print_result(found: Found, out: Path, as_json: bool) -> None:
    from everfed.commands.output import show_table
    from everfed.experiments.papers import writing

    written = writing.write(out, found)
    if as_json:
        typer.echo(json.dumps({"event": "reproduction", **writing.as_dict(found)}))
        return
    for columns, lines in (writing.cells(found.measured), writing.missing(found.judged)):
        if lines:
            show_table(columns, lines)
            typer.echo("")
    for problem in found.problems:
        typer.echo(f"failed: {problem}")
    if found.table.item.note:
        typer.echo(f"note: {found.table.item.note}")
    typer.echo(f"{found.table.name}: {writing.summary(found)}")
    typer.echo(f"written to {', '.join(map(str, written))}")


# listing ---------------------------------------------------------------------------------------------------------


def _show_list(prefix: str, selection: Selection, settings: JobSettings) -> None:
    from everfed.commands.output import show_table
    from everfed.experiments.papers.listing import COLUMNS, overview
    from everfed.experiments.papers.tables import papers

    rows = overview(prefix.lower(), lambda recipe: _seeds(recipe, selection.seeds), settings.scale)
    if not rows:
        raise UserError(f"no table begins with {prefix!r}; papers: {', '.join(papers())}")
    if settings.as_json:
        typer.echo(json.dumps([vars(row) for row in rows], indent=2))
        return
    show_table(COLUMNS, [row.line() for row in rows])
    typer.echo("Samples: training samples processed, from the recipes; replayed and generated ones come on top.")


def _show_status(prefix: str, folder: Path, rate: float | None, seeds: int | None, as_json: bool) -> None:
    from everfed.commands.output import show_table
    from everfed.experiments.papers import matching, records
    from everfed.experiments.papers.status import COLUMNS, Rates, measured_rates, status
    from everfed.experiments.papers.tables import papers

    kept = records.read_all(folder)
    rates = Rates(given=rate) if rate else measured_rates(kept)
    rows = status(prefix.lower(), matching.runs_of(kept), lambda recipe: _seeds(recipe, seeds), rates)
    if not rows:
        raise UserError(f"no table with runs begins with {prefix!r}; papers: {', '.join(papers())}")
    if as_json:
        typer.echo(json.dumps([vars(row) for row in rows], indent=2))
        return
    show_table(COLUMNS, [row.line() for row in rows])
    typer.echo(f"{len(kept)} records in {folder}. Tables share runs: a run that several need is counted in each.")
