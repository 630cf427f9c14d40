"""GLFC: global-local forgetting compensation with exemplars of real samples (Dong et al., CVPR 2022).

Clients train on their data and their exemplars with binary cross-entropy of every output s_ic against targets Y,

    L_GC = mean_ic w_i BCE(s_ic, Y_ic),  w_i = g_i / mean of g over the samples of i's group,  g_i = |sigma(s_i)_y - 1|
    L_RD = mean_ic BCE(s_ic, Y'_ic),     Y' = sigma(old model) on the classes it was trained on, Y on others
    L    = 0.5 L_GC + 0.5 L_RD           (L_GC alone without an old model)

where the groups are samples of learned classes and all others, so that old classes keep their weight though they have
few samples. The memory holds the exemplars and detects changes of task (`transition.py`).

The old model is that of the last task's end, or chosen by a proxy server: clients whose task changed send gradients of
perturbed prototypes (`prototypes.py`), the server reconstructs images from them, and the best model on these is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from everfed.core import random
from everfed.core.legacy import (
    BOUNDARIES,
    CLASSES,
    END,
    MODEL,
    Cohort,
    Collect,
    Context,
    Data,
    Fitted,
    Message,
    Model,
    Once,
    Part,
    Phase,
    Slots,
    State,
    Step,
    Tree,
)
from everfed.core.replica import initial_weights
from everfed.methods.common.checks import at_least, one_of
from everfed.methods.common.layers import in_precision
from everfed.methods.common.teacher import among, frozen_outputs, mask_of
from everfed.methods.generative.prototypes import encoded, label_of, nearest_to_mean, perturbed, reconstructed
from everfed.methods.replay import memory
from everfed.methods.replay.transition import competing
from everfed.models.lenet import EncoderBlueprint

CHOICES = {"old_model": ("last", "proxy", "none"), "form": ("sigmoid", "softmax"), "head": ("seen", "full")}
_MANY = 100_000  # the most prototypes of one round


@dataclass(frozen=True)
class GLFC(Part):
    """compensation, relation: weights of L_GC and L_RD. old_model: of the "last" task's end, chosen by a "proxy"
    server, or "none". form: "sigmoid" (released code) or "softmax": cross-entropy and divergence over classes (the
    paper). head: the loss is over the classes "seen" so far, as if the head grew, or over its "full" width.

    With a proxy: perturbation, perturbation_lr: steps and rate that change a prototype before it is encoded.
    reconstruction, reconstruction_lr: steps and rate of the search for its image. iterates: how many of the last images
    are kept. reset: the best score begins at 0 again at a change of task (released code: never, so a choice can
    freeze).
    """

    compensation: float = 0.5
    relation: float = 0.5
    old_model: str = "last"
    form: str = "sigmoid"
    head: str = "seen"
    perturbation: int = 50
    perturbation_lr: float = 0.2
    reconstruction: int = 250
    reconstruction_lr: float = 0.1
    iterates: int = 20
    reset: bool = True

    name = "glfc"

    def __post_init__(self) -> None:
        one_of(self, **CHOICES)
        at_least(self, 0, "compensation", "relation", "perturbation", "perturbation_lr", "reconstruction")
        at_least(self, 1, "iterates")

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """Boundaries only for a head that grows and for the model of a task's end; otherwise clients detect changes."""
        known = self.head == "seen" or self.old_model == "last"
        return frozenset({memory.NAME, CLASSES, *([BOUNDARIES] if known else [])})

    # the old model, on the server ----------------------------------------------------------------------------------
    def server_slots(self, ctx: Context) -> Tree:
        if self.old_model != "proxy":
            return {}
        weights = initial_weights(_blueprint(ctx), random.key(ctx.seed, "glfc/encoder"))["params"]
        return {"encoder": weights, "best": 0.0, "reached": 0}

    def phases(self) -> tuple[Phase, ...]:
        """An old model is of no use after the last round."""
        on_server = partial(Phase, cohort=Cohort.SERVER, in_last_round=False)
        if self.old_model == "last":
            return (on_server("teacher", when=END, update=self._freeze),)
        if self.old_model == "none":
            return ()
        collect = {"gradients": Collect()}
        return (
            Phase(
                "prototypes", reduce=collect, in_last_round=False, sends=False, run=self._send, update=self._transition
            ),
            on_server("reconstruct", repeat=_MANY, update=self._reconstruct, done=self._reconstructed),
            on_server("choose", update=self._choose, measure=self._score),
        )

    def _freeze(self, server: State, reduced: Tree, ctx: Context) -> Tree:
        return {"old": _knowing(server[MODEL], ctx), "since": ctx.round}

    def _transition(self, server: State, reduced: Tree, ctx: Context) -> Slots:
        """If the task of some clients has changed, the best model becomes the old one, and new images are needed. A
        signal that comes late, when the best model is one of the current task, leaves the old one as it is."""
        if not reduced.get("gradients"):
            return None
        own = server[self.name]
        changed = {**own, "queue": torch.cat(list(reduced["gradients"].values()))}
        for gone in ("images", "labels"):
            changed.pop(gone, None)
        if "current" in own and not _same_task(own["current_task"], ctx):
            changed |= _retired(own)
        return {**changed, "best": 0.0} if self.reset else changed

    def _reconstruct(self, server: State, reduced: Tree, ctx: Context) -> Slots:
        """The images of one prototype of the queue."""
        own = server[self.name]
        if "queue" not in own:
            return None
        encoder = ctx.train.auxiliary(_blueprint(ctx))
        layout, device = encoder.layout, ctx.train.device
        weights = layout.named(own["encoder"].to(device))
        gradient, rest = own["queue"][0].to(device), own["queue"][1:]
        label = label_of(gradient, layout)
        noise = ctx.rng("noise").standard_normal(ctx.facts.input_shape, dtype=np.float32)
        images, _ = reconstructed(
            lambda x: encoded(encoder.module, weights, x, label, differentiable=True),
            gradient,
            torch.from_numpy(noise).to(device),
            self.reconstruction,
            self.reconstruction_lr,
            self.iterates,
        )
        made = {"images": images.cpu(), "labels": label.cpu().repeat(len(images))}
        grown = {k: torch.cat([own[k], new]) if k in own else new for k, new in made.items()}
        others = {k: v for k, v in own.items() if k != "queue"}
        return {**others, **grown, "queue": rest.clone()} if len(rest) else {**others, **grown}

    def _reconstructed(self, server: State, ctx: Context) -> bool:
        """True when every prototype of this round has its images."""
        return "queue" not in server[self.name]

    def _choose(self, server: State, reduced: Tree, ctx: Context) -> Slots:
        """The new model becomes the best if none was better on the images; one of an earlier task that it replaces is
        the old one from then on, whether or not a signal came."""
        own, trainer = server[self.name], ctx.train
        if "images" not in own:
            return None
        trainer.replica.load(server[MODEL])
        trainer.replica.module.eval()
        known = competing(ctx).to(trainer.device)
        with torch.no_grad():
            outputs = trainer.forward_inputs(own["images"].to(trainer.device)).index_select(1, known)
        right = (known[outputs.argmax(1)] == own["labels"].to(trainer.device)).sum().item() / len(outputs)
        if right < own["best"]:
            return {**own, "score": right}
        best = {"current": _knowing(server[MODEL], ctx), "current_since": ctx.round, "current_task": _task(ctx)}
        known_change = ctx.current_task is not None and own.get("current_task", _task(ctx)) != _task(ctx)
        return {**own, **(_retired(own) if known_change else {}), **best, "best": right, "score": right}

    def sample(self, server: State, count: int, ctx: Context) -> tuple[Tensor, Tensor]:
        """The next `count` images reconstructed from clients' gradients, and the labels read off these."""
        own = server.get(self.name, {})
        if self.old_model != "proxy":
            raise ValueError(f"method.glfc.old_model = {self.old_model!r} makes no images; only 'proxy' does")
        if "images" not in own:
            raise ValueError("no prototypes have arrived yet: clients send them when they detect a change of task")
        here = slice(ctx.repeat * count, (ctx.repeat + 1) * count)
        return own["images"][here].to(ctx.train.device), own["labels"][here].to(ctx.train.device)

    def _score(self, server: State, reduced: Tree, ctx: Context) -> dict[str, float]:
        own = server[self.name]
        return {"prototype_accuracy": own["score"]} if "score" in own else {}

    def broadcast(self, server: State, ctx: Context) -> dict[str, Any]:
        own = server.get(self.name, {})
        message: dict[str, Any] = {k: Once(own[f"{k}_since"], own[k]) for k in ("previous", "current") if k in own}
        if "current" in own:
            message["task"] = own["current_task"]
        if "old" in own:
            message["old"] = Once(own["since"], own["old"])
        return {**message, "encoder": Once(0, own["encoder"])} if "encoder" in own else message

    # on the client -----------------------------------------------------------------------------------------------
    def start(self, client: State, message: Message, model: Model, data: Data, ctx: Context) -> tuple[Tree, Model]:
        """The inputs of the loss: the outputs that compete, the learned classes, the old model."""
        host, received = client[memory.NAME]["host"], message.get(self.name, {})
        learned = torch.zeros(ctx.facts.classes, dtype=torch.bool)
        learned[host.get("learned", torch.zeros(0, dtype=torch.int64))] = True
        own: Tree = {"learned": learned, "classes": self._classes(ctx)}
        old = self._old(received, bool(host.get("signal", False)), ctx)
        if old is not None and self.relation:
            own["old"] = old
        return {**own, **({"encoder": received["encoder"]} if "encoder" in received else {})}, model

    def _classes(self, ctx: Context) -> Tensor:
        """(C,) mask of the outputs that compete."""
        return mask_of(ctx, competing(ctx) if self.head == "seen" else torch.arange(ctx.facts.classes))

    def _old(self, received: Tree, signal: bool, ctx: Context) -> Slots:
        """From a proxy: the best model so far for a client that just detected a change of task (signal), unless that is
        one of its current task; the best of the task before for the others."""
        if self.old_model != "proxy":
            return received.get("old")
        if signal and "current" in received and not _same_task(received["task"], ctx):
            return received["current"]
        return received.get("previous")

    def objective(self, step: Step) -> Tensor:
        own = step.state[self.name]
        classes, outputs = own["classes"], among(step.all_outputs, own["classes"])
        targets = functional.one_hot(step.all_y, outputs.shape[1]).to(outputs.dtype) * classes
        weights = class_weights(self._confidence(outputs, targets), own["learned"][step.all_y], own["learned"].any())
        compensated = (weights * self._distance(outputs, targets, classes)).mean()
        if "old" not in own:
            return compensated
        related = self._distance(outputs, self._relations(step, own, targets), classes).mean()
        return self.compensation * compensated + self.relation * related

    def _confidence(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """(n,) the probability of the true class."""
        p = torch.sigmoid(outputs) if self.form == "sigmoid" else functional.softmax(outputs, dim=1)
        return (p.detach() * targets).sum(1)

    def _distance(self, outputs: Tensor, targets: Tensor, classes: Tensor) -> Tensor:
        """(n,) distance of every sample's outputs from its targets: the mean binary cross-entropy over the classes of a
        mask, or the divergence of distributions (for one-hot targets, cross-entropy)."""
        if self.form == "sigmoid":
            each = functional.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
            return (each * classes).sum(1) / classes.sum()
        return functional.kl_div(functional.log_softmax(outputs, dim=1), targets, reduction="none").sum(1)

    def _relations(self, step: Step, own: Tree, targets: Tensor) -> Tensor:
        """(n, outputs) targets, replaced by the old model's outputs at the classes it was trained on."""
        joined = [batch.x for batch in step.batches.values() if batch.joined]
        x = torch.cat([step.x, *joined]) if joined else step.x
        old, known = frozen_outputs(step, own["old"], x), own["old"]["known"] & own["classes"]
        if self.form == "sigmoid":
            return torch.where(known, torch.sigmoid(old), targets)
        mixed = torch.where(known, functional.softmax(among(old, known), dim=1), targets)
        return mixed / mixed.sum(1, keepdim=True)

    def reply(self, client: State, message: Message, fitted: Fitted, data: Data, ctx: Context) -> tuple[Tree, Tree]:
        """A client that detected a change of task makes its prototypes, to be sent in a phase of their own."""
        own, host = client[self.name], client[memory.NAME]["host"]
        if "encoder" not in own or not host.get("signal", False):
            return {"learned": own["learned"]}, {}
        settled = int(host["stored"]) - int(host["staged"])
        current = data.take(np.flatnonzero(~np.isin(data.ids, host["ids"][:settled].numpy())))
        return {"learned": own["learned"], "prototypes": self._prototypes(own, fitted.model, current, ctx)}, {}

    def _prototypes(self, own: Tree, model: Model, data: Data, ctx: Context) -> Tensor:
        """(k, E) for every current class, the gradient of its perturbed prototype."""
        trainer = ctx.train
        rows = nearest_to_mean(trainer, model, data.x, data.y).to(data.x.device)
        y, classes = data.y[rows].to(trainer.device), own["classes"].nonzero().flatten().to(trainer.device)
        inputs = trainer.stream.inputs(data.x[rows].to(trainer.device))
        with in_precision(trainer):
            images = perturbed(trainer, model, inputs, y, classes, self.perturbation, self.perturbation_lr)
        encoder = trainer.auxiliary(_blueprint(ctx))
        weights = encoder.layout.named(own["encoder"].to(trainer.device))
        return torch.stack([encoded(encoder.module, weights, x, label) for x, label in zip(images, y, strict=True)])

    def _send(self, client: State, message: Message, data: Data, ctx: Context) -> tuple[Slots, Tree]:
        """Send the prototypes, if there are any, and forget them."""
        own = client.get(self.name, {})
        if "prototypes" not in own:
            return None, {}
        return {k: v for k, v in own.items() if k != "prototypes"}, {"gradients": own["prototypes"]}


def class_weights(confidence: Tensor, learned: Tensor, any_learned: Tensor) -> Tensor:
    """(n,) w_i: a sample's distance from its label, over the mean of its group (learned classes, others).

    confidence: (n,) probability of the true class. learned: (n,) bool. All ones while no class is learned.
    """
    g = (confidence - 1.0).abs()
    weights = torch.zeros_like(g)
    for group in (learned, ~learned):
        mean = (g * group).sum() / group.sum().clamp(min=1)
        weights = weights + group * g / mean.clamp(min=torch.finfo(g.dtype).tiny)
    return torch.where(any_learned, weights, torch.ones_like(weights))


def _blueprint(ctx: Context) -> EncoderBlueprint:
    return EncoderBlueprint(ctx.facts.input_shape, ctx.facts.classes)


def _task(ctx: Context) -> int:
    """The current task; -1 when tasks are hidden."""
    return -1 if ctx.current_task is None else ctx.current_task


def _same_task(task: int, ctx: Context) -> bool:
    """Is a model chosen in `task` one of the current task? False where tasks are hidden: then signals alone count."""
    return ctx.current_task is not None and task == ctx.current_task


def _retired(own: Tree) -> Tree:
    """The best model so far as the previous one."""
    return {"previous": own["current"], "previous_since": own["current_since"]}


def _knowing(model: Model, ctx: Context) -> Tree:
    """A copy of the model with the classes it has been trained on."""
    return {**model, "known": mask_of(ctx, competing(ctx))}
