"""FedCurv: penalise moves of parameters that matter to the other clients (Shoham et al., 2019).

Round r, client j minimises L_j(w) + lambda * sum_{s != j} (w - w_s)^T diag(I_s) (w - w_s), with w_s and the Fisher
information I_s from the previous round. Clients send u_s = diag(I_s) and v_s = u_s * w_s; the server returns the sums U
and V.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from everfed.core.client import synchronises
from everfed.core.legacy import (
    Context,
    Data,
    Fitted,
    Message,
    Model,
    Optimizer,
    Part,
    Reducer,
    Slots,
    State,
    Step,
    Sum,
    Tree,
    refuse_personal,
)
from everfed.methods.common.checks import at_least, one_of
from everfed.methods.regularise.fisher import FISHER_KINDS, diagonal_fisher


@dataclass(frozen=True)
class FedCurv(Part):
    """weight: lambda; sums over clients, so its strength grows with their number. fisher: "sample" squares the gradient
    of each sample, "batch" that of minibatch means (common in public code, smaller by about the batch size)."""

    weight: float = 1.0
    fisher: str = "sample"
    fisher_samples: int = 500

    name = "fedcurv"

    def __post_init__(self) -> None:
        at_least(self, 0, "weight")
        one_of(self, fisher=FISHER_KINDS)
        at_least(self, 1, "fisher_samples")

    def check(self, parts: Sequence[Part], optimizer: Optimizer) -> Iterable[str]:
        refuse_personal(self, parts)
        return ()

    def reducers(self) -> Mapping[str, Reducer]:
        return {"u": Sum(), "v": Sum()}

    def broadcast(self, server: State, ctx: Context) -> dict[str, Any]:
        return dict(server.get(self.name, {}))

    def update(self, server: State, reduced: Tree, ctx: Context) -> Slots:
        if reduced.get("u") is None:
            return None
        return {"u": reduced["u"], "v": reduced["v"], "round": ctx.round}

    def receive(self, client: State, message: Message, model: Model, data: Data, ctx: Context) -> tuple[Slots, Model]:
        """U_j = U - u_j and V_j = V - v_j, out of place: the sums are shared by all clients of a round. A client that
        did not contribute to them subtracts nothing."""
        own, sums = client.get(self.name, {}), message.get(self.name)
        if not sums:
            return None, model
        contributed = own.get("sent") == sums.get("round") and "u" in own
        others = {f"{k}_others": sums[k] - own[k].to(sums[k].device) if contributed else sums[k] for k in ("u", "v")}
        self._warn_if_unstable(others["u_others"], ctx)
        return {**own, **others}, model

    def _warn_if_unstable(self, u: Tensor, ctx: Context) -> None:
        """The penalty's curvature is 2 lambda U: a step of SGD then overshoots where 2 lr lambda U is above 1."""
        if ctx.options.optimizer.kind == "sgd" and 2.0 * ctx.rate * self.weight * float(u.max()) >= 1.0:
            # always the same words, so that Python prints them once
            message = (
                f"fedcurv: 2 lr weight max U is at least 1, where SGD becomes unstable; lower method.fedcurv.weight "
                f"(now {self.weight:g}) or train.optimizer.lr (now {ctx.options.optimizer.lr:g})"
            )
            warnings.warn(message, RuntimeWarning, stacklevel=2)

    def gradient(self, step: Step, gradient: Tensor) -> Tensor:
        own = step.state.get(self.name, {})
        if "u_others" not in own or self.weight == 0:
            return gradient
        penalty = own["u_others"] * step.params - own["v_others"]
        return gradient.add(penalty, alpha=2.0 * self.weight)

    def reply(self, client: State, message: Message, fitted: Fitted, data: Data, ctx: Context) -> tuple[Slots, Tree]:
        if not synchronises(ctx):  # the server's sums still hold what this client sent last
            return None, {}
        chosen = ctx.rng("fisher").permutation(len(data))[: self.fisher_samples]
        u = diagonal_fisher(ctx, fitted.model, data.take(chosen), self.fisher)
        sent = {"u": u, "v": u * fitted.model["params"]}
        return {**sent, "sent": ctx.round}, sent
