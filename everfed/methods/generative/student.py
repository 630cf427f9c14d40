"""A student with the shared model's architecture, distilled from it on synthetic images; synthesis's adversary."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from everfed.core.replica import tensors
from everfed.core.stream import Stream, StreamView
from everfed.core.trainer import Trainer
from everfed.core.tree import clone
from everfed.method import Model, Optimizer, Server, Tree
from everfed.methods.common.layers import head_inputs, in_precision
from everfed.methods.common.teacher import among

LEVELS = 255.0  # of an 8-bit pixel
GAIN_SPREAD = 0.02  # of the first BatchNorm weights about 1


@dataclass(frozen=True)
class FeatureMap:
    """A linear map of the features, held in the model under these names. weight: of its error in a lesson."""

    matrix: str
    bias: str
    weight: float


@dataclass(frozen=True)
class Lesson:
    """The student's training in a round: `steps` steps of SGD on batches of the pool, T^2 KL at `temperature`.
    keep: does momentum carry over from round to round? projection: distilled too, where there is one."""

    steps: int
    batch: int
    temperature: float
    optimizer: Optimizer
    keep: bool
    projection: FeatureMap | None = None


class Student:
    """The student's vectors, at fixed addresses, and a loop that trains them. The teacher is the model loaded in the
    trainer's replica, whose module computes for both."""

    def __init__(self, trainer: Trainer, lesson: Lesson, shape: tuple[int, ...], capacity: int) -> None:
        self.trainer, self.lesson, self.device = trainer, lesson, trainer.device
        self.layout = trainer.replica.layout
        self.model: Model = trainer.replica.model()
        self.tensors = tensors(self.layout, self.model)
        self.leaves = [self.tensors[entry.name].detach().requires_grad_() for entry in self.layout.params]
        self.tensors |= {entry.name: leaf for entry, leaf in zip(self.layout.params, self.leaves, strict=True)}
        self.moments = lesson.optimizer.init(self.model["params"])
        self.rate = torch.zeros((), device=self.device)
        self.step = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.rows = torch.zeros((lesson.steps, lesson.batch), dtype=torch.int64, device=self.device)
        self.pool = torch.zeros((capacity, *shape), dtype=torch.uint8, device=self.device)
        self.classes = torch.zeros(trainer.stream.classes, dtype=torch.bool, device=self.device)
        self.augmentation = Augmentation(trainer.stream, lesson.steps, lesson.batch, self.device)
        changed = [*self.model.values(), *self.moments.values(), self.step]
        self.loop = trainer.loop(self._step, changed, trainer.replica.generator)

    # its state between rounds --------------------------------------------------------------------------------------
    def first(self, model: Model) -> Tree:
        """The state before the first round."""
        moments = self.lesson.optimizer.init(model["params"])
        return {**model, **({"moments": moments} if self.lesson.keep else {})}

    def load(self, own: Tree) -> None:
        """Load the state that `read` gave."""
        for name, place in self.model.items():
            place.copy_(own[name])
        for name, place in self.moments.items():
            place.copy_(own["moments"][name]) if self.lesson.keep else place.zero_()

    def read(self) -> Tree:
        """A copy of the state after a round."""
        return clone({**self.model, **({"moments": self.moments} if self.lesson.keep else {})})

    # a round -------------------------------------------------------------------------------------------------------
    def answers(self, inputs: Tensor) -> Tensor:
        """(n, C) logits in eval mode; gradients flow to the inputs."""
        with in_precision(self.trainer):
            outputs: Tensor = functional_call(self.trainer.replica.module, self.tensors, (inputs,))
        return outputs.float()

    def learn(self, pool: Tensor, classes: Tensor, rate: float, server: Server) -> None:
        """One lesson on the images of the pool, about the classes of a mask."""
        lesson = self.lesson
        rows = cycled(len(pool), lesson.steps, lesson.batch, server.rng("lesson"))
        self.pool[: len(pool)].copy_(pool)
        self.rows.copy_(torch.from_numpy(rows))
        self.augmentation.draw(server.rng("lesson/augment"))
        self.classes.copy_(classes)
        self.rate.fill_(rate)
        self.step.zero_()
        self.trainer.replica.generator.manual_seed(server.key("lesson/dropout"))
        self.loop(lesson.steps)

    def _step(self) -> None:
        images = self.pool.index_select(0, self.rows.index_select(0, self.step)[0])
        inputs = self.trainer.stream.inputs(self.augmentation(images, self.step))
        gradients = torch.autograd.grad(self.loss(inputs), self.leaves, materialize_grads=True)
        with torch.no_grad():
            gradient = self.layout.flatten_gradient(gradients)
            self.lesson.optimizer.apply(self.model["params"], gradient, self.moments, self.rate)
            self.step.add_(1)

    def loss(self, inputs: Tensor) -> Tensor:
        """T^2 KL(teacher || student), and the error of the projection where there is one."""
        module, lesson = self.trainer.replica.module, self.lesson
        with in_precision(self.trainer), head_inputs(module) as features:
            with torch.no_grad():
                teacher: Tensor = module(inputs)
            module.train()
            student: Tensor = functional_call(module, self.tensors, (inputs,))
            module.eval()
        answer, wanted = (among(outputs.float(), self.classes) for outputs in (student, teacher))
        loss = divergences(answer, wanted, lesson.temperature).mean()
        if lesson.projection is None:
            return loss
        theirs, ours = (rows.float() for rows in features)
        return loss + lesson.projection.weight * self._projection_error(lesson.projection, ours, theirs)

    def _projection_error(self, projection: FeatureMap, ours: Tensor, theirs: Tensor) -> Tensor:
        named = self.layout.named(self.trainer.replica.params)
        target = functional.linear(theirs, named[projection.matrix], named[projection.bias])
        own = functional.linear(ours, self.tensors[projection.matrix], self.tensors[projection.bias])
        return functional.mse_loss(own, target)


