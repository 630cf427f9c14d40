"""FedL2P: federated learning to personalise (Lee et al., 2023).

Two small meta-nets (`meta_nets.py`), shared by all clients, map the statistics of a client's data to how the global
model is fine-tuned there: a learning rate for every parameter tensor (LR-Net) and, for every BatchNorm layer, how far
its statistics move to the client's own (BN-Net),

    statistics_l = (1 - beta_l) stored_l + beta_l client_l                                            (Eq. 3)

where client_l are those of the minibatch during fine-tuning, and afterwards the running ones that it left, which start
from mean 0 and variance 1 (as in the released code).

After every aggregation each participant improves the meta-nets on a fifth of its data. For every minibatch of it the
model is fine-tuned anew on the rest by the meta-nets as they are then. The gradient of the validation loss L_V goes
through the fine-tuned weights by implicit differentiation: they are taken for a fixed point of the update
u(w) = rates (.) grad L_T(w), so

    d L_V / d meta = dL_V/dmeta - dL_V/dw [du/dw]^-1 du/dmeta,   [du/dw]^-1 ~ a sum_{j < K} (I - a du/dw)^j    (Eq. 7)

The server averages the meta-nets. Clients are scored with the model that the meta-nets they received last gave them. In
the original the base is pretrained and fixed; how it is used in continual learning is not described. Here FedAvg trains
it at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm

from everfed.core.legacy import (
    MODEL,
    CompositionError,
    Context,
    Data,
    Layout,
    Mean,
    Message,
    Model,
    Optimizer,
    Part,
    Personal,
    Phase,
    Slots,
    State,
    Step,
    Tree,
)
from everfed.core.pieces import TrainsPieces
from everfed.methods.common.checks import at_least
from everfed.methods.common.features import network
from everfed.methods.personal.meta_nets import MEAN, VARIANCE, MetaNets, Sites, symmetric_divergence
from everfed.methods.personal.moments import InputMoments, input_moments

CLAMP = 1.0  # of every entry of a hypergradient
BETA = "beta"
Statistics = Callable[[Tensor], tuple[Tensor, Tensor]]
"""The input of a BatchNorm layer -> (mean, variance) to normalise it with."""


@dataclass(frozen=True)
class FedL2P(Personal):
    """epochs: of fine-tuning. outer_epochs, meta_lr: of the meta-nets, by SGD over the held-out `validation` share;
    base_lr: the same for the base rates. retune: fine-tune anew for every minibatch of that share (False: once a
    round). terms, step: K and a of Eq. 7. hidden: width of the meta-nets. base_rate: first value of every learned rate.
    limit: of the factors on it."""

    epochs: int = 15
    outer_epochs: int = 3
    meta_lr: float = 1e-3
    base_lr: float = 1e-4
    retune: bool = True
    validation: float = 0.2
    terms: int = 3
    step: float = 0.1
    hidden: int = 100
    base_rate: float = 1e-3
    limit: float = 1000.0

    name = "fedl2p"

    def __post_init__(self) -> None:
        at_least(self, 0, "epochs", "outer_epochs", "meta_lr", "base_lr", "step", "base_rate", "limit")
        at_least(self, 1, "terms", "hidden")
        if not 0.0 < self.validation < 1.0:
            raise ValueError(f"validation must lie between 0 and 1, both excluded; got {self.validation}")

    def check(self, parts: Sequence[Part], optimizer: Optimizer) -> Iterable[str]:
        for part in parts:
            if isinstance(part, TrainsPieces):
                raise CompositionError(
                    f"part {self.name!r} fine-tunes all layers, but {part.name!r} trains some at a time"
                )
        return ()

    def nets(self, layout: Layout) -> MetaNets:
        return MetaNets(Sites.of(layout), self.hidden, self.base_rate, self.limit)

    # the server --------------------------------------------------------------------------------------------------
    def server_slots(self, ctx: Context) -> Tree:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(ctx.key("meta-nets"))
            return {"meta": self.nets(ctx.facts.layout).vector()}

    def phases(self) -> tuple[Phase, ...]:
        phase = Phase(
            "meta", reduce={"meta": Mean(weighted=True)}, broadcast=self._send, run=self._meta, update=self._average
        )
        return (phase,)

    def _send(self, server: State, ctx: Context) -> dict[str, Any]:
        return dict(server[self.name])

    def _average(self, server: State, reduced: Tree, ctx: Context) -> Slots:
        return None if reduced.get("meta") is None else {"meta": reduced["meta"]}

    # the client --------------------------------------------------------------------------------------------------
    def forward(self, module: nn.Module, x: Tensor, own: Tree, message: Tree) -> Tensor:
        """While a client fine-tunes, BatchNorm mixes the statistics of the minibatch with the stored ones."""
        if "mixing" not in own:
            outputs: Tensor = module(x)
            return outputs
        with mixed_batches(module, own["mixing"]):
            outputs = module(x)
        return outputs

    def _meta(self, client: State, message: Message, data: Data, ctx: Context) -> tuple[Slots, Tree]:
        """Fine-tune by the meta-nets, keep that model, and send better meta-nets."""
        if len(data) < 2:
            return None, {}
        train, held = self._split(data, ctx)
        look = Look.at(message[MODEL], train, ctx)
        nets = self.nets(ctx.facts.layout).to(ctx.train.device)
        meta = message[self.name]["meta"].to(ctx.train.device)

        def tune(tag: str) -> tuple[Model, Look]:
            with torch.no_grad():
                rates, betas = nets.at(meta, look.inputs, look.divergences)
            return self.tune(message[MODEL], look, rates, betas, train, ctx, tag)

        personal = tuned, seen = tune("tune")
        for index, (batch, rows) in enumerate(self._outer(train, held, ctx)):
            if index and self.retune:
                tuned, seen = tune(f"tune {index}")
            gradient = self.hypergradient(meta, nets, seen, tuned, batch, rows, ctx)
            meta = meta - self._steps(nets) * gradient.clamp(-CLAMP, CLAMP)
        return {k: v.clone() for k, v in personal[0].items()}, {"meta": meta}

    def _outer(self, train: Data, held: Data, ctx: Context) -> Iterator[tuple[Data, Data]]:
        """(a minibatch to train on, a held-out one), for every step of the meta-nets."""
        rng, size = ctx.rng("outer"), ctx.options.batch_size
        for _ in range(self.outer_epochs):
            for rows in np.array_split(rng.permutation(len(held)), max(1, -(-len(held) // size))):
                yield train.take(rng.permutation(len(train))[:size]), held.take(rows)

    def _steps(self, nets: MetaNets) -> Tensor:
        """(M,) the learning rate of every parameter of the meta-nets; the base rates come first."""
        steps = torch.full_like(nets.vector(), self.meta_lr)
        steps[: nets.base_rates.numel()] = self.base_lr
        return steps

    def personalise(self, client: State, message: Message, model: Model, ctx: Context) -> Model:
        own = client.get(self.name, {})
        return {k: own[k].to(v.device) for k, v in model.items()} if "params" in own else model

    def _split(self, data: Data, ctx: Context) -> tuple[Data, Data]:
        order = ctx.rng("validation").permutation(len(data))
        held = min(max(1, round(self.validation * len(data))), len(data) - 1)
        return data.take(np.sort(order[held:])), data.take(np.sort(order[:held]))

    def tune(
        self, model: Model, look: Look, rates: Tensor, betas: Tensor, data: Data, ctx: Context, tag: str = "tune"
    ) -> tuple[Model, Look]:
        """The model fine-tuned with a rate per tensor, its statistics mixed; and `look` with those that this left."""
        if self.epochs == 0:
            return look.mixed(model, betas), look
        vector = spread(rates, ctx.facts.layout)
        own: Tree = {"mixing": look.mixing(betas)} if look.sites.norms else {}
        fitted = ctx.train.fit(
            ctx.at(rate=1.0),
            (self, _rates()),
            look.reset(model),
            model["params"],
            {self.name: own, Rates.name: {"rates": vector}},
            {},
            data,
            epochs=self.epochs,
            optimizer=Optimizer("sgd", lr=1.0),
            tag=tag,
        )
        seen = look.with_client(fitted.model)
        return {**seen.mixed(model, betas), "params": fitted.model["params"]}, seen

    @sdpa_kernel(SDPBackend.MATH)  # fused kernels of attention have no second derivatives
    def hypergradient(
        self, meta: Tensor, nets: MetaNets, look: Look, tuned: Model, batch: Data, held: Data, ctx: Context
    ) -> Tensor:
        """(M,) gradient of the validation loss with respect to the meta-nets (Eq. 7)."""
        meta = meta.detach().requires_grad_()
        rates, betas = nets.at(meta, look.inputs, look.divergences)
        tensors = {e.name: e.view(tuned["params"]).detach().clone().requires_grad_() for e in ctx.facts.layout.params}
        learned = [tensors[name] for name in look.sites.tensors]
        gradients = torch.autograd.grad(
            look.loss(tensors, betas, batch, ctx), learned, create_graph=True, materialize_grads=True
        )
        update = [rate * gradient for rate, gradient in zip(rates, gradients, strict=True)]
        outer = look.loss(tensors, betas, held, ctx)
        *v, direct = torch.autograd.grad(outer, [*learned, meta], retain_graph=True, materialize_grads=True)
        total = v
        for _ in range(self.terms - 1):
            moved = torch.autograd.grad(update, learned, v, retain_graph=True, materialize_grads=True)
            v = [a - self.step * b for a, b in zip(v, moved, strict=True)]
            total = [a + b for a, b in zip(total, v, strict=True)]
        (indirect,) = torch.autograd.grad(update, meta, [self.step * t for t in total], materialize_grads=True)
        return direct - indirect


@dataclass(frozen=True)
class Look:
    """Statistics of a client's data under a model. inputs: (2 layers,) mean and deviation of every layer's input.
    divergences: (norms,). client, stored: {norm: (mean, variance)} of its input here, and as the model has them."""

    layout: Layout
    sites: Sites
    inputs: Tensor
    divergences: Tensor
    client: dict[str, tuple[Tensor, Tensor]]
    stored: dict[str, tuple[Tensor, Tensor]]

    @staticmethod
    def at(model: Model, data: Data, ctx: Context) -> Look:
        layout = ctx.facts.layout
        sites = Sites.of(layout)
        seen = input_moments(ctx.train, model, data.x, sites.layers)
        stats = {entry.name: entry.view(model["stats"]).to(ctx.train.device) for entry in layout.stats}
        stored = {norm: (stats[f"{norm}.{MEAN}"], stats[f"{norm}.{VARIANCE}"]) for norm in sites.norms}
        client = {norm: seen[norm].by_channel() for norm in sites.norms}
        gaps = [symmetric_divergence(*stored[norm], *client[norm]) for norm in sites.norms]
        divergences = torch.stack(gaps) if gaps else torch.zeros(0, device=ctx.train.device)
        return Look(layout, sites, _summary([seen[layer] for layer in sites.layers]), divergences, client, stored)

    def mixing(self, betas: Tensor) -> Tree:
        """{norm: its beta and stored statistics}, as a step's slots hold them."""
        stored = {norm: dict(zip((MEAN, VARIANCE), self.stored[norm], strict=True)) for norm in self.sites.norms}
        return {norm: {BETA: beta, **stored[norm]} for norm, beta in self._betas(betas)}

    def reset(self, model: Model) -> Model:
        """The model with the statistics of a layer that has seen nothing: mean 0, variance 1."""
        stats = model["stats"].clone()
        for entry in self.layout.stats:
            entry.view(stats).fill_(1.0 if entry.name.endswith(VARIANCE) else 0.0)
        return {**model, "stats": stats}

    def with_client(self, model: Model) -> Look:
        """The same, with the model's statistics as the client's."""
        stats = {entry.name: entry.view(model["stats"]) for entry in self.layout.stats}
        client = {norm: (stats[f"{norm}.{MEAN}"], stats[f"{norm}.{VARIANCE}"]) for norm in self.sites.norms}
        return replace(self, client=client)

    def mixture(self, norm: str, beta: Tensor) -> tuple[Tensor, Tensor]:
        """(mean, variance) of a BatchNorm layer (Eq. 3)."""
        pairs = zip(self.stored[norm], self.client[norm], strict=True)
        mean, variance = ((1.0 - beta) * stored + beta * own for stored, own in pairs)
        return mean, variance

    def mixed(self, model: Model, betas: Tensor) -> Model:
        """The model with the statistics mixed by the betas."""
        stats, places = model["stats"].clone(), {entry.name: entry for entry in self.layout.stats}
        for norm, beta in self._betas(betas):
            for kind, value in zip((MEAN, VARIANCE), self.mixture(norm, beta), strict=True):
                places[f"{norm}.{kind}"].view(stats).copy_(value)
        return {**model, "stats": stats}

    def loss(self, tensors: dict[str, Tensor], betas: Tensor, data: Data, ctx: Context) -> Tensor:
        """The task loss of a network with `tensors`, differentiable in them and in the betas; eval mode otherwise."""
        trainer, module = ctx.train, ctx.train.replica.module
        training = module.training
        module.eval()
        x = trainer.stream.inputs(data.x.to(trainer.device))
        with mixed_norms(module, {norm: self.mixture(norm, beta) for norm, beta in self._betas(betas)}):
            outputs = functional_call(module, tensors, (x,))
        module.train(training)
        return trainer.task_loss(ctx)(outputs, data.y.to(trainer.device))

    def _betas(self, betas: Tensor) -> Iterator[tuple[str, Tensor]]:
        return zip(self.sites.norms, betas, strict=True)


