"""The rows that a table in a folder has already: a second `everfed compare` there adds to them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everfed.errors import UserError
from everfed.experiments.jobs import GridJob, Outcome
from everfed.recipe import Places, Recipe, flat, read
from everfed.store.run import RunFolder

# what may differ between runs of one table: it changes no number, or is what a row is about
_FREE = {"name", "seed", "engine", "federation", "monitor", "compare", "methods"}


@dataclass(frozen=True)
class WrittenTable:
    """The content of a table's JSON file; empty where there is none."""

    folder: Path
    content: dict[str, Any]

    @property
    def baseline(self) -> str:
        return str(self.content.get("baseline", ""))

    def runs(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """(row, run) of all its runs."""
        for row in self.content.get("rows", ()):
            for run in row["runs"]:
                yield row["name"], run


def of_table(folder: Path, stem: str) -> WrittenTable:
    """The table that `stem`.json holds."""
    path = folder / f"{stem}.json"
    try:
        content = json.loads(path.read_text()) if path.exists() else {}
        table = WrittenTable(folder, content)
        list(table.runs())
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        raise UserError(f"{path} cannot be read as a table of everfed; remove it, and it is written anew") from None
    return table


def earlier_outcomes(
    table: WrittenTable, jobs: Sequence[GridJob], scale: float, own_of: Callable[[str], frozenset[str]]
) -> list[Outcome]:
    """What runs of the table that are none of `jobs` came to, where their folders are still there. own_of: the keys in
    which a row may differ from the jobs. Raises UserError for runs on another stream, or under other conditions."""
    planned = {job.folder.name for job in jobs}
    by_seed = {job.recipe.seed: job.recipe for job in reversed(jobs)}
    found = []
    for row, run in table.runs():
        folder = RunFolder(table.folder / Path(run["folder"]).name)
        if folder.path.name in planned or not folder.recipe.exists():
            continue
        recipe = read(str(folder.recipe))
        like = by_seed.get(recipe.seed, jobs[0].recipe)
        _require_alike(folder, recipe, like, own_of(row), scale)
        job = GridJob(row, recipe, folder.path, Places(str(folder.recipe)))
        result = folder.read_result()
        if result is not None or run.get("problem"):
            problem = "" if result is not None else run["problem"]
            ended = {key: result is None and bool(run.get(key)) for key in ("diverged", "stopped")}
            found.append(Outcome(job, result, problem, **ended))
    return found


def _require_alike(folder: RunFolder, there: Recipe, here: Recipe, own: frozenset[str], scale: float) -> None:
    before, now = (_conditions(recipe) for recipe in (there, here))
    before["--scale"], now["--scale"] = folder.read_settings().get("scale", 1.0), scale
    if there.seed != here.seed:  # a stream made in Python may be another one for every seed
        own = own | {"stream.identity"}
    for key in sorted(before.keys() | now.keys()):
        free = any(key == one or key.startswith(f"{one}.") for one in own)
        if not free and before.get(key) != now.get(key):
            raise UserError(
                f"{folder.path.parent} holds runs that do not belong into one table with these: {key} is "
                f"{before.get(key, 'not set')} in {folder.path.name}, and {now.get(key, 'not set')} here. Choose "
                "another --out, or remove them"
            )


def _conditions(recipe: Recipe) -> dict[str, Any]:
    return flat(recipe.model_dump(mode="json", exclude=_FREE))
