"""From pydantic's findings to sentences that name the place, the key and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ValidationError

from everfed.errors import RecipeError
from everfed.recipe.places import Key, Places
from everfed.recipe.schema import Recipe


def refuse(error: ValidationError, places: Places) -> RecipeError:
    """One error with one line for every problem."""
    lines = [f"{places.of(_key(found))}: {_sentence(found)}" for found in error.errors()]
    return RecipeError("\n".join(dict.fromkeys(lines)))


def suggestion(name: str, allowed: Iterable[str]) -> str:
    """` Did you mean ...?`, where something allowed comes close."""
    close = difflib.get_close_matches(name, list(allowed), n=1)
    return f" Did you mean {close[0]}?" if close else ""


def _key(found: Any) -> Key:
    return tuple(str(name) for name in found["loc"])


def _sentence(found: Any) -> str:
    key, kind = _key(found), found["type"]
    name = ".".join(key)
    if kind == "extra_forbidden":
        allowed = _keys_beside(key)
        return f"{name} is not a key.{suggestion(key[-1], allowed)} Allowed: {', '.join(allowed)}"
    if kind == "missing":
        return f"{name} is missing{_remedy(key)}"
    if kind == "value_error":
        return f"{name}: {found['ctx']['error']}"
    if kind == "literal_error":
        allowed = [part.strip("'") for part in found["ctx"]["expected"].replace(" or ", ", ").split(", ")]
        got = found["input"]
        return f"{name} must be one of {', '.join(allowed)}; got {got!r}.{suggestion(str(got), allowed)}"
    return f"{name} {_rule(found['msg'])}; got {_shown(found['input'])}"


def _rule(message: str) -> str:
    return message.replace("Input should be", "must be", 1)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _remedy(key: Key) -> str:
    if key == ("method",):
        return "; add [method] with a name, or use --method NAME (`everfed list methods` shows them)"
    return ""


def _keys_beside(key: Key) -> list[str]:
    """The keys of the table that `key` lies in."""
    section: Any = Recipe
    for name in key[:-1]:
        section = _model_in(section.model_fields[name].annotation)
    return list(section.model_fields)


def _model_in(annotation: Any) -> Any:
    """The section in `Section` or `Section | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(kind for kind in annotation.__args__ if isinstance(kind, type) and issubclass(kind, BaseModel))
