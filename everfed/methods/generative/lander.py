"""LANDER: label-text-centred data-free knowledge transfer (Tran et al., 2024).

Every class c has a fixed anchor e_c (`anchors.py`). A linear map M of the features is pulled to within a radius of it,
which gives the features of all tasks a common frame; predictions do not depend on M.

    Bound(x, y) = relu(MSE(M f(x), e_y) - r)
    first task:  L = CE + ltc Bound
    later:       L = c (CE over the new classes + ltc Bound) + p (L_kd + MSE(M f(x'), M_T f_T(x')))
    a = log2(K / 2 + 1), b = sqrt(K_o / K):  c = cur (1 + 1 / a) / b,  p = pre a b

with x' synthetic images, T the frozen teacher, K_o of K classes old. The server makes the images from anchors, under
the same bound (`NoisySynthesizer`). At a task's end it restores the model with the lowest loss in the first local
epoch, averaged over the clients' samples: the authors' sum over all minibatches, made comparable between rounds with
different clients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from everfed.core.layout import Extras, registered
from everfed.core.trainer import Trainer
from everfed.method import (
    END,
    FIRST,
    AddsParameters,
    Batch,
    Cached,
    Client,
    Cohort,
    CompositionError,
    Mean,
    Model,
    Optimizer,
    Phase,
    Schedule,
    Server,
    Step,
    Table,
    Tree,
    When,
    option,
)
from everfed.methods.common.layers import head_weight, through_head
from everfed.methods.common.teacher import classes_of, frozen_pass
from everfed.methods.generative.anchors import FROM_NAMES, GAUSSIAN, anchors_of, check_named, read_anchors
from everfed.methods.generative.student import LEVELS, FeatureMap, Lesson
from everfed.methods.generative.synthesis import Synthesis, Synthesizer, Turn
from everfed.methods.generative.synthetic_replay import SyntheticReplay
from everfed.models.generators import NoisyBlueprint

HINGES = ("batch", "sample")
STUDENT = Optimizer(momentum=0.9, weight_decay=2e-4)
FIRST_MEAN, FIRST_DEVIATION = 0.5, 0.2  # of the channels, before they are learned
MATRIX, BIAS = (registered("lander", name, personal=False) for name in ("weight", "bias"))


@dataclass(frozen=True)
class Lander(AddsParameters, SyntheticReplay):
    batch: int = option(128, at_least=1, about="synthetic images in a client's step")
    n_syn: int = option(10_000, at_least=1, about="how many images clients receive, the first ones")
    warmup: int = option(10, at_least=0, about="synthesis rounds before images are kept")
    g_steps: int = option(40, at_least=1, about="generator steps in a synthesis round")
    bn: float = option(1.0, at_least=0, about="weight of the batch statistics")
    kd_steps: int = option(50, at_least=0, about="the student's steps in a synthesis round")
    kd_batch: int = option(128, at_least=1, about="images of a student's step")
    lr_student: float = option(0.1, at_least=0, about="the student's learning rate")
    anchors: str = option(
        GAUSSIAN,
        about="gaussian, names (hashed class names), wordllama (names through a sentence encoder) or a file",
    )
    width: int = option(512, at_least=1, about="length of an anchor")
    ltc: float = option(5.0, at_least=0, about="weight of the bound")
    r: float = option(0.015, at_least=0, about="radius of the bound")
    hinge: str = option("batch", one_of=HINGES, about="the bound's hinge is over the batch (code) or over each sample")
    cur: float = option(0.2, at_least=0, about="weight of the current data")
    pre: float = option(0.4, at_least=0, about="weight of the distillation")
    scaling: bool = option(True, about="do both weights follow the numbers of old and new classes?")
    features_kd: float = option(1.0, at_least=0, about="weight of the second part of p's term")
    statistics: str = option(
        "learned",
        one_of=("learned", "stream"),
        about="synthesis normalises with learned channel statistics (code), or as the stream does, like clients",
    )
    lr_stats: float = option(1e-2, at_least=0, about="learning rate of the learned statistics")
    group: int = option(10, at_least=1, about="images under one noisy layer")
    model: str = option("best", one_of=("best", "last"), about="the model that the server keeps at a task's end")

    name = "lander"
    changes = frozenset({"first"})

    # the projection ------------------------------------------------------------------------------------------------
    def parameters(self, server: Server) -> dict[str, Tensor]:
        """M, initialised as PyTorch's linear layers are."""
        inputs, rng = head_weight(server.layout).shape[1], server.rng("lander/projection")
        shapes, reach = {"weight": (self.width, inputs), "bias": (self.width,)}, 1 / math.sqrt(inputs)
        return {name: torch.from_numpy(rng.uniform(-reach, reach, shape)).float() for name, shape in shapes.items()}

    def forward(self, module: nn.Module, x: Tensor, own: Tree, message: Tree) -> Tensor:
        """The unchanged outputs; a training step keeps the features for `objective` and `loss`."""
        outputs, features = through_head(module, x)
        if module.training and "first" in own:
            before = [own["features"]] if "features" in own else []
            own["features"] = torch.cat([*before, features.float()])  # the real minibatch, then the synthetic
        return outputs

    def batches(self, step: Step) -> dict[str, Batch]:
        step.state.pop("features", None)
        return super().batches(step)

    def _projected(self, step: Step) -> tuple[Tensor, Tensor]:
        """M f of the real samples and of the synthetic ones."""
        extras = cast(Extras, step.module.extras)[self.name]
        rows = functional.linear(step.state["features"], extras["weight"].float(), extras["bias"].float())
        return rows[: len(step.x)], rows[len(step.x) :]

    # on the client -------------------------------------------------------------------------------------------------
    def plan(self, client: Client, schedule: Schedule):
        tables = super().plan(client, schedule)
        per_epoch = schedule.steps // client.options.local_epochs
        share, weights = torch.tensor(1 / per_epoch), self._weights(client)
        client.state |= {"first": torch.zeros(()), "share": share, "weights": weights}
        return {**tables, "first": Table.of([np.array([step < per_epoch]) for step in range(schedule.steps)])}

    def _weights(self, client: Client) -> Tensor:
        """(2,) c and p; the first task has no old classes and plain weights."""
        if not client.task:
            return torch.tensor([1.0, 0.0])
        if not self.scaling:
            return torch.tensor([self.cur, self.pre])
        old, seen = (len(classes_of(client, range(client.task + more))) for more in (0, 1))
        return torch.tensor(class_weights(old, seen, self.cur, self.pre))

    def objective(self, step: Step) -> Tensor:
        """c (CE + ltc Bound)."""
        own = step.state
        anchors = step.message["anchors"].index_select(0, step.y)
        pull = bound(self._projected(step)[0], anchors, self.r, self.hinge)
        total = own["weights"][0] * (self.labels_loss(step) + self.ltc * pull)
        own["now"] = total.detach()
        return total

    def loss(self, step: Step) -> Tensor | None:
        """p (L_kd + MSE(M f, M_T f_T))."""
        teacher, own = step.message.get("teacher"), step.state
        if teacher is None:
            return None
        inputs = step.inputs(step.batches["images"].x)
        outputs, features = frozen_pass(step, teacher, inputs)
        named = step.layout.named(teacher["params"])
        targets = functional.linear(features, named[MATRIX], named[BIAS])
        errors = functional.mse_loss(self._projected(step)[1], targets)
        total = own["weights"][1] * (self.distillation(step, outputs) + self.features_kd * errors)
        own["now"] = own["now"] + total.detach()
        return total

    def after(self, step: Step) -> None:
        own = step.state
        own["first"].add_(step.rows["first"][0] * own["share"] * own.pop("now"))
        own.pop("features")

    def reply(self, client: Client):
        """The mean loss of the first local epoch."""
        return {"loss": client.state["first"]}

    def reducers(self):
        return {"loss": Mean(weighted=True, tells="how well the model fits the client's samples")}

    # on the server -------------------------------------------------------------------------------------------------
    def init(self, side: Client | Server) -> None:
        super().init(side)
        if isinstance(side, Server) and self.anchors in FROM_NAMES:
            check_named(self.anchors)
        elif isinstance(side, Server):
            side.state = {"anchors": read_anchors(self.anchors, side.facts.classes, self.width)}

    def phases(self):
        start = Phase("start", Cohort.SERVER, FIRST, When.BEFORE, update=self._start)
        restore = Phase("restore", Cohort.SERVER, END, update=self._restore)
        return (start, *([restore] if self.model == "best" else []), *super().phases())

    def _start(self, server: Server) -> None:
        """The state of the first task; anchors from class names, which `init` cannot read."""
        if self.anchors in FROM_NAMES:
            names = server.trainer.stream.class_names
            if not names:
                raise CompositionError(
                    f"method.lander.anchors = {self.anchors!r}: this stream has no class names; name a file"
                )
            server.state["anchors"] = anchors_of(self.anchors, names, self.width)
        self._first(server)

    def _first(self, server: Server) -> None:
        """Before the first round of a task. start: the model that the round starts from."""
        if self.model == "best":
            server.state |= {"start": dict(server.model), "best": dict(server.model), "lowest": math.inf}

    def update(self, server: Server) -> None:
        """Keep the model that this round started from, if its loss is the lowest so far."""
        if self.model == "last":
            return
        own, loss = server.state, server.reduced.get("loss")
        total = math.inf if loss is None else float(loss)
        if total < own["lowest"]:
            own |= {"best": own["start"], "lowest": total}
        own["start"] = dict(server.model)

    def _restore(self, server: Server) -> None:
        """The model that had the lowest loss."""
        server.model = dict(server.state["best"])
        self._first(server)

    def broadcast(self, server: Server):
        return {"anchors": Cached("anchors", server.state["anchors"]), **super().broadcast(server)}

    @property
    def distils(self) -> bool:
        return self.pre > 0

    @property
    def rounds(self) -> int:
        return self.warmup + self.syn_round

    def turn(self, index: int) -> Turn:
        """From the end of the warm-up on images are kept and the student is trained; the adversary begins later."""
        kept = index + 1 >= self.warmup
        return Turn(self.adv > 0 and index >= self.warmup + 2, kept, self.lr_student if kept else 0.0)

    def synthesizer(self, server: Server) -> Synthesizer:
        trainer, shape = server.trainer, server.facts.input_shape
        blueprint = NoisyBlueprint(shape, self.width, self.synth_batch, self.group, self.nz, self.upsamplings)
        projection = FeatureMap(MATRIX, BIAS, self.ltc)
        lesson = Lesson(self.kd_steps, self.kd_batch, self.t_student, STUDENT, False, projection)
        found = trainer.made(
            f"{self.name}/synthesizer", self, lambda: NoisySynthesizer(trainer, blueprint, self.how(lesson), self)
        )
        found.use(server.state["anchors"])
        return found


