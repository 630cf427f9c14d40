"""Ideal (Oracle): in task t a client trains on all its data of tasks 1..t. An upper bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from everfed.core.context import Context
from everfed.core.data import Data
from everfed.core.part import HISTORY, Part, State


@dataclass(frozen=True)
class Ideal(Part):
    """Nothing to choose."""

    name: ClassVar[str] = "ideal"
    needs: ClassVar[frozenset[str]] = frozenset({HISTORY})

    def dataset(self, client: State, data: Data, ctx: Context) -> Data:
        earlier = ctx.history()
        return Data.union([*earlier, data]) if earlier else data
