"""FedAS: federated parameter alignment and client synchronisation (Yang et al., 2024).

Every client keeps its head; the base is shared. A client that receives a base first aligns it with what it knew: one
epoch that draws the new base's features to the class means of its own previous base's,

    sum over the classes of a minibatch of MSE(f_g(x), mean feature of the class)                     (Eq. 4)

Then it trains as usual and sends how informative its data is about its model, the trace of the empirical Fisher matrix

    T_k = sum over minibatches and parameters of (gradient of the mean loss)^2                        (Eq. 6)

by which the server weighs the bases: theta = sum_k (T_k / sum T) theta_k. A client is scored with its own last model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from everfed.core.legacy import (
    CLASSES,
    MODEL,
    AddsParameters,
    Aggregator,
    Collect,
    CompositionError,
    Context,
    Data,
    Fitted,
    Mean,
    Message,
    Model,
    Optimizer,
    Part,
    Personal,
    Reducer,
    State,
    Step,
    Tree,
)
from everfed.methods.common.checks import at_least
from everfed.methods.common.features import class_means, features, through_head
from everfed.methods.common.layers import in_precision
from everfed.methods.project.matching import combine


@dataclass(frozen=True)
class FedAS(AddsParameters, Aggregator, Personal):
    """head: the layers that stay on the client, by the beginning of their parameters' names. align_epochs, align_lr,
    align_batch: of the alignment, by SGD."""

    head: str = "head"
    align_epochs: int = 1
    align_lr: float = 0.01
    align_batch: int = 16

    name = "fedas"
    needs = frozenset({CLASSES})

    def __post_init__(self) -> None:
        at_least(self, 0, "align_epochs", "align_lr")
        at_least(self, 1, "align_batch")

    def is_personal(self, parameter: str) -> bool:
        return parameter.startswith(f"{self.head}.")

    def server_slots(self, ctx: Context) -> Tree:
        """No slots; refuses a model without such a head."""
        layout = ctx.facts.layout
        if not 0 < layout.shared < layout.size:
            owners = dict.fromkeys(entry.name.partition(".")[0] for entry in layout.params)
            raise CompositionError(
                f"fedas.head = {self.head!r} must name some layers of the model, not all; it has {', '.join(owners)}"
            )
        return {}

    # on the client -----------------------------------------------------------------------------------------------
    def start(self, client: State, message: Message, model: Model, data: Data, ctx: Context) -> tuple[None, Model]:
        own = client.get(self.name, {})
        if "params" not in own or self.align_epochs == 0:
            return None, model
        trainer = ctx.train
        known = features(trainer, {k: own[k] for k in ("params", "stats", "counters")}, data.x)
        means = class_means(known, data.y.to(known.device), ctx.facts.classes)
        fitted = trainer.fit(
            ctx.at(rate=self.align_lr),
            (_alignment(),),
            model,
            model["params"],
            {Alignment.name: {"means": means}},
            {},
            data,
            epochs=self.align_epochs,
            batch_size=self.align_batch,
            optimizer=Optimizer("sgd", lr=self.align_lr),
            tag="alignment",
        )
        return None, {**model, "params": fitted.model["params"]}

    def reply(self, client: State, message: Message, fitted: Fitted, data: Data, ctx: Context) -> tuple[Tree, Tree]:
        model = {k: v.clone() for k, v in fitted.model.items()}
        return model, {"trace": fisher_trace(model, data, ctx)}

    def upload(self, model: Model, message: Message, ctx: Context) -> Tree:
        return {"params": model["params"]} if ctx.options.batchnorm == "local" else dict(model)

    def personalise(self, client: State, message: Message, model: Model, ctx: Context) -> Model:
        own = client.get(self.name, {})
        return {k: own[k].to(v.device) for k, v in model.items()} if "params" in own else model

    # on the server -----------------------------------------------------------------------------------------------
    def reducers(self) -> Mapping[str, Reducer]:
        return {"params": Collect(), "trace": Collect(), "stats": Mean(), "counters": Mean()}

    def aggregate(self, server: State, reduced: Tree, ctx: Context) -> Model:
        model = {k: v if reduced.get(k) is None else reduced[k] for k, v in server[MODEL].items()}
        bases: dict[int, Tensor] | None = reduced.get("params")
        if not bases:
            return {**model, "params": server[MODEL]["params"]}
        traces = torch.stack([reduced["trace"][client].cpu() for client in bases])
        return {**model, "params": combine(list(bases.values()), shares(traces))}


def shares(traces: Tensor) -> Tensor:
    """T_k / sum T, float64; uniform where all are zero."""
    traces = traces.double()
    total = traces.sum()
    return traces / total if total > 0 else torch.full_like(traces, 1.0 / len(traces))


def fisher_trace(model: Model, data: Data, ctx: Context) -> Tensor:
    """0-d: sum over minibatches of the squared norm of the mean loss's gradient (Eq. 6), in eval mode."""
    total = torch.zeros((), device=model["params"].device)
    size = ctx.options.batch_size
    for x, y in zip(data.x.split(size), data.y.split(size), strict=True):
        total += ctx.train.gradient(ctx, model, x, y, mode="eval", tag="fisher").square().sum()
    return total


@dataclass(frozen=True)
class Alignment(Part):
    """Eq. 4 as the objective of a training."""

    name = "fedas-alignment"

    def objective(self, step: Step) -> Tensor:
        trainer = step.ctx.train
        with in_precision(trainer):
            _, found = through_head(step.replica.module, trainer.stream.inputs(step.x))
        return alignment_loss(found.float(), step.y, step.state[self.name]["means"])


def alignment_loss(found: Tensor, y: Tensor, means: Tensor) -> Tensor:
    """Sum over the classes in y of the mean squared distance of their features (n, F) from the class's mean."""
    distances = (found - means.index_select(0, y)).square().mean(1)
    counts = torch.zeros_like(means[:, 0]).index_add_(0, y, torch.ones_like(distances))
    return (distances / counts.index_select(0, y)).sum()


@cache
def _alignment() -> Alignment:
    """One object, so that an engine that keeps captured steps per part finds them again."""
    return Alignment()