def divergences(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """(n,) T^2 KL(softmax(teacher / T) || softmax(student / T)) of every sample."""
    student, teacher = (functional.log_softmax(z / temperature, dim=1) for z in (student, teacher))
    return temperature**2 * (teacher.exp() * (teacher - student)).sum(1)


def fresh_student(trainer: Trainer, teacher: Model, rng: np.random.Generator) -> Model:
    """The teacher's architecture with new weights: matrices and kernels by Xavier, biases N(0, 1), BatchNorm weights
    N(1, 0.02) and biases 0, other layers' weights 1 and biases 0. Statistics are the teacher's until it is trained."""
    layout, owners = trainer.replica.layout, dict(trainer.replica.module.named_modules())
    params = torch.zeros_like(teacher["params"], device="cpu")
    for entry in layout.params:
        owner, _, leaf = entry.name.rpartition(".")
        values = _first_values(owners.get(owner), leaf, entry.shape, rng)
        entry.view(params).copy_(torch.from_numpy(values))
    return {name: params if name == "params" else vector.clone() for name, vector in teacher.items()}


def _first_values(owner: nn.Module | None, leaf: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    if len(shape) >= 2:
        return rng.normal(0.0, _xavier(shape), shape)
    weight = leaf.endswith("weight")
    if isinstance(owner, _BatchNorm):
        return rng.normal(1.0, GAIN_SPREAD, shape) if weight else np.zeros(shape)
    if isinstance(owner, nn.Linear | nn.Conv2d) or leaf.endswith("/bias"):
        return rng.normal(0.0, 1.0, shape)
    return np.ones(shape) if weight else np.zeros(shape)


def _xavier(shape: tuple[int, ...]) -> float:
    """sqrt(2 / (inputs + outputs)) of a matrix (outputs, inputs) or of kernels (outputs, inputs, ...)."""
    field = int(np.prod(shape[2:]))
    return float(np.sqrt(2.0 / ((shape[0] + shape[1]) * field)))


# a pool of synthetic images: bytes, drawing, augmentation, the map to network inputs ----------------------------------
def to_bytes(images: Tensor) -> Tensor:
    """Images with values in [0, 1] as uint8."""
    return (images * LEVELS).round().clamp(0, LEVELS).to(torch.uint8)


def cycled(size: int, steps: int, batch: int, rng: np.random.Generator) -> np.ndarray:
    """(steps, batch) positions in a pool of `size` images; each is used once before any is used again."""
    passes = -(-steps * batch // size)
    order = np.concatenate([rng.permutation(size) for _ in range(passes)])
    return order[: steps * batch].reshape(steps, batch)


def draw_geometry(stream: StreamView, rng: np.random.Generator, count: int) -> np.ndarray | None:
    """Draws of the stream's augmentation of `count` images that leave their colours as they are, as the released code
    of TARGET and LANDER has it for synthetic images."""
    draws = stream.draw_augmentation(rng, count)
    if draws is not None and stream.colour_draws:
        draws[:, -stream.colour_draws :] = 0
    return None if draws is None else np.asarray(draws)


class Augmentation:
    """The stream's own augmentation without its changes of colour, drawn ahead for `steps` steps of `batch` images."""

    def __init__(self, stream: StreamView, steps: int, batch: int, device: torch.device) -> None:
        self.stream, self.count = stream, steps * batch
        probe = draw_geometry(stream, np.random.default_rng(0), 1)
        shape = None if probe is None else (steps, batch, *probe.shape[1:])
        self.table = None if shape is None else torch.zeros(shape, dtype=torch.int64, device=device)

    def draw(self, rng: np.random.Generator) -> None:
        if self.table is not None:
            draws = draw_geometry(self.stream, rng, self.count)
            assert draws is not None
            self.table.copy_(torch.from_numpy(draws.astype(np.int64)).view(self.table.shape))

    def __call__(self, pixels: Tensor, step: Tensor) -> Tensor:
        """Images in storage form, or floats of the same range, as augmented in `step` (1,)."""
        if self.table is None:
            return pixels
        return self.stream.augment(pixels, self.table.index_select(0, step)[0])


def affine(stream: Stream | StreamView, shape: tuple[int, ...], device: torch.device | str) -> tuple[Tensor, Tensor]:
    """(offset, scale), each (1, *shape): the network input of an image x in [0, 1] is offset + scale x."""
    black, white = (
        stream.inputs(torch.full((1, *shape), level, dtype=torch.uint8, device=device)) for level in (0, 255)
    )
    return black, white - black
