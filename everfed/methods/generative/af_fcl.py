"""AF-FCL: accurate forgetting with a normalising flow over features (Wuerkaixi et al., ICLR 2024).

The classifier is an extractor h_a and a head h_b. A class-conditional flow g over features a = h_a(x) is trained and
averaged with it. Every minibatch has three steps:

    F  L_flow = - mean log q(a | y) - k_lf mean log q(a' | c'),  a' from the flow at the previous task's end
    R  L_R    = k_f ( ((1 - theta) p + theta) mean_j pi_j CE(h_b(a_j), c_j) + k_out k_last KD(h_b(a_j), last h_b(a_j)) )
    C  L_C    = CE(x, y) + k_feat k_last mean (a - a_last)^2 + k_out k_last KD(outputs, last outputs)

where a_j come from the flow, p = mean_i q(a_i | y_i)^(1/D), and the credibility pi_j is the likelihood of a_j under the
client's own data: memories that disagree with it are forgotten. KD is soft cross-entropy at temperature 2. "last" is
the aggregate after the previous task's last round, as this client received it. c_j are drawn from the classes that any
client has had so far, c' from those of earlier tasks. Features are taken in eval mode in step F, in train mode in R.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from everfed.core import random
from everfed.core.layout import EXTRAS, Extras, registered
from everfed.core.replica import frozen_forward, in_eval_mode, initial_weights
from everfed.method import (
    BOUNDARIES,
    CLASSES,
    END,
    MODEL,
    AddsParameters,
    Client,
    Cohort,
    Entry,
    Facts,
    Layout,
    Model,
    Optimizer,
    Part,
    Phase,
    Schedule,
    Server,
    Step,
    Substep,
    Table,
    Tree,
    option,
)
from everfed.methods.common.layers import head_inputs, in_precision, network, span
from everfed.methods.common.teacher import classes_of, competing, soft_cross_entropy, tasks_before

TEMPERATURE = 2.0
_HEAD = "head."
PERMUTED = ("reverse", "reverse", "random", "random")  # per layer


@dataclass(frozen=True)
class AFFCL(AddsParameters, Part):
    k_loss_flow: float = option(0.5, at_least=0, about="k_f, weight of replay; 0 switches the flow off")
    k_flow_lastflow: float = option(0.1, at_least=0, about="k_lf, weight of the last flow's samples in step F")
    flow_explore_theta: float = option(
        0.1, at_least=0, at_most=1, about="theta: 1 ignores how well the flow fits, 0 trusts it fully"
    )
    flow_lr: float = option(5e-3, at_least=0, about="learning rate of Adam on the flow")
    replay_lr: float = option(
        0.0,
        at_least=0,
        about="of step R's own Adam, for runs by SGD, which a young flow's outliers make diverge; 0: none",
    )
    k_kd_last_cls: float = option(0.2, at_least=0, about="k_last, weight of distillation from the last model")
    k_kd_global_cls: float = option(0.0, at_least=0, about="weight of distillation from the received model")
    k_kd_feature: float = option(0.5, at_least=0, about="k_feat, share of the features in distillation")
    k_kd_output: float = option(0.1, at_least=0, about="k_out, share of the outputs in distillation")
    hidden: int = option(512, at_least=1, about="width of the flow's networks")
    credibility_space: str = option(
        "latent",
        one_of=("latent", "feature"),
        about="the Gaussian of a class's latents is evaluated at a sample's latent, or at its feature (code)",
    )
    replay_layers: str = option(
        "head", one_of=("head", "middle"), about="replay trains the whole head, or its middle layer only (code)"
    )
    variance_floor: float = option(1e-4, above=0, about="least variance of a class's latents")

    name = "af-fcl"

    def needs(self):
        return {BOUNDARIES, CLASSES}

    # the networks --------------------------------------------------------------------------------------------------
    def blueprint(self, facts: Facts) -> FlowBlueprint:
        return FlowBlueprint(feature_width(facts.layout), facts.classes, self.hidden)

    def parameters(self, server: Server) -> dict[str, Tensor]:
        if not self.k_loss_flow:
            return {}
        blueprint = self.blueprint(server.facts)
        first = initial_weights(blueprint, random.key(server.seed, self.name, "flow"))["params"]
        with torch.device("meta"):
            named = Layout.of(blueprint.build()).named(first)
        return {f"flow.{name}": value for name, value in named.items()}

    def forward(self, module: nn.Module, x: Tensor, own: Tree, message: Tree) -> Tensor:
        """Class logits; in training the features beside them."""
        if not module.training:
            outputs: Tensor = module(x)
            return outputs
        with head_inputs(module, layer=head_of(module)) as seen:
            outputs = module(x)
        return torch.cat([outputs, seen[0]], dim=1)

    def substeps(self, layout: Layout) -> tuple[Substep, ...]:
        if not self.k_loss_flow:
            return ()
        flow = registered(self.name, "flow.", personal=False)
        chosen = replayed_layers(layout, self.replay_layers)
        optimizer = Optimizer("adam", lr=self.flow_lr)
        own = replace(optimizer, lr=self.replay_lr) if self.replay_lr else None
        return (
            Substep("flow", lambda name: name.startswith(flow), self._flow_loss, optimizer, alone=True),
            Substep("replay", lambda name: name in chosen, self._replay_loss, own),
        )

    # before training -----------------------------------------------------------------------------------------------
    def phases(self):
        """After a task's last round its clients receive the aggregate: the `last` of their next task."""
        needed = self.k_kd_last_cls or (self.k_loss_flow and self.k_flow_lastflow)
        return (Phase("last", Cohort.BOUNDARY, END, in_last_round=False, run=self._keep_last),) if needed else ()

    def _keep_last(self, client: Client):
        client.state["last"] = dict(client.received)

    def plan(self, client: Client, schedule: Schedule):
        """The labels of every batch of sampled features: of all clients' classes so far, and of earlier tasks."""
        if not self.k_loss_flow:
            return {}
        own, rng = client.state, client.rng(self.name)

        def labels(among: Tensor) -> Table:
            return Table.of([rng.choice(among.numpy(), count) for count in schedule.rows.lengths])

        tables = {"sampled": labels(competing(client))}
        if "last" in own and self.k_flow_lastflow:
            tables["past"] = labels(classes_of(client, tasks_before(client), everyone=True))
        mask, width = client.trainer.label_mask(client.context), self.blueprint(client.facts).features
        own["mask"] = torch.zeros(client.facts.classes) if mask is None else mask
        own["orders"] = permutations(width, random.key(client.seed, self.name, "permutations"))
        return tables

    def reply(self, client: Client):
        """Nothing but the last model outlives a local training."""
        client.state = {name: value for name, value in client.state.items() if name == "last"}

    # step C: the classifier ----------------------------------------------------------------------------------------
    def objective(self, step: Step) -> Tensor:
        classes = step.facts.classes
        loss = step.task_loss(step.all_outputs[:, :classes], step.all_y)
        teachers = (
            (self.k_kd_last_cls, step.state.get("last")),
            (self.k_kd_global_cls, {**step.of(MODEL).message, "params": step.received}),
        )
        for weight, teacher in teachers:
            if weight and teacher is not None:
                loss = loss + weight * self._distilled(step, teacher)
        return loss

    def _distilled(self, step: Step, teacher: Model) -> Tensor:
        """k_feat mean (a - a_t)^2 + k_out KD(outputs, outputs_t)."""
        classes = step.facts.classes
        outputs, features = step.outputs[:, :classes], step.outputs[:, classes:]
        target_outputs, target_features = self._frozen(step, teacher)
        loss = self.k_kd_output * soft_cross_entropy(outputs, target_outputs, TEMPERATURE)
        return loss + self.k_kd_feature * (features - target_features).square().mean()

    def _frozen(self, step: Step, model: Model) -> tuple[Tensor, Tensor]:
        """(outputs, features) of a model on the batch: eval mode, no gradients."""
        module = step.module
        with in_precision(step.trainer), head_inputs(module, layer=head_of(module)) as seen:
            outputs: Tensor = frozen_forward(step.replica, model, step.inputs(step.x))
        return outputs.float(), seen[0].float()

    # steps F and R: the flow, and the head on features of the flow ---------------------------------------------------
    def _flow_loss(self, step: Step) -> Tensor:
        """L_flow."""
        with in_eval_mode(step.module):
            features = self._features(step)
        loss = -self._log_density(step, features, step.y)[1].mean()
        past = step.rows.get("past")
        if past is None:
            return loss
        with torch.no_grad():
            sampled, _ = self._sampled(step, past, self._last_flow(step))
        return loss - self.k_flow_lastflow * self._log_density(step, sampled, past)[1].mean()

    def _replay_loss(self, step: Step) -> Tensor:
        """L_R."""
        labels, own = step.rows["sampled"], step.state
        with torch.no_grad():
            latents, density = self._log_density(step, self._features(step), step.y)
            usual = (density / latents.shape[1]).exp().mean()
            features, noise = self._sampled(step, labels, self._live(step))
            where = noise if self.credibility_space == "latent" else features
            credible = credibility(latents, step.y, where, labels, usual, len(own["mask"]), self.variance_floor)
        outputs = self._head(step, features)
        masked = outputs + own["mask"].expand_as(outputs).scatter(1, labels.unsqueeze(1), 0.0)
        errors = functional.cross_entropy(masked, labels, reduction="none")
        loss = replay_factor(usual, self.flow_explore_theta) * (credible * errors).mean()
        if "last" in own and self.k_kd_output * self.k_kd_last_cls:
            target = self._head(step, features, own["last"])
            loss = loss + self.k_kd_output * self.k_kd_last_cls * soft_cross_entropy(outputs, target, TEMPERATURE)
        return self.k_loss_flow * loss

    @torch.no_grad()
    def _features(self, step: Step) -> Tensor:
        """(n, D) of the batch, in the mode that the network is in; in train mode BatchNorm's statistics move."""
        module = step.module
        with in_precision(step.trainer), head_inputs(module, layer=head_of(module)) as seen:
            module(step.inputs(step.x))
        return seen[0].float()

    def _head(self, step: Step, features: Tensor, model: Model | None = None) -> Tensor:
        """(n, C) the head's outputs on features; without gradients for another model's head."""
        layer = head_of(step.module)
        with in_precision(step.trainer):
            if model is None:
                return cast(Tensor, layer(features)).float()
            with torch.no_grad(), in_eval_mode(layer):
                tensors = head_tensors(step.layout, model["params"])
                return cast(Tensor, functional_call(layer, tensors, (features,))).float()

    def _log_density(self, step: Step, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(latents u, log q(a | y) (n,))."""
        latents, size = self._flow(step, self._live(step), features, labels)
        return latents, log_normal(latents) + size

    def _sampled(self, step: Step, labels: Tensor, flow: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(features that a flow draws for labels, the noise they come from)."""
        width = step.state["orders"].shape[1]
        noise = torch.randn((len(labels), width), generator=step.generator, device=labels.device)
        return self._flow(step, flow, noise, labels, inverse=True)[0], noise

    def _flow(
        self, step: Step, tensors: dict[str, Tensor], x: Tensor, labels: Tensor, inverse: bool = False
    ) -> tuple[Tensor, Tensor]:
        own = step.state
        module = step.trainer.auxiliary(self.blueprint(step.facts)).module
        context = functional.one_hot(labels, len(own["mask"])).to(x.dtype)
        found: Any = functional_call(module, tensors, (x, context, own["orders"]), {"inverse": inverse})
        return found[0], found[1]

    def _last_flow(self, step: Step) -> dict[str, Tensor]:
        prefix = registered(self.name, "flow.", personal=False)
        where = span(entry for entry in step.layout.params if entry.name.startswith(prefix))
        layout = step.trainer.auxiliary(self.blueprint(step.facts)).layout
        return layout.named(step.state["last"]["params"][where])

    def _live(self, step: Step) -> dict[str, Tensor]:
        extras = cast(Extras, step.module.extras)[self.name]
        return {name.removeprefix("flow."): value for name, value in extras.items()}


def credibility(
    latents: Tensor, y: Tensor, where: Tensor, labels: Tensor, usual: Tensor, classes: int, floor: float
) -> Tensor:
    """(m,) pi_j: the mean over dimensions of N(where_j; mean, variance of its class's latents in the batch); `usual`
    for a class that the batch does not have. latents: (n, D) of samples labelled y; where: (m, D)."""
    own = functional.one_hot(y, classes).to(latents.dtype)
    count = own.sum(0)
    share = own.T / count.clamp(min=1).unsqueeze(1)
    mean = share @ latents
    variance = (share @ (latents - mean[y]).square()).clamp(min=floor)
    spread = variance[labels]
    density = torch.exp(-0.5 * (where - mean[labels]).square() / spread) / (2 * math.pi * spread).sqrt()
    return torch.where(count[labels] > 0, density.mean(1), usual)


def replay_factor(usual: Tensor, theta: float) -> Tensor:
    """(1 - theta) p + theta: the weight of replay, by how well the flow fits this client's data."""
    return (1.0 - theta) * usual + theta


def head_prefix(named: Iterable[tuple[str, int]]) -> str:
    """The prefix of the names of h_b's parameters: the network's `head`, of any number of layers, or else its last
    linear layer. named: (name, dimensions) of the network's own parameters, in order."""
    listed = list(named)
    if any(name.startswith(_HEAD) for name, _ in listed):
        return _HEAD
    matrices = [name for name, dimensions in listed if dimensions == 2]
    if not matrices:
        raise ValueError("af-fcl needs a network with a linear layer: that layer's inputs are the features")
    return matrices[-1].removesuffix("weight")


def head_of(module: nn.Module) -> nn.Module:
    """h_b."""
    own = ((name, p.dim()) for name, p in module.named_parameters() if not name.startswith(EXTRAS))
    return module.get_submodule(head_prefix(own).removesuffix("."))


def head_entries(layout: Layout) -> list[Entry]:
    """The parameters of h_b."""
    prefix = head_prefix((entry.name, len(entry.shape)) for entry in network(layout))
    return [entry for entry in network(layout) if entry.name.startswith(prefix)]


def feature_width(layout: Layout) -> int:
    """D: the length of the head's input."""
    return next(entry.shape[1] for entry in head_entries(layout) if len(entry.shape) == 2)


def replayed_layers(layout: Layout, which: str) -> list[str]:
    """What replay trains: the whole head, or the last but one of its linear layers."""
    names = [entry.name for entry in head_entries(layout)]
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    return names if which == "head" else [name for name in names if name.rpartition(".")[0] in layers[-2:-1]]


def head_tensors(layout: Layout, params: Tensor) -> dict[str, Tensor]:
    """The head of a model, by the names of the head itself."""
    entries = head_entries(layout)
    prefix = head_prefix((entry.name, len(entry.shape)) for entry in network(layout))
    return {entry.name.removeprefix(prefix): entry.view(params) for entry in entries}


# the flow -------------------------------------------------------------------------------------------------------------
# layers of [permutation, affine coupling] map features to noise: one half passes unchanged and determines the scale and
# shift of the other; scales are at most 1.001, so the map contracts
@dataclass(frozen=True)
class FlowBlueprint:
    """features: D. classes: C, the context is a one-hot label. hidden: width of the networks inside."""

    features: int
    classes: int
    hidden: int = 512

    def build(self) -> nn.Module:
        return ConditionalFlow(self.features, self.classes, self.hidden)


class ResidualBlock(nn.Module):
    """x + GLU(Linear(LReLU(Linear(LReLU(x)))), Linear(context)); the last linear layer begins near zero."""

    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.context = nn.Linear(classes, hidden)
        for parameter in self.second.parameters():
            nn.init.uniform_(parameter, -1e-3, 1e-3)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        inner = self.second(functional.leaky_relu(self.first(functional.leaky_relu(x))))
        return x + inner * torch.sigmoid(self.context(context))


class Coupling(nn.Module):
    """Scales and shifts the second half of a vector by a network's outputs for the first half and the label."""

    def __init__(self, features: int, classes: int, hidden: int, blocks: int = 2) -> None:
        super().__init__()
        self.same = features // 2
        self.dense = nn.Linear(self.same + classes, hidden)
        self.blocks = nn.ModuleList(ResidualBlock(hidden, classes) for _ in range(blocks))
        self.out = nn.Linear(hidden, 2 * (features - self.same))

    def forward(self, x: Tensor, context: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
        """(outputs, log-determinant (n,)) of the map, or of its inverse."""
        same, other = x[:, : self.same], x[:, self.same :]
        hidden = self.dense(torch.cat([same, context], dim=1))
        for block in self.blocks:
            hidden = block(hidden, context)
        shift, raw = self.out(hidden).chunk(2, dim=1)
        scale = torch.sigmoid(raw + 2.0) + 1e-3
        size = torch.log(scale).sum(1)
        if inverse:
            return torch.cat([same, (other - shift) / scale], dim=1), -size
        return torch.cat([same, other * scale + shift], dim=1), size


class ConditionalFlow(nn.Module):
    """Four couplings. With D = 512: 5,943,296 parameters for 26 classes, 6,397,952 for 100, 5,906,432 for 20."""

    def __init__(self, features: int, classes: int, hidden: int = 512) -> None:
        super().__init__()
        self.couplings = nn.ModuleList(Coupling(features, classes, hidden) for _ in PERMUTED)

    def forward(self, x: Tensor, context: Tensor, orders: Tensor, inverse: bool = False) -> tuple[Tensor, Tensor]:
        """Features to noise, or back: (n, D), and the log-determinant (n,). orders: (layers, D) of `permutations`."""
        total = torch.zeros_like(x[:, 0])
        layers = list(zip(self.couplings, orders, strict=True))
        for coupling, order in reversed(layers) if inverse else layers:
            x = x if inverse else x.index_select(1, order)
            x, size = coupling(x, context, inverse)
            x = torch.empty_like(x).index_copy(1, order, x) if inverse else x
            total = total + size
        return x, total


def permutations(features: int, seed: int) -> Tensor:
    """(layers, D): reversed, or drawn from the seed, which is the same on all clients."""
    drawn = torch.Generator().manual_seed(seed)
    orders: dict[str, Callable[[], Tensor]] = {
        "reverse": lambda: torch.arange(features - 1, -1, -1),
        "random": lambda: torch.randperm(features, generator=drawn),
    }
    return torch.stack([orders[kind]() for kind in PERMUTED])


def log_normal(z: Tensor) -> Tensor:
    """(n,) log-density of N(0, I)."""
    return -0.5 * z.square().sum(1) - 0.5 * z.shape[1] * math.log(2 * math.pi)
