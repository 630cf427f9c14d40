"""FedGP: buffer-based gradient projection (Dai et al., 2023; later Fed-A-GEM).

After every aggregation each client sends the gradient of the loss on samples of its buffer, taken at the aggregated
model. Their mean is the global reference g_ref; in the next round every local gradient g is projected on conflict:

    g~ = g - (<g, g_ref> / <g_ref, g_ref>) g_ref   if <g, g_ref> < 0, else g        (Eq. 4)

It needs no task boundaries, goes on top of any method, and is the last rule before the optimiser.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from everfed.core.replica import squared_norm
from everfed.method import (
    SHARED,
    Client,
    CompositionError,
    Gradient,
    Mean,
    Part,
    Phase,
    Server,
    Step,
    option,
    overrides,
)
from everfed.methods.replay import memory


@dataclass(frozen=True)
class FedGP(Part):
    samples: int = option(32, at_least=0, about="m, how many buffered samples the reference is computed on (0: all)")
    mode: str = option(
        "train",
        one_of=("train", "eval"),
        about='of the network for the reference; "train" as in the authors\' code (dropout active, batch statistics)',
    )

    name = "fedgp"

    def needs(self):
        return {memory.NAME, SHARED}

    def check(self, parts, optimizer):
        later = [p.name for p in parts[list(parts).index(self) + 1 :] if overrides(p, "gradient")]
        if later:
            raise CompositionError(f"fedgp must be the last gradient rule; move {', '.join(later)} before it")
        changed = [] if optimizer.kind == "sgd" else [optimizer.kind]
        changed += [name for name in ("momentum", "weight_decay", "groups") if getattr(optimizer, name)]
        if changed:
            return (f"fedgp with {' and '.join(changed)}: the update, unlike the gradient, may oppose the reference",)
        return ()

    def phases(self):
        mean = Mean(tells="a gradient: of one sample it is that sample, in the first layer exactly")
        return (Phase("reference", reduce={"gradient": mean}, run=self._buffer_gradient, update=self._keep),)

    def _buffer_gradient(self, client: Client):
        """ComputeBufferGrad (Algorithm 3): labels, not logits, and the plain task loss."""
        x, y = memory.sample(client, self.samples)
        return {"gradient": client.gradient(x, y, mode=self.mode)} if len(x) else {}

    def _keep(self, server: Server) -> None:
        """The reference of the next round; none when all buffers were empty."""
        mean = server.reduced.get("gradient")
        server.state = {} if mean is None else {"reference": finite(mean, "the mean buffer gradient")}

    def broadcast(self, server: Server):
        return server.state

    def receive(self, client: Client) -> None:
        """|g_ref|^2 stays the same for the whole round, so it is computed once."""
        reference = client.message.get("reference")
        client.state = {} if reference is None else {"norm": squared_norm(reference)}

    def gradient(self, step: Step, gradient: Gradient) -> Gradient:
        """Eq. 4."""
        return gradient.without_conflict(step.message.get("reference"), step.state.get("norm"))


def finite(reference: Tensor, what: str) -> Tensor:
    """Raise FloatingPointError for a reference with NaN or Inf, which would spread to the parameters."""
    if not bool(torch.isfinite(reference).all()):
        raise FloatingPointError(f"{what} is not finite")
    return reference
