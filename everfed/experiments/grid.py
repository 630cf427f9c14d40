"""Several runs in one table: methods and seeds on the same stream (compare), or a grid over recipe keys (sweep)."""

from __future__ import annotations

import hashlib
import itertools
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from everfed.api import CHECKPOINT_EVERY
from everfed.errors import RecipeError, UserError
from everfed.experiments import comparison
from everfed.experiments.comparison import Comparison
from everfed.experiments.jobs import GridJob, JobSettings, Output, Shown, check, new_job, run_all
from everfed.methods.registry import canonical
from everfed.naming import split_names
from everfed.recipe import MethodSection, Recipe, Sets, Source, as_entries, parse_set, read

if TYPE_CHECKING:
    from everfed.core.events import Observer
    from everfed.core.stream import Stream

Streams = Callable[[int], "Stream"]  # the stream of a seed
VALIDATION = 0.1  # share of the training data that a sweep holds out when the recipe holds out none
SPLIT = "eval.split"


@dataclass(frozen=True)
class Grid:
    """The runs of a comparison or a sweep. folder: where the tables are written, as `stem`.json, .md and .csv.
    heading: what a row is. note: about the scores."""

    jobs: list[GridJob]
    folder: Path
    seeds: list[int]
    recipe: str

    stem: ClassVar[str]
    heading: ClassVar[str]
    note: ClassVar[str] = ""

    def facts(self, result: Comparison) -> dict[str, Any]:
        """Further entries of the JSON file."""
        return {}

    def run(self, settings: JobSettings, output: Output) -> Comparison:
        """Check all runs, run those that are not finished, and write the table."""
        check(self.jobs, settings)
        rows = comparison.rows(run_all(self.jobs, settings, output=output))
        result = Comparison(self.folder, rows, self.heading, self.note)
        facts = {"recipe": self.recipe, "scale": settings.scale, "seeds": self.seeds, **self.facts(result)}
        comparison.write(self.folder, self.stem, rows, self.heading, facts)
        return result


def streams_of(stream: Stream | Streams | None) -> Callable[[int], Stream | None]:
    """The stream of every seed: the same for all, made by a function of the seed, or the recipe's own (None)."""
    from everfed.core.stream import Stream

    if stream is None or isinstance(stream, Stream):
        return lambda seed: stream
    return stream


def checked_jobs(jobs: int, stream: Stream | Streams | None) -> int:
    """Raises UserError for runs side by side on a stream that other processes do not have."""
    if jobs != 1 and stream is not None:
        raise UserError("jobs must be 1 with a stream of your own: other processes do not have it")
    return jobs


# methods and seeds ---------------------------------------------------------------------------------------------------


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
    grid = plan_comparison(recipe, methods, seeds, out, sets=as_entries(sets), stream=stream, scale=scale)
    settings = JobSettings(data_dir, scale, checkpoint_every, track=track, jobs=checked_jobs(jobs, stream))
    return grid.run(settings, Shown(progress, observers))


class MethodGrid(Grid):
    """A run for every method and seed."""

    stem, heading = "compare", "Method"


def plan_comparison(
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
    key = parse_set(entry).key
    return key[0] == "method" and len(key) > 1 and key[1] not in MethodSection.model_fields


def _applies(entry: str, method: str) -> bool:
    """Does a `--set` apply to this method? An option of a part does if the method has the part."""
    from everfed.methods import registry as methods

    if not _is_method_option(entry):
        return True
    parts: Any = methods.build(method).parts
    return parse_set(entry).key[1] in {part.name for part in parts}


# a grid over keys ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sweep(Grid):
    """held_out: what was set so that validation data is there; empty where the recipe has it."""

    held_out: str

    stem, heading, note = "sweep", "Cell", "scored on validation data"

    def facts(self, result: Comparison) -> dict[str, Any]:
        return {"split": "validation", "best": result.best}


def sweep(
    recipe: Source,
    grid: Mapping[str, Sequence[Any]],
    seeds: Sequence[int] | None = None,
    out: str | Path | None = None,
    *,
    method: str | None = None,
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
    """Try every combination of values, as `everfed sweep` does: sweep("demo", {"train.optimizer.lr": [0.05, 0.1]}).

    Scored on data held out of the training set: stream.validation, or a tenth where the recipe holds out none. A stream
    of your own must have a validation part. `best` of what is returned are the settings of the best cell, as `--set`
    arguments. The rest is as in `everfed.compare`.
    """
    axes = [[as_entries({key: value})[0] for value in values] for key, values in grid.items()]
    planned = plan_sweep(recipe, axes, seeds, out, method=method, sets=as_entries(sets), stream=stream, scale=scale)
    settings = JobSettings(data_dir, scale, checkpoint_every, track=track, jobs=checked_jobs(jobs, stream))
    return planned.run(settings, Shown(progress, observers))


def plan_sweep(
    recipe: Source,
    axes: Sequence[Sequence[str]],
    seeds: Sequence[int] | None,
    out: str | Path | None,
    *,
    method: str | None = None,
    sets: Sequence[str] = (),
    stream: Stream | Streams | None = None,
    scale: float = 1.0,
) -> Sweep:
    """The runs of a sweep. axes: the `--set` entries of every key. Raises UserError."""
    combinations = list(itertools.product(*axes))
    if not axes or not combinations:
        raise RecipeError("the grid is empty; give a key and its values, such as train.optimizer.lr=0.01,0.1")
    base = read(recipe, method=method, sets=[*sets, *combinations[0]])
    held_out = _held_out(base, [*sets, *combinations[0]], own=stream is not None)
    name = f"{base.name.replace('/', '-')}-{base.method.name or 'parts'}-sweep"
    folder = Path(out) if out is not None else Path("runs") / name
    numbers, make = list(seeds) if seeds is not None else [base.seed], streams_of(stream)
    found = [
        new_job(
            as_arguments(combination),
            recipe,
            folder / f"{folder_name(combination)}-{seed}",
            method=method,
            seed=seed,
            sets=[*sets, *held_out.values(), *combination],
            stream=make(seed),
            scale=scale,
        )
        for combination in combinations
        for seed in numbers
    ]
    added = ", ".join(held_out.values()) if held_out.keys() - {SPLIT} else ""
    return Sweep(found, folder, numbers, base.name, added)


def _held_out(base: Recipe, sets: Sequence[str], own: bool) -> dict[str, str]:
    """{key: --set} that make a run score on validation data, holding some out where the recipe does not. own: the
    stream was made in Python, and holds out what it holds out."""
    if any(".".join(parse_set(entry).key) == SPLIT for entry in sets):
        raise RecipeError(f"{SPLIT} cannot be set here: a sweep chooses on validation data, never on test data")
    needed = {SPLIT: f"{SPLIT}=validation"}
    if not own and not (base.stream.model_extra or {}).get("validation"):
        needed["stream.validation"] = f"stream.validation={VALIDATION}"
    return needed


def as_arguments(combination: Sequence[str]) -> str:
    """A cell as arguments that can be pasted into a shell."""
    return " ".join(f"--set {shlex.quote(entry)}" for entry in combination)


def folder_name(combination: Sequence[str]) -> str:
    """A cell's folder: its settings as they are where a file name can hold them, else shortened with a hash."""
    text = ",".join(combination)
    safe = re.sub(r"[^A-Za-z0-9._=,+-]", "_", text)
    if safe == text and len(text) <= 120:
        return text
    return f"{safe[:100]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
