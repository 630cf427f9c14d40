"""TARGET: exemplar-free distillation with images synthesised on the server (Zhang et al., 2023).

After each task but the last the server inverts the shared model T (`synthesis.py`) and keeps only the images. From the
second task on a client trains with

    L = CE(s(x) over the new classes, y) + alpha L_kd                                                 (Eq. 3)
    L_kd = - mean_i sum_c softmax(t_i / 2)_c log softmax(s_i / 2)_c over the old classes              (Eq. 4)

with x its own minibatch, s_i and t_i the logits of student and frozen teacher on synthetic images. The generator is
trained by first-order MAML: from the same start in every round, with noise that is trained too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from everfed.core.trainer import Trainer
from everfed.core.tree import clone
from everfed.method import Model, Optimizer, Server, Step, Tree, option
from everfed.methods.common.teacher import frozen_outputs
from everfed.methods.generative.student import Lesson
from everfed.methods.generative.synthesis import Synthesis, Synthesizer, Turn
from everfed.methods.generative.synthetic_replay import SyntheticReplay
from everfed.models.generators import PixelBlueprint

REPTILE = 67.0  # the code's factor on the generator's displacement
STUDENT = Optimizer(momentum=0.9, weight_decay=1e-4)
LAST_RATE, RATE_ROUNDS = 2e-4, 200  # the student's learning rate follows a cosine over so many rounds


@dataclass(frozen=True)
class Target(SyntheticReplay):
    alpha_kd: float = option(25.0, at_least=0, about="weight of the distillation")
    ce: str = option(
        "split",
        one_of=("split", "full"),
        about="labels compete among the new classes (split, the code) or among all (full, the paper's formula)",
    )
    lr_z: float = option(1e-2, at_least=0, about="learning rate of the noise")
    meta: str = option(
        "fomaml",
        one_of=("fomaml", "reptile"),
        about="how the generator learns from a round; reptile is the code's branch for larger images",
    )

    name = "target"

    # on the client -------------------------------------------------------------------------------------------------
    def objective(self, step: Step) -> Tensor:
        if self.ce == "full":
            return step.task_loss(step.all_outputs, step.all_y)
        return self.labels_loss(step)

    def loss(self, step: Step) -> Tensor | None:
        teacher = step.message.get("teacher")
        if teacher is None:
            return None
        targets = frozen_outputs(step, teacher, step.batches["images"].x)
        return self.alpha_kd * self.distillation(step, targets)  # Eq. 3, 4

    # on the server -------------------------------------------------------------------------------------------------
    @property
    def distils(self) -> bool:
        return self.alpha_kd > 0

    @property
    def rounds(self) -> int:
        return self.syn_round

    def turn(self, index: int) -> Turn:
        """The student is trained from round `warmup` on, counted from 0. The adversary counts one round earlier, as in
        the released code, against the student as it was drawn."""
        schedule = Optimizer(lr=self.lr_student, schedule="cosine", lr_end=min(LAST_RATE, self.lr_student))
        trained = self.adv > 0 and index >= self.warmup
        rate = schedule.rate(min(index - self.warmup, RATE_ROUNDS), RATE_ROUNDS) if trained else 0.0
        return Turn(self.adv > 0 and index + 1 >= self.warmup, keep=True, rate=rate)

    def synthesizer(self, server: Server) -> Synthesizer:
        trainer, shape = server.trainer, server.facts.input_shape
        blueprint = PixelBlueprint(shape, self.nz, self.upsamplings)
        lesson = Lesson(self.kd_steps, self.kd_batch, self.t_student, STUDENT, keep=True)
        return trainer.made(
            f"{self.name}/synthesizer", self, lambda: MetaSynthesizer(trainer, blueprint, self.how(lesson), self)
        )


class MetaSynthesizer(Synthesizer):
    """In every round a copy of the generator and its input noise are trained; then the generator itself takes one step,
    by the sum of the copy's gradients or by the copy's displacement."""

    def __init__(self, trainer: Trainer, blueprint: PixelBlueprint, how: Synthesis, options: Target) -> None:
        super().__init__(trainer, blueprint, how, blueprint.shape)
        self.options = options
        self.noise = self.zeros(how.batch, blueprint.nz).requires_grad_()
        self.noise_rate = torch.tensor(options.lr_z, device=self.device)
        self.moments = self.optimizer.init(self.generator.params)
        self.noise_moments = self.optimizer.init(self.noise.detach())
        self.sum = torch.zeros_like(self.generator.params)
        self.own: Tree = {}

    def first(self, generator: Model, server: Server) -> Tree:
        return {**generator, "moments": self.optimizer.init(generator["params"])}

    def choose(self, classes: np.ndarray, server: Server) -> np.ndarray:
        return server.rng("targets").choice(classes, self.how.batch)

    def load(self, own: Tree, server: Server) -> None:
        self.own = own
        self.generator.load({name: own[name] for name in ("params", "stats", "counters")})
        self.generator.module.train()
        noise = server.rng("noise").standard_normal(tuple(self.noise.shape), dtype=np.float32)
        self.noise.data.copy_(torch.from_numpy(noise))
        for place in (self.sum, *self.moments.values(), *self.noise_moments.values()):
            place.zero_()

    def places(self) -> list[Tensor]:
        moments = [*self.moments.values(), *self.noise_moments.values()]
        return [*self.generator.vectors(), self.noise.data, self.sum, *moments]

    def source(self) -> Tensor:
        return self.noise

    def improve(self, loss: Tensor) -> None:
        *gradients, of_noise = torch.autograd.grad(loss, [*self.generator.trainable, self.noise])
        with torch.no_grad():
            gradient = self.generator.layout.flatten_gradient(tuple(gradients))
            self.sum.add_(gradient)
            self.optimizer.apply(self.generator.params, gradient, self.moments, self.rate)
            self.optimizer.apply(self.noise.data, of_noise, self.noise_moments, self.noise_rate)
            self.generator.refresh()

    def read(self) -> Tree:
        """The generator itself, one step further; its own statistics are never used."""
        own = clone({key: self.own[key] for key in ("params", "moments")})
        params, moments = own["params"].to(self.device), {k: v.to(self.device) for k, v in own["moments"].items()}
        gradient = self.sum if self.options.meta == "fomaml" else REPTILE * (params - self.generator.params)
        self.optimizer.apply(params, gradient, moments, self.rate * self.how.steps)
        return {**self.own, "params": params, "moments": moments}
