"""What is set on top of a recipe: --set, --method and --seed of the command line, `sets` of the functions."""

from __future__ import annotations

import datetime
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from everfed.errors import RecipeError
from everfed.methods.registry import canonical
from everfed.recipe.objects import named_value
from everfed.recipe.problems import Key, split_key
from everfed.recipe.schema import MethodSection

Table = dict[str, Any]
Sets = Sequence[str] | Mapping[str, Any]


@dataclass(frozen=True)
class Override:
    """One key set from outside the file; `option` is how it was written there."""

    key: Key
    value: Any
    option: str


def overrides(method: str | None, seed: int | None, sets: Sets) -> list[Override]:
    if isinstance(sets, str):
        raise RecipeError(f"sets is a list of key=value, or a dict; got the text {sets!r}")
    if isinstance(sets, Mapping):
        named = {key: named_value(split_key(key), value) for key, value in sets.items()}
        found = [_set(key, value, f"--set {_entry(key, value)}") for key, value in named.items()]
    else:
        found = [parse_set(entry) for entry in sets]
    if method is not None:
        found.append(Override(("method", "name"), canonical(method), f"--method {method}"))
    if seed is not None:
        found.append(Override(("seed",), seed, f"--seed {seed}"))
    return found


def overridden(table: Table, found: Sequence[Override]) -> Table:
    table = _with_composition(dict(table))
    table = _with_composition(_for_other_method(table, {one.key: one.value for one in found}))
    for one in found:
        _put(table, one)
    return table


def _with_composition(table: Table) -> Table:
    """[method] filled in from [methods.NAME] where its name is one of these; what it says itself counts more."""
    own, named = table.get("method"), table.get("methods")
    if not isinstance(own, dict) or not isinstance(named, dict) or "parts" in own:
        return table
    chosen = named.get(own.get("name"))
    return {**table, "method": {**chosen, **own}} if isinstance(chosen, dict) else table


def _for_other_method(table: Table, chosen: dict[Key, Any]) -> Table:
    """When another method is chosen than the file's own, the file's options serve it as defaults."""
    own = table.get("method", {})
    if not isinstance(own, dict) or not isinstance(own.get("defaults", {}), dict):
        return table  # refused by the schema
    name = chosen.get(("method", "name"), own.get("name"))
    if name == own.get("name") and ("method", "parts") not in chosen:
        return table
    common = {key: own[key] for key in ("weighting",) if key in own}
    options = {key: value for key, value in own.items() if key not in MethodSection.model_fields}
    named = {} if ("method", "name") not in chosen else {"name": name}
    if "parts" in own and options:  # they may be of parts that only this composition has
        left = {key: value for key, value in own.items() if key != "defaults"}
        table = {**table, "methods": {"parts": left, **table.get("methods", {})}}
    return {**table, "method": {**named, **common, "defaults": {**own.get("defaults", {}), **options}}}


def _put(table: Table, setting: Override) -> None:
    """Set a key, making the tables on the way to it."""
    *path, last = setting.key
    for depth, name in enumerate(path, start=1):
        inner = table.get(name, {})
        if not isinstance(inner, dict):
            raise RecipeError(f"{setting.option}: {'.'.join(setting.key[:depth])} is not a table; it is {inner!r}")
        table[name] = dict(inner)
        table = table[name]
    table[last] = setting.value


def parse_set(entry: str) -> Override:
    """`a.b.c=value`, the value as TOML has it; text that is no other TOML value is a string, quoted or not."""
    name, equals, value = entry.partition("=")
    option = f"--set {entry}"
    return _set(name if equals else "", parse_value(value.strip(), option) if equals else None, option)


def _set(name: str, value: Any, option: str) -> Override:
    key = split_key(name)
    if not key:
        raise RecipeError(f"{option}: write it as key=value, such as train.rounds_per_task=5")
    return Override(key, value, option)


def as_entries(sets: Sets) -> list[str]:
    """Settings as `--set` takes them."""
    if not isinstance(sets, Mapping):
        return list(sets)
    return [_entry(key, named_value(split_key(key), value)) for key, value in sets.items()]


def _entry(key: str, value: Any) -> str:
    """A setting as `--set` takes it: its value a bare word, or TOML in one line."""
    word = isinstance(value, str) and value.replace("-", "_").isidentifier()
    try:
        return f"{key}={value if word else _toml(value)}"
    except TypeError as error:
        raise RecipeError(f"sets: {key}: a recipe holds text, numbers, lists and tables; got {value!r}") from error


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


def flat(table: Mapping[str, Any]) -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    return dict(_flat(table))


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
