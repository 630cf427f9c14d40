"""MOON: a client's features stay near the global model's and away from those of its own last model (Li et al., 2021).

    L = CE + mu l,   l = - log(exp(s_glob) / (exp(s_glob) + exp(s_prev))),   s = sim(z, .) / tau     (Eq. 3)

with z the features of a sample under the model in training, under the model that was received and under the client's
model at the end of its last round; sim is the cosine. A client that takes part for the first time has no z_prev and no
term. Features are the inputs of the head; the paper's projection layer is part of a network that has one.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from everfed.method import PLAIN, SHARED, Batch, Client, Part, Step, option
from everfed.methods.common.layers import keep_features, kept_features
from everfed.methods.common.teacher import frozen_pass


@dataclass(frozen=True)
class MOON(Part):
    mu: float = option(1.0, at_least=0, about="weight of the contrastive term; the paper tunes it in {0.1, 1, 5, 10}")
    temperature: float = option(0.5, above=0, about="tau")

    name = "moon"

    def needs(self):
        return {SHARED, PLAIN}

    def batches(self, step: Step) -> dict[str, Batch]:
        if "previous" in step.state:
            keep_features(step)
        return {}

    def loss(self, step: Step) -> Tensor | None:
        if "previous" not in step.state:
            return None
        models, inputs = (step.received_model, step.state["previous"]), step.inputs(step.x)
        z_glob, z_prev = (frozen_pass(step, model, inputs)[1] for model in models)
        return self.mu * contrast(kept_features(step), z_glob, z_prev, self.temperature)

    def reply(self, client: Client) -> None:
        if self.mu:
            client.state["previous"] = dict(client.model)


def contrast(z: Tensor, z_glob: Tensor, z_prev: Tensor, temperature: float) -> Tensor:
    """Mean over samples of Eq. 3; features are (n, F)."""
    near, far = (functional.cosine_similarity(z, other, dim=1) / temperature for other in (z_glob, z_prev))
    return functional.softplus(far - near).mean()
