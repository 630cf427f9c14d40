"""FedGP: buffer-based gradient projection (Dai et al., 2023; later Fed-A-GEM).

After every aggregation each client sends the gradient of the loss on samples of its buffer, taken at the aggregated
model. Their mean is the global reference g_ref; in the next round every local gradient g is projected on conflict:

    g~ = g - (<g, g_ref> / <g_ref, g_ref>) g_ref   if <g, g_ref> < 0, else g        (Eq. 4)

It needs no task boundaries, goes on top of any method, and is the last rule before the optimiser.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from everfed.core.legacy import (
    MODEL,
    CompositionError,
    Context,
    Data,
    Mean,
    Message,
    Model,
    Optimizer,
    Part,
    Phase,
    Slots,
    State,
    Step,
    Tree,
    overrides,
    refuse_personal,
)
from everfed.core.ops import take_rows
from everfed.core.pieces import only_trained
from everfed.methods.project.projection import check_finite, project, squared_norm
from everfed.methods.replay import memory


@dataclass(frozen=True)
class FedGP(Part):
    """samples: m, how many buffered samples the reference is computed on (0: the whole buffer). mode: "train" as in the
    authors' code (dropout active, batch statistics), or "eval"."""

    samples: int = 32
    mode: str = "train"

    name = "fedgp"
    needs = frozenset({memory.NAME})

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
        changed = [name for name in ("momentum", "weight_decay", "groups") if getattr(optimizer, name)]
        if optimizer.kind != "sgd" or changed:
            what = optimizer.kind if optimizer.kind != "sgd" else " and ".join(changed)
            return (f"fedgp with {what}: the update, unlike the gradient, may oppose the reference",)
        return ()

    def phases(self) -> tuple[Phase, ...]:
        return (Phase("reference", reduce={"gradient": Mean()}, run=self._buffer_gradient, update=self._keep),)

    def _buffer_gradient(
        self, client: State, message: Message, data: Data, ctx: Context
    ) -> tuple[None, dict[str, Tensor]]:
        """ComputeBufferGrad (Algorithm 3): labels, not logits, and the plain task loss."""
        own = client[memory.NAME]
        filled = memory.filled(own, own["x"].shape[0] - 1)
        if filled == 0:
            return None, {}
        chosen = ctx.rng("reference").permutation(filled)[: self.samples or filled]
        rows = torch.from_numpy(chosen).to(own["x"].device, non_blocking=True)
        x, y = take_rows([own["x"], own["y"]], rows)
        gradient = ctx.train.gradient(ctx, message[MODEL], x, y, mode=self.mode, tag="reference")
        return None, {"gradient": only_trained(gradient, message)}

    def _keep(self, server: State, reduced: Tree, ctx: Context) -> Tree:
        """The reference of the next round; none when all buffers were empty."""
        if reduced.get("gradient") is None:
            return {}
        return {"reference": check_finite(reduced["gradient"], "the mean buffer gradient")}

    def broadcast(self, server: State, ctx: Context) -> dict[str, Any]:
        return dict(server.get(self.name, {}))

    def receive(self, client: State, message: Message, model: Model, data: Data, ctx: Context) -> tuple[Slots, Model]:
        """|g_ref|^2 stays the same for the whole round, so it is computed once."""
        reference = message.get(self.name, {}).get("reference")
        return (None if reference is None else {"norm": squared_norm(reference)}), model

    def conflicts_with(self, step: Step) -> tuple[Tensor, Tensor] | None:
        """The reference and its squared norm."""
        reference = step.message.get(self.name, {}).get("reference")
        if reference is None:
            return None
        norm = step.state.get(self.name, {}).get("norm")
        return reference, squared_norm(reference) if norm is None else norm

    def gradient(self, step: Step, gradient: Tensor) -> Tensor:
        found = self.conflicts_with(step)
        return gradient if found is None else project(gradient, *found)
