"""FedRAN: RanPAC with low-rank summaries of Gram matrices (Arockiaraj et al., "Accurate and Resource-Efficient
Federated Continual Learning", arXiv:2606.11480, 2026).

With H_k (n_k, M) the random features of a client's samples of a task, the client sends the truncated singular value
decomposition H_k ~ U S V^T as V S (M, r), for which G_k ~ V S^2 V^T, and Q_k = H_k^T Y. The server merges subspaces by
QR and SVD, those of all clients (spatially), then the result with that of earlier tasks (temporally),

    [V_1 S_1, V_2 S_2, ...] = O R,   R = U' S' W^T,   V = O U',   S = S',   cut to rank r

and solves the ridge regression in closed form, with Q the sum over clients and tasks:

    W = (V S^2 V^T + penalty I)^-1 Q = (Q - V diag(s^2 / (s^2 + penalty)) V^T Q) / penalty

With r at least the rank of all features it is RanPAC. Only the paper's abstract was to be had: it does not say how the
penalty is chosen, and pseudo-labels for samples without a label are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from everfed.method import Client, Collect, Data, Facts, Server, Tells, option
from everfed.methods.features.ridge import RanPAC
from everfed.methods.features.statistics import class_numbers, columns_of, feature_rows, of_all_classes


@dataclass(frozen=True)
class FedRAN(RanPAC):
    penalty: float | None = option(100.0, above=0, about="of the squared weights")
    rank: int = option(64, at_least=1, about="r, how many directions a client sends, and the server keeps")
    classifier: str = option("ridge", one_of=("ridge", "cosine"), about="cosine: weights of unit length")
    sums: str = option("float", one_of=("float",), about="summaries are no whole numbers")
    groups: int = option(0, one_of=(0,), about="a client sends a summary of all its samples")

    name = "fedran"

    def phases(self):
        (statistics, *_) = super().phases()
        sums = {key: statistics.reduce[key] for key in ("products", "counts", "classes")}
        return (replace(statistics, reduce={"summary": Collect(self._numbers, Tells.MOMENTS), **sums}),)

    def _numbers(self, facts: Facts) -> int:
        return self.rank * self.size(facts.layout)

    def _whole_sums(self, client: Client, data: Data):
        """{summary (M, at most r), products (M, classes), counts (classes,)}."""
        classes = self._classes(client)
        columns = columns_of(classes, client.facts.classes)
        rows = [(self.hidden(found)[0], y) for found, y in feature_rows(client, data)]
        h, y = (torch.cat(parts) for parts in zip(*rows, strict=True))
        labels = functional.one_hot(columns.to(y.device)[y], len(classes)).double()
        _, s, v = torch.linalg.svd(h, full_matrices=False)
        sent = {"summary": (v * s.unsqueeze(1))[: self.rank].T, "products": h.T @ labels, "counts": labels.sum(0)}
        return {"classes": classes, **{key: value.cpu().contiguous() for key, value in sent.items()}}

    def _new_head(self, server: Server) -> None:
        held, reduced, every = server.state, server.reduced, server.facts.classes
        classes = None if reduced.get("counts") is None else class_numbers(reduced["classes"], every)
        if classes is None:
            return
        products = of_all_classes(reduced["products"].T, classes, every).T
        counts = of_all_classes(reduced["counts"], classes, every)
        summary = merged(list(reduced["summary"].values()), self.rank)  # spatially
        if held:
            summary = merged([held["summary"], summary], self.rank)  # temporally
            products, counts = products + held["products"], counts + held["counts"]
        assert self.penalty is not None
        penalties = {**held.get("penalties", {}), str(server.round): self.penalty}
        total = {"summary": summary, "products": products.contiguous(), "counts": counts}
        server.state = {**total, "penalties": penalties, "clipped": 0}
        weights = solve_low_rank(summary, products, self.penalty)
        weights = functional.normalize(weights, dim=0) if self.classifier == "cosine" else weights
        params = server.model["params"].clone()
        server.model = {**server.model, "params": self.write(params, weights.float().T, server.layout)}


def merged(summaries: Sequence[Tensor], rank: int) -> Tensor:
    """(M, at most rank) V S of the sum of V_k S_k^2 V_k^T, cut to its largest directions."""
    basis, triangular = torch.linalg.qr(torch.cat(list(summaries), 1))
    u, s, _ = torch.linalg.svd(triangular, full_matrices=False)
    return (basis @ u * s)[:, :rank].contiguous()


def solve_low_rank(summary: Tensor, products: Tensor, penalty: float) -> Tensor:
    """(V S^2 V^T + penalty I)^-1 Q, (M, C), from V S (M, r) and Q (M, C)."""
    s = summary.norm(dim=0)
    v = summary / s.clamp(min=torch.finfo(s.dtype).tiny)
    return (products - v @ ((s**2 / (s**2 + penalty)).unsqueeze(1) * (v.T @ products))) / penalty
