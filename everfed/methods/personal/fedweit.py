"""FedWeIT: federated weighted inter-client transfer (Yoon et al., 2021), with and without the task id at test time.

The weights of every hidden layer, for client c and task t, are composed of shared and personal pieces:

    theta = B (.) sigmoid(m^t) + A^t + sum_j a^t_j KB_j                                          (Eq. 2)

B: shared weights, m: one mask logit per output channel, A: task-adaptive and sparse, KB: the adaptives that the
clients of the previous task's last round published, a client's own among them, a: one scalar per layer and entry.
Biases, BatchNorm and the head are the client's own, anew for every task. Training adds to the loss

    lambda1 |A|_1 + (wd / 2) (|A|^2 + |m|^2) [+ (wd / 2) |B|^2 in the first task]
    + (lambda2 / 2) sum_{i < t} | B (.) sigmoid(m^i) + A^i - theta^i |^2                          (Eq. 4)

with theta^i what B (.) sigmoid(m^i) + A^i was when task t began, before the server's B was merged into the client's (as
in the released code). A^i and m^i are not trained any more, so the last term is |(B - B then) (.) sigmoid(m^i)|^2, and
one number per channel stands for all earlier tasks. A starts at a third of the run's first weights in every task.

Clients send the channels of B whose mask is among the larger 70 %; the server averages each over those that sent it.

Models are scored on the clients. A sample goes through the weights of every task the client trained on, and the
prediction with the least entropy counts; where the task is known (`task` logits), its weights alone are used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from everfed.core.layout import EXTRAS, Extras, registered
from everfed.core.legacy import (
    BOUNDARIES,
    CLASSES,
    END,
    FIRST,
    MODEL,
    AddsParameters,
    Aggregator,
    Cohort,
    Collect,
    CompositionError,
    Context,
    Data,
    Entry,
    Fitted,
    Layout,
    Mean,
    Message,
    Model,
    Once,
    Optimizer,
    Part,
    Personal,
    Phase,
    Position,
    Reducer,
    Server,
    Slots,
    State,
    Step,
    Tree,
    overrides,
)
from everfed.methods.common.checks import at_least
from everfed.methods.common.features import network
from everfed.methods.common.layers import hidden_weights
from everfed.methods.common.teacher import classes_of
from everfed.methods.personal.decomposed import (
    by_channel,
    channel_means,
    composed,
    large,
    layers_of,
    least_entropy,
    predictions,
    pruned,
)
from everfed.methods.personal.sparse import dense, sparse

MASK_SPREAD = 0.1  # deviation of the first mask logits, so that channels differ from the first round on


@dataclass(frozen=True)
class FedWeIT(AddsParameters, Aggregator, Personal):
    """sparsity: lambda1, also the size up to which an entry of A is taken for 0 when it is published or scored.
    retention: lambda2. weight_decay: wd. share: of a layer's channels that are not sent (the quantile of |m|)."""

    sparsity: float = 1e-3
    retention: float = 100.0
    weight_decay: float = 1e-4
    share: float = 0.3

    name = "fedweit"
    needs = frozenset({BOUNDARIES, CLASSES})

    def __post_init__(self) -> None:
        at_least(self, 0, "sparsity", "retention", "weight_decay")
        if not 0.0 <= self.share < 1.0:
            raise ValueError(f"share must be in [0, 1); got {self.share}")

    def check(self, parts: Sequence[Part], optimizer: Optimizer) -> Iterable[str]:
        others = [p.name for p in parts if p is not self and (overrides(p, "gradient") or overrides(p, "loss"))]
        if others:
            raise CompositionError(
                f"fedweit trains decomposed weights, which {', '.join(others)} would take for a plain network's; "
                "compose them with another method"
            )
        if optimizer.kind == "sgd" and self.retention > 20:
            return (
                f"fedweit.retention = {self.retention:g}: plain SGD diverges when lr * retention * finished tasks / 4 "
                "reaches 2; its authors use Adam",
            )
        return ()

    # what is trained ---------------------------------------------------------------------------------------------
    def is_personal(self, parameter: str) -> bool:
        return parameter.startswith(tuple(f"{EXTRAS}{kind}/" for kind in ("adaptive", "mask", "attention", "own")))

    def parameters(self, server: Server) -> dict[str, Tensor]:
        """adaptive/, mask/ and attention/ of every hidden layer, and own/ of every other parameter."""
        ctx = server.context
        layers = hidden_weights(ctx.facts.layout)
        others = [e for e in network(ctx.facts.layout) if e not in layers]
        return {
            **{f"adaptive/{e.name}": torch.zeros(e.shape) for e in layers},
            **{f"mask/{e.name}": torch.zeros(e.shape[0]) for e in layers},
            **{f"attention/{e.name}": torch.zeros(ctx.facts.clients) for e in layers},
            **{f"own/{e.name}": torch.zeros(e.shape) for e in others},
        }

    def forward(self, module: nn.Module, x: Tensor, own: Tree, message: Tree) -> Tensor:
        if module.training or not own.get("tasks"):
            outputs: Tensor = functional_call(module, self._current(module, own), (x,))
            return outputs
        tasks: dict[str, Tree] = own["tasks"]
        route = str(own["host"].get("route"))
        chosen = [tasks[route]] if route in tasks else list(tasks.values())
        return least_entropy([predictions(module, x, kept) for kept in chosen])

    def _current(self, module: nn.Module, own: Tree) -> dict[str, Tensor]:
        """The network's parameters for the task under way."""
        base = dict(module.named_parameters())
        pieces: dict[str, nn.Parameter] = cast(Extras, module.extras)[self.name]
        knowledge = own.get("knowledge", {})
        tensors: dict[str, Tensor] = {
            name.removeprefix("own/"): value for name, value in pieces.items() if name.startswith("own/")
        }
        for name in layers_of(module):
            theta = composed(base[name], pieces[f"mask/{name}"], pieces[f"adaptive/{name}"])
            if knowledge:
                weights = pieces[f"attention/{name}"].index_select(0, knowledge["holders"])
                theta = theta + torch.tensordot(weights, knowledge[name], 1)  # Eq. 2
            tensors[name] = theta
        return tensors

    def gradient(self, step: Step, gradient: Tensor) -> Tensor:
        """The regularisers' gradients (Eq. 4)."""
        own, layout, w = step.state[self.name], step.layout, step.params
        gradient = gradient.clone()
        for entry in hidden_weights(layout):
            adaptive, mask = self._entry(layout, "adaptive", entry), self._entry(layout, "mask", entry)
            a, m, b = adaptive.view(w), mask.view(w), entry.view(w)
            adaptive.view(gradient).add_(self.sparsity * a.sign() + self.weight_decay * a)
            mask.view(gradient).add_(m, alpha=self.weight_decay)
            if "protect" in own:
                held = by_channel(own["protect"][entry.name], b) * (b - own["start"][entry.name])
                entry.view(gradient).add_(held, alpha=self.retention)
            else:
                entry.view(gradient).add_(b, alpha=self.weight_decay)
        return gradient

    # a client's rounds -------------------------------------------------------------------------------------------
    def phases(self) -> tuple[Phase, ...]:
        """`base` gives every client the first model, which it keeps where no client ever sends a value."""
        return (
            Phase("base", cohort=Cohort.ALL, when=FIRST, position=Position.BEFORE, run=self._keep_base),
            Phase(
                "publish",
                when=END,
                reduce={"adaptive": Collect()},
                in_last_round=False,
                run=self._publish,
                update=self._published,
            ),
        )

    def receive(self, client: State, message: Message, model: Model, data: Data, ctx: Context) -> tuple[Tree, Model]:
        own = dict(client.get(self.name, {}))
        received = message[MODEL]["params"]
        if ctx.round % ctx.options.sync_every == 0:
            model = {**model, "params": self._merged(own, received, model["params"])}
        if own.get("host", {}).get("task") != ctx.current_task:
            first = cast(Tensor, own.get("first", received))  # a client that came later has nothing earlier
            model = {**model, "params": self._fresh(model["params"], first, ctx)}
            own = self._begin(own, ctx)
        knowledge = message.get(self.name, {}).get("knowledge")
        return {**own, "knowledge": self._knowledge(knowledge, ctx)} if knowledge else own, model

    def _merged(self, own: Tree, received: Tensor, params: Tensor) -> Tensor:
        """Own values where no client sent any: there the aggregate is exactly 0."""
        if "base" not in own:
            return params
        base = torch.where(received == 0, own["base"].to(received.device), received)
        return torch.cat([base, params[len(base) :].to(base.device)])

    def _fresh(self, params: Tensor, first: Tensor, ctx: Context) -> Tensor:
        """The personal pieces of a new task: A a third of the first model's weights, masks near 0, attention 0, the
        rest as in the first model."""
        layout, rng = ctx.facts.layout, ctx.rng("masks")
        params = params.clone()
        params[layout.shared :] = 0.0
        layers = hidden_weights(layout)
        for entry in layers:
            self._entry(layout, "adaptive", entry).view(params).copy_(entry.view(first) / 3.0)
            logits = rng.normal(0.0, MASK_SPREAD, entry.shape[0]).astype(np.float32)
            self._entry(layout, "mask", entry).view(params).copy_(torch.from_numpy(logits))
        for entry in network(layout):
            if entry not in layers:
                self._entry(layout, "own", entry).view(params).copy_(entry.view(first))
        return params

    def _begin(self, own: Tree, ctx: Context) -> Tree:
        """Slots for a new task: the client's own B, and how much earlier tasks hold each of its channels."""
        own = {**own, "host": {"task": ctx.current_task}}
        masks = [kept["masks"] for kept in own.get("tasks", {}).values()]
        layers = hidden_weights(ctx.facts.layout)
        if masks:
            own["start"] = {e.name: e.view(own["base"]).clone() for e in layers}
            own["protect"] = {e.name: sum(m[e.name].sigmoid().square() for m in masks) for e in layers}
        return own

    def _knowledge(self, published: dict[str, Tree], ctx: Context) -> Tree:
        """{layer: (S, ...) adaptives} and the clients that published them."""
        holders = sorted(published, key=int)
        vectors = torch.stack([dense(published[holder]) for holder in holders])
        layers = hidden_weights(ctx.facts.layout)
        pieces = vectors.split([entry.size for entry in layers], dim=1)
        shaped = {e.name: piece.reshape(-1, *e.shape) for e, piece in zip(layers, pieces, strict=True)}
        return {"holders": torch.tensor([int(holder) for holder in holders]), **shaped}

    def reply(self, client: State, message: Message, fitted: Fitted, data: Data, ctx: Context) -> tuple[Tree, Tree]:
        own = dict(client[self.name])
        knowledge = own.pop("knowledge", None)
        kept = self._keep(fitted.model, knowledge, ctx)
        own["tasks"] = {**own.get("tasks", {}), str(ctx.current_task): kept}
        own["base"] = fitted.model["params"][: ctx.facts.layout.shared].clone()
        return own, {"channels": self._channels(fitted.model["params"], ctx.facts.layout)}

    def _keep(self, model: Model, knowledge: Tree | None, ctx: Context) -> Tree:
        """What later predictions for this task need: A and the knowledge it uses as one sparse vector, masks, the
        client's own parameters and statistics, and the task's classes."""
        layout, w = ctx.facts.layout, model["params"]
        layers = hidden_weights(layout)
        return {
            "fixed": sparse(torch.cat([self._fixed(w, e, knowledge, layout).reshape(-1) for e in layers])),
            "masks": {e.name: self._entry(layout, "mask", e).view(w).clone() for e in layers},
            "own": {e.name: self._entry(layout, "own", e).view(w).clone() for e in network(layout) if e not in layers},
            "stats": model["stats"].clone(),
            "counters": model["counters"].clone(),
            "classes": classes_of(ctx, [ctx.current_task or 0]).to(w.device),
        }

    def _fixed(self, w: Tensor, entry: Entry, knowledge: Tree | None, layout: Layout) -> Tensor:
        adaptive = pruned(self._entry(layout, "adaptive", entry).view(w), self.sparsity)
        if knowledge is None:
            return adaptive
        weights = self._entry(layout, "attention", entry).view(w).index_select(0, knowledge["holders"].to(w.device))
        return adaptive + torch.tensordot(weights, knowledge[entry.name].to(w.device), 1)

    def _channels(self, w: Tensor, layout: Layout) -> Tree:
        """The channels of B whose mask is large: their numbers, and which channels they are."""
        layers = hidden_weights(layout)
        kept = {e.name: large(self._entry(layout, "mask", e).view(w), self.share) for e in layers}
        return {
            "values": torch.cat([e.view(w)[kept[e.name]].reshape(-1) for e in layers]),
            "kept": torch.cat([kept[e.name] for e in layers]),
        }

    def _keep_base(self, client: State, message: Message, data: Data, ctx: Context) -> tuple[Tree, Tree]:
        first = message[MODEL]["params"][: ctx.facts.layout.shared]
        return {**client.get(self.name, {}), "base": first, "first": first}, {}

    def _publish(self, client: State, message: Message, data: Data, ctx: Context) -> tuple[None, Tree]:
        """A, of a client that trained on this task."""
        own, layout, w = client.get(self.name, {}), ctx.facts.layout, message[MODEL]["params"]
        if own.get("host", {}).get("task") != ctx.current_task or str(ctx.current_task) not in own.get("tasks", {}):
            return None, {}
        adaptive = [self._entry(layout, "adaptive", e).view(w).reshape(-1) for e in hidden_weights(layout)]
        return None, {"adaptive": sparse(pruned(torch.cat(adaptive), self.sparsity))}

    # the server --------------------------------------------------------------------------------------------------
    def reducers(self) -> Mapping[str, Reducer]:
        return {"channels": Collect(), "stats": Mean(), "counters": Mean()}

    def upload(self, model: Model, message: Message, ctx: Context) -> Tree:
        """Statistics; the channels of B are part of `reply`, which sees the masks."""
        return {} if ctx.options.batchnorm == "local" else {k: model[k] for k in ("stats", "counters")}

    def aggregate(self, server: State, reduced: Tree, ctx: Context) -> Model:
        """Every channel averaged over the clients that sent it; 0 where none did."""
        model = {k: v if reduced.get(k) is None else reduced[k] for k, v in server[MODEL].items()}
        if not reduced.get("channels"):
            return model
        replies, device = list(reduced["channels"].values()), next(iter(reduced["channels"].values()))["values"].device
        params = model["params"].to(device, copy=True)
        layers = hidden_weights(ctx.facts.layout)
        for entry, mean in zip(layers, channel_means(replies, layers), strict=True):
            entry.view(params).copy_(mean)
        return {**model, "params": params}

    def _published(self, server: State, reduced: Tree, ctx: Context) -> Slots:
        if not reduced.get("adaptive"):
            return None
        return {"knowledge": {str(client): tree for client, tree in reduced["adaptive"].items()}, "since": ctx.round}

    def broadcast(self, server: State, ctx: Context) -> dict[str, Any]:
        own = server.get(self.name)
        return {"knowledge": Once(own["since"], own["knowledge"])} if own else {}

    # scoring -----------------------------------------------------------------------------------------------------
    def personalise(self, client: State, message: Message, model: Model, ctx: Context) -> Model:
        own = client.get(self.name, {})
        return {**model, "params": self._merged(own, message[MODEL]["params"], model["params"])}

    def state_for_task(self, own: Tree, task: int) -> Tree:
        return {**own, "host": {**own.get("host", {}), "route": task}}

    def _entry(self, layout: Layout, kind: str, entry: Entry) -> Entry:
        return layout.param(registered(self.name, f"{kind}/{entry.name}", personal=True))
