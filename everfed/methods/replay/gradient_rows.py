"""Gradients of a client's single samples, of all layers or the last, projected or not; and their features."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from everfed.core import random
from everfed.core.legacy import Context, Model
from everfed.methods.common.checks import at_least, one_of, positive
from everfed.methods.common.per_sample import constants
from everfed.methods.replay.random_projection import RandomProjection
from everfed.methods.replay.sample_gradients import last_layer, sample_gradient_norms, sample_gradients
from everfed.naming import with_options

LAYERS = ("all", "last")


@dataclass(frozen=True)
class GradientOptions:
    """How policies compute gradients of samples.

    layers: differentiate "all" parameters, or those of the "last" layer. projection: project every gradient to so
    many dimensions at random, the same at all clients (0: not at all); what is sent has that length. memory: GiB that
    gradients may take (twice that where there are draws). draws: mean over so many drawn augmentations of each sample,
    such as masks of a language model, the same in all exchanges of a round (0: of the sample as it is stored).
    """

    layers: str = "all"
    projection: int = 0
    memory: float = 1.0
    draws: int = 0

    def __post_init__(self) -> None:
        one_of(self, layers=LAYERS)
        at_least(self, 0, "projection", "draws")
        positive(self, "memory")

    @property
    def limit(self) -> int:
        """Bytes that gradients may take."""
        return int(self.memory * 2**30)

    @staticmethod
    def of(value: Mapping[str, Any] | GradientOptions) -> GradientOptions:
        """From a table of options. Raises ValueError, which names the key."""
        return value if isinstance(value, GradientOptions) else with_options(GradientOptions, value, "gradients")


def gradients_at(ctx: Context, model: Model, x: Tensor, y: Tensor, options: GradientOptions) -> Tensor:
    """(n, d) gradients of the n single-sample task losses at `model`, in eval mode; samples in storage form."""
    ctx.train.replica.load(model)
    samples = _drawn(ctx, x, y, options.draws)
    total = gradients_here(ctx, *next(samples), options)
    for more in samples:
        total += gradients_here(ctx, *more, options)
    return total.div_(options.draws) if options.draws > 1 else total


def _drawn(ctx: Context, x: Tensor, y: Tensor, draws: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The samples under `draws` augmentations; as they are where there are none."""
    stream = ctx.train.stream
    # not by phase or repeat: a client solves for the same gradients in every exchange
    rng = random.generator(ctx.seed, "gradient draws", ctx.round, ctx.client)
    for _ in range(max(1, draws)):
        drawn = stream.draw_augmentation(rng, len(x)) if draws else None
        yield (x, y) if drawn is None else stream.augment_samples(x, y, torch.from_numpy(drawn).to(x.device))


def gradients_here(ctx: Context, x: Tensor, y: Tensor, options: GradientOptions) -> Tensor:
    """The same at the parameters that the replica holds now, such as those of the current training step."""
    trainer = ctx.train
    params = trainer.replica.layout.named(trainer.replica.params)  # float32, whatever the module computes in
    # one projection for all clients of a run, in all rounds: their sums are added up
    seed = random.key(ctx.seed, "gradient projection")
    return sample_gradients(
        trainer.replica.module,
        params,
        constants(trainer.replica.module),
        trainer.stream.inputs(x.to(trainer.device)),
        y.to(trainer.device),
        trainer.task_loss(ctx),
        only=_names(ctx, params, options.layers),
        projection=RandomProjection(options.projection, seed) if options.projection else None,
        memory=options.limit,
    )


def norms_at(ctx: Context, model: Model, x: Tensor, y: Tensor, memory: int) -> Tensor:
    """(n,) lengths of the full gradients of the single-sample task losses at `model`, in eval mode."""
    trainer = ctx.train
    trainer.replica.load(model)
    return sample_gradient_norms(
        trainer.replica.module,
        trainer.replica.layout.named(trainer.replica.params),
        constants(trainer.replica.module),
        trainer.stream.inputs(x.to(trainer.device)),
        y.to(trainer.device),
        trainer.task_loss(ctx),
        memory=memory,
    )


def _names(ctx: Context, params: dict[str, Tensor], layers: str) -> Sequence[str] | None:
    """The parameters to differentiate; personal ones never, since what comes of it may be sent."""
    layout = ctx.facts.layout
    shared = [entry.name for entry in layout.params if entry.start < layout.shared]
    if layers == "last":
        return last_layer({name: params[name] for name in shared})
    return None if len(shared) == len(params) else shared


def features_at(ctx: Context, model: Model, x: Tensor, batch: int = 1000) -> Tensor:
    """(n, D) what the last linear layer is fed with for each sample, float32, in eval mode."""
    trainer = ctx.train
    trainer.replica.load(model)
    module = trainer.replica.module
    linear = [layer for layer in module.modules() if isinstance(layer, torch.nn.Linear)]
    if not linear:
        raise ValueError("herding needs a network with a linear layer: what that layer is fed with are the features")
    caught: list[Tensor] = []
    handle = linear[-1].register_forward_pre_hook(lambda _, fed: caught.append(fed[0].detach().flatten(1).float()))
    module.eval()
    try:
        with torch.no_grad(), torch.autocast(trainer.device.type, torch.bfloat16, trainer.precision == "bf16"):
            for part in x.split(batch):
                module(trainer.stream.inputs(part.to(trainer.device)))
    finally:
        handle.remove()
    return torch.cat(caught) if caught else torch.zeros(0, linear[-1].in_features)
