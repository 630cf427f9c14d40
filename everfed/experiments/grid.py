"""Several runs in one table: methods and seeds on the same stream (compare), or a grid over recipe keys (sweep)."""

from __future__ import annotations

import hashlib
import itertools
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from everfed.api import CHECKPOINT_EVERY
from everfed.errors import RecipeError, UserError
from everfed.experiments import comparison
from everfed.experiments.comparison import Comparison
from everfed.experiments.earlier import earlier_outcomes, of_table
from everfed.experiments.jobs import GridJob, JobSettings, More, Outcome, Output, Shown, check, new_job, run_all
from everfed.experiments.search import Cell, Search, axis_of, drawn, has_range, score_of_cell
from everfed.methods.registry import canonical
from everfed.metrics.scores import score_of
from everfed.naming import split_names
from everfed.recipe import (
    MethodSection,
    Parts,
    Recipe,
    Sets,
    Source,
    as_entries,
    composition,
    parse_set,
    placed,
    read,
    read_placed,
)
from everfed.reports.result import scope_note

if TYPE_CHECKING:
    from everfed.core.events import Observer
    from everfed.core.stream import Stream

Streams = Callable[[int], "Stream"]  # the stream of a seed
Methods = str | Sequence[str | Parts | Mapping[str, Parts]] | Mapping[str, Parts]
VALIDATION = 0.1  # share of the training data that a sweep holds out when the recipe holds out none
SPLIT = "eval.split"
SEARCHES = ("random", "tpe")
AT_A_TIME = 4  # trials that a search proposes ahead where the number of runs side by side is not known


@dataclass(frozen=True)
class Grid:
    """The runs of a comparison or a sweep. folder: where the tables are written, as `stem`.json, .md and .csv.
    heading: what a row is. baseline: the row that the others are compared with, seed by seed; "" for none. own: the
    keys of the recipe in which rows may differ."""

    jobs: list[GridJob]
    folder: Path
    seeds: list[int]
    recipe: str
    baseline: str
    own: frozenset[str]

    stem: ClassVar[str]
    heading: ClassVar[str]

    def facts(self, result: Comparison) -> dict[str, Any]:
        """Further entries of the JSON file."""
        return {}

    def own_of(self, row: str) -> frozenset[str]:
        """The keys that a row which is in the folder already may have to itself."""
        return self.own

    def more(self) -> More | None:
        """Further runs that follow from an outcome."""
        return None

    def run(self, settings: JobSettings, output: Output) -> Comparison:
        """Check all runs, run those that are not finished, and write the table, with the rows that are there already.
        Raises UserError where these are of something else."""
        earlier_outcomes(of_table(self.folder, self.stem), self.jobs, settings.scale, self.own_of)  # or refused
        check(self.jobs, settings)
        own = run_all(self.jobs, settings, self.more(), output)
        table = of_table(self.folder, self.stem)  # another process may have written it meanwhile
        ran = [outcome.job for outcome in own]
        outcomes = [*earlier_outcomes(table, ran, settings.scale, self.own_of), *own]
        split = self.jobs[0].recipe.eval.split
        baseline = table.baseline or self.baseline
        note = scope_note(split, settings.scale)
        result = Comparison(self.folder, comparison.rows(outcomes, baseline), self.heading, note, baseline)
        seeds = sorted({outcome.job.recipe.seed for outcome in outcomes})
        facts = {"recipe": self.recipe, "split": split, "scale": settings.scale, "seeds": seeds, **self.facts(result)}
        comparison.write(result, self.stem, facts)
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
    methods: Methods | None = None,
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

    methods (a list, or a text with commas), seeds: those of the recipe's [compare] where they are left out. A method is
    a name, `package.module:Name` of your own, a part, a list of parts, or {"mine": ["fedavg", Clip(0.5)]} with a name
    of its own. All others are compared with the first one, seed by seed. out: folder of the run folders, by default
    runs/RECIPE-compare; finished runs in it are kept, also in the table, and interrupted ones are resumed. stream:
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
    methods: Methods | None,
    seeds: Sequence[int] | None,
    out: str | Path | None,
    *,
    sets: Sequence[str] = (),
    stream: Stream | Streams | None = None,
    scale: float = 1.0,
) -> MethodGrid:
    """The runs of a comparison. Raises UserError."""
    base = read(recipe, sets=[entry for entry in sets if not _is_method_option(entry)])
    chosen, numbers = _methods(methods, base), _seeds(seeds, base)
    folder = Path(out) if out is not None else Path("runs") / f"{base.name.replace('/', '-')}-compare"
    own = base.compare.options if base.compare else {}
    make = streams_of(stream)
    found: list[GridJob] = []
    used: set[str] = set()
    for method, parts in chosen.items():
        part_names = _part_names(recipe, method, parts)
        usable = [entry for entry in sets if _applies(entry, part_names)]
        used.update(usable)
        given = [*parts, *own.get(method, ()), *usable]
        for seed in numbers:
            place = folder / f"{file_name(method)}-{seed}"
            found.append(
                new_job(method, recipe, place, method=method, seed=seed, sets=given, stream=make(seed), scale=scale)
            )
    for entry in sets:
        if entry not in used:
            raise RecipeError(f"--set {entry}: none of the methods {', '.join(chosen)} has that part")
    varied = frozenset(".".join(parse_set(entry).key) for entries in own.values() for entry in entries)
    return MethodGrid(found, folder, numbers, base.name, next(iter(chosen)), varied | {"method"})


