"""Objects of Python in a recipe: classes, parts and policies become names and tables, as TOML can hold them.

{"model": {"kind": Net}, "method": {"parts": ["fedavg", Memory(policy=Herding), Clip(norm=0.5)]}}
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from everfed.errors import RecipeError

Table = dict[str, Any]
Parts = Any  # a part, its class, or a list of parts, of their names and of tables


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


def named_value(key: tuple[str, ...], value: Any) -> Any:
    """The same for the value of one key of a recipe."""
    table = value
    for name in reversed(key):
        table = {name: table}
    table = named(table) if key else value
    for name in key:
        table = table[name]
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
    if key == "parts" and not isinstance(value, str | None):
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
