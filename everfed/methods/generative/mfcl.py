"""MFCL: mimicking federated continual learning (Babakniya et al., workshop at ICML 2023; equations are its).

At the end of every task but the last the server trains a generator G that inverts the shared model, without any data
(`inversion.py`), and freezes it together with a copy of the model. Both reach a client once per task. During the next
task a client joins every minibatch of real samples with freshly generated ones, labelled by the frozen model, and
minimises, with f the features before the head, W_o the frozen model's head rows of the K_o classes seen so far:

    L_CE                       cross-entropy of the real samples over the new classes only             (Eq. 5)
    + w_ft L_FT                cross-entropy over all seen classes with f held fixed: only the head learns  (Eq. 6)
    + w_kd (1/K_o) mean_i || W_o f(x_i) - W_o f_o(x_i) ||^2     features drawn to the frozen model's   (Eq. 7)

The first task is FedAvg. No data is kept, and the server needs nothing but the aggregate.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from everfed.core import random
from everfed.core.replica import frozen_forward, initial_weights
from everfed.core.stream import cross_entropy
from everfed.method import (
    BOUNDARIES,
    CLASSES,
    END,
    SHARED,
    TOGETHER,
    Batch,
    Cached,
    Client,
    Cohort,
    CompositionError,
    Facts,
    Part,
    Phase,
    Schedule,
    Server,
    Step,
    Tree,
    option,
)
from everfed.methods.common.layers import head, head_weight, in_precision, through_head
from everfed.methods.common.teacher import classes_of, frozen_pass, mask_of, tasks_before
from everfed.methods.generative.inversion import TERMS, Inversion, draw, labels_of, only, training_on
from everfed.models.generators import GeneratorBlueprint, image

PHASE = "generator"


@dataclass(frozen=True)
class MFCL(Part):
    # on clients
    syn_batch: int = option(32, at_least=0, about="generated samples in a step; 0: neither generator nor L_FT")
    label: str = option(
        "teacher",
        one_of=("teacher", "noise"),
        about="a generated sample's label: the frozen model's prediction, or the class encoded in its noise",
    )
    ft_on: str = option(
        "all",
        one_of=("all", "synthetic"),
        about="L_FT on all samples (the authors' code) or on the synthetic ones (the paper)",
    )
    w_ft: float = option(1.0, at_least=0, about="weight of L_FT")
    w_kd: float = option(0.1, at_least=0, about="weight of the distillation of features")
    kd_scale: str = option(
        "code",
        one_of=("code", "paper"),
        about="distillation: a mean over samples and old classes (code), or the sum over both (paper)",
    )
    bn_double_update: bool = option(
        False,
        about="features of L_FT from a second forward pass (code): the same loss, but BatchNorm moves twice a step",
    )
    # on the server
    gen_steps: int = option(5000, at_least=1, about="steps of Adam on the generator at a task's end")
    gen_chunk: int = option(100, at_least=1, about="of them between two checkpoints")
    gen_lr: float = option(1e-3, at_least=0, about="the generator's learning rate")
    gen_batch: int = option(128, at_least=2, about="images of a generator's step")
    z_dim: int = option(200, at_least=1, about="length of the noise (the authors: 1000)")
    gen_light: bool = option(False, about="a generator of a quarter of the width")
    gen_label: str = option(
        "model",
        one_of=("model", "noise"),
        about="target class of a generated image: the model's own prediction (code), or the one in its noise (paper)",
    )
    content_tau: float = option(1000.0, above=0, about="temperature of the content term (code: 1000, paper: 1)")
    diversity: str = option(
        "code",
        one_of=("code", "paper"),
        about="of predictions: in [0, 1] (code), or their negative entropy over q (paper), which needs another w_div",
    )
    w_content: float = option(1.0, at_least=0, about="weight of the content term")
    w_div: float = option(1.0, at_least=0, about="weight of the diversity of predictions")
    w_bn: float = option(50.0, at_least=0, about="weight of the divergence from BatchNorm's statistics")
    w_prior: float = option(1e-3, at_least=0, about="weight of the smoothness of images")
    warm_start: bool = option(True, about="begin with the last task's generator")

    name = "mfcl"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.w_content + self.w_div + self.w_bn + self.w_prior > 0:
            raise ValueError(
                "w_content, w_div, w_bn and w_prior must not all be 0; got nothing to train a generator on"
            )

    def needs(self):
        """One generator serves all clients, so their old classes must be the same."""
        return {BOUNDARIES, TOGETHER, CLASSES, SHARED}

    # the server ------------------------------------------------------------------------------------------------------
    @property
    def inversion(self) -> Inversion:
        weights = (self.w_content, self.w_div, self.w_bn, self.w_prior)
        return Inversion(self.gen_batch, self.gen_lr, self.gen_label, self.content_tau, self.diversity, *weights)

    def blueprint(self, facts: Facts) -> GeneratorBlueprint:
        return GeneratorBlueprint(tuple(facts.input_shape), self.z_dim, self.gen_light)

    def init(self, side: Client | Server) -> None:
        """Refuse what cannot work before the first round."""
        if isinstance(side, Client):
            return
        try:
            image(side.facts.input_shape)
        except ValueError as error:
            raise CompositionError(f"part {self.name!r}: {error}") from error
        if "noise" in (self.label, self.gen_label) and self.z_dim < side.facts.classes:
            raise CompositionError(
                f"mfcl.z_dim must be at least the number of classes, {side.facts.classes}, when noise encodes the label"
            )
        if self.w_bn and side.options.batchnorm == "local" and side.layout.stats:
            raise CompositionError(
                "mfcl.w_bn needs BatchNorm statistics on the server: set model.batchnorm = 'mean', or mfcl.w_bn = 0"
            )

    def phases(self):
        chunks = -(-self.gen_steps // self.gen_chunk) if self.syn_batch else 1
        return (Phase(PHASE, Cohort.SERVER, END, repeat=chunks, in_last_round=False, update=self._invert),)

    def _invert(self, server: Server) -> None:
        """One chunk of generator training; the model at a task's end becomes the teacher."""
        if server.repeat == 0:
            self._begin(server)
            server.state |= {"teacher": dict(server.model), "since": server.round, "tasks": (server.task or 0) + 1}
        if self.syn_batch:
            self._chunk(server)

    def _begin(self, server: Server) -> None:
        """The generator and the moments that generator training starts from."""
        if not self.syn_batch:
            return
        generator = server.state.get("generator") if self.warm_start else None
        if generator is None:
            first = initial_weights(self.blueprint(server.facts), random.key(server.seed, self.name, server.task))
            generator = {name: tensor.to(server.device) for name, tensor in first.items()}
        server.state = {"generator": generator, "adam": self.inversion.optimizer.init(generator["params"])}

    def _chunk(self, server: Server) -> None:
        own, steps = server.state, min(self.gen_chunk, self.gen_steps - server.repeat * self.gen_chunk)
        training = training_on(server.trainer, self.blueprint(server.facts), self.inversion)
        seen, seed = _mask(server, range(own["tasks"])), server.key("noise")
        given = own["generator"], own["adam"]
        own["generator"], own["adam"], terms = training.run(server.model, *given, seen, steps, seed)
        if (server.repeat + 1) * self.gen_chunk >= self.gen_steps:
            del own["adam"]
        own["terms"] = dict(zip(TERMS, terms.tolist(), strict=True))
        for term, mean in own["terms"].items():
            server.report(term, mean)

    def broadcast(self, server: Server):
        own = server.state
        return {name: Cached(own["since"], own[name]) for name in ("teacher", "generator") if name in own}

    def sample(self, server: Server, count: int) -> tuple[Tensor, Tensor]:
        """Generated images and the frozen model's labels for them."""
        own, trainer = server.state, server.trainer
        if "generator" not in own:
            raise ValueError("no generator was trained yet: the first one is, at the end of the first task")
        noise = draw(count, self.z_dim, torch.Generator(trainer.device).manual_seed(server.key("sample")))
        with in_precision(trainer):
            generator = trainer.auxiliary(self.blueprint(server.facts))
            images = frozen_forward(generator, own["generator"], noise).float()
            outputs = frozen_forward(trainer.replica, own["teacher"], images).float()
        return images, only(outputs, _mask(server, range(own["tasks"])).to(trainer.device)).argmax(1)

    # the client ------------------------------------------------------------------------------------------------------
    def plan(self, client: Client, schedule: Schedule):
        """Masks of the classes of earlier tasks, of this task, and of all tasks so far."""
        now = client.task or 0
        tasks = {"old": tasks_before(client), "new": range(now, now + 1), "seen": range(now + 1)}
        client.state = {name: _mask(client, which) for name, which in tasks.items()}

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
        message, own = step.message, step.state
        if "generator" not in message:
            return {}
        noise = draw(self.syn_batch, self.z_dim, step.generator)
        generator = step.trainer.auxiliary(self.blueprint(step.facts))
        with in_precision(step.trainer):
            images = frozen_forward(generator, message["generator"], noise).float()
        outputs, features = frozen_pass(step, message["teacher"], torch.cat([step.inputs(step.x), images]))
        predicted = only(outputs[len(step.x) :], own["old"]).argmax(1)
        labels = predicted if self.label == "teacher" else labels_of(noise, own["old"])
        return {"generated": Batch(images, labels, joined=True, extra={"features": features}, ready=True)}

    def objective(self, step: Step) -> Tensor:
        if "teacher" not in step.message:  # the first task
            return step.task_loss(step.all_outputs, step.all_y)
        features = step.state.pop("features").float()
        total = self.current(step.outputs, step.y, step.state["new"])
        if self.w_ft and step.batches:
            total = total + self.w_ft * self._fine_tuning(step, features)
        if self.w_kd:
            total = total + self.w_kd * self._distillation(step, features)
        return total

    def current(self, outputs: Tensor, y: Tensor, new: Tensor) -> Tensor:
        """L_CE of the real samples over the classes of this task: no gradient reaches the old rows of the head."""
        return cross_entropy(only(outputs, new), y)

    def _fine_tuning(self, step: Step, features: Tensor) -> Tensor:
        """L_FT: the head alone, on fixed features, over all classes so far."""
        own, real = step.state, 0 if self.ft_on == "all" else len(step.x)
        if self.bn_double_update:
            with torch.no_grad():
                step.forward_inputs(torch.cat([step.inputs(step.x), step.batches["generated"].x]))
            features = own.pop("features").float()
        with in_precision(step.trainer):
            outputs = head(step.module)(features[real:].detach()).float()
        return cross_entropy(only(outputs, own["seen"]), step.all_y[real:])

    def _distillation(self, step: Step, features: Tensor) -> Tensor:
        """L_KD on real and generated samples; the frozen head weighs the directions of the features."""
        teacher = step.message["teacher"]
        if step.batches:
            target = step.batches["generated"].extra["features"]
        else:
            target = frozen_pass(step, teacher, step.inputs(step.x))[1]
        weight = head_weight(step.layout).view(teacher["params"])
        return distillation(features, target, weight, step.state["old"], self.kd_scale)


def distillation(features: Tensor, target: Tensor, weight: Tensor, old: Tensor, scale: str = "code") -> Tensor:
    """|| W_o (features - target) ||^2 with the rows of `weight` (C, F) at the mask `old` (C,): "code" divides by their
    number and takes the mean over samples, "paper" sums (Eq. 7). Features are (n, F)."""
    distance = (functional.linear(features - target, weight).square() * old).sum()
    return distance if scale == "paper" else distance / (len(features) * old.sum())


def _mask(side: Client | Server, tasks: Iterable[int]) -> Tensor:
    """(C,) mask of the classes that any client has in some tasks."""
    return mask_of(side, classes_of(side, tasks, everyone=True))