def _methods(methods: Methods | None, recipe: Recipe) -> dict[str, list[str]]:
    """{name: the `--set` entries that define it}, none for a method that is known by its name."""
    if methods is None and recipe.compare is None:
        raise RecipeError(f"{recipe.name} has no [compare] table; name the methods with --methods fedavg,der,...")
    if methods is None and recipe.compare is not None:
        methods = recipe.compare.methods
        if not methods:
            raise RecipeError(f"{recipe.name}: compare.methods is missing; or name them with --methods fedavg,der,...")
    if isinstance(methods, str):
        methods = split_names(methods)
    if not methods:
        raise RecipeError("--methods names none; write them with commas between, such as fedavg,der")
    entries = [methods] if isinstance(methods, Mapping) else methods
    return {name: settings for entry in entries for name, settings in _named_method(entry)}


def _named_method(entry: Any) -> Iterator[tuple[str, list[str]]]:
    if isinstance(entry, str):
        yield canonical(entry), []
    elif isinstance(entry, Mapping):
        yield from ((name, as_entries({"method.parts": composition(parts)})) for name, parts in entry.items())
    else:
        from everfed.methods import registry

        parts = composition(entry)
        alone = "" if isinstance(entry, list | tuple) else _own_name(parts[-1])
        yield (alone, []) if alone else (registry.build(parts=parts).name, as_entries({"method.parts": parts}))


def _own_name(part: Any) -> str:
    """`package.module:Name` of a user's own part without options, by which `--methods` would name it; else ""."""
    path = part if isinstance(part, str) else part["part"] if part.keys() == {"part"} else ""
    return "" if path.startswith("everfed.") else path


def file_name(method: str) -> str:
    """A method's name in the name of a folder: `package.module:Name` has a colon, which not every disk takes."""
    return method.replace(":", ".").replace("/", ".")


def _seeds(seeds: Sequence[int] | None, recipe: Recipe) -> list[int]:
    if seeds is not None:
        return list(dict.fromkeys(seeds))
    return recipe.compare.seeds if recipe.compare else [recipe.seed]


def _is_method_option(entry: str) -> bool:
    """Is this `--set` an option of a part?"""
    key = parse_set(entry).key
    return key[0] == "method" and len(key) > 1 and key[1] not in MethodSection.model_fields


def _part_names(recipe: Source, method: str, parts: Sequence[str]) -> set[str]:
    """The names of a method's parts."""
    from everfed.methods import registry as methods

    reading = read_placed(recipe, method=method, sets=parts)
    section = reading.recipe.method
    with placed(reading.places):
        return {part.name for part in methods.build(section.name, parts=section.parts).parts}


def _applies(entry: str, part_names: set[str]) -> bool:
    """Does a `--set` apply to a method with these parts? An option of a part does if the method has the part."""
    if not _is_method_option(entry):
        return True
    return parse_set(entry).key[1] in part_names


# a grid over keys ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sweep(Grid):
    """held_out: what was set so that validation data is there; empty where the recipe has it. search: proposes further
    cells, of which `of_cell` makes jobs."""

    held_out: str
    of_cell: Callable[[Cell], list[GridJob]]
    search: Search | None = None

    stem, heading = "sweep", "Cell"

    def more(self) -> More | None:
        """Once all seeds of a cell have ended, what the search proposes next."""
        search = self.search
        if search is None:
            return None
        cells = {as_arguments(cell): cell for cell in search.asked}
        scores: dict[str, dict[int, float | None]] = {}

        def follow(outcome: Outcome) -> list[GridJob]:
            found = scores.setdefault(outcome.job.row, {})
            score = score_of(outcome.result["score"] if outcome.result else "accuracy")
            found[outcome.job.recipe.seed] = outcome.result["metrics"].get(score.main) if outcome.result else None
            if len(found) < len(self.seeds):
                return []
            proposed = search.tell(cells[outcome.job.row], score_of_cell(found, score.better), score.better)
            cells.update({as_arguments(cell): cell for cell in proposed})
            return [job for cell in proposed for job in self.of_cell(cell)]

        return follow

    def facts(self, result: Comparison) -> dict[str, Any]:
        return {"best": result.best}

    def own_of(self, row: str) -> frozenset[str]:
        """Also the keys that the row names, as `--set` arguments."""
        return self.own | {".".join(parse_set(entry).key) for entry in shlex.split(row)[1::2]}


