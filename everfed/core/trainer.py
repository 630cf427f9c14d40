"""Local training as a function: a model, data and parts in, a model and the parts' state out.

`Trainer` is what an engine gives to its clients. This one runs every step as it comes and is the reference; an engine
may run the same steps in another way (captured, say) by overriding `_steps` and `gradient`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from everfed.core.context import Context
from everfed.core.data import Data, Schedule, Table, minibatches, take_rows
from everfed.core.handle import Client
from everfed.core.layout import Layout
from everfed.core.message import Model, State
from everfed.core.optimizer import Optimizer
from everfed.core.part import Part, Tables, private
from everfed.core.random import global_generators, seed_global
from everfed.core.replica import Blueprint, Replica
from everfed.core.step import Substeps, Training, train_step
from everfed.core.stream import Stream, StreamView
from everfed.core.tree import Tree, clone, on_device

_CORE = "core"  # the schedule's own tables, beside those of the parts
Thing = TypeVar("Thing")


@dataclass(frozen=True)
class Fitted:
    """What local training produced. start: the model it began with. loss: 0-d tensor, the sum of the step losses (read
    it once, after the phase)."""

    start: Model
    model: Model
    state: State
    moments: dict[str, Tensor]
    loss: Tensor
    samples: int
    steps: int


@dataclass(frozen=True)
class Job:
    """One local training, fully decided: everything the steps need."""

    context: Context
    parts: Sequence[Part]
    model: Model
    received: Tensor
    state: State
    message: Mapping[str, Tree]
    data: Data
    schedule: Schedule
    plans: dict[str, Tables]
    optimizer: Optimizer
    moments: dict[str, Tensor]
    rates: np.ndarray  # (steps,) learning rates
    seed: int  # of dropout


class Trainer:
    """Local training on one device, one client at a time."""

    def __init__(
        self,
        stream: Stream,
        layout: Layout,
        build_module: Callable[[], torch.nn.Module],
        device: torch.device | str = "cpu",
        precision: str = "fp32",
        forward_part: Part | None = None,
        micro_batch: int = 0,
    ) -> None:
        self.stream = StreamView(stream)
        self.device = torch.device(device)
        self.precision = precision
        self.forward_part = forward_part
        self.micro_batch = micro_batch
        self._build_module = build_module
        self.replica = Replica(build_module(), layout, self.device, precision)
        self.network: Callable[[Tensor], Tensor] = self.replica.module
        self._loss: Callable[[Tensor, Tensor], Tensor] = stream.loss
        self._made: dict[str, tuple[Hashable, Any]] = {}

    # what parts and clients call ---------------------------------------------------------------------------------
    def fit(
        self,
        context: Context,
        parts: Sequence[Part],
        model: Model,
        received: Tensor,
        state: State,
        message: Mapping[str, Tree],
        data: Data,
        *,
        epochs: int | None = None,
        batch_size: int | None = None,
        optimizer: Optimizer | None = None,
        moments: dict[str, Tensor] | None = None,
        rate: float | None = None,
        tag: str = "train",
    ) -> Fitted:
        """Train `model` on `data` under `parts`. None of the inputs is changed.

        rate: the learning rate; by default those of the round, by the run's own optimiser, whatever `optimizer` says.
        """
        options = context.options
        batch = batch_size or options.batch_size
        context.require_samples(min(batch, len(data)), len(data))
        schedule = minibatches(
            data.ids,
            options.local_epochs if epochs is None else epochs,
            batch,
            context.rng(f"{tag}/order"),
            options.drop_last,
        )
        state, plans = self._plan(context, parts, model, state, message, data, schedule, tag)
        optimizer = optimizer or options.optimizer
        if not moments:
            substeps = Substeps.of(parts, self.replica.layout)
            moments = substeps.first_moments(optimizer, model["params"].to(self.device))
        job = Job(
            context,
            parts,
            model,
            received,
            {k: on_device(v, self.device) for k, v in state.items()},
            {k: on_device(v, self.device) for k, v in message.items()},
            data,
            schedule,
            plans,
            optimizer,
            moments,
            self._rates(context, schedule.steps, rate),
            context.key(f"{tag}/dropout"),
        )
        return self._steps(job)

    def gradient(
        self, context: Context, model: Model, x: Tensor, y: Tensor, *, mode: str = "train", tag: str
    ) -> Tensor:
        """(P,) gradient of the mean task loss on (x, y), samples in storage form, at `model`; nothing is changed."""
        seed = context.key(f"{tag}/dropout")
        self.replica.load(model)
        self.replica.generator.manual_seed(seed)
        self.replica.module.train(mode == "train")
        with global_generators(self.device):
            seed_global(self.device, seed)
            loss = self.task_loss(context)(self.forward(x.to(self.device)), y.to(self.device))
            return self.replica.gradient(loss)

    def outputs(
        self,
        model: Model,
        x: Tensor,
        state: State | None = None,
        message: Mapping[str, Tree] | None = None,
        batch_size: int = 1000,
    ) -> Tensor:
        """(n, ...) network outputs in eval mode, float32, without gradients."""
        self.replica.load(model)
        self.replica.module.eval()
        state = {k: on_device(v, self.device) for k, v in (state or {}).items()}
        with torch.no_grad():
            chunks = [self.forward(part.to(self.device), state, message).float() for part in x.split(batch_size)]
        return torch.cat(chunks) if chunks else torch.zeros((0, self.stream.classes), device=self.device)

    def forward(self, x: Tensor, state: State | None = None, message: Mapping[str, Tree] | None = None) -> Tensor:
        """Storage form -> network outputs, in the replica's mode and the engine's precision."""
        return self.forward_inputs(self.stream.inputs(x), state, message)

    def forward_inputs(
        self, inputs: Tensor, state: State | None = None, message: Mapping[str, Tree] | None = None
    ) -> Tensor:
        """Network inputs -> network outputs: `forward` for samples that were never in storage form."""
        if self.precision == "bf16":
            with torch.autocast(self.device.type, torch.bfloat16):
                return self._network(inputs, state or {}, message or {}).float()
        return self._network(inputs, state or {}, message or {})

    def _network(self, inputs: Tensor, state: State, message: Mapping[str, Tree]) -> Tensor:
        """The activations of one micro-batch at a time are computed again in the backward pass, so that losses see all
        outputs and only these activations are held."""
        if not 0 < self.micro_batch < len(inputs) or not torch.is_grad_enabled():
            return self._forward(inputs, state, message)
        chunks = inputs.split(self.micro_batch)
        return torch.cat([checkpoint(self._forward, one, state, message, use_reentrant=False) for one in chunks])

    def _forward(self, inputs: Tensor, state: State, message: Mapping[str, Tree]) -> Tensor:
        part = self.forward_part
        if part is None:
            return self.network(inputs)
        return part.forward(self.replica.module, inputs, state.get(part.name, {}), message.get(part.name, {}))

    def task_loss(self, context: Context) -> Callable[[Tensor, Tensor], Tensor]:
        """The stream's loss, restricted to the logits that `train.logits` allows.

        A sample's own label is always among them: a replayed one may come from another task.
        """
        return self.masked_loss(self.label_mask(context))

    def label_mask(self, context: Context) -> Tensor | None:
        """(classes,) 0 where a logit takes part in the task loss, minus infinity elsewhere; None when all do."""
        if context.allowed_labels is None:
            return None
        mask = torch.full((self.stream.classes,), -torch.inf)
        mask[list(context.allowed_labels)] = 0.0
        return mask.to(self.device)

    def masked_loss(self, mask: Tensor | None) -> Callable[[Tensor, Tensor], Tensor]:
        """The stream's loss on the logits that `mask` leaves, and a sample's own."""
        if mask is None:
            return self._loss
        return lambda outputs, y: self._loss(outputs + mask.expand_as(outputs).scatter(1, y.unsqueeze(1), 0.0), y)

    # what parts build beside the model ------------------------------------------------------------------------------
    def first_model(self) -> Model:
        """The model that the run began with, the same on every machine."""
        vectors = self.replica.layout.read(self._build_module())
        return {name: vector.to(self.device) for name, vector in vectors.items()}

    def auxiliary(self, blueprint: Blueprint) -> Replica:
        """The replica of a method's auxiliary network, built once; load it before use, or use `frozen_forward`."""

        def make() -> Replica:
            with torch.random.fork_rng(devices=[]):  # its first weights are never used
                module = blueprint.build()
            return Replica(module, Layout.of(module), self.device, self.precision)

        return self.made(repr(blueprint), blueprint, make)

    def made(self, place: str, key: Hashable, make: Callable[[], Thing]) -> Thing:
        """The thing kept under `place`, made anew when it was made for another `key`: one such thing at a time."""
        if place not in self._made or self._made[place][0] != key:
            self._made.pop(place, None)  # before the next one takes its memory
            self._made[place] = (key, make())
        thing: Thing = self._made[place][1]
        return thing

    def loop(
        self, body: Callable[[], None], changed: Sequence[Tensor], generator: torch.Generator
    ) -> Callable[[int], None]:
        """A function that runs `body` a number of times. An engine may capture it, so `body` keeps the rules of a
        training step: static shapes, no host synchronisation, no branch on data, tensors at fixed places.

        changed: every tensor that it changes, in place. generator: the one that it draws from.
        """

        def run(times: int) -> None:
            for _ in range(times):
                body()

        return run

    # how it is done ----------------------------------------------------------------------------------------------
    def _plan(
        self,
        context: Context,
        parts: Sequence[Part],
        model: Model,
        state: State,
        message: Mapping[str, Tree],
        data: Data,
        schedule: Schedule,
        tag: str,
    ) -> tuple[State, dict[str, Tables]]:
        """Every discrete draw of the parts, on the host, in part order."""
        plans: dict[str, Tables] = {_CORE: {"rows": schedule.rows}}
        count = int(schedule.rows.lengths.sum())
        draws = self.stream.draw_augmentation(context.rng(f"{tag}/augment"), count)
        if draws is not None:
            cuts = np.cumsum(schedule.rows.lengths)[:-1]
            plans[_CORE]["augment"] = Table.of(np.split(draws, cuts))
        for part in parts:
            client = Client(part.name, state, context, message, model, data, plans=plans)
            plans[part.name] = part.plan(client, schedule) or {}
            state = client.states
        return state, plans

    def _rates(self, context: Context, steps: int, rate: float | None) -> np.ndarray:
        if rate is None and context.options.optimizer.by == "step":
            return context.options.optimizer.rates(*context.progress, steps)
        return np.full(steps, context.rate if rate is None else rate)

    def _steps(self, job: Job) -> Fitted:
        # steps change state and moments in place: on copies, so that training changes nothing it was given
        job = replace(job, state=private(job.parts, job.state), moments=clone(job.moments))
        replica = self.replica
        replica.load(job.model)
        replica.generator.manual_seed(job.seed)
        replica.module.train()
        training = self.new_training(job)
        tables = upload(job.plans, self.device)
        x, y = job.data.x.to(self.device), job.data.y.to(self.device)
        rates = torch.from_numpy(job.rates).to(self.device, torch.float32)
        total = torch.zeros((), device=self.device)
        with global_generators(self.device):
            for index in range(job.schedule.steps):
                rows = {
                    part: {name: table[index, : job.plans[part][name].lengths[index]] for name, table in own.items()}
                    for part, own in tables.items()
                }
                seed_global(self.device, job.seed, index)
                self.load_batch(training, x, y, rows)
                total += train_step(training, rates[index])
        return Fitted(job.model, replica.model(), job.state, job.moments, total, len(job.data), job.schedule.steps)

    def new_training(self, job: Job) -> Training:
        def forward(x: Tensor) -> Tensor:
            return self.forward(x, job.state, job.message)

        return Training(
            job.context,
            self.replica,
            job.parts,
            job.optimizer,
            job.moments,
            forward,
            self.task_loss(job.context),
            job.state,
            job.message,
            job.received.to(self.device),
        )

    def load_batch(self, training: Training, x: Tensor, y: Tensor, rows: dict[str, dict[str, Tensor]]) -> None:
        """Gather a minibatch from the client's data and augment it, on the device."""
        core = rows[_CORE]
        batch, targets = take_rows([x, y], core["rows"])
        if "augment" in core:
            batch, targets = self.stream.augment_samples(batch, targets, core["augment"])
        training.begin(batch, targets, rows)


def upload(plans: Mapping[str, Tables], device: torch.device) -> dict[str, dict[str, Tensor]]:
    """The tables of all parts as tensors (steps, width, ...) on `device`."""
    return {
        part: {name: torch.from_numpy(table.values).to(device, non_blocking=True) for name, table in own.items()}
        for part, own in plans.items()
    }
