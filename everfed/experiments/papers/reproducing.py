"""`everfed.reproduce`: a whole table of a paper, run and judged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from everfed.api import CHECKPOINT_EVERY
from everfed.errors import UserError, is_user_error
from everfed.experiments import cells
from everfed.experiments.cells import Cell, Outcome, Settings
from everfed.experiments.grid import Shown
from everfed.experiments.papers import planning, records
from everfed.experiments.papers.judging import Runs, judge
from everfed.experiments.papers.measures import Sample
from everfed.experiments.papers.planning import Cell as Place
from everfed.experiments.papers.planning import Experiment
from everfed.experiments.papers.tables import find
from everfed.experiments.papers.writing import Reproduction
from everfed.experiments.sweeping import folder_name
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
    output: cells.Output | None = None,
) -> Reproduction:
    """Run a table of a paper ("fedgp/table1") and judge it, as `everfed reproduce` does.

    methods: only these, by everfed's names or the paper's; columns: only those whose name contains one of these (lists,
    or texts with commas). seeds: how many, by default as many as the recipe compares. out: folder of the run folders, by
    default runs/reproduce; finished runs in it are kept, interrupted ones resumed. scale: a share of the work, or
    "small". output: shows how far the runs are, instead of `progress`. The rest is as in `everfed.compare`. Raises
    UserError where nothing can be run.
    """
    chosen = find(table)
    if chosen.item.nothing:
        raise UserError(f"{chosen.name} ({chosen.item.about}): there is nothing to run; {chosen.item.nothing}")
    settings = Settings(data_dir, share(scale), checkpoint_every, track=track, jobs=jobs)
    folder = Path(out) if out is not None else default_folder(settings.scale)
    output = output or Shown(progress, ())

    places = planning.plan(chosen, _names(methods), _names(columns))
    grid, refused = _grid(planning.experiments(places), folder, seeds, engine, settings)
    places = [_with_refusal(place, refused) for place in places]
    wanted = {experiment: grid[experiment] for experiment in planning.experiments(places)}
    runs = [cell for own in wanted.values() for cell in own]
    output.say(_announcement(places, runs, settings.scale))
    outcomes = {outcome.cell.folder: outcome for outcome in cells.run(runs, settings, output=output)}
    return Reproduction(
        chosen, settings.scale, folder, judge(places, _ended(wanted, outcomes)), _problems(outcomes.values())
    )


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
    wanted: Sequence[Experiment], folder: Path, seeds: int | None, engine: str | None, settings: Settings
) -> tuple[dict[Experiment, list[Cell]], dict[Experiment, str]]:
    """(runs by experiment, why experiments cannot be run). Raises UserError for a folder that holds other runs."""
    grid: dict[Experiment, list[Cell]] = {}
    refused: dict[Experiment, str] = {}
    for experiment in wanted:
        try:
            grid[experiment] = _cells(experiment, folder, seeds, engine)
            unfinished = [cell for cell in grid[experiment] if not cell.finished]
            if unfinished:
                cells.check_run(unfinished[0], settings)
        except Exception as error:
            if not is_user_error(error):
                raise
            refused[experiment] = str(error)
    cells.check_folders([cell for e, own in grid.items() if e not in refused for cell in own], settings)
    if refused and len(refused) == len(wanted):
        raise UserError("nothing can be run:\n" + "\n".join(dict.fromkeys(refused.values())))
    return grid, refused


def _cells(experiment: Experiment, folder: Path, seeds: int | None, engine: str | None) -> list[Cell]:
    sets = [*experiment.sets, *([f"engine.kind={engine}"] if engine else [])]
    base = experiment.recipe.replace("/", "-")
    parent = folder / (f"{base},{folder_name(experiment.sets)}" if experiment.sets else base)
    name = experiment.method or "parts"
    return [
        cells.new_cell(
            f"{experiment.recipe} {name}",
            experiment.recipe,
            parent / f"{name}-{seed}",
            method=experiment.method or None,
            seed=seed,
            sets=sets,
        )
        for seed in seeds_of(experiment.recipe, seeds)
    ]


def _with_refusal(place: Place, refused: dict[Experiment, str]) -> Place:
    reason = next((refused[run] for run in (place.experiment, place.against) if run in refused), "")
    return replace(place, missing=place.missing or reason)


def _announcement(places: Sequence[Place], runs: Sequence[Cell], scale: float) -> str:
    done, absent = sum(cell.finished for cell in runs), sum(bool(place.missing) for place in places)
    small = "" if scale == 1 else f"; --scale {scale:g}: the numbers are not comparable with the paper's"
    return (
        f"{len(runs)} runs ({done} finished already); {len(places) - absent} of {len(places)} cells can be run{small}"
    )


def _ended(wanted: dict[Experiment, list[Cell]], outcomes: dict[Path, Outcome]) -> Runs:
    """The runs that finished, and those that diverged."""
    return {
        experiment: {
            cell.recipe.seed: Sample(records.of_run(cell.folder))
            for cell in own
            if outcomes[cell.folder].result is not None or records.diverged(cell.folder)
        }
        for experiment, own in wanted.items()
    }


def _problems(outcomes: Iterable[Outcome]) -> list[str]:
    return [f"{one.cell.folder}: {one.problem}" for one in outcomes if one.result is None]
