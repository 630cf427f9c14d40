"""An auxiliary-classifier GAN on top of a classifier, whose network, with a second head, is the discriminator; and how
FedCIL's server trains it. Outputs of the discriminator are rows (n, C + 1): the class logits, then the logit of "real".

The server takes a few training steps of the averaged GAN on images of all the clients' generators. In every step each
client's generator makes images of that client's current labels. A class-balanced batch of them replaces real ones; from
the second task on, a second batch comes from the generators and labels of earlier tasks. The images are drawn on the
host beforehand, so that only the generators of drawn images run, and the steps are a loop over tensors at fixed
addresses, which an engine may capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from everfed.core.layout import Extras
from everfed.core.step import Moments, Substeps
from everfed.core.trainer import Trainer
from everfed.method import Model, Optimizer, Part, Server, Tree
from everfed.methods.common.layers import in_precision
from everfed.methods.common.teacher import among, divergence
from everfed.models.acgan import ACGANBlueprint

GENERATOR = "generator"  # prefix of the names of its parameters
LOSSES = ("discriminator", "generator")
NOW, OLD = "now", "old"
Clients = Mapping[str, Tree]  # {client: {generator (G,), labels (C,) bool}}
Rows = dict[str, np.ndarray]  # name -> (steps, ...) whole numbers


@dataclass(frozen=True)
class ACGAN:
    """The losses of both networks. classes: (C,) mask of the class logits that compete."""

    trainer: Trainer
    blueprint: ACGANBlueprint
    classes: Tensor

    def images(self, generator: Mapping[str, Tensor] | Tensor, labels: Tensor) -> Tensor:
        """(n, ...) network inputs that a generator makes from labels (n,) and fresh noise. generator: its tensors by
        name, or its parameters as one vector."""
        replica = self.trainer.auxiliary(self.blueprint)
        tensors = replica.layout.named(generator) if isinstance(generator, Tensor) else dict(generator)
        z = noise(labels, self.classes.numel(), self.blueprint.z_dim, self.trainer.replica.generator)
        with in_precision(self.trainer):
            images: Tensor = functional_call(replica.module, tensors, (z,))
        return images.float()

    @torch.no_grad()
    def fixed_images(self, generator: Mapping[str, Tensor] | Tensor, labels: Tensor) -> Tensor:
        """The same without gradients: for steps in which the generator does not move."""
        return self.images(generator, labels)

    def outputs(self, images: Tensor) -> Tensor:
        """(n, C + 1) rows of generated images. BatchNorm's running statistics stay those of real ones, on which the
        classifier is scored: early in training generated ones look like none of them."""
        replica = self.trainer.replica
        statistics, counters = replica.stats.clone(), replica.counters.clone()
        rows = self.trainer.forward_inputs(images)
        # `data`: autograd would refuse a backward pass after a change, though in training it does not use them
        replica.stats.data.copy_(statistics)
        replica.counters.data.copy_(counters)
        return rows

    def logits(self, rows: Tensor) -> Tensor:
        """(n, C) class logits; those of classes that do not compete are masked."""
        return among(rows[:, :-1], self.classes)

    def label_loss(self, rows: Tensor, y: Tensor) -> Tensor:
        """NLL(p(.|x), y)."""
        return functional.cross_entropy(self.logits(rows), y)

    def judged(self, rows: Tensor, y: Tensor, real: bool) -> Tensor:
        """BCE(d(x), real) + NLL(p(.|x), y)."""
        truth = torch.full_like(rows[:, -1], float(real))
        return functional.binary_cross_entropy_with_logits(rows[:, -1], truth) + self.label_loss(rows, y)

    def discriminated(self, real: Tensor, y: Tensor, generator: Mapping[str, Tensor] | Tensor, c: Tensor) -> Tensor:
        """A(x, y): real rows and labels against a fresh fake batch of labels c."""
        fake = self.outputs(self.fixed_images(generator, c))
        return self.judged(real, y, True) + self.judged(fake, c, False)

    def generated(self, generator: Mapping[str, Tensor], c: Tensor) -> Tensor:
        """L_G: the loss of the generator's images when judged as real ones of their labels."""
        return self.judged(self.outputs(self.images(generator, c)), c, True)

    def apart(self, rows: Tensor, target: Tensor) -> Tensor:
        """KL(p(.|target) || p(.|rows)), without a gradient to the target."""
        return divergence(self.logits(rows), self.logits(target).detach(), 1.0)


