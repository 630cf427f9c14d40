"""Which methods, streams and tries the leaderboard has: the content of tuning.toml as `--set` entries."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

from everfed.methods import registry as methods
from everfed.recipe import shipped as recipes

RECIPES = "leaderboard/"  # what the recipes of the streams begin with
RATE = "train.optimizer.lr"
MOST_TRIES = 5
WITH_FEDGP = ("fedgp", "fedgp+er", "fedgp+der", "fedgp+agem")  # of all combinations with FedGP, these


def streams() -> list[str]:
    """The streams, digits first."""
    found = [name.removeprefix(RECIPES) for name in recipes.names() if name.startswith(RECIPES)]
    return sorted(found, key=lambda name: list(_table()["learning_rates"]).index(name))


def compared() -> list[str]:
    """The methods: all that `everfed list methods` shows, of the combinations with FedGP only four."""
    return [name for name in methods.names() if not name.startswith("fedgp") or name in WITH_FEDGP]


def slowest_first(names: Sequence[str]) -> list[str]:
    """The same methods, those that take long first, so that no core waits for them at the end."""
    slow = _table()["slowest"]
    return sorted(names, key=lambda name: slow.index(name) if name in slow else len(slow))


def tries(method: str, stream: str, count: int) -> list[tuple[str, ...]]:
    """The first `count` tries of a method, each as `--set` entries."""
    rates = _table()["learning_rates"][stream]
    weight = weight_of(method)
    found = []
    for rate, place in _table()["pairs"][:count]:
        own = () if weight is None else (f"method.{_quoted(weight['option'])}={weight['values'][place]}",)
        found.append((f"{RATE}={rates[rate]}", *own))
    return found


def weight_of(method: str) -> dict[str, Any] | None:
    """{option, values} of a method's main weight; None where it has none."""
    found: dict[str, Any] | None = _table()["weights"].get(method)
    return found


def reason_without(method: str) -> str:
    """Why a method has no weight of its own; KeyError for one that has."""
    return str(_table()["without"][method])


def _quoted(option: str) -> str:
    """A dotted key whose part may have a name that TOML quotes, such as der++."""
    part, _, name = option.partition(".")
    return f'"{part}".{name}' if "+" in part else option


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(
        resources.files("everfed.experiments.leaderboard").joinpath("tuning.toml").read_text(encoding="utf-8")
    )
