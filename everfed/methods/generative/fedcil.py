"""FedCIL: generative replay by auxiliary-classifier GANs, consolidated on the server (Qi et al., ICLR 2023).

Every client trains a generator G and a discriminator, whose class head is the classifier, on its real data (x, y) and
on what its own generator of the previous task's end replays, (x', y'):

    A(x, y) = BCE(d(x), 1) + NLL(p(.|x), y) + BCE(d(G(z, c)), 0) + NLL(p(.|G(z, c)), c)
    L_D     = A(x, y) in the first task, then (A(x, y) + A(x', y')) / 2;  plus consistency with the global generator G_s
    L_G     = BCE(d(G(z, c)), 1) + NLL(p(.|G(z, c)), c)

    C1 = KL(p(.|G_s(z, y)) || p(.|x)),  C2 = KL(p(.|G_s(z, c)) || p(.|G(z', c))),  C3 = NLL(p(.|G_s(z, c)), c)

The server averages whole GANs and then trains the average for a few steps on a class-balanced mix of images of all the
clients' generators, which it must therefore see one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from everfed.core import random
from everfed.core.layout import Extras, registered
from everfed.core.legacy import (
    BOUNDARIES,
    CLASSES,
    MODEL,
    AddsParameters,
    Aggregator,
    Cohort,
    Collect,
    Context,
    Data,
    Fitted,
    Layout,
    Mean,
    Message,
    Model,
    Optimizer,
    Phase,
    Reducer,
    Schedule,
    Server,
    Slots,
    State,
    Step,
    Substep,
    Table,
    Tables,
    Tree,
)
from everfed.core.replica import initial_weights
from everfed.methods.common.checks import at_least, one_of
from everfed.methods.common.features import head_weight, span, through_head
from everfed.methods.common.teacher import mask_of
from everfed.methods.generative.acgan import ACGAN, GENERATOR, live_generator
from everfed.methods.generative.consolidation import LOSSES, Consolidation
from everfed.methods.replay.transition import competing
from everfed.models.acgan import KINDS, ACGANBlueprint

CHOICES = {"generator": ("auto", *KINDS), "head": ("seen", "full"), "weighting": ("samples", "uniform")}


@dataclass(frozen=True)
class FedCIL(AddsParameters, Aggregator):
    """consistency_real, consistency_fake, consistency_label: weights of C1, C2, C3 (0 in the released code).
    server_steps, server_batch: of consolidation in every round, `server_chunk` steps between two checkpoints.
    noise: entries of z beside the one-hot label. generator: "wide" (grey images in the release), "slim" (colour), or
    "auto", by the images. width: of its first map; 0 for the kind's own. generator_lr: of a separate Adam for the
    generator, with the betas of the release; 0: the run's optimiser. head: class losses are over the classes "seen" so
    far, as if the head grew, or over its "full" width (released code). weighting: of clients, by "samples" or
    "uniform".
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

    name = "fedcil"
    needs = frozenset({BOUNDARIES, CLASSES})

    def __post_init__(self) -> None:
        one_of(self, **CHOICES)
        at_least(self, 0, "consistency_real", "consistency_fake", "consistency_label")
        at_least(self, 0, "server_steps", "noise", "width", "generator_lr")
        at_least(self, 1, "server_batch", "server_chunk")

    # the networks --------------------------------------------------------------------------------------------------
    def blueprint(self, ctx: Context) -> ACGANBlueprint:
        shape = ctx.facts.input_shape
        kind = ("wide" if shape[0] == 1 else "slim") if self.generator == "auto" else self.generator
        return ACGANBlueprint(shape, ctx.facts.classes + self.noise, kind, self.width)

    def parameters(self, server: Server) -> dict[str, Tensor]:
        """The real-or-fake head, then the generator: last, so that each network is one slice of the vector."""
        ctx = server.context
        inputs = head_weight(ctx.facts.layout).shape[1]
        rng = random.generator(ctx.seed, self.name, "adversary")
        drawn = rng.uniform(-(inputs**-0.5), inputs**-0.5, inputs + 1).astype(np.float32)
        blueprint = self.blueprint(ctx)
        first = initial_weights(blueprint, random.key(ctx.seed, self.name, GENERATOR))["params"]
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
        loss = self._generator_loss
        return (Substep(GENERATOR, lambda name: name.startswith(prefix), loss, own, alone=True, after=True),)

    def generator_span(self, layout: Layout) -> slice:
        """The generator's slice of the parameter vector."""
        prefix = registered(self.name, f"{GENERATOR}.", personal=False)
        return span(entry for entry in layout.params if entry.name.startswith(prefix))

    # a client's training -------------------------------------------------------------------------------------------
    def start(self, client: State, message: Message, model: Model, data: Data, ctx: Context) -> tuple[Tree, Model]:
        """At a change of task the latest generator becomes the one that replays, for the labels seen until then.

        host: the task, its labels, those of earlier tasks, and how often the client has trained in it."""
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
            outputs = gan.outputs(replayed)
            loss = 0.5 * loss + 0.5 * gan.discriminated(outputs, rows["old"], generator, rows["fake_old"])
        return loss + self._consistent(step, gan) if "known" in rows else loss

    def _consistent(self, step: Step, gan: ACGAN) -> Tensor:
        """C1, C2 and C3 with their weights; G_s is the generator that came with this round's model."""
        known = step.rows[self.name]["known"]
        shared = step.received[self.generator_span(step.layout)]
        first, second, third = self._consistency
        alike = gan.outputs(gan.fixed_images(shared, step.y))
        ours = gan.outputs(gan.fixed_images(self._live(step), known))
        theirs = gan.outputs(gan.fixed_images(shared, known))
        same = first * gan.apart(step.outputs, alike) + second * gan.apart(ours, theirs)
        return same + third * gan.label_loss(theirs, known)

    def _generator_loss(self, step: Step) -> Tensor:
        """L_G, after the discriminator's step."""
        return self._gan(step).generated(self._live(step), step.rows[self.name][GENERATOR])

    def _live(self, step: Step) -> dict[str, Tensor]:
        return live_generator(step.replica.module, self.name)

    def reply(self, client: State, message: Message, fitted: Fitted, data: Data, ctx: Context) -> tuple[Tree, Tree]:
        """Keeps the generator, since a client cannot know which training is the task's last; sends its labels."""
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

    def upload(self, model: Model, message: Message, ctx: Context) -> Tree:
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
        work = Phase("consolidate", Cohort.SERVER, repeat=chunks, update_model=self._consolidate, measure=self._losses)
        return (work,)

    def update(self, server: State, reduced: Tree, ctx: Context) -> Slots:
        """now: the clients' latest generators and labels in this task; old: in earlier ones, with all their labels."""
        if not self.server_steps or not reduced.get("params"):
            return None
        own = server.get(self.name, {})
        now, old, moments = dict(own.get("now", {})), dict(own.get("old", {})), own.get("moments", {})
        if own.get("task", ctx.current_task) != ctx.current_task:
            old |= {k: {**v, "labels": v["labels"] | old.get(k, v)["labels"]} for k, v in now.items()}
            now, moments = {}, {}  # every task begins with fresh moments
        where = self.generator_span(ctx.facts.layout)
        for client, params in reduced["params"].items():
            now[str(client)] = {GENERATOR: params[where].clone(), "labels": reduced["labels"][client]}
        return {"now": now, "old": old, "task": ctx.current_task, "moments": moments}

    def _consolidate(self, server: State, model: Model, ctx: Context) -> tuple[Slots, Model]:
        """One chunk of steps of the averaged GAN."""
        own = server.get(self.name, {})
        if not own.get("now"):
            return None, model
        steps = min(self.server_chunk, self.server_steps - ctx.repeat * self.server_chunk)
        given = model, own["moments"], own["now"], own["old"], self._competing(ctx)["classes"]
        model, moments, losses = self._consolidation(ctx).run(*given, steps, ctx)
        return {**own, "moments": moments, "losses": dict(zip(LOSSES, losses.tolist(), strict=True))}, model

    def _losses(self, server: State, reduced: Tree, ctx: Context) -> dict[str, float]:
        """The mean losses of the server's GAN in the last chunk."""
        return dict(server.get(self.name, {}).get("losses", {}))

    def _consolidation(self, ctx: Context) -> Consolidation:
        """The trainer's consolidation, built at first use."""
        trainer, optimizer, clients = ctx.train, ctx.options.optimizer, ctx.facts.clients

        def make() -> Consolidation:
            gan = ACGAN(trainer, self.blueprint(ctx), self._competing(ctx)["classes"].to(trainer.device))
            return Consolidation(self, gan, optimizer, self.server_batch, self.server_chunk, clients)

        return trainer.made("consolidation", (self, optimizer), make)

    def sample(self, server: State, count: int, ctx: Context) -> tuple[Tensor, Tensor]:
        """Images of the global generator, with the labels they were made for: classes so far."""
        trainer, known = ctx.train, self._competing(ctx)["classes"]
        drawn = ctx.rng("sample").choice(competing(ctx).numpy(), count)
        labels = torch.from_numpy(drawn).to(trainer.device)
        trainer.replica.generator.manual_seed(ctx.key("sample"))
        generator = server[MODEL]["params"][self.generator_span(ctx.facts.layout)].to(trainer.device)
        gan = ACGAN(trainer, self.blueprint(ctx), known.to(trainer.device))
        return gan.fixed_images(generator, labels), labels