def class_weights(old: int, seen: int, cur: float = 0.2, pre: float = 0.4) -> tuple[float, float]:
    """(c, p) when `old` of the `seen` classes are old."""
    if not 0 < old <= seen:
        raise ValueError(f"the weights need some old classes among those seen; got {old} of {seen}")
    a, b = math.log2(seen / 2 + 1), math.sqrt(old / seen)
    return cur * (1 + 1 / a) / b, pre * a * b


def bound(projected: Tensor, anchors: Tensor, radius: float, hinge: str = "batch") -> Tensor:
    """relu(MSE(projected, anchors) - radius), both (n, d); the mean is over all entries, or over each sample's own
    before the hinge."""
    errors = (projected - anchors).square()
    if hinge == "sample":
        return functional.relu(errors.mean(1) - radius).mean()
    return functional.relu(errors.mean() - radius)


# synthesis ------------------------------------------------------------------------------------------------------------
class NoisySynthesizer(Synthesizer):
    """Images from anchors, through layers that are redrawn in every round (NAYER, Tran et al., 2024). The generator
    itself is trained in every round, by a fresh Adam.

    The channel means and deviations that normalise the images are trained too, so that the server need not know those
    of the data; clients normalise the images as their own data, so it can be better to do the same here. The teacher's
    projected features are bound to the anchors as the clients' are.
    """

    def __init__(self, trainer: Trainer, blueprint: NoisyBlueprint, how: Synthesis, options: Lander) -> None:
        super().__init__(trainer, blueprint, how, blueprint.shape)
        self.options = options
        self.anchors = self.zeros(trainer.stream.classes, blueprint.anchors)
        self.sources = self.zeros(how.batch, blueprint.anchors)  # the anchors of the targets
        channels = blueprint.shape[0]
        self.channel_stats = self.zeros(2, channels, 1, 1).requires_grad_()
        self.stats_rate = torch.tensor(options.lr_stats, device=self.device)
        self.moments = self.optimizer.init(self.generator.params)
        self.stats_moments = self.optimizer.init(self.channel_stats.detach())

    def use(self, anchors: Tensor) -> None:
        """Set the anchors (C, d) of all classes."""
        self.anchors.copy_(anchors)

    def first(self, generator: Model, server: Server) -> Tree:
        stats = torch.empty(tuple(self.channel_stats.shape))
        stats[0], stats[1] = FIRST_MEAN, FIRST_DEVIATION
        return {**generator, "channels": stats}

    def choose(self, classes: np.ndarray, server: Server) -> np.ndarray:
        return balanced(classes, self.how.batch, server.rng("targets"))

    def load(self, own: Tree, server: Server) -> None:
        self.generator.load({**own, "params": self._redrawn(own["params"], server.rng("noisy layers"))})
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
        if self.options.statistics == "stream":
            return super().normalise(pixels)
        mean, deviation = self.channel_stats
        return (pixels / LEVELS - mean) / deviation

    def further(self, features: Tensor) -> Tensor | None:
        """ltc Bound of the teacher's projected features."""
        options, named = self.options, self.trainer.replica.layout.named(self.trainer.replica.params)
        projected = functional.linear(features, named[MATRIX], named[BIAS])
        return options.ltc * bound(projected, self.sources, options.r, options.hinge)

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