def noise(labels: Tensor, classes: int, z_dim: int, generator: torch.Generator | None = None) -> Tensor:
    """(n, z_dim) standard normal, the first `classes` entries overwritten by the one-hot label."""
    z = torch.randn((len(labels), z_dim), generator=generator, device=labels.device)
    z[:, :classes] = functional.one_hot(labels, classes).to(z.dtype)
    return z


def balanced(labels: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Positions of `count` samples of a pool: labels uniformly among those present, then one sample of each."""
    drawn = rng.choice(np.unique(labels), count)
    return np.array([rng.choice(np.flatnonzero(labels == label)) for label in drawn], dtype=np.int64)


def live_generator(module: nn.Module, part: str) -> dict[str, Tensor]:
    """The generator's current tensors, which are extra parameters of a part, by their own names."""
    extras, prefix = cast(Extras, module.extras)[part], f"{GENERATOR}."
    return {name.removeprefix(prefix): value for name, value in extras.items() if name.startswith(prefix)}


# on the server --------------------------------------------------------------------------------------------------------
class Consolidation:
    """Consolidation on one trainer: static tensors, and a loop over them for the first task and one for later tasks.

    part: the owner of the GAN. batch: images of a generator, and of a mix. chunk: the most steps of a run. clients: the
    most clients.
    """

    def __init__(self, part: Part, gan: ACGAN, optimizer: Optimizer, batch: int, chunk: int, clients: int) -> None:
        self.part, self.gan, self.optimizer, self.batch = part, gan, optimizer, batch
        replica, self.device = gan.trainer.replica, gan.trainer.device
        self.substeps = Substeps.of((part,), replica.layout)
        self.moments = self.substeps.first_moments(optimizer, replica.params)
        self.generators_at_once = min(batch, clients)
        self.generators = torch.zeros(0, gan.trainer.auxiliary(gan.blueprint).layout.size, device=self.device)
        self.tables = {name: self._whole(chunk, *shape) for name, shape in self._shapes().items()}
        self.index, self.rate = self._whole(1), torch.zeros((), device=self.device)
        self.sums = torch.zeros(len(LOSSES), device=self.device)
        self.loops: dict[bool, Callable[[int], None]] = {}

    def _whole(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=self.device)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of a row of every table. rows: generators that run. labels: of all their images. taken: images of
        the mix, as positions among these; y: their labels. fake: labels of the fake batch."""
        mix = {"rows": (self.generators_at_once,), "labels": (self.generators_at_once, self.batch)}
        mix |= {name: (self.batch,) for name in ("taken", "y", "fake")}
        return {GENERATOR: (self.batch,), **{f"{group}/{k}": v for group in (NOW, OLD) for k, v in mix.items()}}

    def run(
        self, model: Model, moments: Moments, now: Clients, old: Clients, classes: Tensor, steps: int, server: Server
    ) -> tuple[Model, Moments, Tensor]:
        """(model, moments, mean of LOSSES) after some steps; the arguments stay as they are. now, old: the generators
        of this task and of earlier ones. moments: empty at first. classes: (C,) mask of those that compete."""
        replica = self.gan.trainer.replica
        replica.load(model)
        replica.generator.manual_seed(server.key("consolidate"))
        replica.module.train()
        first = moments or self.substeps.first_moments(self.optimizer, replica.params)
        for name, place in self.moments.items():
            place.copy_(first[name])
        self._load(now, old, steps, server)
        self.gan.classes.copy_(classes)
        self.rate.fill_(self.optimizer.rate(server.round % server.facts.rounds_per_task, server.facts.rounds_per_task))
        self._loop(bool(old))(steps)
        return replica.model(), {k: v.clone() for k, v in self.moments.items()}, self.sums / max(steps, 1)

    def _load(self, now: Clients, old: Clients, steps: int, server: Server) -> None:
        """Draw the images of all steps, and copy the generators to the device."""
        rng, seen = server.rng("consolidate"), labels_of([*now.values(), *old.values()])
        drawn: Rows = {GENERATOR: rng.choice(seen, (steps, self.batch))}
        needed: list[Tensor] = []
        for group, clients in ((NOW, now), (OLD, old)):
            if clients:
                mix = self.mixes(clients, steps, rng)
                mix["fake"] = rng.choice(seen, (steps, self.batch))
                mix["rows"] += len(needed)
                needed += [one[GENERATOR] for one in clients.values()]
                drawn |= {f"{group}/{name}": table for name, table in mix.items()}
        for name, table in drawn.items():
            self.tables[name][:steps].copy_(torch.from_numpy(table))
        self._bring(needed)
        self.index.zero_()
        self.sums.zero_()

    def mixes(self, clients: Clients, steps: int, rng: np.random.Generator) -> Rows:
        """Class-balanced batches of the clients' generated images, a row for every step, generators by position."""
        found: dict[str, list[np.ndarray]] = {"rows": [], "labels": [], "taken": [], "y": []}
        own = [labels_of([one]) for one in clients.values()]
        for _ in range(steps):
            labels = np.stack([rng.choice(some, self.batch) for some in own])
            taken = balanced(labels.reshape(-1), self.batch, rng)
            running, position = np.unique(taken // self.batch, return_inverse=True)
            rows = np.zeros(self.generators_at_once, dtype=np.int64)  # unused entries repeat the first generator
            rows[: len(running)] = running
            found["rows"].append(rows)
            found["labels"].append(labels[rows])
            found["taken"].append(position * self.batch + taken % self.batch)
            found["y"].append(labels.reshape(-1)[taken])
        return {name: np.stack(table) for name, table in found.items()}

    def _bring(self, generators: Sequence[Tensor]) -> None:
        """Copy generators to the device; a larger tensor has another address, so the loops are made anew."""
        if len(generators) > len(self.generators):
            self.loops.clear()
            room = max(len(generators), 2 * len(self.generators))
            self.generators = torch.zeros(room, self.generators.shape[1], device=self.device)
        for place, generator in zip(self.generators, generators, strict=False):
            place.copy_(generator, non_blocking=True)

    def _loop(self, past: bool) -> Callable[[int], None]:
        if past not in self.loops:
            trainer = self.gan.trainer
            changed = [*trainer.replica.vectors(), *self.moments.values(), self.index, self.sums]
            groups = (NOW, OLD) if past else (NOW,)
            self.loops[past] = trainer.loop(lambda: self._step(groups), changed, trainer.replica.generator)
        return self.loops[past]

    def _step(self, groups: Iterable[str]) -> None:
        """One step of the discriminator, one of the generator."""
        replica, main = self.gan.trainer.replica, self.substeps.main
        row = {name: table.index_select(0, self.index)[0] for name, table in self.tables.items()}
        judged = self.discriminator_loss(row, groups)
        gradient = replica.gradient(judged, main)
        with torch.no_grad():
            self.optimizer.apply(replica.params[main], gradient, self.moments, self.rate)
            replica.refresh()
        made = self.gan.generated(self._live(), row[GENERATOR])
        for move in self.substeps.after:
            gradient = replica.gradient(made, move.span)
            with torch.no_grad():
                move.apply(replica.params, gradient, self.moments, self.optimizer, self.rate)
                replica.refresh()
        self.sums.add_(torch.stack([judged.detach(), made.detach()]))
        self.index.add_(1)

    def discriminator_loss(self, row: Mapping[str, Tensor], groups: Iterable[str]) -> Tensor:
        """L_D on a mix of current images and, from the second task on, on one of earlier tasks."""
        terms = []
        for group in groups:
            x = self.mixed(row[f"{group}/rows"], row[f"{group}/labels"], row[f"{group}/taken"])
            outputs = self.gan.outputs(x)
            terms.append(self.gan.discriminated(outputs, row[f"{group}/y"], self._live(), row[f"{group}/fake"]))
        return torch.stack(terms).mean()

    def mixed(self, rows: Tensor, labels: Tensor, taken: Tensor) -> Tensor:
        """The images of a mix: of all that these generators make for their labels, the drawn ones."""
        chosen = self.generators.index_select(0, rows)
        images = [self.gan.fixed_images(own, y) for own, y in zip(chosen, labels, strict=True)]
        return torch.cat(images).index_select(0, taken)

    def _live(self) -> dict[str, Tensor]:
        return live_generator(self.gan.trainer.replica.module, self.part.name)


def labels_of(clients: list[Tree]) -> np.ndarray:
    """All labels of some clients, ascending."""
    masks = [one["labels"].cpu() for one in clients]
    return np.asarray(torch.stack(masks).any(0).nonzero().flatten().numpy())
