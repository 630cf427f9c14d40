"""LANDER's synthesis: images from anchors, through layers that are redrawn in every round (NAYER, Tran et al., 2024).

The channel means and deviations that normalise the images are trained too, so that the server need not know those of
the data; clients normalise the images as their own data, so it can be better to do the same here. The teacher's
projected features are bound to the anchors as the clients' are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from everfed.core.legacy import Context, Model, Trainer, Tree
from everfed.methods.generative.adversary import bound
from everfed.methods.generative.image_pool import LEVELS
from everfed.methods.generative.synthesis import Synthesis, Synthesizer
from everfed.models.pixel_generators import NoisyBlueprint

FIRST_MEAN, FIRST_DEVIATION = 0.5, 0.2
STATISTICS = ("learned", "stream")


@dataclass(frozen=True)
class Anchored:
    """weight, radius, hinge: of the bound. statistics: images are normalised with "learned" channel means and
    deviations (lr_stats: their rate), or as the "stream" does. matrix, bias: names of the projection in the model."""

    weight: float
    radius: float
    hinge: str
    statistics: str
    lr_stats: float
    matrix: str
    bias: str


class NoisySynthesizer(Synthesizer):
    """The generator itself is trained in every round, by a fresh Adam."""

    def __init__(self, trainer: Trainer, blueprint: NoisyBlueprint, how: Synthesis, terms: Anchored) -> None:
        super().__init__(trainer, blueprint, how, blueprint.shape)
        self.terms = terms
        self.anchors = self.zeros(trainer.stream.classes, blueprint.anchors)
        self.sources = self.zeros(how.batch, blueprint.anchors)  # the anchors of the targets
        channels = blueprint.shape[0]
        self.channel_stats = self.zeros(2, channels, 1, 1).requires_grad_()
        self.stats_rate = torch.tensor(terms.lr_stats, device=self.device)
        self.moments = self.optimizer.init(self.generator.params)
        self.stats_moments = self.optimizer.init(self.channel_stats.detach())

    def use(self, anchors: Tensor) -> None:
        """Set the anchors (C, d) of all classes."""
        self.anchors.copy_(anchors)

    def first(self, generator: Model, ctx: Context) -> Tree:
        stats = torch.empty(tuple(self.channel_stats.shape))
        stats[0], stats[1] = FIRST_MEAN, FIRST_DEVIATION
        return {**generator, "channels": stats}

    def choose(self, classes: np.ndarray, ctx: Context) -> np.ndarray:
        return balanced(classes, self.how.batch, ctx.rng("targets"))

    def load(self, own: Tree, ctx: Context) -> None:
        self.generator.load({**own, "params": self._redrawn(own["params"], ctx.rng("noisy layers"))})
        self.generator.module.train()
        self.channel_stats.data.copy_(own["channels"])
        self.sources.copy_(self.anchors.index_select(0, self.targets))
        for place in (*self.moments.values(), *self.stats_moments.values()):
            place.zero_()

    def _redrawn(self, params: Tensor, rng: np.random.Generator) -> Tensor:
        """The parameters with new noisy layers: weights N(0, 1), biases 0."""
        params, layout = params.to(self.device, copy=True), self.generator.layout
        weight = layout.param("weight")
        draws = rng.standard_normal(weight.shape, dtype=np.float32)
        weight.view(params).copy_(torch.from_numpy(draws))
        layout.param("bias").view(params).zero_()
        return params

    def places(self) -> list[Tensor]:
        moments = [*self.moments.values(), *self.stats_moments.values()]
        return [*self.generator.vectors(), self.channel_stats.data, *moments]

    def source(self) -> Tensor:
        return self.sources

    def normalise(self, pixels: Tensor) -> Tensor:
        if self.terms.statistics == "stream":
            return super().normalise(pixels)
        mean, deviation = self.channel_stats
        return (pixels / LEVELS - mean) / deviation

    def further(self, features: Tensor) -> Tensor | None:
        """ltc Bound of the teacher's projected features."""
        terms, named = self.terms, self.trainer.replica.layout.named(self.trainer.replica.params)
        projected = functional.linear(features, named[terms.matrix], named[terms.bias])
        return terms.weight * bound(projected, self.sources, terms.radius, terms.hinge)

    def improve(self, loss: Tensor) -> None:
        *gradients, of_stats = torch.autograd.grad(
            loss, [*self.generator.trainable, self.channel_stats], materialize_grads=True
        )
        with torch.no_grad():
            gradient = self.generator.layout.flatten_gradient(tuple(gradients))
            self.optimizer.apply(self.generator.params, gradient, self.moments, self.rate)
            self.optimizer.apply(self.channel_stats.data, of_stats, self.stats_moments, self.stats_rate)
            self.generator.refresh()

    def read(self) -> Tree:
        return {**self.generator.model(), "channels": self.channel_stats.detach().clone()}


def balanced(classes: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """(count,) labels: every class equally often, and the remainder at random."""
    repeated = np.tile(classes, count // len(classes))
    return np.concatenate([repeated, rng.choice(classes, count % len(classes))])
