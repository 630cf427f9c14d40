"""ER: train on what is stored beside what is new (Chaudhry et al., 2019; Riemer et al., 2019).

per_step: each step draws from the buffer without replacement and takes the mean cross-entropy over all samples in one
forward pass, so the replayed share is b_r / (b + b_r).
union: the buffer and the current data are one data set; every element is used once per epoch ("Coordinated Replay
Sample Selection for Continual Federated Learning").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from everfed.core.legacy import Batch, Context, Data, Part, Schedule, State, Step, Tables
from everfed.core.ops import take_rows
from everfed.methods.common.checks import at_least, one_of
from everfed.methods.replay import memory

MODES = ("per_step", "union")


@dataclass(frozen=True)
class Replay(Part):
    """mode: "per_step" or "union". batch: b_r, replayed samples per step (per_step)."""

    batch: int = 32
    mode: str = "per_step"

    name = "er"
    needs = frozenset({memory.NAME})

    def __post_init__(self) -> None:
        at_least(self, 1, "batch")
        one_of(self, mode=MODES)

    def dataset(self, client: State, data: Data, ctx: Context) -> Data:
        """Stored samples that are in the current data already (a reservoir holds some) are not added again."""
        if self.mode == "per_step":
            return data
        kept = memory.stored(client[memory.NAME])
        others = np.flatnonzero(~np.isin(kept.ids, data.ids))
        return Data.union([data, kept.take(others)]) if len(others) else data

    def plan(self, client: State, schedule: Schedule, plans: Mapping[str, Tables], ctx: Context) -> tuple[None, Tables]:
        if self.mode == "union":
            return None, {}
        return None, {"rows": memory.replay_rows(plans, self.batch, ctx.rng(self.name))}

    def batches(self, step: Step) -> dict[str, Batch]:
        return drawn(step, self.name, joined=True) if self.mode == "per_step" else {}


def drawn(
    step: Step, name: str, joined: bool = False, rows: str = "rows", only_outputs: bool = False
) -> dict[str, Batch]:
    """The samples of the buffer that part `name` planned for this step; none while the buffer is empty."""
    index = step.rows[name][rows]
    if len(index) == 0:
        return {}
    slots: dict[str, Tensor] = step.state[memory.NAME]
    found = {key: slots[key] for key in ("x", "y", "logits") if key in slots}
    x, y, *logits = take_rows(list(found.values()), index)
    extra = {"logits": logits[0]} if logits else {}
    key = name if rows == "rows" else f"{name}/{rows}"
    return {key: Batch(x, y, joined, extra, only_outputs=only_outputs)}
