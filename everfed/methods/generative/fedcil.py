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

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from everfed.core import random
from everfed.core.layout import Extras, registered
from everfed.core.replica import initial_weights
from everfed.method import (
    BOUNDARIES,
    CLASSES,
    AddsParameters,
    Aggregator,
    Client,
    Cohort,
    Collect,
    Facts,
    Layout,
    Mean,
    Model,
    Optimizer,
    Phase,
    Schedule,
    Server,
    Step,
    Substep,
    Table,
    Tells,
    Tree,
    option,
)
from everfed.methods.common.layers import head_weight, span, through_head
from everfed.methods.common.teacher import competing, mask_of
from everfed.methods.generative.acgan import ACGAN, GENERATOR, LOSSES, Consolidation, labels_of, live_generator
from everfed.models.acgan import KINDS, ACGANBlueprint


@dataclass(frozen=True)
class FedCIL(AddsParameters, Aggregator):
    consistency_real: float = option(1.0, at_least=0, about="weight of C1 (0 in the released code)")
    consistency_fake: float = option(1.0, at_least=0, about="weight of C2 (0 in the released code)")
    consistency_label: float = option(1.0, at_least=0, about="weight of C3 (0 in the released code)")
    server_steps: int = option(100, at_least=0, about="steps of consolidation in every round; 0: plain averaging")
    server_batch: int = option(32, at_least=1, about="images of every client and of a mix in a step of the server")
    server_chunk: int = option(25, at_least=1, about="steps of the server between two checkpoints")
    noise: int = option(100, at_least=0, about="entries of z beside the one-hot label")
    generator: str = option(
        "auto",
        one_of=("auto", *KINDS),
        about="wide (grey images in the release), slim (colour), or auto, by the images",
    )
    width: int = option(0, at_least=0, about="channels of the generator's first map; 0: the kind's own, 512 or 384")
    generator_lr: float = option(
        0.0,
        at_least=0,
        about="of the generator's own Adam, with the release's betas; 0: the run's optimiser, which should be Adam",
    )
    head: str = option(
        "seen",
        one_of=("seen", "full"),
        about="class losses are over the classes seen so far, as if the head grew, or over the full head (code)",
    )
    weighting: str = option("samples", one_of=("samples", "uniform"), about="of clients in the mean")

    name = "fedcil"

    def needs(self):
        return {BOUNDARIES, CLASSES}

    # the networks --------------------------------------------------------------------------------------------------
    def blueprint(self, facts: Facts) -> ACGANBlueprint:
        shape = facts.input_shape
        kind = ("wide" if shape[0] == 1 else "slim") if self.generator == "auto" else self.generator
        return ACGANBlueprint(shape, facts.classes + self.noise, kind, self.width)

    def parameters(self, server: Server) -> dict[str, Tensor]:
        """The real-or-fake head, then the generator: last, so that each network is one slice of the vector."""
        inputs = head_weight(server.layout).shape[1]
        rng = random.generator(server.seed, self.name, "adversary")
        drawn = rng.uniform(-(inputs**-0.5), inputs**-0.5, inputs + 1).astype(np.float32)
        blueprint = self.blueprint(server.facts)
        first = initial_weights(blueprint, random.key(server.seed, self.name, GENERATOR))["params"]
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
        own = Optimizer("adam", lr=self.generator_lr, beta1=0.5, beta2=0.99) if self.generator_lr else None
        return (Substep(GENERATOR, self._generates, self._generator_loss, own, alone=True, after=True),)

    def _generates(self, parameter: str) -> bool:
        """Is it one of the generator's?"""
        return parameter.startswith(registered(self.name, f"{GENERATOR}.", personal=False))

    def generator_span(self, layout: Layout) -> slice:
        """The generator's slice of the parameter vector."""
        return span(entry for entry in layout.params if self._generates(entry.name))

    # a client's training -------------------------------------------------------------------------------------------
    def start(self, client: Client) -> None:
        """At a change of task the latest generator becomes the one that replays, for the labels seen until then.

        host: the task, its labels, those of earlier tasks, and how often the client has trained in it."""
        none = torch.zeros(0, dtype=torch.int64)
        host = client.state.get("host", {"task": -1, "current": none, "past": none, "trained": 0})
        labels = torch.unique(client.data.y).cpu()
        if host["task"] != client.task:
            past = torch.unique(torch.cat([host["past"], host["current"]]))
            host = {"task": client.task, "current": labels, "past": past, "trained": 0}
            latest = client.state.get("latest")
            client.state = {} if latest is None else {"old": latest, "latest": latest}
        client.state["host"] = {**host, "current": torch.unique(torch.cat([host["current"], labels]))}

    def plan(self, client: Client, schedule: Schedule):
        """The labels of every generated batch. old: replayed. known: for consistency, from a task's second round on."""
        own, rng = client.state, client.rng(self.name)
        past, current = own["host"]["past"].numpy(), own["host"]["current"].numpy()
        seen = np.union1d(past, current)

        def labels(among: np.ndarray) -> Table:
            return Table.of([rng.choice(among, count) for count in schedule.rows.lengths])

        tables = {"fake": labels(seen), GENERATOR: labels(seen)}
        if "old" in own and len(past):
            tables |= {"old": labels(past), "fake_old": labels(seen)}
        if own["host"]["trained"] and any(self._consistency):
            tables["known"] = labels(competing(client).numpy())
        own["classes"] = self._competing(client)
        return tables

    @property
    def _consistency(self) -> tuple[float, float, float]:
        return self.consistency_real, self.consistency_fake, self.consistency_label

    def _competing(self, side: Client | Server) -> Tensor:
        """(C,) mask of the class logits that compete."""
        everything = torch.arange(side.facts.classes)
        return mask_of(side, competing(side) if self.head == "seen" else everything)

    def _gan(self, step: Step) -> ACGAN:
        return ACGAN(step.trainer, self.blueprint(step.facts), step.state["classes"])

    def objective(self, step: Step) -> Tensor:
        """L_D; the outputs of the real batch carry the logit of "real"."""
        gan, rows, generator = self._gan(step), step.rows, self._live(step)
        loss = gan.discriminated(step.outputs, step.y, generator, rows["fake"])
        if "old" in rows:
            replayed = gan.fixed_images(step.state["old"], rows["old"])
            outputs = gan.outputs(replayed)
            loss = 0.5 * loss + 0.5 * gan.discriminated(outputs, rows["old"], generator, rows["fake_old"])
        return loss + self._consistent(step, gan) if "known" in rows else loss

    def _consistent(self, step: Step, gan: ACGAN) -> Tensor:
        """C1, C2 and C3 with their weights; G_s is the generator that came with this round's model."""
        known = step.rows["known"]
        shared = step.received[self.generator_span(step.layout)]
        first, second, third = self._consistency
        alike = gan.outputs(gan.fixed_images(shared, step.y))
        ours = gan.outputs(gan.fixed_images(self._live(step), known))
        theirs = gan.outputs(gan.fixed_images(shared, known))
        same = first * gan.apart(step.outputs, alike) + second * gan.apart(ours, theirs)
        return same + third * gan.label_loss(theirs, known)

    def _generator_loss(self, step: Step) -> Tensor:
        """L_G, after the discriminator's step."""
        return self._gan(step).generated(self._live(step), step.rows[GENERATOR])

    def _live(self, step: Step) -> dict[str, Tensor]:
        return live_generator(step.module, self.name)

    def reply(self, client: Client):
        """Keeps the generator, since a client cannot know which training is the task's last; sends its labels."""
        host, old = client.state["host"], client.state.get("old")
        latest = client.model["params"][self.generator_span(client.layout)].clone()
        kept = {"latest": latest, "host": {**host, "trained": int(host["trained"]) + 1}}
        client.state = kept if old is None else {"old": old, **kept}
        if not self.server_steps:
            return {}
        return {"labels": mask_of(client, host["current"]), "samples": client.fitted.samples}

    # the server ----------------------------------------------------------------------------------------------------
    @property
    def _mean(self) -> Mean:
        return Mean(weighted=self.weighting == "samples")

    def reducers(self):
        statistics = {"stats": self._mean, "counters": self._mean}
        if not self.server_steps:
            return {"params": self._mean, **statistics}
        own = {"labels": Collect(tells=Tells.COUNTS), "samples": Collect(tells=Tells.AMOUNT)}
        return {"params": Collect(), **own, **statistics}

    def aggregate(self, server: Server) -> Model:
        """The mean of whole GANs."""
        model, sent = dict(super().aggregate(server)), server.reduced.get("params")
        if isinstance(sent, dict):  # by client
            mean = self._mean.start()
            for client, params in sent.items():
                mean.add(client, params, float(server.reduced["samples"][client]))
            found = mean.result()
            model["params"] = server.model["params"] if found is None else found
        return model

    def phases(self):
        chunks = -(-self.server_steps // self.server_chunk)
        return (Phase("consolidate", Cohort.SERVER, repeat=chunks, update=self._consolidate),) if chunks else ()

    def update(self, server: Server) -> None:
        """now: the clients' latest generators and labels in this task; old: in earlier ones, with all their labels."""
        if not self.server_steps or not server.reduced.get("params"):
            return
        own = server.state
        now, old, moments = own.get("now", {}), own.get("old", {}), own.get("moments", {})
        if own.get("task", server.task) != server.task:
            old |= {k: {**v, "labels": v["labels"] | old.get(k, v)["labels"]} for k, v in now.items()}
            now, moments = {}, {}  # every task begins with fresh moments
        where = self.generator_span(server.layout)
        for client, params in server.reduced["params"].items():
            now[str(client)] = {GENERATOR: params[where].clone(), "labels": server.reduced["labels"][client]}
        server.state = {"now": now, "old": old, "task": server.task, "moments": moments}

    def _consolidate(self, server: Server) -> None:
        """One chunk of steps of the averaged GAN."""
        own = server.state
        if not own.get("now"):
            return
        steps = min(self.server_chunk, self.server_steps - server.repeat * self.server_chunk)
        classes = self._competing(server)
        classes[labels_of([*own["now"].values(), *own["old"].values()])] = True  # clients may be ahead of the server
        given = server.model, own["moments"], own["now"], own["old"], classes
        server.model, own["moments"], losses = self._consolidation(server).run(*given, steps, server)
        own["losses"] = dict(zip(LOSSES, losses.tolist(), strict=True))
        for name, loss in own["losses"].items():
            server.report(name, loss)

    def _consolidation(self, server: Server) -> Consolidation:
        """The trainer's consolidation, built at first use."""
        trainer, optimizer, facts = server.trainer, server.options.optimizer, server.facts

        def make() -> Consolidation:
            gan = ACGAN(trainer, self.blueprint(facts), self._competing(server).to(trainer.device))
            return Consolidation(self, gan, optimizer, self.server_batch, self.server_chunk, facts.clients)

        return trainer.made("consolidation", (self, optimizer), make)

    def sample(self, server: Server, count: int) -> tuple[Tensor, Tensor]:
        """Images of the global generator, with the labels they were made for: classes so far."""
        drawn = server.rng("sample").choice(competing(server).numpy(), count)
        labels = torch.from_numpy(drawn).to(server.device)
        server.trainer.replica.generator.manual_seed(server.key("sample"))
        generator = server.model["params"][self.generator_span(server.layout)].to(server.device)
        gan = ACGAN(server.trainer, self.blueprint(server.facts), self._competing(server).to(server.device))
        return gan.fixed_images(generator, labels), labels
