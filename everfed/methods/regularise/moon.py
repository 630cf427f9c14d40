"""MOON: a client's features stay near the global model's and away from those of its own last model (Li et al., 2021).

    L = CE + mu l,   l = - log(exp(s_glob) / (exp(s_glob) + exp(s_prev))),   s = sim(z, .) / tau     (Eq. 3)

with z the features of a sample under the model in training, under the model that was received and under the client's
model at the end of its last round; sim is the cosine. A client that takes part for the first time has no z_prev and no
term. Features are the inputs of the head; the paper's projection layer is part of a network that has one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from everfed.core.client import OWN
from everfed.core.legacy import (
    MODEL,
    Batch,
    Context,
    Data,
    Fitted,
    Message,
    Optimizer,
    Part,
    Slots,
    State,
    Step,
    Tree,
    refuse_personal,
)
from everfed.methods.common.checks import at_least, positive
from everfed.methods.common.features import keep_features, kept_features
from everfed.methods.common.teacher import frozen_pass, refuse_changed_forward


@dataclass(frozen=True)
class MOON(Part):
    """mu: weight of the contrastive term; the paper tunes it in {0.1, 1, 5, 10}. temperature: tau."""

    mu: float = 1.0
    temperature: float = 0.5

    name = "moon"

    def __post_init__(self) -> None:
        at_least(self, 0, "mu")
        positive(self, "temperature")

    def check(self, parts: Sequence[Part], optimizer: Optimizer) -> Iterable[str]:
        refuse_personal(self, parts)
        refuse_changed_forward(self, parts)
        return ()

    def batches(self, step: Step) -> dict[str, Batch]:
        if self._previous(step) is not None:
            keep_features(step, self.name)
        return {}

    def loss(self, step: Step) -> Tensor | None:
        previous = self._previous(step)
        if previous is None:
            return None
        inputs, own = step.inputs(step.x), step.state.get(OWN, {})
        local: Tree = {key: own[key] for key in ("stats", "counters") if key in own}  # batchnorm = "local"
        received: Tree = {**step.message[MODEL], **local}
        z_glob, z_prev = (frozen_pass(step, model, inputs)[1] for model in (received, previous))
        return self.mu * contrast(kept_features(step, self.name), z_glob, z_prev, self.temperature)

    def _previous(self, step: Step) -> Tree | None:
        previous: Tree | None = step.state.get(self.name, {}).get("previous")
        return previous

    def reply(self, client: State, message: Message, fitted: Fitted, data: Data, ctx: Context) -> tuple[Slots, Tree]:
        return ({"previous": dict(fitted.model)} if self.mu else None), {}


def contrast(z: Tensor, z_glob: Tensor, z_prev: Tensor, temperature: float) -> Tensor:
    """Mean over samples of Eq. 3; features are (n, F)."""
    near, far = (functional.cosine_similarity(z, other, dim=1) / temperature for other in (z_glob, z_prev))
    return functional.softplus(far - near).mean()
