"""A user's mistakes in a recipe as sentences that name the place, the key and what is allowed."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from everfed import __version__
from everfed.errors import RecipeError, SettingError, UserError, is_user_error
from everfed.methods.registry import PARTS
from everfed.recipe.schema import Recipe

Key = tuple[str, ...]

_NAME = r"""(?:"[^"]*"|'[^']*'|[^\s"'.=\[\]#]+)"""
_DOTTED = rf"{_NAME}(?:\s*\.\s*{_NAME})*"
_HEADER = re.compile(rf"\s*\[\s*({_DOTTED})\s*\]")
_ASSIGNMENT = re.compile(rf"\s*({_DOTTED})\s*=")


def split_key(text: str) -> Key:
    """The names of a dotted key: `method."der++".weight` has three. Empty when it is not a dotted key."""
    if not re.fullmatch(_DOTTED, text.strip()):
        return ()
    return tuple(name.strip("\"'") for name in re.findall(_NAME, text))


@dataclass(frozen=True)
class Places:
    """label: what the recipe is called in messages. options: {key: the option that set it}, over the file's text."""

    label: str
    text: str = ""
    options: Mapping[Key, str] = field(default_factory=dict)

    def of(self, key: Key) -> str:
        """Where `key` was written: an option that set it or something in it, else its line or that of the nearest table
        around it."""
        for set_key, option in self.options.items():
            if set_key[: len(key)] == key:
                return option
        lines = _lines(self.text)
        for around in _outwards(key):
            if around in self.options:
                return self.options[around]
            if around in lines:
                return f"{self.label}, line {lines[around]}"
        return self.label


def key_of_message(message: str) -> Key:
    """The key that a message opens with; empty when it opens with none."""
    found = re.match(r"[a-z]+(\.[^\s:=,]+)*", message)
    return tuple(found[0].split(".")) if found else ()


def _outwards(key: Key) -> Iterable[Key]:
    """The key, then the tables around it, the nearest first; a part's options may stand in the list of parts."""
    around = [key[:length] for length in range(len(key), 0, -1)]
    return [*around[:-1], ("method", "parts"), ("method",)] if key[:1] == ("method",) and key[1:] else around


def _lines(text: str) -> dict[Key, int]:
    """{key: the line that first names it}; tables count as well."""
    lines: dict[Key, int] = {}
    table: Key = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            table = split_key(header[1])
            lines.setdefault(table, number)
        elif assignment := _ASSIGNMENT.match(line):
            lines.setdefault(table + split_key(assignment[1]), number)
    return lines


# sentences ---------------------------------------------------------------------------------------------------------

# The key to blame when a message does not open with one, by the error's class.
_BLAMED = {
    "DataError": "stream.dataset",
    "PartitionError": "stream.partition",
    "ModelError": "model",
    "NameProblem": "method.parts",
}


@contextmanager
def placed(places: Places) -> Iterator[None]:
    """Say where in the recipe the key stands that a layer below refuses."""
    try:
        yield
    except Exception as error:
        placed_already = isinstance(error, UserError) and not isinstance(error, SettingError)
        if placed_already or not is_user_error(error):
            raise
        key, message = _blamed(error)
        raise RecipeError(f"{places.of(key)}: {message}") from error


def _blamed(error: Exception) -> tuple[Key, str]:
    """The key to put right and the message: the key that it opens with, the one that it says to set, or the one that is
    to blame for errors of this kind, named in front of it then."""
    message = f"{error}{_hint(str(error))}"
    key = key_of_message(message)
    if set(key[:1]) & set(Recipe.model_fields):
        return key, message
    if asked := re.search(rf"\bset ((?:{'|'.join(Recipe.model_fields)})\.[a-z_.]*[a-z])", message):
        return split_key(asked[1]), message
    of_client = error.__cause__ if error.__cause__ is not None and is_user_error(error.__cause__) else error
    blamed = _BLAMED.get(type(of_client).__name__, "method")
    return split_key(blamed), f"{blamed}: {message}"


def _hint(message: str) -> str:
    """What was probably meant, where a message quotes what it refuses and lists what is allowed."""
    listed = re.search(r"(?:one of(?: the allowed values:)?|[Aa]llowed:|has(?! no )) ([^;]+)", message)
    refused = re.search(r"'([^']+)'", message)
    words = [refused[1] if refused else "", *key_of_message(message)[-1:]]
    allowed = re.split(r",? or |, ", listed[1]) if listed else []
    hints = (suggestion(word, allowed) for word in words if word not in allowed)
    return next((f".{hint}" for hint in hints if hint), "")


def refuse(error: ValidationError, places: Places) -> RecipeError:
    """One error with one line for every problem."""
    lines = [f"{places.of(_key(found))}: {_sentence(found)}" for found in error.errors()]
    return RecipeError("\n".join(dict.fromkeys(lines)))


def suggestion(name: str, allowed: Iterable[str]) -> str:
    """` Did you mean ...?`, where something allowed comes close."""
    names = list(allowed)
    longer = [other for other in names if other.startswith(name)] if len(name) > 2 else []
    close = [*difflib.get_close_matches(name, names, n=1), *longer]
    return f" Did you mean {close[0]}?" if close else ""


def _key(found: Any) -> Key:
    return tuple(str(name) for name in found["loc"])


def _sentence(found: Any) -> str:
    key, kind = _key(found), found["type"]
    name = ".".join(key)
    if kind == "extra_forbidden":
        allowed = _keys_beside(key)
        hint = _part_options(key) or suggestion(key[-1], allowed) or _elsewhere(key[-1]) or NEWER
        return f"{name} is not a key.{hint} Allowed: {', '.join(allowed)}"
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


def _part_options(key: Key) -> str:
    """` Did you mean ...?`, where the options of a part stand beside [method], not in it."""
    return f" Did you mean method.{key[0]}?" if len(key) == 1 and key[0] in PARTS else ""


# a recipe may come from a version with more keys
NEWER = f" everfed {__version__} has none like it; a newer version may."


def _elsewhere(name: str) -> str:
    """` Did you mean ...?`, where another table has a key of that name."""
    found = [key for key in _all_keys(Recipe) if key[-1] == name]
    return f" Did you mean {'.'.join(found[0])}?" if found else ""


def _all_keys(section: Any) -> Iterator[Key]:
    for name, info in section.model_fields.items():
        yield (name,)
        inner = _model_in(info.annotation)
        if inner is not None:
            yield from ((name, *key) for key in _all_keys(inner))


def _model_in(annotation: Any) -> Any:
    """The section in `Section` or `Section | None`; None where there is none."""
    kinds = (annotation, *get_args(annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
