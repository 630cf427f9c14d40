"""FedCurv: penalise moves of parameters that matter to the other clients (Shoham et al., 2019).

Round r, client j minimises L_j(w) + lambda * sum_{s != j} (w - w_s)^T diag(I_s) (w - w_s), with w_s and the Fisher
information I_s from the previous round. Clients send u_s = diag(I_s) and v_s = u_s * w_s; the server returns the sums U
and V.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from torch import Tensor

from everfed.method import SHARED, Client, Gradient, Part, Server, Step, Sum, option
from everfed.methods.regularise.fisher import FISHER, diagonal_fisher


@dataclass(frozen=True)
class FedCurv(Part):
    weight: float = option(
        1.0, at_least=0, about="lambda; the penalty sums over clients, so its strength grows with their number"
    )
    fisher: str = option("sample", **FISHER)
    fisher_samples: int = option(500, at_least=1, about="samples that it is computed on, at most")

    name = "fedcurv"

    def needs(self):
        return {SHARED}

    # on the server ---------------------------------------------------------------------------------------------------
    def reducers(self):
        return {
            "u": Sum(tells="squared gradients: of one sample its brightness, pixel by pixel"),
            "v": Sum(tells="squared gradients times the trained model"),
        }

    def update(self, server: Server) -> None:
        if server.reduced.get("u") is not None:
            server.state = {"u": server.reduced["u"], "v": server.reduced["v"], "round": server.round}

    def broadcast(self, server: Server):
        return server.state

    # on the client ---------------------------------------------------------------------------------------------------
    def receive(self, client: Client) -> None:
        """U_j = U - u_j and V_j = V - v_j, out of place: the sums are shared by all clients of a round. A client that
        did not contribute to them subtracts nothing."""
        own, sums = client.state, client.message
        if not sums:
            return
        contributed = own.get("sent") == sums.get("round") and "u" in own
        others = {f"{k}_others": sums[k] - own[k].to(sums[k].device) if contributed else sums[k] for k in ("u", "v")}
        self._warn_if_unstable(others["u_others"], client)
        own |= others

    def _warn_if_unstable(self, u: Tensor, client: Client) -> None:
        """The penalty's curvature is 2 lambda U: a step of SGD then overshoots where 2 lr lambda U is above 1."""
        optimizer = client.options.optimizer
        if optimizer.kind == "sgd" and 2.0 * client.rate * self.weight * float(u.max()) >= 1.0:
            # always the same words, so that Python prints them once
            message = (
                f"fedcurv: 2 lr weight max U is at least 1, where SGD becomes unstable; lower method.fedcurv.weight "
                f"(now {self.weight:g}) or train.optimizer.lr (now {optimizer.lr:g})"
            )
            warnings.warn(message, RuntimeWarning, stacklevel=2)

    def gradient(self, step: Step, gradient: Gradient) -> Gradient | Tensor:
        own = step.state
        if "u_others" not in own or self.weight == 0:
            return gradient
        penalty = own["u_others"] * step.params - own["v_others"]
        return gradient.vector.add(penalty, alpha=2.0 * self.weight)

    def reply(self, client: Client):
        if not client.synchronises:  # the server's sums still hold what this client sent last
            return None
        chosen = client.rng("fisher").permutation(len(client.data))[: self.fisher_samples]
        u = diagonal_fisher(client, client.model, client.data.take(chosen), self.fisher)
        sent = {"u": u, "v": u * client.model["params"]}
        client.state = {**sent, "sent": client.round}
        return sent
