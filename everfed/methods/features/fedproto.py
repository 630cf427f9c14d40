"""FedProto: clients share class means of features, and pull their own features towards them (Tan et al., 2022).

    L = CE + weight mean((f(x) - P_y)^2)            over a minibatch and the coordinates of features

After training a client passes once over its samples and sends, for the task's classes, how many it has and the sum of
their features. The server's prototype P_c is their mean; a class that no client sent keeps its own. In a first round
there are none, and no term. Models are averaged, too; `fedproto-personal` shares prototypes alone, as published.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from everfed.method import (
    CLASSES,
    SHARED,
    WHOLE,
    AddsParameters,
    Batch,
    Client,
    Mean,
    Part,
    Server,
    Step,
    Sum,
    Tells,
    option,
)
from everfed.methods.common.layers import keep_features, kept_features
from everfed.methods.features.statistics import class_moments, class_numbers, of_all_classes, task_classes


@dataclass(frozen=True)
class FedProto(Part):
    weight: float = option(1.0, at_least=0, about="of the pull; the authors use 1 for MNIST and 0.1 for CIFAR-10")
    weighting: str = option(
        "count",
        one_of=("count", "client"),
        about="a prototype is the mean over samples, or over clients of their means (the authors' code)",
    )

    name = "fedproto"

    def needs(self):
        return {CLASSES, SHARED}

    # on the client ---------------------------------------------------------------------------------------------------
    def broadcast(self, server: Server):
        return server.state

    def batches(self, step: Step) -> dict[str, Batch]:
        if self._pulls(step):
            keep_features(step)
        return {}

    def loss(self, step: Step) -> Tensor | None:
        if not self._pulls(step):
            return None
        sent = step.message
        distances = (kept_features(step) - sent["prototypes"][step.y]).square().mean(1)
        return self.weight * (distances * sent["known"][step.y]).mean()

    def _pulls(self, step: Step) -> bool:
        return bool(self.weight and step.message)

    def reply(self, client: Client):
        """Of the task's classes, in float64, which secure aggregation does not clip."""
        if not self.weight or not client.synchronises:
            return {}
        classes = task_classes(client)
        counts, sums, _ = (value[classes] for value in class_moments(client))
        if self.weighting == "client":
            sums, counts = sums / counts.clamp(min=1).unsqueeze(1), counts.clamp(max=1)
        return {"sums": sums, "counts": counts, "classes": classes}

    # on the server ---------------------------------------------------------------------------------------------------
    def reducers(self):
        return {"sums": Sum(tells=Tells.SUMS), "counts": Sum(tells=Tells.COUNTS), "classes": Mean(tells=Tells.CLASSES)}

    def update(self, server: Server) -> None:
        own, reduced, count = server.state, server.reduced, server.facts.classes
        classes = None if reduced.get("sums") is None else class_numbers(reduced["classes"], count)
        if classes is None:
            return
        sums, counts = (of_all_classes(reduced[key], classes, count) for key in ("sums", "counts"))
        means, there = (sums / counts.clamp(min=1).unsqueeze(1)).float(), counts > 0
        if own:
            means, there = torch.where(there.unsqueeze(1), means, own["prototypes"]), there | own["known"]
        server.state = {"prototypes": means, "known": there}


@dataclass(frozen=True)
class PersonalFedProto(AddsParameters, FedProto):
    """FedProto as published: every client keeps its own network, and only prototypes are shared."""

    name = "fedproto-personal"

    def needs(self):
        return {CLASSES, WHOLE}

    def is_personal(self, parameter: str) -> bool:
        return True
