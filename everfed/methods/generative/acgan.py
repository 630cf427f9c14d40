"""An auxiliary-classifier GAN on top of a classifier: its network, with a second head, is the discriminator.

Outputs of the discriminator are rows (n, C + 1): the class logits, then the logit of "real".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from everfed.core.layout import Extras
from everfed.core.legacy import Trainer
from everfed.methods.common.layers import in_precision
from everfed.methods.common.teacher import among, divergence
from everfed.models.acgan import ACGANBlueprint

GENERATOR = "generator"  # prefix of the names of its parameters


@dataclass(frozen=True)
class ACGAN:
    """The losses of both networks. classes: (C,) mask of the class logits that compete."""

    trainer: Trainer
    blueprint: ACGANBlueprint
    classes: Tensor

    def images(self, generator: Mapping[str, Tensor] | Tensor, labels: Tensor) -> Tensor:
        """(n, ...) network inputs that a generator makes from labels (n,) and fresh noise. generator: its tensors by
        name, or its parameters as one vector."""
        replica = self.trainer.auxiliary(self.blueprint)
        tensors = replica.layout.named(generator) if isinstance(generator, Tensor) else dict(generator)
        z = noise(labels, self.classes.numel(), self.blueprint.z_dim, self.trainer.replica.generator)
        with in_precision(self.trainer):
            images: Tensor = functional_call(replica.module, tensors, (z,))
        return images.float()

    @torch.no_grad()
    def fixed_images(self, generator: Mapping[str, Tensor] | Tensor, labels: Tensor) -> Tensor:
        """The same without gradients: for steps in which the generator does not move."""
        return self.images(generator, labels)

    def outputs(self, images: Tensor) -> Tensor:
        """(n, C + 1) rows of generated images. BatchNorm's running statistics stay those of real ones, on which the
        classifier is scored: early in training generated ones look like none of them."""
        replica = self.trainer.replica
        statistics, counters = replica.stats.clone(), replica.counters.clone()
        rows = self.trainer.forward_inputs(images)
        # `data`: autograd would refuse a backward pass after a change, though in training it does not use them
        replica.stats.data.copy_(statistics)
        replica.counters.data.copy_(counters)
        return rows

    def logits(self, rows: Tensor) -> Tensor:
        """(n, C) class logits; those of classes that do not compete are masked."""
        return among(rows[:, :-1], self.classes)

    def label_loss(self, rows: Tensor, y: Tensor) -> Tensor:
        """NLL(p(.|x), y)."""
        return functional.cross_entropy(self.logits(rows), y)

    def judged(self, rows: Tensor, y: Tensor, real: bool) -> Tensor:
        """BCE(d(x), real) + NLL(p(.|x), y)."""
        truth = torch.full_like(rows[:, -1], float(real))
        return functional.binary_cross_entropy_with_logits(rows[:, -1], truth) + self.label_loss(rows, y)

    def discriminated(self, real: Tensor, y: Tensor, generator: Mapping[str, Tensor] | Tensor, c: Tensor) -> Tensor:
        """A(x, y): real rows and labels against a fresh fake batch of labels c."""
        fake = self.outputs(self.fixed_images(generator, c))
        return self.judged(real, y, True) + self.judged(fake, c, False)

    def generated(self, generator: Mapping[str, Tensor], c: Tensor) -> Tensor:
        """L_G: the loss of the generator's images when judged as real ones of their labels."""
        return self.judged(self.outputs(self.images(generator, c)), c, True)

    def apart(self, rows: Tensor, target: Tensor) -> Tensor:
        """KL(p(.|target) || p(.|rows)), without a gradient to the target."""
        return divergence(self.logits(rows), self.logits(target).detach(), 1.0)


def noise(labels: Tensor, classes: int, z_dim: int, generator: torch.Generator | None = None) -> Tensor:
    """(n, z_dim) standard normal, the first `classes` entries overwritten by the one-hot label."""
    z = torch.randn((len(labels), z_dim), generator=generator, device=labels.device)
    z[:, :classes] = functional.one_hot(labels, classes).to(z.dtype)
    return z


def balanced(labels: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Positions of `count` samples of a pool: labels uniformly among those present, then one sample of each."""
    drawn = rng.choice(np.unique(labels), count)
    return np.array([rng.choice(np.flatnonzero(labels == label)) for label in drawn], dtype=np.int64)


def live_generator(module: nn.Module, part: str) -> dict[str, Tensor]:
    """The generator's current tensors, which are extra parameters of a part, by their own names."""
    extras, prefix = cast(Extras, module.extras)[part], f"{GENERATOR}."
    return {name.removeprefix(prefix): value for name, value in extras.items() if name.startswith(prefix)}
