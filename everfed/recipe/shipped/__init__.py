"""The recipes that ship with everfed, by short name: `demo`, `fedgp/table1-rotated-mnist`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable

SUFFIX = ".toml"


def names() -> list[str]:
    """Every short name, sorted."""
    return sorted(name for name, _ in _walk(resources.files(__name__), ""))


def text(name: str) -> str:
    """The TOML of the recipe of that short name; KeyError where there is none."""
    return dict(_walk(resources.files(__name__), ""))[name].read_text(encoding="utf-8")


def about(name: str) -> str:
    """What a recipe says of itself: the first line of its opening comment."""
    first = text(name).partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def _walk(folder: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _walk(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(SUFFIX):
            yield prefix + entry.name.removesuffix(SUFFIX), entry
