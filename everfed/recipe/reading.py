"""Reading a recipe from a file, a shipped name, or a table made in Python; and recipes made from recipes: scaled down,
with the method's defaults settled, and as text."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from everfed.errors import RecipeError
from everfed.recipe import shipped as recipes
from everfed.recipe.objects import named
from everfed.recipe.problems import Places, refuse, suggestion
from everfed.recipe.schema import MethodSection, Recipe
from everfed.recipe.settings import Sets, Table, overridden, overrides

Source = str | Path | Table | Recipe


@dataclass(frozen=True)
class Reading:
    """A recipe, and where each of its keys was written."""

    recipe: Recipe
    places: Places


def read(source: Source, *, method: str | None = None, seed: int | None = None, sets: Sets = ()) -> Recipe:
    """A recipe from a TOML file, by the name of a shipped one, or from a dict, with `sets` ("a.b.c=value", or
    {"a.b.c": value}), `method` and `seed` on top. Raises RecipeError. The keys of [stream], [model] and [method] that
    name options are checked by `api.check`."""
    return read_placed(source, method=method, seed=seed, sets=sets).recipe


def read_placed(source: Source, *, method: str | None = None, seed: int | None = None, sets: Sets = ()) -> Reading:
    """As `read`, and where every key was written. A dict may hold classes and parts (`named`)."""
    own = overrides(method, seed, sets)
    if isinstance(source, Recipe) and not own:
        return Reading(source, Places("recipe"))
    table, label, text = _table(source)
    places = Places(label, text, {one.key: one.option for one in own})
    return Reading(_validated(overridden(table, own), places), places)


def _table(source: Source) -> tuple[Table, str, str]:
    """(table, label, text) of a recipe; a table made in Python has no text."""
    if isinstance(source, Recipe):
        return source.model_dump(exclude_none=True, exclude_unset=True), "recipe", ""
    if isinstance(source, dict):
        return named(source), "recipe", ""
    if not isinstance(source, str | Path):
        raise RecipeError(
            f"a recipe is a dict, a path, a Recipe or the name of a shipped one; got a {type(source).__name__}; a "
            "stream goes into stream=..."
        )
    name, label, text = _find(source)
    try:
        return {"name": name, **tomllib.loads(text)}, label, text
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{label} is not valid TOML: {error}") from error


def from_table(table: Table) -> Recipe:
    """A recipe from a dict as TOML would give it. Raises RecipeError."""
    return _validated(table, Places("recipe"))


def _find(source: str | Path) -> tuple[str, str, str]:
    """(name, label, text) of a recipe."""
    if isinstance(source, str) and source in recipes.names():
        return source, f"{source} (shipped recipe)", recipes.text(source)
    path = Path(source)
    if path.is_file():
        return path.stem, str(path), _text_of(path)
    if path.is_dir():
        raise RecipeError(f"{path} is a folder, not a recipe; `everfed resume {path}` goes on with a run")
    raise RecipeError(
        f"{source} is neither a file nor a shipped recipe.{suggestion(str(source), recipes.names())} "
        "Allowed: the path of a TOML file, or a name that `everfed list recipes` shows"
    )


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} cannot be read as text: {error}") from error


def _validated(table: Table, places: Places) -> Recipe:
    try:
        return Recipe.model_validate(table)
    except ValidationError as error:
        raise refuse(error, places) from error


def unused_settings(recipe: Recipe) -> list[str]:
    """What [compare.options] sets for the recipe's method and the recipe itself does not: only comparisons use it."""
    own = recipe.compare.options.get(recipe.method.name, []) if recipe.compare else []
    return [entry for entry in own if read(recipe, sets=[entry]).model_dump() != recipe.model_dump()]


# recipes made from recipes -----------------------------------------------------------------------------------------


def scaled(recipe: Recipe, factor: float) -> Recipe:
    """The recipe as it is run at `factor` of its work: with a `share` of its rounds, and with method.defaults settled.

    The stream shrinks its data by the same share; at least one synchronised round per task is left.
    """
    if not 0 < factor <= 1:
        raise RecipeError(f"--scale must be above 0 and at most 1; got {factor:g}")
    train = recipe.train
    synchronisations = max(1, round(train.rounds_per_task * share(factor) / train.sync_every))
    rounds = synchronisations * train.sync_every
    return settled(recipe).model_copy(update={"train": train.model_copy(update={"rounds_per_task": rounds})})


def share(factor: float) -> float:
    """Of the rounds, and of the data, that are left at `factor` of the work."""
    return math.sqrt(factor)


def settled(recipe: Recipe) -> Recipe:
    """The recipe with method.defaults settled: those of the method's own parts become its options, the rest go.

    A default for a part that is neither shipped nor in the method is refused. Imports the methods, and torch with them.
    """
    section = recipe.method
    if not section.defaults:
        return recipe
    from everfed.methods import registry as methods

    own = [part.name for part in methods.build(section.name, parts=section.parts).parts]
    of_others = [part.name for one in (recipe.methods or {}).values() for part in methods.build(parts=one.parts).parts]
    known = {*own, *of_others, *methods.PARTS}
    for name in section.defaults:
        if name not in known:
            allowed = sorted(known)
            raise RecipeError(f"method.{name} names no part.{suggestion(name, allowed)} Parts: {', '.join(allowed)}")
    usable = {name: options for name, options in section.defaults.items() if name in own}
    return recipe.model_copy(update={"method": _with_options(section, usable)})


def _with_options(section: MethodSection, options: dict[str, dict[str, Any]]) -> MethodSection:
    """Options of the section itself win over `options`, key by key."""
    table = section.model_dump(exclude={"defaults"})
    given = section.model_extra or {}
    merged = {name: {**values, **given.get(name, {})} for name, values in options.items()}
    return MethodSection.model_validate({**table, **merged})


def to_toml(recipe: Recipe) -> str:
    """The whole recipe as TOML, every value spelled out; reading it gives an equal recipe."""
    table = recipe.model_dump(exclude_none=True)
    if not table["method"]["defaults"]:
        del table["method"]["defaults"]
    return tomli_w.dumps(table)
