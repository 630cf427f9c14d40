"""FedCIL's server: the averaged GAN is trained for a moment on images of all the clients' generators.

In every step each client's generator makes images of that client's current labels. A class-balanced batch of them
stands in for real ones; from the second task on, a second batch comes from the generators and labels of earlier tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from everfed.core.context import Context
from everfed.core.optimizer import Optimizer
from everfed.core.part import Model, Part
from everfed.core.substep import Course, Moments
from everfed.core.tree import Tree, clone, map_tensors
from everfed.parts.acgan import ACGAN, GENERATOR, balanced, live_generator


@dataclass(frozen=True)
class Consolidation:
    """part: whose GAN it is. batch: images of every client, and of a mix. now, old: {client: {generator (G,), labels
    (C,) bool}} of this task and of earlier ones."""

    part: Part
    gan: ACGAN
    batch: int
    optimizer: Optimizer
    rate: float
    now: Mapping[str, Tree]
    old: Mapping[str, Tree]

    def run(self, model: Model, moments: Moments, steps: int, ctx: Context) -> tuple[Model, Moments]:
        """(model, moments) after some steps; nothing that is given changes."""
        replica = self.gan.trainer.replica
        replica.load(model)
        replica.generator.manual_seed(ctx.key("consolidate"))
        replica.module.train()
        course = Course.of((self.part,), replica.layout)
        moved = clone(map_tensors(lambda t: t.to(replica.device), moments))
        moments = moved or course.first_moments(self.optimizer, replica.params)
        pace, rng = torch.tensor(self.rate, device=replica.device), ctx.rng("consolidate")
        for _ in range(steps):
            self._step(course, moments, pace, rng)
        return replica.model(), moments

    def _step(self, course: Course, moments: Moments, pace: Tensor, rng: np.random.Generator) -> None:
        """One of the discriminator, one of the generator."""
        replica = self.gan.trainer.replica
        gradient = replica.gradient(self.discriminator_loss(rng), course.main)
        with torch.no_grad():
            self.optimizer.apply(replica.params[course.main], gradient, moments, pace)
            replica.refresh()
        for move in course.after:
            gradient = replica.gradient(self.gan.generated(self._live(), self._fake(rng)), move.span)
            with torch.no_grad():
                move.apply(replica.params, gradient, moments, self.optimizer, pace)
                replica.refresh()

    def discriminator_loss(self, rng: np.random.Generator) -> Tensor:
        """L_D on a mix of current images and, once there are any, on one of earlier tasks."""
        terms = []
        for clients in (self.now, self.old):
            if clients:
                x, y = self.mixed(clients, rng)
                outputs = self.gan.trainer.forward_inputs(x)
                terms.append(self.gan.discriminated(outputs, y, self._live(), self._fake(rng)))
        return torch.stack(terms).mean()

    def mixed(self, clients: Mapping[str, Tree], rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """(images, labels): a class-balanced batch of what the clients' generators make."""
        labels = [rng.choice(labels_of([one]), self.batch) for one in clients.values()]
        images = [
            self.gan.fixed_images(one[GENERATOR].to(self.gan.trainer.device), self._on_device(y))
            for one, y in zip(clients.values(), labels, strict=True)
        ]
        pooled = np.concatenate(labels)
        chosen = balanced(pooled, self.batch, rng)
        return torch.cat(images)[self._on_device(chosen)], self._on_device(pooled[chosen])

    def _fake(self, rng: np.random.Generator) -> Tensor:
        """Labels of a fake batch: any that a client has had."""
        return self._on_device(rng.choice(labels_of([*self.now.values(), *self.old.values()]), self.batch))

    def _live(self) -> dict[str, Tensor]:
        return live_generator(self.gan.trainer.replica.module, self.part.name)

    def _on_device(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.gan.trainer.device)


def labels_of(clients: list[Tree]) -> np.ndarray:
    """All labels of some clients, ascending."""
    masks = [one["labels"].cpu() for one in clients]
    return np.asarray(torch.stack(masks).any(0).nonzero().flatten().numpy())
