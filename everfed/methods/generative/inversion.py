"""Training a generator against a frozen classifier, without any data, in chunks of steps (ABD, MFCL, TARGET).

    L_G = w_content L_content + w_div L_div + w_bn L_BN + w_prior L_prior                              (MFCL's Eq. 4)

The generator is in train mode. The classifier is in eval mode and stays as it is; gradients flow through it to the
images and on to the generator. Nothing here waits for the device or branches on data, so all of it can be captured. One
chunk is one repeat of a server phase: its inputs and outputs are vectors, so a run can be resumed between two chunks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from everfed.core.trainer import Trainer
from everfed.method import Model, Optimizer
from everfed.methods.common.layers import constant, in_precision
from everfed.models.fused import channel_moments
from everfed.models.generators import GeneratorBlueprint

TERMS = ("content", "diversity", "statistics", "prior")
VARIANCE_EPS = 1e-8  # added to variances before they are compared
REACH = 2  # pixels on each side that the image prior averages over
SPREAD = 2.0  # of its weights exp(-(d / SPREAD)^2): a Gaussian with a standard deviation of sqrt(2)


# which classes compete ------------------------------------------------------------------------------------------------
def only(outputs: Tensor, classes: Tensor) -> Tensor:
    """Logits (n, C) with minus infinity for all but the classes of a mask (C,): softmax gives these exactly 0, and no
    gradient reaches them."""
    return outputs.masked_fill(~classes, -torch.inf)


def competing(outputs: Tensor) -> Tensor:
    """0-d: the number of classes that compete in logits (n, C)."""
    return (~torch.isneginf(outputs[0])).sum()


# the predictions of images --------------------------------------------------------------------------------------------
def content(outputs: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Cross-entropy of logits (n, C) at a temperature; classes at minus infinity do not take part."""
    return functional.cross_entropy(outputs / temperature, labels)


def diversity(outputs: Tensor) -> Tensor:
    """1 + sum_k p_k log p_k / log q of the mean prediction p over the q classes that compete: 0 when it is uniform, 1
    when all images are predicted as one class, 0 when q = 1."""
    count = competing(outputs)
    scale = count.clamp(min=2).to(outputs.dtype).log()
    return torch.where(count > 1, 1.0 + _mean_log_likelihood(outputs) / scale, 0.0)


def negative_entropy(outputs: Tensor) -> Tensor:
    """(1/q) sum_k p_k log p_k, the form the MFCL paper prints: in [-log(q)/q, 0], lowest when p is uniform."""
    return _mean_log_likelihood(outputs) / competing(outputs)


def _mean_log_likelihood(outputs: Tensor) -> Tensor:
    p = functional.softmax(outputs, dim=1).mean(0)
    return (p * p.clamp(min=torch.finfo(p.dtype).tiny).log()).sum()  # 0 log 0 = 0, with a finite gradient


