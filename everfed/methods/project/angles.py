"""Angles: how well a client's tasks, and a round's clients, agree (STAMP, Fig. 3 and 4). A part that only measures.

After local training every participant trains a clone of its current model theta on each of its tasks so far, the
current one included, as long as a local training lasts:

    temporal   mean over the pairs i < j of its tasks of cos(Delta_i, Delta_j),  Delta_i = theta_i - theta
    spatial    mean over the pairs of clients of the cosine between their updates of the round

as the released code does for every method. Both are reported as events ("measure"). Added to a method as its last part,
`everfed.methods.project.angles:Angles`, it changes no result. It reads the data of earlier tasks, and each participant
sends its update a second time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from everfed.core.legacy import (
    BOUNDARIES,
    HISTORY,
    MODEL,
    Collect,
    Context,
    Data,
    Fitted,
    Mean,
    Message,
    Part,
    Reducer,
    State,
    Tree,
)
from everfed.methods.common.checks import at_least
from everfed.methods.project.fedomg import angles, mean_cosine


@dataclass(frozen=True)
class Angles(Part):
    """every: measured in the last of every so many rounds. samples: of each task that a clone is trained on, drawn at
    random (0: all)."""

    every: int = 1
    samples: int = 0

    name = "angles"
    needs = frozenset({BOUNDARIES, HISTORY})

    def __post_init__(self) -> None:
        at_least(self, 1, "every")
        at_least(self, 0, "samples")

    def reply(self, client: State, message: Message, fitted: Fitted, data: Data, ctx: Context) -> tuple[None, Tree]:
        if (ctx.round + 1) % self.every:
            return None, {}
        shared = ctx.facts.layout.shared
        theta = fitted.model["params"][:shared]
        values: Tree = {"update": theta - message[MODEL]["params"][:shared].to(theta.device)}
        tasks = [task for task in (*ctx.history(), data) if len(task)]
        if len(tasks) < 2:
            return None, values
        ends = [self._clone(f"angles {i}", task, client, message, fitted, ctx) for i, task in enumerate(tasks)]
        cosine = mean_cosine([(end[:shared] - theta).cpu() for end in ends])
        return None, values if cosine is None else {**values, "cosine": cosine, "tasks": len(tasks)}

    def _clone(self, tag: str, data: Data, client: State, message: Message, fitted: Fitted, ctx: Context) -> Tensor:
        """(P,) where training the current model on a task ends; the optimiser goes on from the client's state."""
        if self.samples:
            data = data.take(ctx.rng(tag).permutation(len(data))[: self.samples])
        forward = ctx.train.forward_part  # the only other part that matters: it changes the forward pass
        args = (ctx, () if forward is None else (forward,), fitted.model, fitted.start["params"], client, message)
        return ctx.train.fit(*args, data, moments=_moments(fitted), tag=tag).model["params"]

    def reducers(self) -> Mapping[str, Reducer]:
        return {"update": Collect(), "cosine": Mean(), "tasks": Mean()}

    def measure(self, server: State, reduced: Tree, ctx: Context) -> dict[str, float]:
        updates = list((reduced.get("update") or {}).values())
        spatial, temporal = mean_cosine(updates), reduced.get("cosine")
        found = {} if spatial is None else angles("spatial", spatial, len(updates))
        if temporal is not None:
            found |= angles("temporal", float(temporal), round(float(reduced["tasks"])))
        return found


def _moments(fitted: Fitted) -> dict[str, Tensor] | None:
    """The optimiser's state after training; None, a fresh one, where parts of the method divide the vector."""
    vectors = [moment for moment in fitted.moments.values() if moment.dim()]
    whole = all(len(moment) == len(fitted.model["params"]) for moment in vectors)
    return fitted.moments if vectors and whole else None
