"""FOT: federated orthogonal training (Bakman et al., 2024), with one head and no task id.

For every convolution and hidden linear layer the server keeps an orthonormal basis U (m, r) of the inputs that earlier
tasks gave to that layer. A round's global update G (rows: outputs) then leaves what they produce untouched:

    G <- G - (G U) U^T,    w <- w_old - G

At a task's end each client sends, per layer, a random sketch of what its inputs X (m, N) have outside U and how much
that is; the server adds them up (so no single client need be seen) and extends U:

    R = X - U U^T X,  A_k = R Z,  rho_k = |R| / |X|        e' = (rho - (1 - e)) / rho,
    smallest r with  sum_{j <= r} sigma_j(A)^2 > e' |A|^2,  U <- qr([U, first r left singular vectors of A])

Biases, BatchNorm and the head are never projected.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from everfed.core.trainer import Trainer
from everfed.core.tree import on_device
from everfed.method import (
    END,
    TOGETHER,
    AddsParameters,
    Aggregator,
    Client,
    Cohort,
    CompositionError,
    Data,
    Entry,
    Layout,
    Mean,
    Model,
    Part,
    Phase,
    Server,
    Sum,
    Tells,
    option,
)
from everfed.methods.common.layers import fan_in, hidden_weights, in_precision

_AT_ONCE = 16  # samples whose layer inputs are held at a time


@dataclass(frozen=True)
class FOT(AddsParameters, Part):
    """A basis has at most as many directions as the sketch has columns, and a sketch with few columns makes the inputs
    look concentrated: then it holds less energy than `threshold`."""

    threshold: float = option(
        0.87, above=0, at_most=1, about="e, the share of a layer's input energy that the basis must hold"
    )
    threshold_step: float = option(0.001, at_least=0, about="added to the threshold after every task")
    sketch_cols: int = option(
        0, at_least=0, about="columns of a sketch; 0: sketch_factor times the layer's fan-in m, 5 m for linear layers"
    )
    sketch_factor: int = option(
        5, at_least=1, about="columns per input of a convolution: 5 in the authors' ResNets, 1 in their AlexNet"
    )
    samples: int = option(0, at_least=0, about="task samples that a client sketches; 0: all")
    max_rank: int = option(0, at_least=0, about="directions per layer, at most; 0: no limit, that is m")

    name = "fot"

    def needs(self):
        # what is protected once one client has finished a task is what the others would still have to learn
        return {TOGETHER}

    def check(self, parts, optimizer):
        if any(isinstance(part, Aggregator) and getattr(part, "weighting", "") == "samples" for part in parts):
            return ("fot: its authors average clients uniformly; method.weighting is 'samples'",)
        return ()

    def init(self, side: Client | Server) -> None:
        """Refuses a network in which no hidden layer is trained."""
        if not hidden_weights(side.layout):
            raise CompositionError(
                f"part {self.name!r} projects updates of hidden layers, but none is trained: low-rank adapters and "
                "frozen networks have none"
            )

    def adapt(self, module: nn.Module, server: Server) -> None:
        """Refuses a network with a trained layer whose inputs it cannot sketch."""
        for entry in hidden_weights(Layout.of(module)):  # what parts before this one have frozen is not trained
            owner, _, leaf = entry.name.rpartition(".")
            layer = module.get_submodule(owner)
            if leaf != "weight" or not _has_columns(layer):
                raise CompositionError(
                    f"part {self.name!r} cannot project {entry.name}: it needs linear layers, or 2-D convolutions "
                    f"without groups and with numbers for their padding; this is of a {type(layer).__name__}. "
                    "Freeze it (model.trainable), or use another method"
                )

    def phases(self):
        reduce = {"sketch": Sum(tells=Tells.MOMENTS), "outside": Mean(weighted=True, tells=Tells.MOMENTS)}
        return [
            Phase(
                "subspace",
                Cohort.BOUNDARY,
                END,
                reduce=reduce,
                in_last_round=False,
                broadcast=self.send_bases,
                run=self.sketch,
                update=self.extend,
            )
        ]

    # every round, on the server ----------------------------------------------------------------------------------
    def update(self, server: Server) -> None:
        """The round's update, projected layer by layer."""
        bases: dict[str, Tensor] = server.state.get("bases", {})
        if not bases:
            return
        new = server.model["params"]
        old = server.before["params"].to(new.device)
        update = old - new
        for entry in hidden_weights(server.layout):
            if entry.name in bases:
                part = entry.view(update)
                part.copy_(outside(part.reshape(len(part), -1), bases[entry.name]).reshape(part.shape))
        server.model = {**server.model, "params": old - update}

    # at a task's end, on clients ---------------------------------------------------------------------------------
    def send_bases(self, server: Server):
        bases = server.state.get("bases")
        return {"bases": bases} if bases else {}

    def sketch(self, client: Client):
        """{sketch: all layers' A one after the other, outside: (layers,) rho}."""
        data = client.data
        if len(data) == 0:
            return {}
        if self.samples:
            data = data.take(client.rng("sketch").permutation(len(data))[: self.samples])
        bases = on_device(dict(client.message), client.device).get("bases", {})
        sketches = [Sketch(e, self.columns(e), bases.get(e.name), client) for e in hidden_weights(client.layout)]
        for inputs in layer_inputs(client.trainer, client.model, data, [s.entry for s in sketches]):
            for sketch in sketches:
                sketch.add(inputs[sketch.entry.name])
        return {
            "sketch": torch.cat([sketch.total.reshape(-1) for sketch in sketches]),
            "outside": torch.stack([sketch.share() for sketch in sketches]),
        }

    def columns(self, entry: Entry) -> int:
        """How many columns the sketch of a layer has."""
        return self.sketch_cols or fan_in(entry) * (self.sketch_factor if len(entry.shape) == 4 else 5)

    # at a task's end, on the server ------------------------------------------------------------------------------
    def extend(self, server: Server) -> None:
        own, reduced = server.state, server.reduced
        if reduced.get("sketch") is None:
            return
        finished = int(own.get("finished", 0))
        threshold = min(1.0, self.threshold + finished * self.threshold_step)
        bases = dict(own.get("bases", {}))
        layers = hidden_weights(server.layout)
        sketches = reduced["sketch"].split([fan_in(e) * self.columns(e) for e in layers])
        for entry, flat, rho in zip(layers, sketches, reduced["outside"].tolist(), strict=True):
            new = directions(flat.reshape(fan_in(entry), -1), wanted_share(rho, threshold))
            basis = extended(bases.get(entry.name), new, min(self.max_rank or fan_in(entry), fan_in(entry)))
            if basis.shape[1]:
                bases[entry.name] = basis
        server.state = {"bases": bases, "finished": finished + 1}


