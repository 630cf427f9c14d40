"""DOLFIN: LoRA in directions that earlier tasks do not use (Moussadek et al., "DOLFIN: Balancing Stability and
Plasticity in Federated Continual Learning", arXiv:2510.13567, 2025).

Task t has factors of its own for every adapted layer, trained on top of the earlier ones: W x + sum_{j <= t} B_j A_j x.
A_t is frozen; clients train B_t and the head alone, and the server averages them. With H_t (inputs, n) what samples of
all clients give to a layer when the task begins, and M_t an orthonormal basis of what earlier tasks gave to it,

    A_t = the first r left singular vectors of (I - M_t M_t^T) H_t, so that span(A_t) is orthogonal to M_t

At the task's end M grows as in gradient projection memory (DualGPM: Liang and Li, 2023), at the trained network: by the
fewest left singular vectors of (I - M M^T) H with which M holds the share `threshold` of the energy |H|^2.

Clients send H H^T, whose sum over clients has the singular vectors of all their inputs. The paper's text was to be had
in part: how clients agree on A_t, and the threshold, are our choices.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from everfed.method import BEGIN, END, Client, Cohort, Layout, Phase, Server, Sum, Tells, When, option
from everfed.methods.pretrained.lora import FFALoRA
from everfed.methods.pretrained.piecewise import task_of
from everfed.methods.pretrained.regmean import input_grams, packed, unpacked
from everfed.models import lora

_FACTOR = ".lora_A"
_ROUNDING = 1e-10  # of a Gram matrix's largest eigenvalue: less is no direction


@dataclass(frozen=True)
class DOLFIN(FFALoRA):
    """Other options as those of LoRA."""

    threshold: float = option(0.95, above=0, at_most=1, about="of the energy of a layer's inputs that M holds")

    name = "dolfin"
    merge = "sum"

    def adapt(self, module: nn.Module, server: Server) -> None:
        super().adapt(module, server)
        for layer in lora.layers(module).values():
            layer.together = True

    def phases(self):
        grams = {"grams": Sum(tells=Tells.MOMENTS)}
        phase = partial(Phase, cohort=Cohort.BOUNDARY, reduce=grams, run=self._grams)
        begin = phase("directions", rounds=BEGIN, when=When.BEFORE, update=self._choose_directions)
        return *super().phases(), begin, phase("protect", rounds=END, in_last_round=False, update=self._protect)

    def _grams(self, client: Client):
        """H H^T of every adapted layer, in float64."""
        if len(client.data) == 0:
            return {}
        found = input_grams(client, adapted(client.layout))
        return {"grams": packed([found[name] for name in adapted(client.layout)]).cpu()}

    def _summed(self, server: Server) -> dict[str, tuple[Tensor, Tensor]]:
        """{layer: (H H^T of all clients, M)}; empty where none replied."""
        if server.reduced.get("grams") is None:
            return {}
        sizes = {name: server.layout.param(name + _FACTOR).shape[-1] for name in adapted(server.layout)}
        grams = unpacked(server.reduced["grams"], [(size, size) for size in sizes.values()])
        bases, none = server.state.get("bases", {}), torch.zeros(0, dtype=torch.float64)
        return {n: (g, bases.get(n, none.reshape(s, 0))) for (n, s), g in zip(sizes.items(), grams, strict=True)}

    def _choose_directions(self, server: Server) -> None:
        """A_t; rows of zeros where earlier tasks leave fewer than r directions."""
        params = server.model["params"].clone()
        for name, (gram, basis) in self._summed(server).items():
            values, vectors = outside(gram, basis)
            rows = vectors[:, : self.rank].T * (values[: self.rank] > 0).unsqueeze(1)
            own = server.layout.param(name + _FACTOR).view(params)[task_of(server)].zero_()
            own[: len(rows)] = rows.to(own)
        server.model = {**server.model, "params": params}

    def _protect(self, server: Server) -> None:
        bases = dict(server.state.get("bases", {}))
        for name, (gram, basis) in self._summed(server).items():
            bases[name] = grown(gram, basis, self.threshold)
        server.state["bases"] = bases


def adapted(layout: Layout) -> list[str]:
    """The layers with factors, by name."""
    return [entry.name.removesuffix(_FACTOR) for entry in layout.params if entry.name.endswith(_FACTOR)]


def outside(gram: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, descending, and eigenvectors of (I - M M^T) G (I - M M^T): squared singular values and left singular
    vectors of (I - M M^T) H. What is no more than rounding is 0."""
    rest = torch.eye(len(gram)).to(gram) - basis @ basis.T
    values, vectors = torch.linalg.eigh(rest @ gram @ rest)
    values = torch.where(values > _ROUNDING * gram.diagonal().sum(), values, 0.0)
    return values.flip(0), vectors.flip(1)


def grown(gram: Tensor, basis: Tensor, threshold: float) -> Tensor:
    """M with the fewest further directions that hold the share `threshold` of the energy tr G."""
    values, vectors = outside(gram, basis)
    energy = gram.diagonal().sum()
    missing = threshold * energy - (energy - values.sum())
    count = int((values.cumsum(0) - values < missing - _ROUNDING * energy).sum())
    return torch.cat([basis, vectors[:, : min(count, int((values > 0).sum()))]], 1)
