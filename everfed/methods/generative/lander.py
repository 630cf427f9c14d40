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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from everfed.core.layout import Extras, registered
from everfed.core.legacy import (
    END,
    FIRST,
    MODEL,
    AddsParameters,
    Batch,
    Cohort,
    CompositionError,
    Context,
    Data,
    Fitted,
    Mean,
    Message,
    Model,
    Once,
    Optimizer,
    Phase,
    Position,
    Reducer,
    Schedule,
    Server,
    Slots,
    State,
    Step,
    Table,
    Tables,
    Tree,
)
from everfed.methods.common.checks import at_least, one_of
from everfed.methods.common.features import head_weight, through_head
from everfed.methods.common.teacher import classes_of, frozen_pass
from everfed.methods.generative.adversary import HINGES, bound
from everfed.methods.generative.anchors import FROM_NAMES, GAUSSIAN, anchors_of, check_named, read_anchors
from everfed.methods.generative.noisy_synthesis import STATISTICS, Anchored, NoisySynthesizer
from everfed.methods.generative.student import Lesson, Projection
from everfed.methods.generative.synthesis import Synthesizer, Turn
from everfed.methods.generative.synthetic_replay import SyntheticReplay
from everfed.models.pixel_generators import NoisyBlueprint

MODELS = ("best", "last")
STUDENT = Optimizer(momentum=0.9, weight_decay=2e-4)
MATRIX, BIAS = (registered("lander", name, personal=False) for name in ("weight", "bias"))


