"""FedCIL's server: a few training steps of the averaged GAN on images of all the clients' generators.

In every step each client's generator makes images of that client's current labels. A class-balanced batch of them
replaces real ones; from the second task on, a second batch comes from the generators and labels of earlier tasks.

The images are drawn on the host beforehand, so that only the generators of drawn images run, and the steps are a loop
over tensors at fixed addresses, which an engine may capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from everfed.core.legacy import Context, Model, Optimizer, Part, Tree
from everfed.core.step import Moments, Substeps
from everfed.methods.generative.acgan import ACGAN, GENERATOR, balanced, live_generator

LOSSES = ("discriminator", "generator")
NOW, OLD = "now", "old"
Clients = Mapping[str, Tree]  # {client: {generator (G,), labels (C,) bool}}
Tables = dict[str, np.ndarray]  # name -> (steps, ...) whole numbers


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
        self, model: Model, moments: Moments, now: Clients, old: Clients, classes: Tensor, steps: int, ctx: Context
    ) -> tuple[Model, Moments, Tensor]:
        """(model, moments, mean of LOSSES) after some steps; the arguments stay as they are. now, old: the generators
        of this task and of earlier ones. moments: empty at first. classes: (C,) mask of those that compete."""
        replica = self.gan.trainer.replica
        replica.load(model)
        replica.generator.manual_seed(ctx.key("consolidate"))
        replica.module.train()
        first = moments or self.substeps.first_moments(self.optimizer, replica.params)
        for name, place in self.moments.items():
            place.copy_(first[name])
        self._load(now, old, steps, ctx)
        self.gan.classes.copy_(classes)
        self.rate.fill_(self.optimizer.rate(ctx.round % ctx.facts.rounds_per_task, ctx.facts.rounds_per_task))
        self._loop(bool(old))(steps)
        return replica.model(), {k: v.clone() for k, v in self.moments.items()}, self.sums / max(steps, 1)

    def _load(self, now: Clients, old: Clients, steps: int, ctx: Context) -> None:
        """Draw the images of all steps, and copy the generators to the device."""
        rng, seen = ctx.rng("consolidate"), labels_of([*now.values(), *old.values()])
        drawn: Tables = {GENERATOR: rng.choice(seen, (steps, self.batch))}
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

    def mixes(self, clients: Clients, steps: int, rng: np.random.Generator) -> Tables:
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
