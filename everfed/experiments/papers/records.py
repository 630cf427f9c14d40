"""Records of finished runs, small enough for the repository: all that a table or a verdict needs of a run.

A record is `result.json` without its long lists, with the recipe's settings and their hash, and with the means that
are computed from the run's events. A run that diverged has a record, too: where, and no metrics. A record lies in
RECIPE/METHOD-SEED-PRECISION-HASH.json below the folder of all records; another run of the same name beside it, with
a number behind the hash.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import everfed
from everfed.errors import UserError
from everfed.experiments.papers.measures import from_events
from everfed.recipe import Recipe, flat, settled
from everfed.recipe import read as read_recipe
from everfed.store.event_log import read_log
from everfed.store.files import digest, make_folder, write_atomic
from everfed.store.run import RECIPE, RESULT, RunFolder

Record = dict[str, Any]
FOLDER = Path("results")
LEADERBOARD = "leaderboard"  # a folder in it with records of another form (`everfed.experiments.leaderboard.records`)
_HOW = {
    "name",
    "seed",
    "engine",
    "federation",
    "compare",
    "monitor",
}  # of a recipe: does not decide the numbers' meaning
_LONG = {"labels", "who_got_what", "users", "origins"}  # of a stream's facts
_NEEDED = ("recipe", "recipe_hash", "settings", "method", "seed", "metrics", "accuracy_matrix", "cost", "environment")


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """The keys of a recipe that decide its numbers, apart from the seed, as far as they differ from the defaults."""
    return settled(recipe).model_dump(mode="json", exclude=_HOW, exclude_defaults=True)


def recipe_hash(settings: Mapping[str, Any]) -> str:
    """Identifies settings."""
    return digest(json.dumps(settings, sort_keys=True).encode())


def of_run(folder: Path, *, shared: bool = False, remark: str = "") -> Record:
    """The record of a run folder that is finished or diverged. shared: other programs used the device, so that its
    seconds are no measurement of speed. Raises UserError."""
    opened = RunFolder.open(folder)
    result = opened.read_result() or _of_diverged(opened)
    if result is None:
        raise UserError(f"{folder} has no result.json: the run is not finished; `everfed resume {folder}` finishes it")
    measured = from_events(folder) if "diverged" not in result else {}
    return make(result, settings_of(read_recipe(str(opened.recipe))), measured, shared=shared, remark=remark)


def folders(given: Iterable[Path]) -> list[Path]:
    """Run folders: themselves, by their result.json, or below the folders given; only finished and diverged ones of
    those below. Raises UserError."""
    found: list[Path] = []
    for path in (one.parent if one.name == RESULT else one for one in given):
        if not path.exists():
            raise UserError(f"there is no folder {path}")
        if (path / RECIPE).exists():
            found.append(path)
            continue
        below = [recipe.parent for recipe in sorted(path.rglob(RECIPE))]
        inside = [one for one in below if (one / RESULT).exists() or diverged(one)]
        if not inside:
            raise UserError(f"{path} holds no finished run")
        found += inside
    return found


def diverged(folder: Path) -> str:
    """The error with which an unfinished run diverged, if that was the last that it did."""
    log = read_log(folder)
    if (folder / RESULT).exists() or not log.failed:
        return ""
    kind, _, message = log.notes[-1].message.partition(": ")
    return message if kind == "Diverged" else ""


def _of_diverged(opened: RunFolder) -> dict[str, Any] | None:
    """What a run that diverged has in place of a result: its stream's facts, built anew, and where it ended."""
    message = diverged(opened.path)
    if not message:
        return None
    from everfed.api import reassemble

    run = reassemble(opened, on_cpu=True)
    facts = run.stream.describe()
    recipe = run.recipe
    return {
        "everfed": everfed.__version__,
        "recipe": recipe.name,
        "method": run.method.name,
        "seed": recipe.seed,
        "stream": {**facts, **({"scale": run.scale} if "scale" in facts else {})},
        "diverged": message,
        "metrics": {},
        "accuracy_matrix": [],
        "cost": {},
        "environment": {"engine": recipe.engine.kind, "precision": recipe.engine.precision},
    }


