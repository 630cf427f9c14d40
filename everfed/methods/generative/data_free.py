"""Training a generator against a frozen classifier, without any data, in chunks of steps (ABD, MFCL).

    L_G = w_content L_content + w_div L_div + w_bn L_BN + w_prior L_prior                              (Eq. 4)

The generator is in train mode; the classifier is in eval mode and stays as it is. One chunk is one repeat of a server
phase: its inputs and outputs are vectors, so a run can be resumed between two chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from everfed.core.legacy import Model, Optimizer, Trainer
from everfed.methods.common.layers import constant, in_precision
from everfed.methods.generative.inversion import (
    batch_statistics,
    content,
    diversity,
    negative_entropy,
    only,
    roughness,
    smoothing,
)
from everfed.models.generators import GeneratorBlueprint

TERMS = ("content", "diversity", "statistics", "prior")


@dataclass(frozen=True)
class Inversion:
    """How a generator is trained. labels: the target class of an image, the "model"'s own prediction or the one encoded
    in the "noise" (the largest of its first entries). diversity: "code" or "paper", see `inversion`."""

    batch: int = 128
    lr: float = 1e-3
    labels: str = "model"
    temperature: float = 1000.0
    diversity: str = "code"
    w_content: float = 1.0
    w_div: float = 1.0
    w_bn: float = 50.0
    w_prior: float = 1e-3

    @property
    def optimizer(self) -> Optimizer:
        return Optimizer("adam", lr=self.lr)


class GeneratorTraining:
    """Generator training on one trainer: static tensors, and a loop over them that an engine may capture."""

    def __init__(self, trainer: Trainer, blueprint: GeneratorBlueprint, how: Inversion) -> None:
        self.trainer, self.blueprint, self.how = trainer, blueprint, how
        self.generator = trainer.auxiliary(blueprint)
        self.optimizer = how.optimizer
        device = trainer.device
        self.moments = self.optimizer.init(self.generator.params)
        self.rate = torch.tensor(how.lr, device=device)
        self.seen = torch.zeros(trainer.stream.classes, dtype=torch.bool, device=device)
        self.sums = torch.zeros(len(TERMS), device=device)
        self.smoother = smoothing(blueprint.shape[-1], device)
        changed = [*self.generator.vectors(), *self.moments.values(), self.sums]
        self.loop = trainer.loop(self._step, changed, self.generator.generator)

    def run(
        self, classifier: Model, model: Model, moments: dict[str, Tensor], seen: Tensor, steps: int, seed: int
    ) -> tuple[Model, dict[str, Tensor], Tensor]:
        """(generator, moments, mean of each term of TERMS) after `steps` steps; none of the inputs is changed.

        seen: (classes,) mask of the classes that images may be of.
        """
        self.trainer.replica.load(classifier)
        self.trainer.replica.module.eval()
        self.generator.load(model)
        self.generator.module.train()
        self.generator.generator.manual_seed(seed)
        for name, place in self.moments.items():
            place.copy_(moments[name])
        self.seen.copy_(seen)
        self.sums.zero_()
        self.loop(steps)
        return self.generator.model(), {k: v.clone() for k, v in self.moments.items()}, self.sums / max(steps, 1)

    def _step(self) -> None:
        terms = self.terms()
        how = self.how
        weights = (how.w_content, how.w_div, how.w_bn, how.w_prior)
        loss = sum((w * term for w, term in zip(weights, terms, strict=True) if w), terms[0].new_zeros(()))
        gradient = self.generator.gradient(loss)
        with torch.no_grad():
            self.optimizer.apply(self.generator.params, gradient, self.moments, self.rate)
            self.generator.refresh()
            self.sums.add_(torch.stack([term.detach() for term in terms]))

    def terms(self) -> tuple[Tensor, ...]:
        """The terms of Eq. 4, unweighted, on fresh noise, with gradients to the generator."""
        noise = draw(self.how.batch, self.blueprint.z_dim, self.generator.generator)
        module = self.trainer.replica.module
        with in_precision(self.trainer), batch_statistics(module) as statistics:
            images = self.generator.module(noise)
            with constant(module):
                outputs = module(images).float()
        outputs = only(outputs, self.seen)
        return (
            content(outputs, self._labels(outputs, noise), self.how.temperature),
            diversity(outputs) if self.how.diversity == "code" else negative_entropy(outputs),
            # a network without BatchNorm stores no statistics of its data
            statistics.divergence() if statistics.seen else outputs.new_zeros(()),
            roughness(images.float(), self.smoother),
        )

    def _labels(self, outputs: Tensor, noise: Tensor) -> Tensor:
        return outputs.argmax(1) if self.how.labels == "model" else labels_of(noise, self.seen)


def training_on(trainer: Trainer, blueprint: GeneratorBlueprint, how: Inversion) -> GeneratorTraining:
    """The trainer's generator training, built at first use."""
    return trainer.made("generator training", (blueprint, how), lambda: GeneratorTraining(trainer, blueprint, how))


def draw(count: int, z_dim: int, generator: torch.Generator) -> Tensor:
    """(count, z_dim) standard normal noise on the generator's device."""
    return torch.randn(count, z_dim, generator=generator, device=generator.device)


def labels_of(noise: Tensor, classes: Tensor) -> Tensor:
    """(n,) the class encoded in noise: the largest of its entries at the classes of a mask (C,)."""
    return only(noise[:, : len(classes)], classes).argmax(1)
