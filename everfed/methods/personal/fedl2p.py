"""FedL2P: federated learning to personalise (Lee et al., 2023).

Two small meta-nets, shared by all clients, map the statistics of a client's data to how the global
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

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm

from everfed.method import (
    WHOLE,
    Client,
    Data,
    Gradient,
    Layout,
    Mean,
    Model,
    Optimizer,
    Part,
    Personal,
    Phase,
    Server,
    Step,
    Tells,
    Tree,
    option,
)
from everfed.methods.common.layers import CHUNK, in_precision, network

CLAMP = 1.0  # of every entry of a hypergradient
BETA = "beta"
Statistics = Callable[[Tensor], tuple[Tensor, Tensor]]
"""The input of a BatchNorm layer -> (mean, variance) to normalise it with."""


@dataclass(frozen=True)
class FedL2P(Personal):
    epochs: int = option(15, at_least=0, about="epochs of fine-tuning")
    outer_epochs: int = option(3, at_least=0, about="epochs of the meta-nets over the held-out share, by SGD")
    meta_lr: float = option(1e-3, at_least=0, about="learning rate of the meta-nets")
    base_lr: float = option(1e-4, at_least=0, about="learning rate of the base rates")
    retune: bool = option(True, about="fine-tune anew for every held-out minibatch; false: once a round")
    validation: float = option(0.2, above=0, below=1, about="share of a client's data that is held out")
    terms: int = option(3, at_least=1, about="K of Eq. 7")
    step: float = option(0.1, at_least=0, about="a of Eq. 7")
    hidden: int = option(100, at_least=1, about="width of the meta-nets")
    base_rate: float = option(1e-3, at_least=0, about="first value of every learned rate")
    limit: float = option(1000.0, at_least=0, about="upper bound of the factors on the base rates")

    name = "fedl2p"

    def needs(self):
        return {WHOLE}

    def nets(self, layout: Layout) -> MetaNets:
        return MetaNets(Sites.of(layout), self.hidden, self.base_rate, self.limit)

    # the server --------------------------------------------------------------------------------------------------
    def init(self, side: Client | Server) -> None:
        if isinstance(side, Server):
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(side.key("meta-nets"))
                side.state["meta"] = self.nets(side.layout).vector()

    def phases(self):
        reduce = {"meta": Mean(weighted=True, tells=Tells.GRADIENTS)}
        return (Phase("meta", reduce=reduce, broadcast=self._send, run=self._meta, update=self._average),)

    def _send(self, server: Server):
        return server.state

    def _average(self, server: Server) -> None:
        if server.reduced.get("meta") is not None:
            server.state["meta"] = server.reduced["meta"]

    # the client --------------------------------------------------------------------------------------------------
    def forward(self, module: nn.Module, x: Tensor, state: Tree, message: Tree) -> Tensor:
        """While a client fine-tunes, BatchNorm mixes the statistics of the minibatch with the stored ones."""
        if "mixing" not in state:
            outputs: Tensor = module(x)
            return outputs
        with mixed_batches(module, state["mixing"]):
            outputs = module(x)
        return outputs

    def _meta(self, client: Client):
        """Fine-tune by the meta-nets, keep that model, and send better meta-nets."""
        if len(client.data) < 2:
            return {}
        train, held = self._split(client)
        look = Look.at(client, train)
        nets = self.nets(client.layout).to(client.device)
        meta = client.message["meta"].to(client.device)

        def tune(tag: str) -> tuple[Model, Look]:
            with torch.no_grad():
                rates, betas = nets.at(meta, look.inputs, look.divergences)
            return self.tune(client, look, rates, betas, train, tag)

        tuned, seen = tune("tune")
        client.state = {key: value.clone() for key, value in tuned.items()}
        for index, (batch, rows) in enumerate(self._outer(client, train, held)):
            if index and self.retune:
                tuned, seen = tune(f"tune {index}")
            gradient = self.hypergradient(client, meta, nets, seen, tuned, batch, rows)
            meta = meta - self._steps(nets) * gradient.clamp(-CLAMP, CLAMP)
        return {"meta": meta}

    def _outer(self, client: Client, train: Data, held: Data) -> Iterator[tuple[Data, Data]]:
        """(a minibatch to train on, a held-out one), for every step of the meta-nets."""
        rng, size = client.rng("outer"), client.options.batch_size
        for _ in range(self.outer_epochs):
            for rows in np.array_split(rng.permutation(len(held)), max(1, -(-len(held) // size))):
                yield train.take(rng.permutation(len(train))[:size]), held.take(rows)

    def _steps(self, nets: MetaNets) -> Tensor:
        """(M,) the learning rate of every parameter of the meta-nets; the base rates come first."""
        steps = torch.full_like(nets.vector(), self.meta_lr)
        steps[: nets.base_rates.numel()] = self.base_lr
        return steps

    def _split(self, client: Client) -> tuple[Data, Data]:
        data = client.data
        order = client.rng("validation").permutation(len(data))
        held = min(max(1, round(self.validation * len(data))), len(data) - 1)
        return data.take(np.sort(order[held:])), data.take(np.sort(order[:held]))

    def tune(
        self, client: Client, look: Look, rates: Tensor, betas: Tensor, data: Data, tag: str = "tune"
    ) -> tuple[Model, Look]:
        """The model fine-tuned with a rate per tensor, its statistics mixed; and `look` with those that this left."""
        model = client.model
        if self.epochs == 0:
            return look.mixed(model, betas), look
        own: Tree = {"mixing": look.mixing(betas)} if look.sites.norms else {}
        fitted = client.fit(
            (self, Rates()),
            model=look.reset(model),
            data=data,
            state={self.name: own, Rates.name: {"rates": spread(rates, client.layout)}},
            rate=1.0,
            epochs=self.epochs,
            optimizer=Optimizer("sgd", lr=1.0),
            tag=tag,
        )
        seen = look.with_client(fitted.model)
        return {**seen.mixed(model, betas), "params": fitted.model["params"]}, seen

    @sdpa_kernel(SDPBackend.MATH)  # fused kernels of attention have no second derivatives
    def hypergradient(
        self, client: Client, meta: Tensor, nets: MetaNets, look: Look, tuned: Model, batch: Data, held: Data
    ) -> Tensor:
        """(M,) gradient of the validation loss with respect to the meta-nets (Eq. 7)."""
        meta = meta.detach().requires_grad_()
        rates, betas = nets.at(meta, look.inputs, look.divergences)
        tensors = {e.name: e.view(tuned["params"]).detach().clone().requires_grad_() for e in client.layout.params}
        learned = [tensors[name] for name in look.sites.tensors]
        gradients = torch.autograd.grad(
            look.loss(client, tensors, betas, batch), learned, create_graph=True, materialize_grads=True
        )
        update = [rate * gradient for rate, gradient in zip(rates, gradients, strict=True)]
        outer = look.loss(client, tensors, betas, held)
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
    def at(client: Client, data: Data) -> Look:
        """Of the client's model on this data."""
        layout = client.layout
        sites = Sites.of(layout)
        seen = input_moments(client, data.x, sites.layers)
        stats = {entry.name: entry.view(client.model["stats"]).to(client.device) for entry in layout.stats}
        stored = {norm: (stats[f"{norm}.{MEAN}"], stats[f"{norm}.{VARIANCE}"]) for norm in sites.norms}
        own = {norm: seen[norm].by_channel() for norm in sites.norms}
        gaps = [symmetric_divergence(*stored[norm], *own[norm]) for norm in sites.norms]
        divergences = torch.stack(gaps) if gaps else torch.zeros(0, device=client.device)
        return Look(layout, sites, _summary([seen[layer] for layer in sites.layers]), divergences, own, stored)

    def mixing(self, betas: Tensor) -> Tree:
        """{norm: its beta and stored statistics}, as the state in a step holds them."""
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

    def loss(self, client: Client, tensors: dict[str, Tensor], betas: Tensor, data: Data) -> Tensor:
        """The task loss of a network with `tensors`, differentiable in them and in the betas; eval mode otherwise."""
        trainer, module = client.trainer, client.trainer.replica.module
        training = module.training
        module.eval()
        x = trainer.stream.inputs(data.x.to(trainer.device))
        with mixed_norms(module, {norm: self.mixture(norm, beta) for norm, beta in self._betas(betas)}):
            outputs = functional_call(module, tensors, (x,))
        module.train(training)
        return trainer.task_loss(client.context)(outputs, data.y.to(trainer.device))

    def _betas(self, betas: Tensor) -> Iterator[tuple[str, Tensor]]:
        return zip(self.sites.norms, betas, strict=True)


