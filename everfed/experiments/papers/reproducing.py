"""`everfed.reproduce`: a whole table of a paper, run and judged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from everfed.api import CHECKPOINT_EVERY
from everfed.errors import UserError, is_user_error
from everfed.experiments.grid import folder_name
from everfed.experiments.jobs import (
    GridJob,
    JobSettings,
    Outcome,
    Output,
    Shown,
    check_folders,
    check_run,
    new_job,
    run_all,
)
from everfed.experiments.papers import planning, records
from everfed.experiments.papers.judging import Runs, judge
from everfed.experiments.papers.measures import Sample
from everfed.experiments.papers.planning import Experiment, TableCell
from everfed.experiments.papers.tables import find
from everfed.experiments.papers.writing import Reproduction
from everfed.naming import split_names
from everfed.recipe import read

SMALL = 0.05  # scale="small": enough data for every recipe's division among clients


def reproduce(
    table: str,
    methods: Sequence[str] | str | None = None,
    columns: Sequence[str] | str | None = None,
    seeds: int | None = None,
    out: str | Path | None = None,
    *,
    engine: str | None = None,
    data_dir: str | Path | None = None,
    scale: float | str = 1.0,
    track: Sequence[str] = (),
    checkpoint_every: float = CHECKPOINT_EVERY,
    jobs: int = 1,
    progress: bool | None = None,
    output: Output | None = None,
) -> Reproduction:
    """Run a table of a paper ("fedgp/table1") and judge it, as `everfed reproduce` does.

    methods: only these, by everfed's names or the paper's; columns: only those whose name contains one of these (lists,
    or texts with commas). seeds: how many, by default as many as the recipe compares. out: folder of the run folders,
    by default runs/reproduce; finished runs in it are kept, interrupted ones resumed. scale: a share of the work, or
    "small". output: shows how far the runs are, instead of `progress`. The rest is as in `everfed.compare`. Raises
    UserError where nothing can be run.
    """
    chosen = find(table)
    if chosen.item.nothing:
        raise UserError(f"{chosen.name} ({chosen.item.about}): there is nothing to run; {chosen.item.nothing}")
    settings = JobSettings(data_dir, share(scale), checkpoint_every, track=track, jobs=jobs)
    folder = Path(out) if out is not None else default_folder(settings.scale)
    output = output or Shown(progress, ())

    cells = planning.plan(chosen, _names(methods), _names(columns))
    grid, refused = _grid(planning.experiments(cells), folder, seeds, engine, settings)
    cells = [_with_refusal(cell, refused) for cell in cells]
    wanted = {experiment: grid[experiment] for experiment in planning.experiments(cells)}
    runs = [job for own in wanted.values() for job in own]
    output.say(_announcement(cells, runs, settings.scale))
    outcomes = {outcome.job.folder: outcome for outcome in run_all(runs, settings, output=output)}
    judged = judge(cells, _ended(wanted, outcomes))
    return Reproduction(chosen, settings.scale, folder, judged, _problems(outcomes.values()))


def share(scale: float | str) -> float:
    """The share of the work that --scale names. Raises UserError."""
    try:
        return SMALL if scale == "small" else float(scale)
    except ValueError as error:
        raise UserError(f"--scale must be a number above 0 and at most 1, or small; got {scale!r}") from error


def default_folder(scale: float) -> Path:
    """Scaled runs have a folder of their own."""
    return Path("runs") / ("reproduce" if scale == 1 else f"reproduce-{scale:g}")


def seeds_of(recipe: str, count: int | None) -> list[int]:
    """The first `count` seeds of those the recipe compares, and further ones when it has fewer."""
    base = read(recipe)
    own = base.compare.seeds if base.compare else [base.seed]
    if count is None or count <= len(own):
        return own[:count]
    further = [seed for seed in range(count + len(own)) if seed not in own]
    return [*own, *further][:count]


def _names(chosen: Sequence[str] | str | None) -> list[str]:
    return split_names(chosen) if chosen is None or isinstance(chosen, str) else list(chosen)


def _grid(
    wanted: Sequence[Experiment], folder: Path, seeds: int | None, engine: str | None, settings: JobSettings
) -> tuple[dict[Experiment, list[GridJob]], dict[Experiment, str]]:
    """(runs by experiment, why experiments cannot be run). Raises UserError for a folder that holds other runs."""
    grid: dict[Experiment, list[GridJob]] = {}
    refused: dict[Experiment, str] = {}
    for experiment in wanted:
        try:
            grid[experiment] = _jobs(experiment, folder, seeds, engine)
            unfinished = [job for job in grid[experiment] if not job.finished]
            if unfinished:
                check_run(unfinished[0], settings)
        except Exception as error:
            if not is_user_error(error):
                raise
            refused[experiment] = str(error)
    check_folders([job for e, own in grid.items() if e not in refused for job in own], settings)
    if refused and len(refused) == len(wanted):
        raise UserError("nothing can be run:\n" + "\n".join(dict.fromkeys(refused.values())))
    return grid, refused


def _jobs(experiment: Experiment, folder: Path, seeds: int | None, engine: str | None) -> list[GridJob]:
    sets = [*experiment.sets, *([f"engine.kind={engine}"] if engine else [])]
    base = experiment.recipe.replace("/", "-")
    parent = folder / (f"{base},{folder_name(experiment.sets)}" if experiment.sets else base)
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
        for seed in seeds_of(experiment.recipe, seeds)
    ]


def _with_refusal(cell: TableCell, refused: dict[Experiment, str]) -> TableCell:
    reason = next((refused[run] for run in (cell.experiment, cell.against) if run in refused), "")
    return replace(cell, missing=cell.missing or reason)


def _announcement(cells: Sequence[TableCell], runs: Sequence[GridJob], scale: float) -> str:
    done, possible = sum(job.finished for job in runs), sum(not cell.missing for cell in cells)
    small = "" if scale == 1 else f"; --scale {scale:g}: the numbers are not comparable with the paper's"
    return f"{len(runs)} runs ({done} finished already); {possible} of {len(cells)} cells can be run{small}"


def _ended(wanted: dict[Experiment, list[GridJob]], outcomes: dict[Path, Outcome]) -> Runs:
    """The runs that finished, and those that diverged."""
    return {
        experiment: {
            job.recipe.seed: Sample(records.of_run(job.folder))
            for job in own
            if outcomes[job.folder].result is not None or records.diverged(job.folder)
        }
        for experiment, own in wanted.items()
    }


def _problems(outcomes: Iterable[Outcome]) -> list[str]:
    return [f"{one.job.folder}: {one.problem}" for one in outcomes if one.result is None]
