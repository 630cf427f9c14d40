"""A grid over recipe keys, chosen on data held out of the training set, never on test data."""

from __future__ import annotations

import hashlib
import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everfed.api import CHECKPOINT_EVERY
from everfed.errors import RecipeError
from everfed.experiments.grid import Grid, Shown, Streams, checked_jobs, streams_of
from everfed.experiments.jobs import JobSettings, key_of_set, new_job
from everfed.experiments.result import Comparison
from everfed.recipe import Recipe, Sets, Source, as_entries, read

if TYPE_CHECKING:
    from everfed.core.events import Observer
    from everfed.core.stream import Stream

VALIDATION = 0.1  # share of the training data to hold out when the recipe holds out none
SPLIT = "eval.split"


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
    planned = plan(recipe, axes, seeds, out, method=method, sets=as_entries(sets), stream=stream, scale=scale)
    settings = JobSettings(data_dir, scale, checkpoint_every, track=track, jobs=checked_jobs(jobs, stream))
    return planned.run(settings, Shown(progress, observers))


def plan(
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
    if any(".".join(key_of_set(entry)) == SPLIT for entry in sets):
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
