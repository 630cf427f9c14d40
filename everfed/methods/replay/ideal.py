"""Ideal (Oracle): in task t a client trains on all its data of tasks 1..t. An upper bound."""

from __future__ import annotations

from dataclasses import dataclass

from everfed.core.legacy import HISTORY, Context, Data, Part, State


@dataclass(frozen=True)
class Ideal(Part):
    """No options."""

    name = "ideal"
    needs = frozenset({HISTORY})

    def dataset(self, client: State, data: Data, ctx: Context) -> Data:
        earlier = ctx.history()
        return Data.union([*earlier, data]) if earlier else data