def make(
    result: Mapping[str, Any],
    settings: dict[str, Any],
    events: Mapping[str, float],
    *,
    shared: bool = False,
    remark: str = "",
) -> Record:
    """A record from a result, the settings of its recipe, and the means over its events."""
    stream = result.get("stream", {})
    facts = {key: value for key, value in stream.items() if key not in _LONG}
    if "origin" in facts:
        facts["origin"] = Path(facts["origin"]).name  # where it lay is one machine's business
    divisions = [one["hash"] for one in stream.get("who_got_what", []) if "hash" in one]
    return {
        **{key: value for key, value in result.items() if key not in ("stream", "parts")},
        "stream": {**facts, **({"divisions": divisions} if divisions else {})},
        "settings": settings,
        "recipe_hash": recipe_hash(settings),
        "from_events": dict(events),
        **({"shared_device": True} if shared else {}),
        **({"remark": remark} if remark else {}),
    }


def write(record: Record, root: Path) -> Path:
    """Write a record to its place below `root`: one line per key. A different record that has the name already stays:
    this one gets the next number."""
    lines = ",\n".join(f'  "{key}": {json.dumps(record[key])}' for key in sorted(record))
    content = f"{{\n{lines}\n}}\n".encode()
    for number in itertools.count(1):
        path = root / _place(record, number)
        if not path.exists():
            make_folder(path.parent)
            write_atomic(path, content)
            return path
        if path.read_bytes() == content:
            return path
    raise AssertionError("numbers end")


def read(path: Path) -> Record:
    """One record. Raises UserError for a file that is none."""
    try:
        record: Record = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is no record: {error}") from error
    missing = [key for key in _NEEDED if not isinstance(record, dict) or key not in record]
    if missing:
        raise UserError(f"{path} is no record: it has no {', '.join(missing)}; `everfed record RUN` writes records")
    if record["recipe_hash"] != recipe_hash(record["settings"]):
        raise UserError(f"{path}: recipe_hash does not belong to settings; write the record anew")
    return record


def read_all(root: Path) -> list[Record]:
    """Every record below `root`, in the order of their paths and numbers; those of the leaderboard are no records of
    runs. Raises UserError for a file that is no record."""
    found = (path for path in root.rglob("*.json") if LEADERBOARD not in path.relative_to(root).parts)
    return [read(path) for path in sorted(found, key=_order)]


def _order(path: Path) -> tuple[str, int]:
    stem, _, number = str(path.with_suffix("")).rpartition(".")
    return (stem, int(number)) if stem and number.isdecimal() else (str(path.with_suffix("")), 1)


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[str, ...]:
    """The dotted keys in which two settings differ. What they leave out is as it is by default: a default that changes
    has to be written into the records that left it out (a test notices)."""
    left, right = complete(ours), complete(theirs)
    return tuple(sorted(key for key in {*left, *right} if left.get(key) != right.get(key)))


def complete(settings: Mapping[str, Any]) -> dict[str, Any]:
    """By dotted key, with the defaults of what is left out."""
    return {**_defaults(), **flat(settings)}


@functools.cache
def _defaults() -> dict[str, Any]:
    any_method = Recipe.model_validate({"method": {"name": "fedavg"}})
    return flat(any_method.model_dump(mode="json", exclude={**dict.fromkeys(_HOW, True), "method": {"name", "parts"}}))


def _place(record: Record, number: int) -> Path:
    precision = record["environment"].get("precision", "fp32")
    name = f"{record['method']}-{record['seed']}-{precision}-{record['recipe_hash'][:8]}"
    return Path(record["recipe"].replace("/", "-")) / f"{name}{f'.{number}' if number > 1 else ''}.json"
