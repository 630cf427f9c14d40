"""FedCIL: generative replay by auxiliary-classifier GANs, consolidated on the server (Qi et al., ICLR 2023).

Every client trains a generator G and a discriminator, whose class head is the classifier, on its real data (x, y) and
on what its own generator of the previous task's end replays, (x', y'):

    A(x, y) = BCE(d(x), 1) + NLL(p(.|x), y) + BCE(d(G(z, c)), 0) + NLL(p(.|G(z, c)), c)
    L_D     = A(x, y) in the first task, then (A(x, y) + A(x', y')) / 2;  plus consistency with the global generator G_s
    L_G     = BCE(d(G(z, c)), 1) + NLL(p(.|G(z, c)), c)

    C1 = KL(p(.|G_s(z, y)) || p(.|x)),  C2 = KL(p(.|G_s(z, c)) || p(.|G(z', c))),  C3 = NLL(p(.|G_s(z, c)), c)

The server averages whole GANs and then trains the average for a moment on a class-balanced mix of images of all the
clients' generators, which it must therefore see one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from everfed.core import random
from everfed.core.companion import first_vectors
from everfed.core.context import Context
from everfed.core.data import Data
from everfed.core.extras import Extras, registered
from everfed.core.layout import Layout
from everfed.core.message import MODEL
from everfed.core.optimizer import Optimizer
from everfed.core.part import BOUNDARIES, Model, Part, State, Tables
from everfed.core.phase import TRAIN, Cohort, Phase
from everfed.core.reduce import Collect, Mean, Reducer
from everfed.core.schedule import Schedule, Table
from everfed.core.step import Step
from everfed.core.substep import Substep
from everfed.core.trainer import Fitted
from everfed.core.tree import Tree
from everfed.models.acgan import KINDS, ACGANBlueprint
from everfed.parts.generative.acgan import ACGAN, GENERATOR, live_generator
from everfed.parts.generative.consolidation import LOSSES, Consolidation
from everfed.parts.memory.transition import competing
from everfed.parts.shared.features import head_weight, span, through_head
from everfed.parts.shared.teacher import mask_of

CHOICES = {"generator": ("auto", *KINDS), "head": ("seen", "full"), "weighting": ("samples", "uniform")}


@dataclass(frozen=True)
class FedCIL(Part):
    """consistency_real, consistency_fake, consistency_label: weights of C1, C2, C3 (0 in the released code).
    server_steps, server_batch: of consolidation in every round, `server_chunk` steps between two checkpoints.
    noise: entries of z beside the one-hot label. generator: "wide" (grey images in the release), "slim" (colour), or
    "auto", by the images. width: of its first map; 0 for its own. generator_lr: of an Adam of the generator's own, with
    the betas of the release; 0 leaves it to the run's optimiser. head: class losses are over the classes "seen" so
    far, as if the head grew, or over its "full" width (released code). weighting: clients weigh by "samples", or
    "uniform"ly.
    """

    consistency_real: float = 1.0
    consistency_fake: float = 1.0
    consistency_label: float = 1.0
    server_steps: int = 100
    server_batch: int = 32
    server_chunk: int = 25
    noise: int = 100
    generator: str = "auto"
    width: int = 0
    generator_lr: float = 0.0
    head: str = "seen"
    weighting: str = "samples"

    name: ClassVar[str] = "fedcil"
    aggregates: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({BOUNDARIES})

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {getattr(self, name)!r}")
        for name in (
            *("consistency_real", "consistency_fake", "consistency_label"),
            *("server_steps", "noise", "width", "generator_lr"),
        ):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0; got {getattr(self, name)}")
        for name in ("server_batch", "server_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")

    # the networks --------------------------------------------------------------------------------------------------
    def blueprint(self, ctx: Context) -> ACGANBlueprint:
        shape = ctx.facts.input_shape
        kind = ("wide" if shape[0] == 1 else "slim") if self.generator == "auto" else self.generator
        return ACGANBlueprint(shape, ctx.facts.classes + self.noise, kind, self.width)

    def extra_parameters(self, ctx: Context) -> dict[str, Tensor]:
        """The head that tells real from fake, then the generator: last, so that each lies together in the vector."""
        inputs = head_weight(ctx.facts.layout).shape[1]
        rng = random.generator(ctx.seed, self.name, "adversary")
        drawn = rng.uniform(-(inputs**-0.5), inputs**-0.5, inputs + 1).astype(np.float32)
        blueprint = self.blueprint(ctx)
        first = first_vectors(blueprint, random.key(ctx.seed, self.name, GENERATOR))["params"]
        with torch.device("meta"):
            names = Layout.of(blueprint.build()).named(first)
        made = {f"{GENERATOR}.{name}": value for name, value in names.items()}
        adversary = {
            "adversary.weight": torch.from_numpy(drawn[None, :-1]),
            "adversary.bias": torch.from_numpy(drawn[-1:]),
        }
        return {**adversary, **made}

    def forward(self, module: nn.Module, x: Tensor, own: Tree, message: Tree) -> Tensor:
        """Class logits; in training the logit of "real" beside them."""
        outputs, features = through_head(module, x)
        if not module.training:
            return outputs
        extras = cast(Extras, module.extras)[self.name]
        real = nn.functional.linear(features, extras["adversary.weight"], extras["adversary.bias"])
        return torch.cat([outputs, real], dim=1)

    def substeps(self, layout: Layout) -> tuple[Substep, ...]:
        prefix = registered(self.name, f"{GENERATOR}.", personal=False)
        own = Optimizer("adam", lr=self.generator_lr, beta1=0.5, beta2=0.99) if self.generator_lr else None
        return (Substep(GENERATOR, lambda name: name.startswith(prefix), own, alone=True, after=True),)

    def generator_span(self, layout: Layout) -> slice:
        """Where the generator lies in the parameter vector."""
        prefix = registered(self.name, f"{GENERATOR}.", personal=False)
        return span(entry for entry in layout.params if entry.name.startswith(prefix))

    # a client's training -------------------------------------------------------------------------------------------
    def start(
        self, client: State, message: dict[str, Tree], model: Model, data: Data, ctx: Context
    ) -> tuple[Tree, Model]:
        """At a change of task the generator kept last becomes the one that replays, for the labels known till then.

        host: the task, the labels of it and of the tasks before, and how often the client has trained in it."""
        own = client.get(self.name, {})
        none = torch.zeros(0, dtype=torch.int64)
        host = own.get("host", {"task": -1, "current": none, "past": none, "trained": 0})
        labels = torch.unique(data.y).cpu()
        if host["task"] != ctx.current_task:
            past = torch.unique(torch.cat([host["past"], host["current"]]))
            host = {"task": ctx.current_task, "current": labels, "past": past, "trained": 0}
            own = {"old": own["latest"], "latest": own["latest"]} if "latest" in own else {}
        return {**own, "host": {**host, "current": torch.unique(torch.cat([host["current"], labels]))}}, model

    def plan(self, client: State, schedule: Schedule, plans: Mapping[str, Tables], ctx: Context) -> tuple[Tree, Tables]:
        """The labels of every generated batch. old: replayed. known: for consistency, from a task's second round on."""
        own, rng = client[self.name], ctx.rng(self.name)
        past, current = own["host"]["past"].numpy(), own["host"]["current"].numpy()
        seen = np.union1d(past, current)

        def labels(among: np.ndarray) -> Table:
            return Table.of([rng.choice(among, count) for count in schedule.rows.lengths])

        tables = {"fake": labels(seen), GENERATOR: labels(seen)}
        if "old" in own and len(past):
            tables |= {"old": labels(past), "fake_old": labels(seen)}
        if own["host"]["trained"] and any(self._consistency):
            tables["known"] = labels(competing(ctx).numpy())
        return {**own, **self._competing(ctx)}, tables

    @property
    def _consistency(self) -> tuple[float, float, float]:
        return self.consistency_real, self.consistency_fake, self.consistency_label

    def _competing(self, ctx: Context) -> dict[str, Tensor]:
        """(C,) mask of the class logits that compete."""
        return {"classes": mask_of(ctx, competing(ctx) if self.head == "seen" else torch.arange(ctx.facts.classes))}

    def _gan(self, step: Step) -> ACGAN:
        own = step.state[self.name]
        return ACGAN(step.ctx.train, self.blueprint(step.ctx), own["classes"])

    def objective(self, step: Step) -> Tensor:
        """L_D; the outputs of the real batch carry the logit of "real"."""
        gan, rows, generator = self._gan(step), step.rows[self.name], self._live(step)
        loss = gan.discriminated(step.outputs, step.y, generator, rows["fake"])
        if "old" in rows:
            replayed = gan.fixed_images(step.state[self.name]["old"], rows["old"])
            outputs = step.forward_inputs(replayed)
            loss = 0.5 * loss + 0.5 * gan.discriminated(outputs, rows["old"], generator, rows["fake_old"])
        return loss + self._consistent(step, gan) if "known" in rows else loss

    def _consistent(self, step: Step, gan: ACGAN) -> Tensor:
        """C1, C2 and C3 with their weights; G_s is the generator that came with this round's model."""
        known = step.rows[self.name]["known"]
        shared = step.received[self.generator_span(step.layout)]
        first, second, third = self._consistency
        alike = step.forward_inputs(gan.fixed_images(shared, step.y))
        ours = step.forward_inputs(gan.fixed_images(self._live(step), known))
        theirs = step.forward_inputs(gan.fixed_images(shared, known))
        same = first * gan.apart(step.outputs, alike) + second * gan.apart(ours, theirs)
        return same + third * gan.label_loss(theirs, known)

    def substep(self, step: Step, name: str) -> Tensor:
        """L_G, after the discriminator has moved."""
        return self._gan(step).generated(self._live(step), step.rows[self.name][GENERATOR])

    def _live(self, step: Step) -> dict[str, Tensor]:
        return live_generator(step.replica.module, self.name)

    def reply(self, client: State, fitted: Fitted, data: Data, ctx: Context) -> tuple[Tree, Tree]:
        """The generator is kept, since nobody knows which training is the task's last; labels for consolidation."""
        own, host = client[self.name], client[self.name]["host"]
        kept = {"old": own["old"]} if "old" in own else {}
        kept["latest"] = fitted.model["params"][self.generator_span(ctx.facts.layout)].clone()
        kept["host"] = {**host, "trained": int(host["trained"]) + 1}
        if not self.server_steps:
            return kept, {}
        labels = torch.zeros(ctx.facts.classes, dtype=torch.bool)
        labels[host["current"]] = True
        return kept, {"labels": labels, "samples": fitted.samples}

    # the server ----------------------------------------------------------------------------------------------------
    def reducers(self) -> Mapping[str, Reducer]:
        mean = Mean(weighted=self.weighting == "samples")
        statistics = {"stats": mean, "counters": mean}
        if not self.server_steps:
            return {"params": mean, **statistics}
        return {"params": Collect(), "labels": Collect(), "samples": Collect(), **statistics}

    def upload(self, model: Model, message: dict[str, Tree], ctx: Context) -> Tree:
        return {"params": model["params"]} if ctx.options.batchnorm == "local" else dict(model)

    def aggregate(self, server: State, reduced: Tree, ctx: Context) -> Model:
        """The mean of whole GANs."""
        found: Tree = {k: reduced.get(k) for k in server[MODEL]}
        if isinstance(found["params"], dict):
            mean = Mean(weighted=self.weighting == "samples").start()
            for client, params in found["params"].items():
                mean.add(client, params, float(reduced["samples"][client]))
            found["params"] = mean.result()
        return {k: old if found[k] is None else found[k] for k, old in server[MODEL].items()}

    def phases(self) -> tuple[Phase, ...]:
        if not self.server_steps:
            return ()
        chunks = -(-self.server_steps // self.server_chunk)
        return (Phase("consolidate", owner=self.name, cohort=Cohort.SERVER, repeat=chunks),)

    def update(self, server: State, phase: str, reduced: Tree, ctx: Context) -> Tree:
        own = server.get(self.name, {})
        if phase == TRAIN and self.server_steps and reduced.get("params"):
            return self._take(own, reduced, ctx)
        return self._consolidate(server, own, ctx) if phase == "consolidate" and own.get("now") else own

    def revise(self, server: State, phase: str, model: Model, ctx: Context) -> Model:
        consolidated: Model | None = server.get(self.name, {}).get("consolidated")
        return model if phase != "consolidate" or consolidated is None else consolidated

    def _take(self, own: Tree, reduced: Tree, ctx: Context) -> Tree:
        """now: what clients sent last in this task; old: in earlier ones, with all labels they had then."""
        now, old, moments = dict(own.get("now", {})), dict(own.get("old", {})), own.get("moments", {})
        if own.get("task", ctx.current_task) != ctx.current_task:
            old |= {k: {**v, "labels": v["labels"] | old.get(k, v)["labels"]} for k, v in now.items()}
            now, moments = {}, {}  # optimisers are made anew for every task
        where = self.generator_span(ctx.facts.layout)
        for client, params in reduced["params"].items():
            now[str(client)] = {GENERATOR: params[where].clone(), "labels": reduced["labels"][client]}
        return {"now": now, "old": old, "task": ctx.current_task, "moments": moments}

    def _consolidate(self, server: State, own: Tree, ctx: Context) -> Tree:
        """Some steps of the averaged GAN."""
        steps = min(self.server_chunk, self.server_steps - ctx.repeat * self.server_chunk)
        classes = self._competing(ctx)["classes"]
        given = server[MODEL], own["moments"], own["now"], own["old"]
        model, moments, losses = self._consolidation(ctx).run(*given, classes, steps, ctx)
        told = dict(zip(LOSSES, losses.tolist(), strict=True))
        return {**own, "moments": moments, "consolidated": model, "losses": told}

    def _consolidation(self, ctx: Context) -> Consolidation:
        """The trainer's own, built when it is first asked for."""
        trainer, optimizer, clients = ctx.train, ctx.options.optimizer, ctx.facts.clients

        def make() -> Consolidation:
            gan = ACGAN(trainer, self.blueprint(ctx), self._competing(ctx)["classes"].to(trainer.device))
            return Consolidation(self, gan, optimizer, self.server_batch, self.server_chunk, clients)

        return trainer.made("consolidation", (self, optimizer), make)

    def sample(self, server: State, count: int, ctx: Context) -> tuple[Tensor, Tensor]:
        """Images of the global generator, with the labels that it was asked for: classes so far."""
        trainer, known = ctx.train, self._competing(ctx)["classes"]
        drawn = ctx.rng("sample").choice(competing(ctx).numpy(), count)
        labels = torch.from_numpy(drawn).to(trainer.device)
        trainer.replica.generator.manual_seed(ctx.key("sample"))
        generator = server[MODEL]["params"][self.generator_span(ctx.facts.layout)].to(trainer.device)
        gan = ACGAN(trainer, self.blueprint(ctx), known.to(trainer.device))
        return gan.fixed_images(generator, labels), labels

    def measure(self, server: State, reduced: Tree, ctx: Context) -> dict[str, float]:
        """The mean losses of the server's GAN over the steps since the last checkpoint."""
        return dict(server.get(self.name, {}).get("losses", {})) if ctx.phase == "consolidate" else {}