@dataclass(frozen=True)
class Rates(Part):
    """Fine-tuning with a learning rate for every parameter."""

    name = "fedl2p-rates"

    def gradient(self, step: Step, gradient: Gradient) -> Tensor:
        rates: Tensor = step.state["rates"]
        return gradient.vector * rates


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


# the meta-nets, and the statistics of a client's data that they read -------------------------------------------------
MEAN, VARIANCE = "running_mean", "running_var"


@dataclass(frozen=True)
class Sites:
    """What of a network is personalised. layers: those with parameters. tensors: its parameters. norms: BatchNorms."""

    layers: tuple[str, ...]
    tensors: tuple[str, ...]
    norms: tuple[str, ...]

    @staticmethod
    def of(layout: Layout) -> Sites:
        tensors = tuple(entry.name for entry in network(layout))
        layers = tuple(dict.fromkeys(name.rpartition(".")[0] for name in tensors))
        norms = tuple(e.name.rpartition(".")[0] for e in layout.stats if e.name.endswith(MEAN))
        return Sites(layers, tensors, norms)


class MetaNets(nn.Module):
    """LR-Net: (mean, deviation) of every layer's input -> a factor per parameter tensor, times a learned base rate.
    BN-Net: one divergence per BatchNorm layer -> beta per layer; absent where there is no BatchNorm.

    Both have three layers. At first every factor is 1 and every beta 1/2, whatever the input.
    """

    def __init__(self, sites: Sites, hidden: int, base_rate: float, limit: float) -> None:
        super().__init__()
        self.limit = limit
        self.lr_net = _three_layers(2 * len(sites.layers), hidden, len(sites.tensors), 1.0)
        self.base_rates = nn.Parameter(torch.full((len(sites.tensors),), base_rate))
        self.bn_net = _three_layers(len(sites.norms), hidden, len(sites.norms), 0.5) if sites.norms else None

    def forward(self, inputs: Tensor, divergences: Tensor) -> tuple[Tensor, Tensor]:
        """(rates (tensors,), betas (norms,)); factors lie in [0, limit] and betas in [0, 1]."""
        factors = clamped(self.lr_net(inputs), 0.0, self.limit)
        betas = divergences.new_zeros(0) if self.bn_net is None else clamped(self.bn_net(divergences), 0.0, 1.0)
        return factors * self.base_rates, betas

    def vector(self) -> Tensor:
        """All its parameters, in order."""
        return torch.cat([p.detach().reshape(-1) for p in self.parameters()])

    def at(self, vector: Tensor, inputs: Tensor, divergences: Tensor) -> tuple[Tensor, Tensor]:
        """`forward` with the parameters of `vector`, which may require gradients."""
        named = dict(self.named_parameters())
        pieces = vector.split([p.numel() for p in named.values()])
        tensors = {name: piece.view_as(p) for (name, p), piece in zip(named.items(), pieces, strict=True)}
        result: tuple[Tensor, Tensor] = functional_call(self, tensors, (inputs, divergences))
        return result


