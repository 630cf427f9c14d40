"""Reading a recipe: from a file, a shipped name, or a table made in Python, which may hold classes, parts and policies:

    {"model": {"kind": Net}, "method": {"parts": ["fedavg", Memory(policy=Herding), Clip(norm=0.5)]}}

and recipes made from recipes: scaled down, with the method's defaults settled, and as text.
"""

from __future__ import annotations

import math
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from everfed.errors import RecipeError
from everfed.recipe import shipped as recipes
from everfed.recipe.problems import Places, refuse, suggestion
from everfed.recipe.schema import MethodSection, Recipe
from everfed.recipe.settings import Sets, Table, overridden, overrides

Source = str | Path | Table | Recipe
Parts = Any  # a part, its class, or a list of parts, of their names and of tables


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


# objects as names --------------------------------------------------------------------------------------------------


def named(table: Table) -> Table:
    """The same recipe with `package.module:Name` for every class, function and object in it. Raises RecipeError."""
    model, method = table.get("model"), table.get("method")
    if isinstance(model, dict) and callable(model.get("kind")):
        table = {**table, "model": {**model, "kind": name_of(model["kind"], "model.kind")}}
    if isinstance(method, dict):
        table = {**table, "method": _named_section(method)}
    scoring = table.get("eval")
    if isinstance(scoring, dict) and isinstance(scoring.get("metrics"), list | tuple):
        metrics = [_entry(entry, "metric", "eval.metrics") for entry in scoring["metrics"]]
        table = {**table, "eval": {**scoring, "metrics": metrics}}
    if isinstance(table.get("methods"), dict):
        own = {name: _named_section(one) if isinstance(one, dict) else one for name, one in table["methods"].items()}
        table = {**table, "methods": own}
    return table


def _named_section(section: Table) -> Table:
    return {key: _section(key, value) for key, value in section.items()}


def name_of(thing: Any, key: str) -> str:
    """`package.module:Name` of a class or function; a resumed run must find it there again."""
    module, name = getattr(thing, "__module__", ""), getattr(thing, "__qualname__", "")
    if not name:
        raise RecipeError(f"{key}: give the class or function itself, not an object of class {type(thing).__name__}")
    if getattr(sys.modules.get(module), name, None) is not thing:
        raise RecipeError(f"{key}: {name} cannot be found again by that name; define it at the top level of a module")
    return f"{module}:{name}"


def composition(parts: Parts) -> list[Any]:
    """The list of parts of a method as a recipe has it. A part alone stands on top of `fedavg`, unless it aggregates
    itself. Raises RecipeError."""
    from everfed.methods.registry import entries

    found = entries(parts)
    if found is None:
        raise RecipeError(f"a method is a part or a list of parts; got {parts!r}")
    return [_entry(entry, "part", "method.parts") for entry in found]


def _section(key: str, value: Any) -> Any:
    """A key of [method]: the list of parts, or the options of one part."""
    if key == "parts" and isinstance(value, list | tuple):
        return composition(value)
    return _option(value, f"method.{key}")


def _entry(entry: Any, kind: str, key: str) -> Any:
    """Names and tables stay; a part or a metric becomes a table with the options that are not its defaults."""
    if isinstance(entry, type):
        return name_of(entry, key)
    if isinstance(entry, str | int | float | Mapping | list | tuple):
        return _option(entry, key)
    return {kind: name_of(type(entry), key), **(_options(entry, key) if is_dataclass(entry) else {})}


def _options(entry: Any, key: str) -> Table:
    """The options of an object that are not its defaults."""
    options = {f.name: getattr(entry, f.name) for f in fields(entry) if getattr(entry, f.name) != f.default}
    for option, value in options.items():
        if value is None:
            raise RecipeError(f"{key}: {entry!r}: a recipe cannot hold None; give {option} another default")
    return {option: _option(value, f"{key}: {option}") for option, value in options.items()}


def _option(value: Any, key: str) -> Any:
    """An option's value as TOML can hold it. A class goes by its name; an object is a table of its options, with its
    class as `kind` where it is one of several kinds (a policy)."""
    if isinstance(value, Mapping):
        return {name: _option(entry, f"{key}.{name}") for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_option(entry, key) for entry in value)
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, type):
        return name_of(value, key)
    if is_dataclass(value):
        kind = {"kind": name_of(type(value), key)} if hasattr(value, "kind") else {}
        return {**kind, **_options(value, key)}
    raise RecipeError(f"{key}: a recipe holds text, numbers, lists and tables, not an object of {type(value).__name__}")


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
