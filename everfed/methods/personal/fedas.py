"""FedAS: federated parameter alignment and client synchronisation (Yang et al., 2024).

Every client keeps its head; the base is shared. A client that receives a base first aligns it with what it knew: one
epoch that draws the new base's features to the class means of its own previous base's,

    sum over the classes of a minibatch of MSE(f_g(x), mean feature of the class)                     (Eq. 4)

Then it trains as usual and sends how informative its data is about its model, the trace of the empirical Fisher matrix

    T_k = sum over minibatches and parameters of (gradient of the mean loss)^2                        (Eq. 6)

by which the server weighs the bases: theta = sum_k (T_k / sum T) theta_k. A client is scored with its own last model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from everfed.method import (
    CLASSES,
    AddsParameters,
    Aggregator,
    Client,
    Collect,
    CompositionError,
    Mean,
    Model,
    Optimizer,
    Part,
    Personal,
    Server,
    Step,
    Tells,
    option,
)
from everfed.methods.common.layers import class_means, features, in_precision, through_head
from everfed.methods.project.matching import combine


@dataclass(frozen=True)
class FedAS(AddsParameters, Aggregator, Personal):
    head: str = option("head", about="the layers that stay on the client, by the beginning of their parameters' names")
    align_epochs: int = option(1, at_least=0, about="epochs of the alignment")
    align_lr: float = option(0.01, at_least=0, about="learning rate of the alignment, by SGD")
    align_batch: int = option(16, at_least=1, about="minibatch of the alignment")

    name = "fedas"

    def needs(self):
        return {CLASSES}

    def is_personal(self, parameter: str) -> bool:
        return parameter.startswith(f"{self.head}.")

    def init(self, side: Client | Server) -> None:
        """Refuses a model without such a head."""
        layout = side.layout
        if not 0 < layout.shared < layout.size:
            owners = dict.fromkeys(entry.name.partition(".")[0] for entry in layout.params)
            raise CompositionError(
                f"fedas.head = {self.head!r} must name some layers of the model, not all; it has {', '.join(owners)}"
            )

    # on the client -----------------------------------------------------------------------------------------------
    def start(self, client: Client) -> None:
        own, data = client.state, client.data
        if "params" not in own or self.align_epochs == 0:
            return
        known = features(client.trainer, {k: own[k] for k in ("params", "stats", "counters")}, data.x)
        means = class_means(known, data.y.to(known.device), client.facts.classes)
        fitted = client.fit(
            (Alignment(),),
            state={Alignment.name: {"means": means}},
            rate=self.align_lr,
            epochs=self.align_epochs,
            batch_size=self.align_batch,
            optimizer=Optimizer("sgd", lr=self.align_lr),
            tag="alignment",
        )
        client.model = {**client.model, "params": fitted.model["params"]}

    def reply(self, client: Client):
        client.state = {key: value.clone() for key, value in client.model.items()}
        return {"trace": fisher_trace(client)}

    # on the server -----------------------------------------------------------------------------------------------
    def reducers(self):
        return {"params": Collect(), "trace": Collect(tells=Tells.MOMENTS), "stats": Mean(), "counters": Mean()}

    def aggregate(self, server: Server) -> Model:
        bases: dict[int, Tensor] | None = server.reduced.get("params")
        if not bases:
            return {**super().aggregate(server), "params": server.model["params"]}
        traces = torch.stack([server.reduced["trace"][client].cpu() for client in bases])
        return {**super().aggregate(server), "params": combine(list(bases.values()), shares(traces))}


def shares(traces: Tensor) -> Tensor:
    """T_k / sum T, float64; uniform where all are zero."""
    traces = traces.double()
    total = traces.sum()
    return traces / total if total > 0 else torch.full_like(traces, 1.0 / len(traces))


def fisher_trace(client: Client) -> Tensor:
    """0-d: sum over minibatches of the squared norm of the mean loss's gradient (Eq. 6), in eval mode."""
    total, data = torch.zeros((), device=client.model["params"].device), client.data
    size = client.options.batch_size
    for x, y in zip(data.x.split(size), data.y.split(size), strict=True):
        total += client.gradient(x, y, mode="eval", tag="fisher").square().sum()
    return total


@dataclass(frozen=True)
class Alignment(Part):
    """Eq. 4 as the objective of a training."""

    name = "fedas-alignment"

    def objective(self, step: Step) -> Tensor:
        with in_precision(step.trainer):
            _, found = through_head(step.module, step.inputs(step.x))
        return alignment_loss(found.float(), step.y, step.state["means"])


def alignment_loss(found: Tensor, y: Tensor, means: Tensor) -> Tensor:
    """Sum over the classes in y of the mean squared distance of their features (n, F) from the class's mean."""
    distances = (found - means.index_select(0, y)).square().mean(1)
    counts = torch.zeros_like(means[:, 0]).index_add_(0, y, torch.ones_like(distances))
    return (distances / counts.index_select(0, y)).sum()