@dataclass(frozen=True)
class Rates(Part):
    """Fine-tuning with a learning rate for every parameter."""

    name = "fedl2p-rates"

    def gradient(self, step: Step, gradient: Tensor) -> Tensor:
        return gradient * step.state[self.name]["rates"]


@cache
def _rates() -> Rates:
    """One object, so that an engine that keeps captured steps per part finds them again."""
    return Rates()


def spread(rates: Tensor, layout: Layout) -> Tensor:
    """(P,) the rate of every parameter from one per tensor; 0 for what other parts added."""
    vector = torch.zeros(layout.size, device=rates.device)
    for entry, rate in zip(network(layout), rates, strict=True):
        vector[entry.start : entry.start + entry.size] = rate
    return vector


@contextmanager
def mixed_norms(module: nn.Module, statistics: dict[str, tuple[Tensor, Tensor]]) -> Iterator[None]:
    """BatchNorm layers by hand, because torch's own has no gradient for its running statistics."""

    def given(pair: tuple[Tensor, Tensor]) -> Statistics:
        return lambda x: pair

    with _by_hand(module, {norm: given(pair) for norm, pair in statistics.items()}):
        yield


@contextmanager
def mixed_batches(module: nn.Module, mixing: dict[str, Tree]) -> Iterator[None]:
    """BatchNorm layers that mix the statistics of their minibatch with the stored ones; torch's own, whose outputs are
    not used, keep the running statistics of the minibatches."""

    def mixed(kept: Tree) -> Statistics:
        def statistics(x: Tensor) -> tuple[Tensor, Tensor]:
            axes, beta = (0, *range(2, x.dim())), kept[BETA]
            mean = (1.0 - beta) * kept[MEAN] + beta * x.mean(axes)
            return mean, (1.0 - beta) * kept[VARIANCE] + beta * x.var(axes, unbiased=False)

        return statistics

    with _by_hand(module, {norm: mixed(kept) for norm, kept in mixing.items()}):
        yield


@contextmanager
def _by_hand(module: nn.Module, statistics: dict[str, Statistics]) -> Iterator[None]:
    """BatchNorm layers that normalise with what `statistics` gives for their input."""

    def hook(of: Statistics) -> Any:
        def normalise(layer: _BatchNorm, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            x = args[0].float()
            shape = (1, -1, *(1,) * (x.dim() - 2))
            mean, variance = of(x)
            scale = layer.weight / (variance + layer.eps).sqrt()
            return ((x - mean.view(shape)) * scale.view(shape) + layer.bias.view(shape)).to(output.dtype)

        return normalise

    handles = [module.get_submodule(norm).register_forward_hook(hook(of)) for norm, of in statistics.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _summary(seen: list[InputMoments]) -> Tensor:
    """(2 layers,) mean and deviation of every layer's input."""
    return torch.stack([torch.stack(layer.overall()) for layer in seen]).reshape(-1)