def sweep(
    recipe: Source,
    grid: Mapping[str, Sequence[Any] | str],
    seeds: Sequence[int] | None = None,
    out: str | Path | None = None,
    *,
    trials: int = 0,
    search: str = "random",
    method: str | None = None,
    sets: Sets = (),
    data_dir: str | Path | None = None,
    scale: float = 1.0,
    stream: Stream | Streams | None = None,
    stop_early: bool = False,
    progress: bool | None = None,
    track: Sequence[str] = (),
    observers: Sequence[Observer] = (),
    checkpoint_every: float = CHECKPOINT_EVERY,
    jobs: int = 1,
) -> Comparison:
    """Try every combination of values, as `everfed sweep` does: sweep("demo", {"train.optimizer.lr": [0.05, 0.1]}).

    Scored on data held out of the training set: stream.validation, or a tenth where the recipe holds out none. A stream
    of your own must have a validation part. trials: only so many combinations, where a value may be a range, as in
    sweep("demo", {"train.optimizer.lr": "0.001..1"}, trials=20); they are drawn at random, or proposed from the scores
    so far with search="tpe" (the extra `search`). stop_early: end runs that are behind the median of the finished ones
    at a task's end. `best` of what is returned are the settings of the best cell, as
    `--set` arguments. The rest is as in `everfed.compare`.
    """
    axes = [
        [f"{key}={values}"] if isinstance(values, str) else [as_entries({key: value})[0] for value in values]
        for key, values in grid.items()
    ]
    how: dict[str, Any] = {"trials": trials, "search": search, "jobs": jobs, "stream": stream, "scale": scale}
    planned = plan_sweep(recipe, axes, seeds, out, method=method, sets=as_entries(sets), **how)
    settings = JobSettings(
        data_dir, scale, checkpoint_every, track=track, jobs=checked_jobs(jobs, stream), stop_early=stop_early
    )
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
    trials: int = 0,
    search: str = "random",
    jobs: int = 1,
) -> Sweep:
    """The runs of a sweep. axes: the `--set` entries of every key. trials, search: as in `sweep`. jobs: runs side by
    side, 0 where that is not known. Raises UserError."""
    if not axes or not all(axes):
        raise RecipeError("the grid is empty; give a key and its values, such as train.optimizer.lr=0.01,0.1")
    axes = [list(dict.fromkeys(axis)) for axis in axes]
    combinations = _combinations(axes, trials, search)
    base = read(recipe, method=method, sets=[*sets, *combinations[0]])
    held_out = _held_out(base, [*sets, *combinations[0]], own=stream is not None)
    name = f"{base.name.replace('/', '-')}-{file_name(base.method.name or 'parts')}-sweep"
    folder = Path(out) if out is not None else Path("runs") / name
    numbers, make = list(seeds) if seeds is not None else [base.seed], streams_of(stream)
    proposing = None
    if trials and search == "tpe":
        proposing = Search([axis_of(axis) for axis in axes], trials, folder, jobs or AT_A_TIME)
        combinations = proposing.asked

    def of_cell(cell: Cell) -> list[GridJob]:
        place, given = folder / folder_name(cell), [*sets, *held_out.values(), *cell]
        how: dict[str, Any] = {"method": method, "sets": given, "scale": scale}
        return [
            new_job(as_arguments(cell), recipe, Path(f"{place}-{seed}"), seed=seed, stream=make(seed), **how)
            for seed in numbers
        ]

    found = [job for combination in combinations for job in of_cell(combination)]
    added = ", ".join(held_out.values()) if held_out.keys() - {SPLIT} else ""
    varied = frozenset(".".join(parse_set(entry).key) for entry in combinations[0])
    return Sweep(found, folder, numbers, base.name, "", varied, added, of_cell, proposing)


def _combinations(axes: Sequence[Sequence[str]], trials: int, search: str) -> list[Cell]:
    """All combinations, or some at random."""
    if search not in SEARCHES:
        raise RecipeError(f"--search {search}: allowed are {', '.join(SEARCHES)}")
    if trials:
        return drawn([axis_of(axis) for axis in axes], trials)
    ranges = [axis[0] for axis in axes if has_range(axis)]
    if ranges:
        raise RecipeError(f"--grid {ranges[0]}: of a range only some values can be tried; say how many: --trials 20")
    if search != "random":
        raise RecipeError(f"--search {search} needs --trials N")
    return list(itertools.product(*axes))


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
