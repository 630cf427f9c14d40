"""MFCL: mimicking federated continual learning (Babakniya et al., workshop at ICML 2023; equations are its).

At the end of every task but the last the server trains a generator G that inverts the shared model, without any data
(`data_free.py`), and freezes it together with a copy of the model. Both reach a client once per task. During the next
task a client joins every minibatch of real samples with freshly generated ones, labelled by the frozen model, and
minimises, with f the features before the head, W_o the frozen model's head rows of the K_o classes seen so far:

    L_CE                       cross-entropy of the real samples over the new classes only             (Eq. 5)
    + w_ft L_FT                cross-entropy over all seen classes with f held fixed: only the head learns  (Eq. 6)
    + w_kd (1/K_o) mean_i || W_o f(x_i) - W_o f_o(x_i) ||^2     features drawn to the frozen model's   (Eq. 7)

The first task is FedAvg. No data is kept, and the server needs nothing but the aggregate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from everfed.core import random
from everfed.core.evaluate import class_mask
from everfed.core.legacy import (
    BOUNDARIES,
    CLASSES,
    END,
    MODEL,
    TOGETHER,
    Batch,
    Cohort,
    CompositionError,
    Context,
    Model,
    Once,
    Optimizer,
    Part,
    Phase,
    Schedule,
    State,
    Step,
    Tables,
    Tree,
    refuse_personal,
)
from everfed.core.ops import cross_entropy
from everfed.core.replica import frozen_forward, initial_weights
from everfed.methods.common.checks import at_least, one_of, positive
from everfed.methods.common.features import head, head_weight, through_head
from everfed.methods.common.layers import in_precision
from everfed.methods.common.teacher import frozen_pass, tasks_before
from everfed.methods.generative.data_free import TERMS, Inversion, draw, labels_of, training_on
from everfed.methods.generative.inversion import only
from everfed.models.generators import GeneratorBlueprint, image

PHASE = "generator"
CHOICES: Mapping[str, tuple[str, ...]] = {
    "label": ("teacher", "noise"),
    "ft_on": ("all", "synthetic"),
    "kd_scale": ("code", "paper"),
    "class_weights": ("none", "abd"),
    "gen_label": ("model", "noise"),
    "diversity": ("code", "paper"),
}


@dataclass(frozen=True)
class MFCL(Part):
    """On clients. syn_batch: generated samples per step. label: of a generated sample, the frozen model's prediction or
    the class encoded in its noise. ft_on: L_FT on "all" samples (the authors' code) or the "synthetic" ones (the
    paper). w_ft, w_kd: weights. kd_scale: "code" as above, "paper" a sum over samples and classes. class_weights: "abd"
    weighs samples of old classes by K_o/K and of new ones by 1 - K_o/K. bn_double_update: compute the features of L_FT
    in a second forward pass, as the authors' code does: the same loss, but BatchNorm's statistics move twice per step.

    On the server. gen_steps steps of Adam at gen_lr on batches of gen_batch, gen_chunk of them between checkpoints.
    z_dim: length of the noise (the authors: 1000). gen_light: a quarter of the width. gen_label, content_tau: the
    target class of generated images, the "model"'s own prediction at a temperature of 1000 (the authors' code) or the
    one encoded in the "noise" at 1 (the paper). diversity, w_div, w_bn, w_prior: the other terms, see `inversion.py`.
    warm_start: begin with the last task's generator. keep_adam: and with its optimiser's moments (ABD)."""

    syn_batch: int = 32
    label: str = "teacher"
    ft_on: str = "all"
    w_ft: float = 1.0
    w_kd: float = 0.1
    kd_scale: str = "code"
    class_weights: str = "none"
    bn_double_update: bool = False
    gen_steps: int = 5000
    gen_chunk: int = 100
    gen_lr: float = 1e-3
    gen_batch: int = 128
    z_dim: int = 200
    gen_light: bool = False
    gen_label: str = "model"
    content_tau: float = 1000.0
    diversity: str = "code"
    w_content: float = 1.0
    w_div: float = 1.0
    w_bn: float = 50.0
    w_prior: float = 1e-3
    warm_start: bool = True
    keep_adam: bool = False

    name = "mfcl"
    # one generator serves all clients, so their old classes must be the same
    needs = frozenset({BOUNDARIES, TOGETHER, CLASSES})

    def __post_init__(self) -> None:
        one_of(self, **CHOICES)
        at_least(self, 0, "syn_batch", "w_ft", "w_kd", "w_content", "w_div", "w_bn", "w_prior", "gen_lr")
        at_least(self, 1, "gen_steps", "gen_chunk", "z_dim")
        at_least(self, 2, "gen_batch")
        positive(self, "content_tau")
        if not self.w_content + self.w_div + self.w_bn + self.w_prior > 0:
            raise ValueError(
                "w_content, w_div, w_bn and w_prior must not all be 0; got nothing to train a generator on"
            )

    def check(self, parts: Sequence[Part], optimizer: Optimizer) -> Iterable[str]:
        refuse_personal(self, parts)
        return ()

    # the server ------------------------------------------------------------------------------------------------------
    @property
    def inversion(self) -> Inversion:
        weights = (self.w_content, self.w_div, self.w_bn, self.w_prior)
        return Inversion(self.gen_batch, self.gen_lr, self.gen_label, self.content_tau, self.diversity, *weights)

    def blueprint(self, ctx: Context) -> GeneratorBlueprint:
        return GeneratorBlueprint(tuple(ctx.facts.input_shape), self.z_dim, self.gen_light)

    def server_slots(self, ctx: Context) -> Tree:
        """No slots; refuses what cannot work before the first round."""
        try:
            image(ctx.facts.input_shape)
        except ValueError as error:
            raise CompositionError(f"part {self.name!r}: {error}") from error
        if "noise" in (self.label, self.gen_label) and self.z_dim < ctx.facts.classes:
            raise CompositionError(
                f"mfcl.z_dim must be at least the number of classes, {ctx.facts.classes}, when noise encodes the label"
            )
        if self.w_bn and ctx.options.batchnorm == "local" and ctx.facts.layout.stats:
            raise CompositionError(
                "mfcl.w_bn needs BatchNorm statistics on the server: set model.batchnorm = 'mean', or mfcl.w_bn = 0"
            )
        return {}

    def phases(self) -> tuple[Phase, ...]:
        chunks = -(-self.gen_steps // self.gen_chunk) if self.syn_batch else 1
        return (
            Phase(
                PHASE, Cohort.SERVER, END, repeat=chunks, in_last_round=False, update=self._invert, measure=self._terms
            ),
        )

    def _invert(self, server: State, reduced: Tree, ctx: Context) -> Tree:
        """One chunk of generator training; the model at a task's end becomes the teacher."""
        own = server.get(self.name, {})
        if ctx.repeat == 0:
            finished = {"since": ctx.round, "tasks": (ctx.current_task or 0) + 1}
            own = {**self._begin(own, ctx), "teacher": dict(server[MODEL]), **finished}
        return self._chunk(own, server[MODEL], ctx) if self.syn_batch else own

    def _begin(self, own: Tree, ctx: Context) -> Tree:
        """The generator and the moments that generator training starts from."""
        if not self.syn_batch:
            return {}
        generator = own.get("generator") if self.warm_start else None
        if generator is None:
            first = initial_weights(self.blueprint(ctx), random.key(ctx.seed, self.name, ctx.current_task))
            generator = {k: v.to(ctx.train.device) for k, v in first.items()}
        fresh = self.inversion.optimizer.init(generator["params"])
        return {"generator": generator, "adam": own.get("adam", fresh) if self.keep_adam else fresh}

    def _chunk(self, own: Tree, model: Model, ctx: Context) -> Tree:
        steps = min(self.gen_chunk, self.gen_steps - ctx.repeat * self.gen_chunk)
        training = training_on(ctx.train, self.blueprint(ctx), self.inversion)
        seen = _classes(ctx, range((ctx.current_task or 0) + 1))
        generator, adam, terms = training.run(model, own["generator"], own["adam"], seen, steps, ctx.key("noise"))
        measured = dict(zip(TERMS, terms.tolist(), strict=True))
        kept = {**own, "generator": generator, "adam": adam, "terms": measured}
        over = (ctx.repeat + 1) * self.gen_chunk >= self.gen_steps
        return {k: v for k, v in kept.items() if k != "adam"} if over and not self.keep_adam else kept

    def _terms(self, server: State, reduced: Tree, ctx: Context) -> dict[str, float]:
        """The mean of each term of the generator's loss over the chunk."""
        return dict(server[self.name].get("terms", {}))

    def broadcast(self, server: State, ctx: Context) -> dict[str, Any]:
        own = server.get(self.name, {})
        return {k: Once(own["since"], own[k]) for k in ("teacher", "generator") if k in own}

    def sample(self, server: State, count: int, ctx: Context) -> tuple[Tensor, Tensor]:
        """Generated images and the frozen model's labels for them."""
        own, trainer = server.get(self.name, {}), ctx.train
        if "generator" not in own:
            raise ValueError("no generator was trained yet: the first one is, at the end of the first task")
        noise = draw(count, self.z_dim, torch.Generator(trainer.device).manual_seed(ctx.key("sample")))
        with in_precision(trainer):
            images = frozen_forward(trainer.auxiliary(self.blueprint(ctx)), own["generator"], noise).float()
            outputs = frozen_forward(trainer.replica, own["teacher"], images).float()
        known = _classes(ctx, range(own["tasks"])).to(trainer.device)
        return images, only(outputs, known).argmax(1)

    # the client ------------------------------------------------------------------------------------------------------
    def plan(self, client: State, schedule: Schedule, plans: Mapping[str, Tables], ctx: Context) -> tuple[Tree, Tables]:
        """Masks of the classes of earlier tasks, of this task, and of all tasks so far."""
        now = ctx.current_task or 0
        tasks = {"old": tasks_before(ctx), "new": range(now, now + 1), "seen": range(now + 1)}
        return {name: _classes(ctx, which) for name, which in tasks.items()}, {}

    def forward(self, module: nn.Module, x: Tensor, own: Tree, message: Tree) -> Tensor:
        """The model's own outputs; when there is a teacher, training keeps the features for the losses."""
        if not (module.training and "teacher" in message):
            outputs: Tensor = module(x)
            return outputs
        outputs, features = through_head(module, x)
        own.setdefault("features", features)  # the first pass of a step is that of the real and generated samples
        return outputs

    def batches(self, step: Step) -> dict[str, Batch]:
        """Freshly generated samples with labels, and the teacher's features of the real and the generated ones."""
        message, own = step.message.get(self.name, {}), step.state[self.name]
        if "generator" not in message:
            return {}
        noise = draw(self.syn_batch, self.z_dim, step.replica.generator)
        generator = step.ctx.train.auxiliary(self.blueprint(step.ctx))
        with in_precision(step.ctx.train):
            images = frozen_forward(generator, message["generator"], noise).float()
        outputs, features = frozen_pass(step, message["teacher"], torch.cat([step.inputs(step.x), images]))
        predicted = only(outputs[len(step.x) :], own["old"]).argmax(1)
        labels = predicted if self.label == "teacher" else labels_of(noise, own["old"])
        return {self.name: Batch(images, labels, joined=True, extra={"features": features}, ready=True)}

    def objective(self, step: Step) -> Tensor:
        message, own = step.message.get(self.name, {}), step.state[self.name]
        if "teacher" not in message:  # the first task
            return step.task_loss(step.all_outputs, step.all_y)
        features = own.pop("features").float()
        total = self.current(step.outputs, step.y, own)
        if self.w_ft and self.name in step.batches:
            total = total + self.w_ft * self._fine_tuning(step, features)
        if self.w_kd:
            total = total + self.w_kd * self._distillation(step, features)
        return total

    def current(self, outputs: Tensor, y: Tensor, own: Tree) -> Tensor:
        """L_CE of the real samples over the classes of this task: no gradient reaches the old rows of the head."""
        return self._cross_entropy(only(outputs, own["new"]), y, own)

    def _fine_tuning(self, step: Step, features: Tensor) -> Tensor:
        """L_FT: the head alone, on fixed features, over all classes so far."""
        own, real = step.state[self.name], 0 if self.ft_on == "all" else len(step.x)
        if self.bn_double_update:
            with torch.no_grad():
                step.forward_inputs(torch.cat([step.inputs(step.x), step.batches[self.name].x]))
            features = own.pop("features").float()
        with in_precision(step.ctx.train):
            outputs = head(step.replica.module)(features[real:].detach()).float()
        return self._cross_entropy(only(outputs, own["seen"]), step.all_y[real:], own)

    def _cross_entropy(self, outputs: Tensor, y: Tensor, own: Tree) -> Tensor:
        if self.class_weights == "none":
            return cross_entropy(outputs, y)
        weights = abd_weights(own["old"], own["seen"]).index_select(0, y)
        return (weights * functional.cross_entropy(outputs, y, reduction="none")).mean()

    def _distillation(self, step: Step, features: Tensor) -> Tensor:
        """L_KD on real and generated samples; the frozen head weighs the directions of the features."""
        teacher, own = step.message[self.name]["teacher"], step.state[self.name]
        if self.name in step.batches:
            target = step.batches[self.name].extra["features"]
        else:
            target = frozen_pass(step, teacher, step.inputs(step.x))[1]
        weight = head_weight(step.layout).view(teacher["params"])
        return distillation(features, target, weight, own["old"], self.kd_scale)


def distillation(features: Tensor, target: Tensor, weight: Tensor, old: Tensor, scale: str = "code") -> Tensor:
    """|| W_o (features - target) ||^2 with the rows of `weight` (C, F) at the mask `old` (C,): "code" divides by their
    number and takes the mean over samples, "paper" sums (Eq. 7). Features are (n, F)."""
    distance = (functional.linear(features - target, weight).square() * old).sum()
    return distance if scale == "paper" else distance / (len(features) * old.sum())


def abd_weights(old: Tensor, seen: Tensor) -> Tensor:
    """(C,) weights of samples by class: K_o/K for the old ones, 1 - K_o/K for the new, given masks of both."""
    share = old.sum() / seen.sum()
    return torch.where(old, share, 1.0 - share)


def _classes(ctx: Context, tasks: Iterable[int]) -> Tensor:
    """(C,) mask of the classes of some tasks."""
    stream = ctx.train.stream
    return class_mask((label for task in tasks for label in stream.labels(task)), stream.classes)
