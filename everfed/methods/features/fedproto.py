"""FedProto: clients share class means of features, and pull their own features towards them (Tan et al., 2022).

    L = CE + weight mean((f(x) - P_y)^2)            over a minibatch and the coordinates of features

After training a client passes once over its samples and sends, for the task's classes, how many it has and the sum of
their features. The server's prototype P_c is their mean; a class that no client sent keeps its own. In a first round
there are none, and no term. Models are averaged, too; `fedproto-personal` shares prototypes alone, as published.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from everfed.core.client import synchronises
from everfed.core.legacy import (
    CLASSES,
    MODEL,
    AddsParameters,
    Batch,
    CompositionError,
    Context,
    Data,
    Fitted,
    Mean,
    Message,
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
from everfed.core.pieces import TrainsPieces
from everfed.methods.common.checks import at_least, one_of
from everfed.methods.common.features import keep_features, kept_features
from everfed.methods.features.statistics import class_moments, class_numbers, of_all_classes, task_classes


@dataclass(frozen=True)
class FedProto(Part):
    """weight: of the pull; the authors use 1 for MNIST and 0.1 for CIFAR-10. weighting: a prototype is the mean over
    samples ("count"), or over clients of their means ("client", the authors' code)."""

    weight: float = 1.0
    weighting: str = "count"

    name = "fedproto"
    needs = frozenset({CLASSES})

    def __post_init__(self) -> None:
        at_least(self, 0, "weight")
        one_of(self, weighting=("count", "client"))

    def check(self, parts: Sequence[Part], optimizer: Optimizer) -> Iterable[str]:
        refuse_personal(self, parts)
        return ()

    # on the client ---------------------------------------------------------------------------------------------------
    def broadcast(self, server: State, ctx: Context) -> dict[str, Any]:
        return dict(server.get(self.name, {}))

    def batches(self, step: Step) -> dict[str, Batch]:
        if self._pulls(step):
            keep_features(step, self.name)
        return {}

    def loss(self, step: Step) -> Tensor | None:
        if not self._pulls(step):
            return None
        sent = step.message[self.name]
        distances = (kept_features(step, self.name) - sent["prototypes"][step.y]).square().mean(1)
        return self.weight * (distances * sent["known"][step.y]).mean()

    def _pulls(self, step: Step) -> bool:
        return bool(self.weight) and self.name in step.message

    def reply(self, client: State, message: Message, fitted: Fitted, data: Data, ctx: Context) -> tuple[Slots, Tree]:
        """Of the task's classes, in float64, which secure aggregation does not clip."""
        if not self.weight or not synchronises(ctx):
            return None, {}
        classes = task_classes(ctx)
        counts, sums, _ = (v[classes] for v in class_moments(client, {**message, MODEL: fitted.model}, data, ctx))
        if self.weighting == "client":
            sums, counts = sums / counts.clamp(min=1).unsqueeze(1), counts.clamp(max=1)
        return None, {"sums": sums, "counts": counts, "classes": classes}

    # on the server ---------------------------------------------------------------------------------------------------
    def reducers(self) -> Mapping[str, Reducer]:
        return {"sums": Sum(), "counts": Sum(), "classes": Mean()}

    def update(self, server: State, reduced: Tree, ctx: Context) -> Slots:
        classes = None if reduced.get("sums") is None else class_numbers(reduced["classes"], ctx.facts.classes)
        if classes is None:
            return None
        own = server.get(self.name)
        sums, counts = (of_all_classes(reduced[key], classes, ctx.facts.classes) for key in ("sums", "counts"))
        means, there = (sums / counts.clamp(min=1).unsqueeze(1)).float(), counts > 0
        if own:
            means, there = torch.where(there.unsqueeze(1), means, own["prototypes"]), there | own["known"]
        return {"prototypes": means, "known": there}


@dataclass(frozen=True)
class PersonalFedProto(AddsParameters, FedProto):
    """FedProto as published: every client keeps its own network, and only prototypes are shared."""

    name = "fedproto-personal"

    def check(self, parts: Sequence[Part], optimizer: Optimizer) -> Iterable[str]:
        for part in parts:
            if isinstance(part, TrainsPieces):
                raise CompositionError(f"part {self.name!r} shares no parameters, but {part.name!r} averages some")
        return ()

    def is_personal(self, parameter: str) -> bool:
        return True
