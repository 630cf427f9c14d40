"""The base of TARGET and LANDER: after each task the server makes a pool of unlabelled images (`synthesis.py`); clients
of the next task receive it once, with the frozen teacher, and distil on it beside their own data.

A client's step has two forward passes, one for the real minibatch and one for the synthetic, so that each is normalised
with statistics of its own. Every real sample is used once an epoch; the pool is cycled through.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

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
    Part,
    Phase,
    Schedule,
    Server,
    Step,
    Table,
    Tables,
    option,
    overrides,
)
from everfed.methods.common.teacher import among, classes_of, mask_of, soft_cross_entropy, tasks_before
from everfed.methods.generative.student import Lesson, cycled, draw_geometry
from everfed.methods.generative.synthesis import Synthesis, Synthesizer, Turn
from everfed.models.generators import checked

SYNTHESIS = "synthesis"


@dataclass(frozen=True)
class SyntheticReplay(Part):
    t_kd: float = option(2.0, above=0, about="temperature of the clients' distillation")
    batch: int = option(500, at_least=1, about="synthetic images in a client's step")
    n_syn: int = option(8000, at_least=1, about="how many images clients receive, the first ones")
    syn_round: int = option(40, at_least=1, about="synthesis rounds that make images")
    warmup: int = option(20, at_least=0, about="the first synthesis round with the student")
    synth_batch: int = option(256, at_least=2, about="images of a synthesis round; BatchNorm needs two")
    g_steps: int = option(10, at_least=1, about="generator steps in a synthesis round")
    lr_g: float = option(2e-3, at_least=0, about="learning rate of the generator")
    nz: int = option(256, at_least=1, about="length of the input of the generator's trunk")
    bn: float = option(10.0, at_least=0, about="weight of the batch statistics")
    oh: float = option(0.5, at_least=0, about="weight of the labels")
    adv: float = option(1.0, at_least=0, about="weight of the adversary")
    mask: str = option(
        "agree",
        one_of=("agree", "disagree"),
        about="the adversary counts where teacher and student agree (released code) or disagree (TARGET paper)",
    )
    bn_momentum: float = option(0.9, at_least=0, below=1, about="share of earlier rounds in the batch statistics")
    kd_steps: int = option(400, at_least=0, about="the student's steps in a synthesis round")
    kd_batch: int = option(256, at_least=1, about="images of a student's step")
    t_student: float = option(20.0, above=0, about="temperature of the student's distillation")
    lr_student: float = option(0.2, at_least=0, about="the student's learning rate")
    upsamplings: int = option(
        0,
        at_least=0,
        about="doublings of the side in the generator (code: 2); 0: 2 below 64 pixels, 3 below 128, 4 from there",
    )

    def needs(self):
        """One pool serves all clients, so their old classes must be the same."""
        return {BOUNDARIES, TOGETHER, CLASSES, SHARED}

    def check(self, parts, optimizer):
        """The objective is over the new classes only, so other parts may not replay samples."""
        for other in parts:
            if other is not self and overrides(other, "batches"):
                raise CompositionError(f"part {self.name!r} trains on its own synthetic images; remove {other.name!r}")

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
    def synthesizer(self, server: Server) -> Synthesizer:
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
    def init(self, side: Client | Server) -> None:
        """Refuse what cannot work before the first round."""
        if isinstance(side, Client):
            return
        blank = side.facts.blank.x
        if blank.dtype != torch.uint8 or blank.dim() != 4:
            raise CompositionError(
                f"part {self.name!r} synthesises 8-bit images; this stream's samples are "
                f"{str(blank.dtype).removeprefix('torch.')} of shape {tuple(blank.shape[1:])}"
            )
        try:
            checked(side.facts.input_shape, self.upsamplings)
        except ValueError as error:
            raise CompositionError(f"part {self.name!r}: {error}") from error
        if self.bn and side.options.batchnorm == "local" and side.layout.stats:
            key = f"method.{self.name}.bn"
            raise CompositionError(
                f"{key} needs BatchNorm statistics on the server: set model.batchnorm = 'mean', or {key} = 0"
            )

    def phases(self):
        """Images are made after every task but the last, if clients distil."""
        if not self.distils:
            return ()
        make = self._synthesise
        return (Phase(SYNTHESIS, Cohort.SERVER, END, repeat=self.rounds, in_last_round=False, update=make),)

    def _synthesise(self, server: Server) -> None:
        """One synthesis round; after the last one the pool and the teacher are frozen."""
        own, teacher, synthesizer = server.state, server.model, self.synthesizer(server)
        if server.repeat == 0:
            for gone in ("teacher", "since", "tasks"):
                own.pop(gone, None)
            own["pool"] = torch.zeros((0, *server.facts.input_shape), dtype=torch.uint8)
            own["work"] = synthesizer.begin(teacher, server)
        tasks = (server.task or 0) + 1
        classes = mask_of(server, classes_of(server, range(tasks)))
        own |= synthesizer.round(teacher, own["work"], own["pool"], classes, self.turn(server.repeat), server)
        if server.repeat + 1 == self.rounds:
            del own["work"]
            own |= {"pool": own["pool"][: self.n_syn].clone(), "teacher": dict(teacher)}
            own |= {"since": server.round, "tasks": tasks}
        else:  # how far it is: the loss of the round's best batch, and the number of images so far
            server.report("loss", float(own["work"]["loss"]))
            server.report("images", float(len(own["pool"])))

    def broadcast(self, server: Server):
        own = server.state
        return {key: Cached(own["since"], own[key]) for key in ("teacher", "pool")} if "teacher" in own else {}

    def sample(self, server: Server, count: int) -> tuple[Tensor, Tensor]:
        """The next `count` images of the pool, fewer at its end, and the frozen model's labels for them."""
        own, trainer = server.state, server.trainer
        if "tasks" not in own:
            raise ValueError("no images were made yet: the first ones are, at the end of the first task")
        images = own["pool"][server.repeat * count : (server.repeat + 1) * count].to(trainer.device)
        known = mask_of(server, classes_of(server, range(own["tasks"]))).to(trainer.device)
        return trainer.stream.inputs(images), among(trainer.outputs(own["teacher"], images), known).argmax(1)

    # on the client -------------------------------------------------------------------------------------------------
    def plan(self, client: Client, schedule: Schedule):
        """Masks of the old and the new classes, except in the first task; the images of each step."""
        pool, task = client.message.get("pool"), client.task
        size = 0 if pool is None else len(pool)
        client.state = {"host": {"pool": size}}
        if task:
            for name, tasks in (("old", tasks_before(client)), ("new", [task])):
                client.state[name] = mask_of(client, classes_of(client, tasks))
        return self._images(size, schedule, client) if size else {}

    def _images(self, size: int, schedule: Schedule, client: Client) -> Tables:
        rows = cycled(size, schedule.steps, min(self.batch, size), client.rng("synthetic/rows"))
        tables = {"rows": _table(rows)}
        draws = draw_geometry(client.trainer.stream, client.rng("synthetic/augment"), rows.size)
        if draws is not None:
            tables["augment"] = _table(draws.reshape(*rows.shape, *draws.shape[1:]))
        return tables

    def batches(self, step: Step) -> dict[str, Batch]:
        pool, rows = step.message.get("pool"), step.rows
        if pool is None:
            return {}
        x = pool.index_select(0, rows["rows"])
        if "augment" in rows:
            x = step.trainer.stream.augment(x, rows["augment"])
        return {"images": Batch(x, torch.zeros_like(rows["rows"]))}  # without labels

    def labels_loss(self, step: Step) -> Tensor:
        """Cross-entropy of the real minibatch, from the second task on among the new classes only."""
        new = step.state.get("new")
        if new is None:
            return step.task_loss(step.all_outputs, step.all_y)
        return step.task_loss(among(step.outputs, new), step.y)

    def distillation(self, step: Step, teacher: Tensor) -> Tensor:
        """- mean_i sum_c softmax(t_i / T)_c log softmax(s_i / T)_c over the old classes c; no factor T^2."""
        old, student = step.state["old"], step.batches["images"].outputs
        assert student is not None
        return soft_cross_entropy(among(student, old), among(teacher, old), self.t_kd)


def _table(values: np.ndarray) -> Table:
    return Table(values.astype(np.int64), np.full(len(values), values.shape[1], dtype=np.int64))
