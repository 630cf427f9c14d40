"""ER: train on the current minibatch joined with one from memory (Chaudhry et al., 2019; Riemer et al., 2019).

Each step draws from the buffer without replacement and takes the mean cross-entropy over all samples in one forward
pass, so the replayed share is b_r / (b + b_r).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from everfed.core.context import Context
from everfed.core.part import Part, State, Tables
from everfed.core.schedule import Schedule
from everfed.core.step import Batch, Step
from everfed.core.tree import Tree
from everfed.parts import memory


@dataclass(frozen=True)
class Replay(Part):
    """batch: b_r, replayed samples per step."""

    batch: int = 32

    name: ClassVar[str] = "er"
    needs: ClassVar[frozenset[str]] = frozenset({memory.NAME})

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(f"batch must be at least 1; got {self.batch}")

    def plan(self, client: State, schedule: Schedule, plans: Mapping[str, Tables], ctx: Context) -> tuple[Tree, Tables]:
        return {}, {"rows": memory.replay_rows(plans, self.batch, ctx.rng(self.name))}

    def batches(self, step: Step) -> dict[str, Batch]:
        return drawn(step, self.name, joined=True)


def drawn(step: Step, name: str, joined: bool = False, rows: str = "rows") -> dict[str, Batch]:
    """The samples of the buffer that part `name` planned for this step; none while the buffer is empty."""
    index = step.rows[name][rows]
    if len(index) == 0:
        return {}
    slots: dict[str, Tensor] = step.state[memory.NAME]
    x, y = (slots[key].index_select(0, index) for key in ("x", "y"))
    extra = {"logits": slots["logits"].index_select(0, index)} if "logits" in slots else {}
    key = name if rows == "rows" else f"{name}/{rows}"
    return {key: Batch(x, y, joined, extra)}
