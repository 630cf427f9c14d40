"""Synthesis on the server: images that a classifier recognises and its student does not know yet (TARGET, LANDER).

One synthesis round trains a generator against the frozen classifier (the teacher T) and the student S, keeps the best
batch as 8-bit images, and then distils T into S on all images so far (`student.py`):

    L = bn L_bn + oh CE(T(x_a), y) + adv L_adv + the method's own terms      x_a: the generator's images, augmented

L_bn compares the stored statistics of T's BatchNorm layers with those of their inputs, mixed with earlier rounds'. The
inputs and outputs of a round are vectors, so a run can be resumed between two rounds. Steps work on tensors at fixed
addresses, which an engine may capture; all draws are made ahead, on the host.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from everfed.core.replica import Blueprint, initial_weights
from everfed.core.trainer import Trainer
from everfed.method import Model, Optimizer, Server, Tree
from everfed.methods.common.layers import head_inputs, in_precision
from everfed.methods.common.teacher import among
from everfed.methods.generative.inversion import Statistics, batch_statistics
from everfed.methods.generative.student import (
    LEVELS,
    Augmentation,
    Lesson,
    Student,
    affine,
    divergences,
    fresh_student,
    to_bytes,
)


@dataclass(frozen=True)
class Synthesis:
    """Options of synthesis. batch: images of a round. steps: of the generator in a round. lr: of the generator. bn, oh,
    adv: weights of the terms. mask: where L_adv counts, see `adversarial`. momentum: share of the earlier rounds in the
    batch statistics. capacity: the most images that are kept. lesson: the student's training in a round."""

    batch: int
    steps: int
    lr: float
    bn: float
    oh: float
    adv: float
    mask: str
    momentum: float
    capacity: int
    lesson: Lesson


@dataclass(frozen=True)
class Turn:
    """Settings of one round. adversary: does L_adv count? keep: is the batch kept? rate: the student's learning rate, 0
    where it is not trained."""

    adversary: bool
    keep: bool
    rate: float