def _three_layers(inputs: int, hidden: int, outputs: int, first: float) -> nn.Sequential:
    last = nn.Linear(hidden, outputs)
    nn.init.zeros_(last.weight)
    nn.init.constant_(last.bias, first)
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), last)


def clamped(x: Tensor, low: float, high: float) -> Tensor:
    """x within bounds, with the gradient of x itself (straight-through)."""
    return x.detach().clamp(low, high) + (x - x.detach())  # the second term is exactly 0


def symmetric_divergence(mean: Tensor, var: Tensor, other_mean: Tensor, other_var: Tensor, eps: float = 1e-5) -> Tensor:
    """0-d: mean over channels of (KL(p || q) + KL(q || p)) / 2 of normal distributions; the logarithms cancel."""
    a, b = var + eps, other_var + eps
    gap = (mean - other_mean).square()
    return (((a + gap) / b + (b + gap) / a) / 4.0 - 0.5).mean()


# the statistics ------------------------------------------------------------------------------------------------------
class InputMoments:
    """Running sums over the samples of one layer's input, by channel, in float64."""

    def __init__(self) -> None:
        self.count = 0
        self.total: Tensor | float = 0.0
        self.squares: Tensor | float = 0.0

    def add(self, x: Tensor) -> None:
        """x: (n, channels, ...), or (n, channels)."""
        rows = x.detach().double().transpose(0, 1).flatten(1)
        self.count += rows.shape[1]
        self.total = self.total + rows.sum(1)
        self.squares = self.squares + rows.square().sum(1)

    def by_channel(self) -> tuple[Tensor, Tensor]:
        """(mean, variance), each (channels,) float32."""
        mean = torch.as_tensor(self.total / self.count)
        variance = (self.squares / self.count - mean.square()).clamp(min=0.0)
        return mean.float(), variance.float()

    def overall(self) -> tuple[Tensor, Tensor]:
        """(mean, deviation) over all channels together, 0-d float32."""
        means = torch.as_tensor(self.total / self.count)
        mean = means.mean()
        variance = (torch.as_tensor(self.squares / self.count).mean() - mean.square()).clamp(min=0.0)
        return mean.float(), variance.sqrt().float()


def input_moments(client: Client, x: Tensor, layers: Iterable[str]) -> dict[str, InputMoments]:
    """Moments of the inputs of `layers` when the client's model runs on samples x (storage form), in eval mode."""
    trainer = client.trainer
    trainer.replica.load(client.model)
    module = trainer.replica.module.eval()
    seen = {name: InputMoments() for name in layers}
    handles = [module.get_submodule(n).register_forward_pre_hook(partial(_record, s)) for n, s in seen.items()]
    try:
        with torch.no_grad(), in_precision(trainer):
            for part in x.split(CHUNK):
                module(trainer.stream.inputs(part.to(trainer.device)))
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _record(seen: InputMoments, layer: nn.Module, args: tuple[Tensor, ...]) -> None:
    seen.add(args[0])