@dataclass(frozen=True)
class Lander(AddsParameters, SyntheticReplay):
    """anchors: "gaussian", "names" (hashed class names), "wordllama" (names through a sentence encoder) or a file, see
    `anchors.py`; width: their length. ltc, r: weight and radius of the bound; hinge: over the "batch" (code) or each
    "sample". cur, pre: weights of the current data and of distillation; scaling: do they follow the numbers of classes?
    features_kd: weight of the second part of p's term. statistics: synthesis normalises its images with "learned"
    channel means and deviations (code; lr_stats: their rate), or as the "stream" does, which is what clients will do.
    group: images under one noisy layer. model: at a task's end the server keeps its "best" model or the "last". The
    others are those of `SyntheticReplay`."""

    batch: int = 128
    n_syn: int = 10_000
    warmup: int = 10
    g_steps: int = 40
    bn: float = 1.0
    kd_steps: int = 50
    kd_batch: int = 128
    lr_student: float = 0.1
    anchors: str = GAUSSIAN
    width: int = 512
    ltc: float = 5.0
    r: float = 0.015
    hinge: str = "batch"
    cur: float = 0.2
    pre: float = 0.4
    scaling: bool = True
    features_kd: float = 1.0
    statistics: str = "learned"
    lr_stats: float = 1e-2
    group: int = 10
    model: str = "best"

    name = "lander"
    changes = frozenset({"first"})

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 0, "ltc", "r", "cur", "pre", "features_kd", "lr_stats")
        at_least(self, 1, "width", "group")
        one_of(self, hinge=HINGES, model=MODELS, statistics=STATISTICS)

    # the projection ------------------------------------------------------------------------------------------------
    def parameters(self, server: Server) -> dict[str, Tensor]:
        """M, initialised as PyTorch's linear layers are."""
        ctx = server.context
        inputs, rng = head_weight(ctx.facts.layout).shape[1], ctx.rng("lander/projection")
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
        step.state[self.name].pop("features", None)
        return super().batches(step)

    def _projected(self, step: Step) -> tuple[Tensor, Tensor]:
        """M f of the real samples and of the synthetic ones."""
        extras = cast(Extras, step.replica.module.extras)[self.name]
        rows = functional.linear(step.state[self.name]["features"], extras["weight"].float(), extras["bias"].float())
        return rows[: len(step.x)], rows[len(step.x) :]

    # on the client -------------------------------------------------------------------------------------------------
    def plan(self, client: State, schedule: Schedule, plans: Mapping[str, Tables], ctx: Context) -> tuple[Tree, Tables]:
        own, tables = super().plan(client, schedule, plans, ctx)
        per_epoch = schedule.steps // ctx.options.local_epochs
        own |= {"first": torch.zeros(()), "share": torch.tensor(1 / per_epoch), "weights": self._weights(ctx)}
        tables["first"] = Table.of([np.array([step < per_epoch]) for step in range(schedule.steps)])
        return own, tables

    def _weights(self, ctx: Context) -> Tensor:
        """(2,) c and p; the first task has no old classes and plain weights."""
        if not ctx.current_task:
            return torch.tensor([1.0, 0.0])
        if not self.scaling:
            return torch.tensor([self.cur, self.pre])
        old, seen = (len(classes_of(ctx, range(ctx.current_task + more))) for more in (0, 1))
        return torch.tensor(class_weights(old, seen, self.cur, self.pre))

    def objective(self, step: Step) -> Tensor:
        """c (CE + ltc Bound)."""
        own = step.state[self.name]
        anchors = step.message[self.name]["anchors"].index_select(0, step.y)
        pull = bound(self._projected(step)[0], anchors, self.r, self.hinge)
        total = own["weights"][0] * (self.labels_loss(step) + self.ltc * pull)
        own["now"] = total.detach()
        return total

    def loss(self, step: Step) -> Tensor | None:
        """p (L_kd + MSE(M f, M_T f_T))."""
        teacher, own = step.message[self.name].get("teacher"), step.state[self.name]
        if teacher is None:
            return None
        inputs = step.inputs(step.batches[self.name].x)
        outputs, features = frozen_pass(step, teacher, inputs)
        named = step.layout.named(teacher["params"])
        targets = functional.linear(features, named[MATRIX], named[BIAS])
        errors = functional.mse_loss(self._projected(step)[1], targets)
        total = own["weights"][1] * (self.distillation(step, outputs) + self.features_kd * errors)
        own["now"] = own["now"] + total.detach()
        return total

    def after(self, step: Step) -> None:
        own = step.state[self.name]
        own["first"].add_(step.rows[self.name]["first"][0] * own["share"] * own.pop("now"))
        own.pop("features")

    def reply(self, client: State, message: Message, fitted: Fitted, data: Data, ctx: Context) -> tuple[None, Tree]:
        """The mean loss of the first local epoch."""
        return None, {"loss": client[self.name]["first"]}

    def reducers(self) -> Mapping[str, Reducer]:
        return {"loss": Mean(weighted=True)}

    # on the server -------------------------------------------------------------------------------------------------
    def server_slots(self, ctx: Context) -> Tree:
        super().server_slots(ctx)
        if self.anchors in FROM_NAMES:
            check_named(self.anchors)
            return {}
        return {"anchors": read_anchors(self.anchors, ctx.facts.classes, self.width)}

    def phases(self) -> tuple[Phase, ...]:
        start = Phase("start", Cohort.SERVER, FIRST, position=Position.BEFORE, update=self._start)
        restore = Phase("restore", Cohort.SERVER, END, update_model=self._restore)
        return (start, *([restore] if self.model == "best" else []), *super().phases())

    def _start(self, server: State, reduced: Tree, ctx: Context) -> Tree:
        """The slots of the first task; anchors from class names, which `server_slots` cannot read."""
        anchors = {}
        if self.anchors in FROM_NAMES:
            names = ctx.train.stream.class_names
            if not names:
                raise CompositionError(
                    f"method.lander.anchors = {self.anchors!r}: this stream has no class names; name a file"
                )
            anchors = {"anchors": anchors_of(self.anchors, names, self.width)}
        return {**server.get(self.name, {}), **anchors, **self._first(server[MODEL])}

    def _first(self, model: Model) -> Tree:
        """Before the first round of a task. start: the model that the round starts from."""
        return {"start": dict(model), "best": dict(model), "lowest": math.inf} if self.model == "best" else {}

    def update(self, server: State, reduced: Tree, ctx: Context) -> Slots:
        """Keep the model that this round started from, if its loss is the lowest so far."""
        if self.model == "last":
            return None
        own, loss = server[self.name], reduced.get("loss")
        total = math.inf if loss is None else float(loss)
        better = {"best": own["start"], "lowest": total} if total < own["lowest"] else {}
        return {**own, **better, "start": dict(server[MODEL])}

    def _restore(self, server: State, model: Model, ctx: Context) -> tuple[Tree, Model]:
        """The model that had the lowest loss."""
        own = server[self.name]
        return {**own, **self._first(own["best"])}, dict(own["best"])

    def broadcast(self, server: State, ctx: Context) -> dict[str, Any]:
        return {"anchors": Once("anchors", server[self.name]["anchors"]), **super().broadcast(server, ctx)}

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

    def synthesizer(self, ctx: Context, server: State) -> Synthesizer:
        trainer, shape = ctx.train, ctx.facts.input_shape
        blueprint = NoisyBlueprint(shape, self.width, self.synth_batch, self.group, self.nz, self.upsamplings)
        terms = Anchored(self.ltc, self.r, self.hinge, self.statistics, self.lr_stats, MATRIX, BIAS)
        lesson = Lesson(
            self.kd_steps, self.kd_batch, self.t_student, STUDENT, False, Projection(MATRIX, BIAS, self.ltc)
        )
        found = trainer.made(
            f"{self.name}/synthesizer", self, lambda: NoisySynthesizer(trainer, blueprint, self.how(lesson), terms)
        )
        found.use(server[self.name]["anchors"])
        return found


def class_weights(old: int, seen: int, cur: float = 0.2, pre: float = 0.4) -> tuple[float, float]:
    """(c, p) when `old` of the `seen` classes are old."""
    if not 0 < old <= seen:
        raise ValueError(f"the weights need some old classes among those seen; got {old} of {seen}")
    a, b = math.log2(seen / 2 + 1), math.sqrt(old / seen)
    return cur * (1 + 1 / a) / b, pre * a * b
