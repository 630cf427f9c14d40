"""Several methods and seeds on the same stream, one table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everfed.api import CHECKPOINT_EVERY
from everfed.errors import RecipeError
from everfed.experiments.grid import Grid, Shown, Streams, checked_jobs, streams_of
from everfed.experiments.jobs import GridJob, JobSettings, key_of_set, new_job
from everfed.experiments.result import Comparison
from everfed.methods.registry import canonical
from everfed.naming import split_names
from everfed.recipe import MethodSection, Recipe, Sets, Source, as_entries, read

if TYPE_CHECKING:
    from everfed.core.events import Observer
    from everfed.core.stream import Stream


def compare(
    recipe: Source,
    methods: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    out: str | Path | None = None,
    *,
    sets: Sets = (),
    data_dir: str | Path | None = None,
    scale: float = 1.0,
    stream: Stream | Streams | None = None,
    progress: bool | None = None,
    track: Sequence[str] = (),
    observers: Sequence[Observer] = (),
    checkpoint_every: float = CHECKPOINT_EVERY,
    jobs: int = 1,
) -> Comparison:
    """Run several methods over several seeds, as `everfed compare` does; returns the table, the best row first.

    methods (a list, or a text with commas), seeds: those of the recipe's [compare] where they are left out. out: folder
    of the run folders, by default runs/RECIPE-compare; finished runs in it are kept, interrupted ones resumed. stream:
    one of your own for all runs, or a function from the seed to a stream. jobs: runs side by side in processes of their
    own, 0 for what is fastest; a script then needs `if __name__ == "__main__"`. The rest is as in `everfed.run`.
    """
    grid = plan(recipe, methods, seeds, out, sets=as_entries(sets), stream=stream, scale=scale)
    settings = JobSettings(data_dir, scale, checkpoint_every, track=track, jobs=checked_jobs(jobs, stream))
    return grid.run(settings, Shown(progress, observers))


class MethodGrid(Grid):
    """A run for every method and seed."""

    stem, heading = "compare", "Method"


def plan(
    recipe: Source,
    methods: Sequence[str] | None,
    seeds: Sequence[int] | None,
    out: str | Path | None,
    *,
    sets: Sequence[str] = (),
    stream: Stream | Streams | None = None,
    scale: float = 1.0,
) -> MethodGrid:
    """The runs of a comparison. Raises UserError."""
    base = read(recipe, sets=[entry for entry in sets if not _is_method_option(entry)])
    names, numbers = _methods(methods, base), _seeds(seeds, base)
    folder = Path(out) if out is not None else Path("runs") / f"{base.name.replace('/', '-')}-compare"
    own = base.compare.options if base.compare else {}
    make = streams_of(stream)

    def job(method: str, seed: int, given: Sequence[str]) -> GridJob:
        place = folder / f"{method}-{seed}"
        return new_job(method, recipe, place, method=method, seed=seed, sets=given, stream=make(seed), scale=scale)

    return MethodGrid(_jobs(job, names, numbers, own, sets), folder, numbers, base.name)


def _methods(methods: Sequence[str] | None, recipe: Recipe) -> list[str]:
    if isinstance(methods, str):
        methods = split_names(methods)
    if methods is not None and not methods:
        raise RecipeError("--methods names none; write them with commas between, such as fedavg,der")
    if methods is not None:
        return list(dict.fromkeys(map(canonical, methods)))
    if recipe.compare is None:
        raise RecipeError(f"{recipe.name} has no [compare] table; name the methods with --methods fedavg,der,...")
    return recipe.compare.methods


def _seeds(seeds: Sequence[int] | None, recipe: Recipe) -> list[int]:
    if seeds is not None:
        return list(dict.fromkeys(seeds))
    return recipe.compare.seeds if recipe.compare else [recipe.seed]


def _jobs(
    job: Callable[[str, int, Sequence[str]], GridJob],
    methods: Sequence[str],
    seeds: Sequence[int],
    own: Mapping[str, Sequence[str]],
    sets: Sequence[str],
) -> list[GridJob]:
    """A run for every method and seed. own: settings by method, which those of the command line follow."""
    grid, used = [], set()
    for method in methods:
        usable = [entry for entry in sets if _applies(entry, method)]
        used.update(usable)
        grid += [job(method, seed, [*own.get(method, ()), *usable]) for seed in seeds]
    for entry in sets:
        if entry not in used:
            raise RecipeError(f"--set {entry}: none of the methods {', '.join(methods)} has that part")
    return grid


def _is_method_option(entry: str) -> bool:
    """Is this `--set` an option of a part?"""
    key = key_of_set(entry)
    return key[0] == "method" and len(key) > 1 and key[1] not in MethodSection.model_fields


def _applies(entry: str, method: str) -> bool:
    """Does a `--set` apply to this method? An option of a part does if the method has the part."""
    from everfed.methods import registry as methods

    if not _is_method_option(entry):
        return True
    parts: Any = methods.build(method).parts
    return key_of_set(entry)[1] in {part.name for part in parts}
