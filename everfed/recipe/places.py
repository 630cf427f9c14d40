"""Where a recipe's key was written, so that a message can say so: a line of the file, or an option."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

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
    """The key, then the tables around it, the nearest first."""
    return (key[:length] for length in range(len(key), 0, -1))


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