class Synthesizer(ABC):
    """Synthesis on one trainer. Subclasses define the generator's input and its training."""

    optimizer = Optimizer("adam", beta1=0.5, beta2=0.999)

    def __init__(self, trainer: Trainer, blueprint: Blueprint, how: Synthesis, shape: tuple[int, ...]) -> None:
        self.trainer, self.blueprint, self.how, self.device = trainer, blueprint, how, trainer.device
        self.generator = trainer.auxiliary(blueprint)
        self.student = Student(trainer, how.lesson, shape, how.capacity)
        self.augmentation = Augmentation(trainer.stream, how.steps, how.batch, self.device)
        self.classes = torch.zeros(trainer.stream.classes, dtype=torch.bool, device=self.device)
        self.targets = torch.zeros(how.batch, dtype=torch.int64, device=self.device)
        self.lowest, self.images = self.zeros(), self.zeros(how.batch, *shape)
        self.step = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.rate = torch.tensor(how.lr, device=self.device)
        self.offset, self.scale = affine(trainer.stream, shape, self.device)
        self._statistics_places(shape)
        self.loops: dict[bool, Callable[[int], None]] = {}

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, device=self.device)

    def _statistics_places(self, shape: tuple[int, ...]) -> None:
        """Allocate the statistics of every BatchNorm layer, in the order of their use."""
        module = self.trainer.replica.module.eval()
        with torch.no_grad(), in_precision(self.trainer), batch_statistics(module) as found:
            module(self.zeros(2, *shape))
        self.widths = [len(mean) for mean, _ in found.seen]
        self.kept, self.latest = self.zeros(2, sum(self.widths)), self.zeros(2, sum(self.widths))
        self.mix = self.zeros()

    # what subclasses define ----------------------------------------------------------------------------------------
    @abstractmethod
    def first(self, generator: Model, server: Server) -> Tree:
        """The state of the generator's training before the first round."""

    @abstractmethod
    def load(self, own: Tree, server: Server) -> None:
        """Load the state of the generator's training, after the targets are set; make this round's draws."""

    @abstractmethod
    def source(self) -> Tensor:
        """The generator's input."""

    @abstractmethod
    def improve(self, loss: Tensor) -> None:
        """One step of the generator and of the other trained tensors."""

    @abstractmethod
    def read(self) -> Tree:
        """A copy of the state of the generator's training after the round."""

    @abstractmethod
    def places(self) -> list[Tensor]:
        """Every tensor that `improve` changes."""

    @abstractmethod
    def choose(self, classes: np.ndarray, server: Server) -> np.ndarray:
        """(batch,) the target classes of the images."""

    def normalise(self, pixels: Tensor) -> Tensor:
        """Augmented images, values up to 255, as network inputs."""
        return self.offset + pixels / LEVELS * self.scale

    def further(self, features: Tensor) -> Tensor | None:
        """The method's own term, from the teacher's features of the images."""
        return None

    # a round -------------------------------------------------------------------------------------------------------
    def begin(self, teacher: Model, server: Server) -> Tree:
        """The state before the first round."""
        generator = initial_weights(self.blueprint, server.key("generator"))
        student = fresh_student(self.trainer, teacher, server.rng("student"))
        return {"generator": self.first(generator, server), "student": self.student.first(student)}

    def round(self, teacher: Model, work: Tree, pool: Tensor, classes: Tensor, turn: Turn, server: Server) -> Tree:
        """{"work": the state, "pool": all images so far}; none of the inputs is changed.

        pool: (n, ...) uint8. classes: (C,) mask of those that images may be of.
        """
        self.trainer.replica.load(teacher)
        self.trainer.replica.module.eval()
        self.classes.copy_(classes)
        self._draw(classes, server)
        self._load_statistics(work.get("statistics"))
        self.student.load(work["student"])
        self.load(work["generator"], server)
        self._loop(turn.adversary)(self.how.steps)
        if turn.keep:
            pool = torch.cat([pool.to(self.device), to_bytes(self.images)])
        if turn.rate and len(pool):
            self.student.learn(pool, self.classes, turn.rate, server)
        statistics = torch.lerp(self.latest, self.kept, self.mix)
        work = {"generator": self.read(), "student": self.student.read(), "statistics": statistics}
        return {"work": {**work, "loss": self.lowest.clone()}, "pool": pool}

    def _draw(self, classes: Tensor, server: Server) -> None:
        allowed = classes.cpu().nonzero().squeeze(1).numpy()
        self.targets.copy_(torch.from_numpy(self.choose(allowed, server)))
        self.augmentation.draw(server.rng("augment"))
        self.step.zero_()
        self.lowest.fill_(math.inf)

    def _load_statistics(self, kept: Tensor | None) -> None:
        """Without earlier rounds the batch's own statistics count alone."""
        self.mix.fill_(0.0 if kept is None else self.how.momentum)
        if kept is not None:
            self.kept.copy_(kept)

    def _loop(self, adversary: bool) -> Callable[[int], None]:
        if adversary not in self.loops:
            own = [self.lowest, self.images, self.step, self.latest]
            body = partial(self._improve, adversary)
            self.loops[adversary] = self.trainer.loop(body, [*own, *self.places()], self.generator.generator)
        return self.loops[adversary]

    # a step --------------------------------------------------------------------------------------------------------
    def _improve(self, adversary: bool) -> None:
        with in_precision(self.trainer):
            images = self.generator.module(self.source()).float()
        inputs = self.normalise(self.augmentation(images * LEVELS, self.step))
        loss = self.loss(inputs, adversary)
        self._remember(images.detach(), loss.detach())
        self.improve(loss)
        self.step.add_(1)

    def loss(self, inputs: Tensor, adversary: bool) -> Tensor:
        """The loss of network inputs, on the autograd tape."""
        module, how = self.trainer.replica.module, self.how
        with in_precision(self.trainer), batch_statistics(module) as found, head_inputs(module) as features:
            teacher = among(module(inputs).float(), self.classes)
        loss = how.oh * functional.cross_entropy(teacher, self.targets)
        if self.widths:
            loss = loss + how.bn * self._statistics(found)
        if adversary:
            student = among(self.student.answers(inputs), self.classes)
            loss = loss + how.adv * adversarial(student, teacher, how.mask)
        added = self.further(features[0].float())
        return loss if added is None else loss + added

    def _statistics(self, found: Statistics) -> Tensor:
        """L_bn; stores the batch's own statistics in `latest`."""
        now = torch.stack([torch.cat([seen[row] for seen in found.seen]) for row in (0, 1)])
        self.latest.copy_(now.detach())
        means, variances = torch.lerp(now, self.kept, self.mix).split(1)
        mixed = zip(means[0].split(self.widths), variances[0].split(self.widths), strict=True)
        return statistics_distance(found.stored, list(mixed))

    def _remember(self, images: Tensor, loss: Tensor) -> None:
        """Keep the batch with the lowest loss."""
        better = loss < self.lowest
        self.lowest.copy_(torch.where(better, loss, self.lowest))
        self.images.copy_(torch.where(better, images, self.images))


# the losses -----------------------------------------------------------------------------------------------------------
def statistics_distance(stored: Sequence[tuple[Tensor, Tensor]], seen: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """L_bn: sum over layers of ||variance - v|| + ||mean - m||, each pair (mean, variance) of (C,)."""
    terms = [
        torch.linalg.vector_norm(variance - v) + torch.linalg.vector_norm(mean - m)
        for (mean, variance), (m, v) in zip(stored, seen, strict=True)
    ]
    return torch.stack(terms).sum() if terms else torch.zeros(())


def adversarial(student: Tensor, teacher: Tensor, mask: str) -> Tensor:
    """L_adv = - mean_i [w_i KL(teacher_i || student_i)], w_i = 1 where their predictions agree (or disagree)."""
    agree = student.argmax(1) == teacher.argmax(1)
    chosen = agree if mask == "agree" else ~agree
    return -(chosen * divergences(student, teacher)).mean()