# the statistics that BatchNorm stores ---------------------------------------------------------------------------------
@dataclass
class Statistics:
    """Mean and biased variance, per channel, of the inputs of each BatchNorm layer, and the layers themselves."""

    layers: list[_BatchNorm]
    seen: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @property
    def stored(self) -> list[tuple[Tensor, Tensor]]:
        """What the layers themselves have."""
        return [(layer.running_mean, layer.running_var) for layer in self.layers]  # type: ignore[misc]

    def divergence(self) -> Tensor:
        """Mean over layers of KL(stored || seen); the network must have some."""
        means, variances = (torch.cat([pair[i] for pair in self.stored]) for i in (0, 1))
        seen_means, seen_variances = (torch.cat([pair[i] for pair in self.seen]) for i in (0, 1))
        by_channel = normal_divergences(means, variances, seen_means, seen_variances)
        # all layers at once: layer by layer they would be hundreds of kernels for a few thousand numbers
        return (by_channel * _shares(tuple(len(mean) for mean, _ in self.seen), by_channel.device)).sum()

    def _note(self, layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if not isinstance(layer, _BatchNorm) or layer.running_mean is None:
            return None  # it stores nothing that could be compared
        x, *moments = channel_moments(args[0], layer)
        self.layers.append(layer)
        self.seen.append((moments[0], moments[1]))
        return (x,)


@lru_cache(maxsize=16)
def _shares(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """For every channel of all layers its weight in a mean over layers of means over channels."""
    return torch.cat([torch.full((size,), 1.0 / (len(sizes) * size)) for size in sizes]).to(device)


@contextmanager
def batch_statistics(module: nn.Module) -> Iterator[Statistics]:
    """Collects the input statistics of a module's BatchNorm layers in a forward pass, in the order of their use."""
    statistics = Statistics([])
    norms = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
    handles = [layer.register_forward_pre_hook(statistics._note) for layer in norms]
    try:
        yield statistics
    finally:
        for handle in handles:
            handle.remove()


def normal_divergences(mean: Tensor, variance: Tensor, other_mean: Tensor, other_variance: Tensor) -> Tensor:
    """(C,) KL(N(mean, variance) || N(other_mean, other_variance)) of every channel, each (C,)."""
    variance, other_variance = variance + VARIANCE_EPS, other_variance + VARIANCE_EPS
    distance = (variance + (mean - other_mean).square()) / other_variance
    return 0.5 * ((other_variance / variance).log() + distance - 1.0)


# the smoothness of images ---------------------------------------------------------------------------------------------
def roughness(images: Tensor, smoother: Tensor) -> Tensor:
    """Mean squared difference between images (n, c, side, side) and their smoothed versions."""
    return (images - smoother @ images @ smoother.T).square().mean()


def smoothing(side: int, device: torch.device | str = "cpu") -> Tensor:
    """(side, side) S: S x S^T is the image x under a 5 x 5 Gaussian with reflected borders.

    The kernel is a product of a row and a column, so two multiplications do it, on a GPU in a fixed order of sums.
    """
    if side <= REACH:
        raise ValueError(f"the image prior needs images of more than {REACH} pixels; got {side}")
    weights = gaussian()
    matrix = torch.zeros(side, side, dtype=torch.float64)
    for row in range(side):
        for offset, weight in zip(range(-REACH, REACH + 1), weights, strict=True):
            matrix[row, _reflected(row + offset, side)] += weight
    return matrix.to(device, torch.float32)


def gaussian() -> Sequence[float]:
    """The five weights of the kernel's rows and columns; they sum to 1."""
    raw = [math.exp(-((d / SPREAD) ** 2)) for d in range(-REACH, REACH + 1)]
    return [value / sum(raw) for value in raw]


def _reflected(index: int, side: int) -> int:
    index = abs(index)
    return 2 * (side - 1) - index if index >= side else index


# a generator's training -----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Inversion:
    """How a generator is trained. labels: the target class of an image, the "model"'s own prediction or the one encoded
    in the "noise" (the largest of its first entries). diversity: as in the "code" (`diversity`) or as in the "paper"
    (`negative_entropy`)."""

    batch: int = 128
    lr: float = 1e-3
    labels: str = "model"
    temperature: float = 1000.0
    diversity: str = "code"
    w_content: float = 1.0
    w_div: float = 1.0
    w_bn: float = 50.0
    w_prior: float = 1e-3

    @property
    def optimizer(self) -> Optimizer:
        return Optimizer("adam", lr=self.lr)


class GeneratorTraining:
    """Generator training on one trainer: static tensors, and a loop over them that an engine may capture."""

    def __init__(self, trainer: Trainer, blueprint: GeneratorBlueprint, how: Inversion) -> None:
        self.trainer, self.blueprint, self.how = trainer, blueprint, how
        self.generator = trainer.auxiliary(blueprint)
        self.optimizer = how.optimizer
        device = trainer.device
        self.moments = self.optimizer.init(self.generator.params)
        self.rate = torch.tensor(how.lr, device=device)
        self.seen = torch.zeros(trainer.stream.classes, dtype=torch.bool, device=device)
        self.sums = torch.zeros(len(TERMS), device=device)
        self.smoother = smoothing(blueprint.shape[-1], device)
        changed = [*self.generator.vectors(), *self.moments.values(), self.sums]
        self.loop = trainer.loop(self._step, changed, self.generator.generator)

    def run(
        self, classifier: Model, model: Model, moments: dict[str, Tensor], seen: Tensor, steps: int, seed: int
    ) -> tuple[Model, dict[str, Tensor], Tensor]:
        """(generator, moments, mean of each term of TERMS) after `steps` steps; none of the inputs is changed.

        seen: (classes,) mask of the classes that images may be of.
        """
        self.trainer.replica.load(classifier)
        self.trainer.replica.module.eval()
        self.generator.load(model)
        self.generator.module.train()
        self.generator.generator.manual_seed(seed)
        for name, place in self.moments.items():
            place.copy_(moments[name])
        self.seen.copy_(seen)
        self.sums.zero_()
        self.loop(steps)
        return self.generator.model(), {k: v.clone() for k, v in self.moments.items()}, self.sums / max(steps, 1)

    def _step(self) -> None:
        terms = self.terms()
        how = self.how
        weights = (how.w_content, how.w_div, how.w_bn, how.w_prior)
        loss = sum((w * term for w, term in zip(weights, terms, strict=True) if w), terms[0].new_zeros(()))
        gradient = self.generator.gradient(loss)
        with torch.no_grad():
            self.optimizer.apply(self.generator.params, gradient, self.moments, self.rate)
            self.generator.refresh()
            self.sums.add_(torch.stack([term.detach() for term in terms]))

    def terms(self) -> tuple[Tensor, ...]:
        """The terms of Eq. 4, unweighted, on fresh noise, with gradients to the generator."""
        noise = draw(self.how.batch, self.blueprint.z_dim, self.generator.generator)
        module = self.trainer.replica.module
        with in_precision(self.trainer), batch_statistics(module) as statistics:
            images = self.generator.module(noise)
            with constant(module):
                outputs = module(images).float()
        outputs = only(outputs, self.seen)
        return (
            content(outputs, self._labels(outputs, noise), self.how.temperature),
            diversity(outputs) if self.how.diversity == "code" else negative_entropy(outputs),
            # a network without BatchNorm stores no statistics of its data
            statistics.divergence() if statistics.seen else outputs.new_zeros(()),
            roughness(images.float(), self.smoother),
        )

    def _labels(self, outputs: Tensor, noise: Tensor) -> Tensor:
        return outputs.argmax(1) if self.how.labels == "model" else labels_of(noise, self.seen)


def training_on(trainer: Trainer, blueprint: GeneratorBlueprint, how: Inversion) -> GeneratorTraining:
    """The trainer's generator training, built at first use."""
    return trainer.made("generator training", (blueprint, how), lambda: GeneratorTraining(trainer, blueprint, how))


def draw(count: int, z_dim: int, generator: torch.Generator) -> Tensor:
    """(count, z_dim) standard normal noise on the generator's device."""
    return torch.randn(count, z_dim, generator=generator, device=generator.device)


def labels_of(noise: Tensor, classes: Tensor) -> Tensor:
    """(n,) the class encoded in noise: the largest of its entries at the classes of a mask (C,)."""
    return only(noise[:, : len(classes)], classes).argmax(1)
