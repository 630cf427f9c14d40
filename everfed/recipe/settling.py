"""Recipes made from recipes: scaled down, with the method's defaults settled, and as text."""

from __future__ import annotations

import math
from typing import Any

import tomli_w

from everfed.errors import RecipeError
from everfed.recipe.problems import suggestion
from everfed.recipe.schema import MethodSection, Recipe


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
    known = {*own, *methods.PARTS}
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
