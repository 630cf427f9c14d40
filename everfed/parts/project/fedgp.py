"""FedGP: buffer-based gradient projection (Dai et al., 2023; later Fed-A-GEM).

After every aggregation each client sends the gradient of the loss on samples of its buffer, taken at the aggregated
model. Their mean is the global reference g_ref; in the next round every local gradient g is projected on conflict:

    g~ = g - (<g, g_ref> / <g_ref, g_ref>) g_ref   if <g, g_ref> < 0, else g        (Eq. 4)

It needs no task boundaries, goes on top of any method, and is the last rule before the optimiser.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from everfed.core.context import Context
from everfed.core.data import Data
from everfed.core.message import MODEL
from everfed.core.optimizer import Optimizer
from everfed.core.part import CompositionError, Model, Part, State, overrides, refuse_personal
from everfed.core.phase import Phase
from everfed.core.reduce import Mean
from everfed.core.step import Step
from everfed.core.tree import Tree
from everfed.parts.memory import buffer as memory
from everfed.parts.project.projection import check_finite, project, squared_norm


@dataclass(frozen=True)
class FedGP(Part):
    """samples: m, how many buffered samples the reference is computed on (0: the whole buffer). mode: "train" as in the
    authors' code (dropout active, batch statistics), or "eval"."""

    samples: int = 32
    mode: str = "train"

    name: ClassVar[str] = "fedgp"
    needs: ClassVar[frozenset[str]] = frozenset({memory.NAME})

    def __post_init__(self) -> None:
        if self.samples < 0:
            raise ValueError(f"samples must be at least 0 (0: the whole buffer); got {self.samples}")
        if self.mode not in ("train", "eval"):
            raise ValueError(f"mode must be 'train' or 'eval'; got {self.mode!r}")

    def check(self, parts: Sequence[Part], optimizer: Optimizer) -> Iterable[str]:
        refuse_personal(self, parts)
        later = [p.name for p in parts[list(parts).index(self) + 1 :] if overrides(p, "gradient")]
        if later:
            raise CompositionError(f"fedgp must be the last gradient rule; move {', '.join(later)} before it")
        changed = [name for name in ("momentum", "weight_decay") if getattr(optimizer, name)]
        if optimizer.kind != "sgd" or changed:
            what = optimizer.kind if optimizer.kind != "sgd" else " and ".join(changed)
            return (f"fedgp with {what}: the update, unlike the gradient, may oppose the reference",)
        return ()

    def phases(self) -> tuple[Phase, ...]:
        return (Phase("reference", owner=self.name, reduce={"gradient": Mean()}),)

    def run(self, client: State, phase: str, message: dict[str, Tree], data: Data, ctx: Context) -> tuple[Tree, Tree]:
        """ComputeBufferGrad (Algorithm 3): labels, not logits, and the plain task loss."""
        own = client[memory.NAME]
        filled = memory.filled(own, own["x"].shape[0] - 1)
        if filled == 0:
            return {}, {}
        chosen = ctx.rng("reference").permutation(filled)[: self.samples or filled]
        rows = torch.from_numpy(chosen).to(own["x"].device)
        x, y = own["x"].index_select(0, rows), own["y"].index_select(0, rows)
        return {}, {"gradient": ctx.train.gradient(ctx, message[MODEL], x, y, mode=self.mode, tag="reference")}

    def update(self, server: State, phase: str, reduced: Tree, ctx: Context) -> Tree:
        if phase != "reference":
            return server.get(self.name, {})
        if reduced.get("gradient") is None:  # nobody had a buffer: there is no reference
            return {}
        return {"reference": check_finite(reduced["gradient"], "the mean buffer gradient")}

    def broadcast(self, server: State, phase: str, ctx: Context) -> dict[str, Any]:
        return dict(server.get(self.name, {})) if phase == "train" else {}

    def receive(self, client: State, message: dict[str, Tree], model: Model, ctx: Context) -> tuple[Tree, Model]:
        """|g_ref|^2 stays the same for the whole round, so it is computed once."""
        reference = message.get(self.name, {}).get("reference")
        return ({} if reference is None else {"norm": squared_norm(reference)}), model

    def gradient(self, step: Step, gradient: Tensor) -> Tensor:
        reference = step.message.get(self.name, {}).get("reference")
        if reference is None:
            return gradient
        return project(gradient, reference, step.state.get(self.name, {}).get("norm"))