class Sketch:
    """The sketch of one layer on one client, built from pieces of its inputs."""

    def __init__(self, entry: Entry, columns: int, basis: Tensor | None, client: Client) -> None:
        device = client.device
        self.entry, self.basis, self.columns = entry, basis, columns
        self.generator = torch.Generator(device).manual_seed(client.key(f"sketch/{entry.name}"))
        self.total = torch.zeros((fan_in(entry), columns), device=device)
        self.energy = torch.zeros((), dtype=torch.float64, device=device)
        self.energy_outside = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, inputs: Tensor) -> None:
        """inputs: (m, N) more columns of X."""
        rest = inputs if self.basis is None else outside(inputs.T, self.basis).T
        z = torch.randn((inputs.shape[1], self.columns), generator=self.generator, device=inputs.device)
        self.total.addmm_(rest, z)
        self.energy += inputs.double().square().sum()
        self.energy_outside += rest.double().square().sum()

    def share(self) -> Tensor:
        """rho: 1 when there is no basis yet, 0 for a layer that only ever saw zeros."""
        return torch.where(self.energy > 0, (self.energy_outside / self.energy).sqrt(), self.energy).float()


def outside(rows: Tensor, basis: Tensor) -> Tensor:
    """rows (n, m) without their part in the span of basis (m, r)."""
    basis = basis.to(rows.device)
    return rows - (rows @ basis) @ basis.T


def wanted_share(rho: float, threshold: float) -> float:
    """e': the share of the new energy to hold, so that `threshold` of all energy is held; 0 when it is already."""
    return max(0.0, (rho - (1.0 - threshold)) / rho) if rho > 0 else 0.0


def directions(sketch: Tensor, share: float) -> Tensor:
    """(m, r) the first left singular vectors, holding more than `share` of the sketch's energy; none for share 0."""
    if share <= 0:
        return sketch[:, :0]
    vectors, values, _ = torch.linalg.svd(sketch, full_matrices=False)
    held = values.double().square().cumsum(0)
    enough = int((held <= share * held[-1]).sum()) + 1
    return vectors[:, :enough]


def extended(basis: Tensor | None, new: Tensor, limit: int) -> Tensor:
    """An orthonormal basis of the span of both, of at most `limit` directions (the old ones first)."""
    joined = new if basis is None else torch.cat([basis.to(new.device), new], dim=1)
    vectors, _ = torch.linalg.qr(joined[:, :limit])
    return vectors.contiguous()  # the memory order after sending or loading, so that products agree to the bit


def layer_inputs(trainer: Trainer, model: Model, data: Data, entries: list[Entry]) -> Iterator[dict[str, Tensor]]:
    """{layer's weight: (m, N) its inputs, one column per output position}, for a few samples at a time; eval mode."""
    module = trainer.replica.module
    trainer.replica.load(model)
    module.eval()
    seen: dict[str, Tensor] = {}
    handles = [_record(module, entry, seen) for entry in entries]
    try:
        for x in data.x.split(_AT_ONCE):
            with torch.no_grad(), in_precision(trainer):
                module(trainer.stream.inputs(x.to(trainer.device)))
            yield seen
    finally:
        for handle in handles:
            handle.remove()


def _record(module: nn.Module, entry: Entry, seen: dict[str, Tensor]) -> Any:
    layer: Any = module.get_submodule(entry.name.rpartition(".")[0])

    def record(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        seen[entry.name] = input_columns(layer, arguments[0].float())

    return layer.register_forward_pre_hook(record)


def input_columns(layer: Any, x: Tensor) -> Tensor:
    """(m, N) im2col of a layer's input."""
    if isinstance(layer, nn.Linear):
        return x.reshape(-1, x.shape[-1]).T
    columns = functional.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    return columns.transpose(0, 1).reshape(columns.shape[1], -1)


def _has_columns(layer: nn.Module) -> bool:
    convolution = isinstance(layer, nn.Conv2d) and layer.groups == 1 and not isinstance(layer.padding, str)
    return convolution or isinstance(layer, nn.Linear)
