"""The base of TARGET and LANDER: after each task the server makes a pool of unlabelled images (`synthesis.py`); clients
of the next task receive it once, with the frozen teacher, and distil on it beside their own data.

A client's step has two forward passes, one for the real minibatch and one for the synthetic, so that each is normalised
with statistics of its own. Every real sample is used once an epoch; the pool is cycled through.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
    Data,
    Message,
    Model,
    Once,
    Optimizer,
    Part,
    Phase,
    Schedule,
    State,
    Step,
    Table,
    Tables,
    Tree,
    overrides,
    refuse_personal,
)
from everfed.methods.common.checks import at_least, one_of, positive
from everfed.methods.common.teacher import among, classes_of, mask_of, soft_cross_entropy, tasks_before
from everfed.methods.generative.adversary import MASKS
from everfed.methods.generative.image_pool import cycled, draw_geometry
from everfed.methods.generative.student import Lesson
from everfed.methods.generative.synthesis import Synthesis, Synthesizer, Turn
from everfed.models.pixel_generators import checked

SYNTHESIS = "synthesis"


@dataclass(frozen=True)
class SyntheticReplay(Part):
    """t_kd: temperature of the clients' distillation. batch: synthetic images in a client's step. n_syn: how many
    images clients receive, the first ones. syn_round: synthesis rounds that make images; warmup: the first round with
    the student. synth_batch, g_steps, lr_g: images, generator steps and their learning rate in a round. nz: length of
    the input of the generator's trunk. bn, oh, adv: weights of batch statistics, labels and adversary. mask: the
    adversary counts where teacher and student "agree" (released code) or "disagree" (TARGET paper). bn_momentum: share
    of earlier rounds in the batch statistics. kd_steps, kd_batch, t_student, lr_student: the student's training in a
    round. upsamplings: of the generator; 0 chooses by the image's side."""

    t_kd: float = 2.0
    batch: int = 500
    n_syn: int = 8000
    syn_round: int = 40
    warmup: int = 20
    synth_batch: int = 256
    g_steps: int = 10
    lr_g: float = 2e-3
    nz: int = 256
    bn: float = 10.0
    oh: float = 0.5
    adv: float = 1.0
    mask: str = "agree"
    bn_momentum: float = 0.9
    kd_steps: int = 400
    kd_batch: int = 256
    t_student: float = 20.0
    lr_student: float = 0.2
    upsamplings: int = 0

    # one pool serves all clients, so their old classes must be the same
    needs = frozenset({BOUNDARIES, TOGETHER, CLASSES})

    def __post_init__(self) -> None:
        at_least(self, 1, "batch", "n_syn", "syn_round", "synth_batch", "g_steps", "nz", "kd_batch")
        at_least(self, 0, "warmup", "lr_g", "bn", "oh", "adv", "kd_steps", "lr_student", "upsamplings")
        positive(self, "t_kd", "t_student")
        if self.synth_batch < 2:
            raise ValueError(f"synth_batch must be at least 2, for BatchNorm; got {self.synth_batch}")
        if not 0 <= self.bn_momentum < 1:
            raise ValueError(f"bn_momentum must be at least 0 and below 1; got {self.bn_momentum}")
        one_of(self, mask=MASKS)

    def check(self, parts: Sequence[Part], optimizer: Optimizer) -> Iterable[str]:
        """The objective is over the new classes only, so other parts may not replay samples."""
        refuse_personal(self, parts)
        for other in parts:
            if other is not self and overrides(other, "batches"):
                raise CompositionError(f"part {self.name!r} trains on its own synthetic images; remove {other.name!r}")
        return ()

    # what subclasses define ----------------------------------------------------------------------------------------
    @property
    @abstractmethod
    def distils(self) -> bool:
        """Is there anything to distil?"""

    @property
    @abstractmethod
    def rounds(self) -> int:
        """Synthesis rounds after a task."""

    @abstractmethod
    def turn(self, index: int) -> Turn:
        """The settings of synthesis round `index`."""

    @abstractmethod
    def synthesizer(self, ctx: Context, server: State) -> Synthesizer:
        """The trainer's synthesizer, built at first use."""

    def how(self, lesson: Lesson) -> Synthesis:
        """The options of synthesis together."""
        return Synthesis(
            batch=self.synth_batch,
            steps=self.g_steps,
            lr=self.lr_g,
            bn=self.bn,
            oh=self.oh,
            adv=self.adv,
            mask=self.mask,
            momentum=self.bn_momentum,
            capacity=self.rounds * self.synth_batch,
            lesson=lesson,
        )

    # on the server -------------------------------------------------------------------------------------------------
    def server_slots(self, ctx: Context) -> Tree:
        """No slots; refuses what cannot work before the first round."""
        blank = ctx.facts.blank.x
        if blank.dtype != torch.uint8 or blank.dim() != 4:
            raise CompositionError(
                f"part {self.name!r} synthesises 8-bit images; this stream's samples are "
                f"{str(blank.dtype).removeprefix('torch.')} of shape {tuple(blank.shape[1:])}"
            )
        try:
            checked(ctx.facts.input_shape, self.upsamplings)
        except ValueError as error:
            raise CompositionError(f"part {self.name!r}: {error}") from error
        if self.bn and ctx.options.batchnorm == "local" and ctx.facts.layout.stats:
            key = f"method.{self.name}.bn"
            raise CompositionError(
                f"{key} needs BatchNorm statistics on the server: set model.batchnorm = 'mean', or {key} = 0"
            )
        return {}

    def phases(self) -> tuple[Phase, ...]:
        """Images are made after every task but the last, if clients distil."""
        if not self.distils:
            return ()
        return (
            Phase(
                SYNTHESIS,
                Cohort.SERVER,
                END,
                repeat=self.rounds,
                in_last_round=False,
                update=self._synthesise,
                measure=self._progress,
            ),
        )

    def _synthesise(self, server: State, reduced: Tree, ctx: Context) -> Tree:
        """One synthesis round; after the last one the pool and the teacher are frozen."""
        own = server.get(self.name, {})
        synthesizer, teacher = self.synthesizer(ctx, server), server[MODEL]
        kept = {key: value for key, value in own.items() if key not in ("teacher", "since", "tasks", "pool", "work")}
        if ctx.repeat == 0:
            empty = torch.zeros((0, *ctx.facts.input_shape), dtype=torch.uint8)
            own = {"pool": empty, "work": synthesizer.begin(teacher, ctx)}
        tasks = (ctx.current_task or 0) + 1
        classes = mask_of(ctx, classes_of(ctx, range(tasks)))
        made = synthesizer.round(teacher, own["work"], own["pool"], classes, self.turn(ctx.repeat), ctx)
        if ctx.repeat + 1 < self.rounds:
            return {**kept, **made}
        made = {"pool": made["pool"][: self.n_syn].clone(), "teacher": dict(teacher)}
        return {**kept, **made, "since": ctx.round, "tasks": tasks}

    def broadcast(self, server: State, ctx: Context) -> dict[str, Any]:
        own = server.get(self.name, {})
        if "teacher" not in own:
            return {}
        return {key: Once(own["since"], own[key]) for key in ("teacher", "pool")}

    def _progress(self, server: State, reduced: Tree, ctx: Context) -> dict[str, float]:
        """The loss of the round's best batch, and the number of images so far."""
        own = server[self.name]
        return {"loss": float(own["work"]["loss"]), "images": float(len(own["pool"]))} if "work" in own else {}

    def sample(self, server: State, count: int, ctx: Context) -> tuple[Tensor, Tensor]:
        """The next `count` images of the pool, fewer at its end, and the frozen model's labels for them."""
        own, trainer = server.get(self.name, {}), ctx.train
        if "tasks" not in own:
            raise ValueError("no images were made yet: the first ones are, at the end of the first task")
        images = own["pool"][ctx.repeat * count : (ctx.repeat + 1) * count].to(trainer.device)
        known = mask_of(ctx, classes_of(ctx, range(own["tasks"]))).to(trainer.device)
        return trainer.stream.inputs(images), among(trainer.outputs(own["teacher"], images), known).argmax(1)

    # on the client -------------------------------------------------------------------------------------------------
    def start(self, client: State, message: Message, model: Model, data: Data, ctx: Context) -> tuple[Tree, Model]:
        pool = message.get(self.name, {}).get("pool")
        return {**client.get(self.name, {}), "host": {"pool": 0 if pool is None else len(pool)}}, model

    def plan(self, client: State, schedule: Schedule, plans: Mapping[str, Tables], ctx: Context) -> tuple[Tree, Tables]:
        """Masks of the old and the new classes, except in the first task; the images of each step."""
        size = client[self.name]["host"]["pool"]
        own: Tree = {"host": {"pool": size}}
        if ctx.current_task:
            tasks = {"old": tasks_before(ctx), "new": [ctx.current_task]}
            own |= {name: mask_of(ctx, classes_of(ctx, which)) for name, which in tasks.items()}
        return own, self._images(size, schedule, ctx) if size else {}

    def _images(self, size: int, schedule: Schedule, ctx: Context) -> Tables:
        rows = cycled(size, schedule.steps, min(self.batch, size), ctx.rng("synthetic/rows"))
        tables = {"rows": _table(rows)}
        draws = draw_geometry(ctx.train.stream, ctx.rng("synthetic/augment"), rows.size)
        if draws is not None:
            tables["augment"] = _table(draws.reshape(*rows.shape, *draws.shape[1:]))
        return tables

    def batches(self, step: Step) -> dict[str, Batch]:
        pool, rows = step.message.get(self.name, {}).get("pool"), step.rows.get(self.name, {})
        if pool is None:
            return {}
        x = pool.index_select(0, rows["rows"])
        if "augment" in rows:
            x = step.ctx.train.stream.augment(x, rows["augment"])
        return {self.name: Batch(x, torch.zeros_like(rows["rows"]))}  # without labels

    def labels_loss(self, step: Step) -> Tensor:
        """Cross-entropy of the real minibatch, from the second task on among the new classes only."""
        new = step.state[self.name].get("new")
        if new is None:
            return step.task_loss(step.all_outputs, step.all_y)
        return step.task_loss(among(step.outputs, new), step.y)

    def distillation(self, step: Step, teacher: Tensor) -> Tensor:
        """- mean_i sum_c softmax(t_i / T)_c log softmax(s_i / T)_c over the old classes c; no factor T^2."""
        old, student = step.state[self.name]["old"], step.batches[self.name].outputs
        assert student is not None
        return soft_cross_entropy(among(student, old), among(teacher, old), self.t_kd)


def _table(values: np.ndarray) -> Table:
    return Table(values.astype(np.int64), np.full(len(values), values.shape[1], dtype=np.int64))
