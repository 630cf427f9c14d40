"""A recipe made in Python may hold classes and parts themselves; here they become the names a recipe knows them by.

{"model": {"kind": Net}, "method": {"parts": ["fedavg", Clip(norm=0.5)]}}
"""

from __future__ import annotations

import sys
from dataclasses import fields, is_dataclass
from typing import Any

from everfed.errors import RecipeError

Table = dict[str, Any]


def named(table: Table) -> Table:
    """The same recipe with `package.module:Name` for every class, function or part in it. Raises RecipeError."""
    model, method = table.get("model"), table.get("method")
    if isinstance(model, dict) and callable(model.get("kind")):
        table = {**table, "model": {**model, "kind": name_of(model["kind"], "model.kind")}}
    if isinstance(method, dict) and isinstance(method.get("parts"), list | tuple):
        table = {**table, "method": {**method, "parts": [_part(entry) for entry in method["parts"]]}}
    return table


def name_of(thing: Any, key: str) -> str:
    """`package.module:Name` of a class or function; a resumed run must find it there again."""
    module, name = getattr(thing, "__module__", ""), getattr(thing, "__qualname__", "")
    if not name:
        raise RecipeError(f"{key}: give the class or function itself, not an object of class {type(thing).__name__}")
    if getattr(sys.modules.get(module), name, None) is not thing:
        raise RecipeError(f"{key}: {name} cannot be found again by that name; define it at the top level of a module")
    return f"{module}:{name}"


def _part(entry: Any) -> Any:
    """Names and tables stay; a part becomes a table with the options that are not its defaults."""
    if isinstance(entry, type):
        return name_of(entry, "method.parts")
    if not is_dataclass(entry):
        return entry
    options = {f.name: getattr(entry, f.name) for f in fields(entry) if getattr(entry, f.name) != f.default}
    for option, value in options.items():
        if value is None:
            raise RecipeError(f"method.parts: {entry!r}: a recipe cannot hold None; give {option} another default")
    return {"part": name_of(type(entry), "method.parts"), **options}
