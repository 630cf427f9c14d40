"""Reading a recipe: from a file or a shipped name, with what the command line sets on top."""

from __future__ import annotations

import datetime
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from everfed.errors import RecipeError
from everfed.methods.registry import canonical
from everfed.recipe import shipped as recipes
from everfed.recipe.objects import named
from everfed.recipe.places import Key, Places, split_key
from everfed.recipe.problems import refuse, suggestion
from everfed.recipe.schema import MethodSection, Recipe

Table = dict[str, Any]
Source = str | Path | Table | Recipe
Sets = Sequence[str] | Mapping[str, Any]


@dataclass(frozen=True)
class Reading:
    """A recipe, and where each of its keys was written."""

    recipe: Recipe
    places: Places


@dataclass(frozen=True)
class Setting:
    """One key set from outside the file; `option` is how it was written there."""

    key: Key
    value: Any
    option: str


def read(source: Source, *, method: str | None = None, seed: int | None = None, sets: Sets = ()) -> Recipe:
    """A recipe from a TOML file, by the name of a shipped one, or from a dict, with `sets` ("a.b.c=value", or
    {"a.b.c": value}), `method` and `seed` on top. Raises RecipeError. The keys of [stream], [model] and [method] that
    name options are checked by `api.check`."""
    return read_placed(source, method=method, seed=seed, sets=sets).recipe


def read_placed(source: Source, *, method: str | None = None, seed: int | None = None, sets: Sets = ()) -> Reading:
    """As `read`, and where every key was written. A dict may hold classes and parts (`recipe.objects`)."""
    settings = _settings(method, seed, sets)
    if isinstance(source, Recipe) and not settings:
        return Reading(source, Places("recipe"))
    table, label, text = _table(source)
    places = Places(label, text, {setting.key: setting.option for setting in settings})
    return Reading(_validated(_with_settings(table, settings), places), places)


def _settings(method: str | None, seed: int | None, sets: Sets) -> list[Setting]:
    if isinstance(sets, str):
        raise RecipeError(f"sets is a list of key=value, or a dict; got the text {sets!r}")
    if isinstance(sets, Mapping):
        settings = [_set(key, value, f"--set {key}={_as_value(value)}") for key, value in sets.items()]
    else:
        settings = [parse_set(entry) for entry in sets]
    if method is not None:
        settings.append(Setting(("method", "name"), canonical(method), f"--method {method}"))
    if seed is not None:
        settings.append(Setting(("seed",), seed, f"--seed {seed}"))
    return settings


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


def parse_set(entry: str) -> Setting:
    """`a.b.c=value`, the value as TOML has it; text that is no other TOML value is a string, quoted or not."""
    name, equals, value = entry.partition("=")
    option = f"--set {entry}"
    return _set(name if equals else "", parse_value(value.strip(), option) if equals else None, option)


def _set(name: str, value: Any, option: str) -> Setting:
    key = split_key(name)
    if not key:
        raise RecipeError(f"{option}: write it as key=value, such as train.rounds_per_task=5")
    return Setting(key, value, option)


def as_entries(sets: Sets) -> list[str]:
    """Settings as `--set` takes them."""
    if not isinstance(sets, Mapping):
        return list(sets)
    return [f"{key}={_as_value(value)}" for key, value in sets.items()]


def _as_value(value: Any) -> str:
    """A value as `--set` takes it: a bare word, or TOML in one line."""
    word = isinstance(value, str) and value.replace("-", "_").isidentifier()
    return str(value) if word else _toml(value)


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_toml(entry)}" for key, entry in value.items()) + " }"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value)  # as TOML writes text, numbers, true and false


def parse_value(text: str, option: str) -> Any:
    """A TOML value; a bare word is a string."""
    try:
        value = tomllib.loads(f"value = {text}")["value"] if "\n" not in text else text
    except tomllib.TOMLDecodeError as error:
        if not text or text[0] in "[{\"'":
            raise RecipeError(f"{option}: {text!r} is not a TOML value: {error}") from error
        return text
    return text if isinstance(value, (datetime.date, datetime.time)) else value


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


def _with_settings(table: Table, settings: Sequence[Setting]) -> Table:
    table = _for_other_method(dict(table), {setting.key: setting.value for setting in settings})
    for setting in settings:
        _put(table, setting)
    return table


def _for_other_method(table: Table, chosen: dict[Key, Any]) -> Table:
    """When another method is chosen than the file's own, the file's options serve it as defaults."""
    own = table.get("method", {})
    if not isinstance(own, dict) or not isinstance(own.get("defaults", {}), dict):
        return table  # refused by the schema
    same_name = chosen.get(("method", "name"), own.get("name")) == own.get("name")
    if same_name and ("method", "parts") not in chosen:
        return table
    common = {key: own[key] for key in ("weighting",) if key in own}
    options = {key: value for key, value in own.items() if key not in MethodSection.model_fields}
    return {**table, "method": {**common, "defaults": {**own.get("defaults", {}), **options}}}


def _put(table: Table, setting: Setting) -> None:
    """Set a key, making the tables on the way to it."""
    *path, last = setting.key
    for depth, name in enumerate(path, start=1):
        inner = table.get(name, {})
        if not isinstance(inner, dict):
            raise RecipeError(f"{setting.option}: {'.'.join(setting.key[:depth])} is not a table; it is {inner!r}")
        table[name] = dict(inner)
        table = table[name]
    table[last] = setting.value


def _validated(table: Table, places: Places) -> Recipe:
    try:
        return Recipe.model_validate(table)
    except ValidationError as error:
        raise refuse(error, places) from error
