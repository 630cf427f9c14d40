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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from everfed.core.layout import EXTRAS, Extras, registered
from everfed.method import (
    BOUNDARIES,
    CLASSES,
    END,
    FIRST,
    AddsParameters,
    Aggregator,
    Cached,
    Client,
    Cohort,
    Collect,
    CompositionError,
    Entry,
    Gradient,
    Layout,
    Mean,
    Model,
    Personal,
    Phase,
    Server,
    Step,
    Tells,
    Tree,
    When,
    option,
    overrides,
)
from everfed.methods.common.layers import hidden_names, hidden_weights, network
from everfed.methods.common.teacher import classes_of

MASK_SPREAD = 0.1  # deviation of the first mask logits, so that channels differ from the first round on
IMPOSSIBLE = -1e4  # far below any real log-probability


@dataclass(frozen=True)
class FedWeIT(AddsParameters, Aggregator, Personal):
    sparsity: float = option(
        1e-3,
        at_least=0,
        about="lambda1; also the size up to which an entry of A is taken for 0 when published or scored",
    )
    retention: float = option(100.0, at_least=0, about="lambda2")
    weight_decay: float = option(1e-4, at_least=0, about="wd")
    share: float = option(
        0.3, at_least=0, below=1, about="share of a layer's channels that are not sent (the quantile of |m|)"
    )

    name = "fedweit"

    def needs(self):
        return {BOUNDARIES, CLASSES}

    def check(self, parts, optimizer):
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
        layers = hidden_weights(server.layout)
        others = [e for e in network(server.layout) if e not in layers]
        return {
            **{f"adaptive/{e.name}": torch.zeros(e.shape) for e in layers},
            **{f"mask/{e.name}": torch.zeros(e.shape[0]) for e in layers},
            **{f"attention/{e.name}": torch.zeros(server.facts.clients) for e in layers},
            **{f"own/{e.name}": torch.zeros(e.shape) for e in others},
        }

    def forward(self, module: nn.Module, x: Tensor, state: Tree, message: Tree) -> Tensor:
        if module.training or not state.get("tasks"):
            outputs: Tensor = functional_call(module, self._current(module, state), (x,))
            return outputs
        tasks: dict[str, Tree] = state["tasks"]
        route = str(state["host"].get("route"))
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

    def gradient(self, step: Step, gradient: Gradient) -> Tensor:
        """The regularisers' gradients (Eq. 4)."""
        own, layout, w = step.state, step.layout, step.params
        vector = gradient.vector.clone()
        for entry in hidden_weights(layout):
            adaptive, mask = self._entry(layout, "adaptive", entry), self._entry(layout, "mask", entry)
            a, m, b = adaptive.view(w), mask.view(w), entry.view(w)
            adaptive.view(vector).add_(self.sparsity * a.sign() + self.weight_decay * a)
            mask.view(vector).add_(m, alpha=self.weight_decay)
            if "protect" in own:
                held = by_channel(own["protect"][entry.name], b) * (b - own["start"][entry.name])
                entry.view(vector).add_(held, alpha=self.retention)
            else:
                entry.view(vector).add_(b, alpha=self.weight_decay)
        return vector

    # a client's rounds -------------------------------------------------------------------------------------------
    def phases(self):
        """`base` gives every client the first model, which it keeps where no client ever sends a value."""
        base = Phase("base", cohort=Cohort.ALL, rounds=FIRST, when=When.BEFORE, run=self._keep_base)
        publish = Phase(
            "publish",
            rounds=END,
            reduce={"adaptive": Collect(tells=Tells.GRADIENTS)},
            in_last_round=False,
            run=self._publish,
            update=self._published,
        )
        return base, publish

    def receive(self, client: Client) -> None:
        if client.round % client.options.sync_every == 0:
            client.model = self.personalise(client)
        if client.state.get("host", {}).get("task") != client.task:
            client.model = {**client.model, "params": self._fresh(client)}
            self._begin(client)
        knowledge = client.message.get("knowledge")
        if knowledge:
            client.state["knowledge"] = _knowledge(knowledge, client.layout)

    def personalise(self, client: Client) -> Model:
        """Own values where no client sent any: there the aggregate is exactly 0."""
        if "base" not in client.state:
            return client.model
        received, params = client.received["params"], client.model["params"]
        base = torch.where(received == 0, client.state["base"].to(received.device), received)
        return {**client.model, "params": torch.cat([base, params[len(base) :].to(base.device)])}

    def state_for_task(self, state: Tree, task: int) -> Tree:
        return {**state, "host": {**state.get("host", {}), "route": task}}

    def _fresh(self, client: Client) -> Tensor:
        """The parameters with which a task begins: A a third of the first model's weights, masks near 0, attention 0,
        the client's own as in the first model."""
        layout, rng = client.layout, client.rng("masks")
        first = client.state.get("first", client.received["params"])  # a client that came later has nothing earlier
        params = client.model["params"].clone()
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

    def _begin(self, client: Client) -> None:
        """For a new task: the client's own B, and how much earlier tasks hold each of its channels."""
        own, layers = client.state, hidden_weights(client.layout)
        own["host"] = {"task": client.task}
        masks = [kept["masks"] for kept in own.get("tasks", {}).values()]
        if masks:
            own["start"] = {e.name: e.view(own["base"]).clone() for e in layers}
            own["protect"] = {e.name: sum(m[e.name].sigmoid().square() for m in masks) for e in layers}

    def reply(self, client: Client):
        own, w = client.state, client.model["params"]
        kept = self._keep(client, own.pop("knowledge", None))
        own["tasks"] = {**own.get("tasks", {}), str(client.task): kept}
        own["base"] = w[: client.layout.shared].clone()
        return {"channels": self._channels(w, client.layout)}

    def _keep(self, client: Client, knowledge: Tree | None) -> Tree:
        """What later predictions for this task need: A and the knowledge it uses as one sparse vector, masks, the
        client's own parameters and statistics, and the task's classes."""
        layout, model, w = client.layout, client.model, client.model["params"]
        layers = hidden_weights(layout)
        return {
            "fixed": sparse(torch.cat([self._fixed(w, e, knowledge, layout).reshape(-1) for e in layers])),
            "masks": {e.name: self._entry(layout, "mask", e).view(w).clone() for e in layers},
            "own": {e.name: self._entry(layout, "own", e).view(w).clone() for e in network(layout) if e not in layers},
            "stats": model["stats"].clone(),
            "counters": model["counters"].clone(),
            "classes": classes_of(client, [client.task or 0]).to(w.device),
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

    def _keep_base(self, client: Client):
        first = client.model["params"][: client.layout.shared]
        client.state |= {"base": first, "first": first}

    def _publish(self, client: Client):
        """A, of a client that trained on this task."""
        own, w = client.state, client.model["params"]
        if own.get("host", {}).get("task") != client.task or str(client.task) not in own.get("tasks", {}):
            return {}
        layers = hidden_weights(client.layout)
        adaptive = [self._entry(client.layout, "adaptive", e).view(w).reshape(-1) for e in layers]
        return {"adaptive": sparse(pruned(torch.cat(adaptive), self.sparsity))}

    # the server --------------------------------------------------------------------------------------------------
    def reducers(self):
        return {"channels": Collect(tells=Tells.GRADIENTS), "stats": Mean(), "counters": Mean()}

    def upload(self, client: Client):
        """Statistics; the channels of B are part of `reply`."""
        return {key: value for key, value in super().upload(client).items() if key != "params"}

    def aggregate(self, server: Server) -> Model:
        """Every channel averaged over the clients that sent it; 0 where none did."""
        model, replies = super().aggregate(server), list((server.reduced.get("channels") or {}).values())
        if not replies:
            return model
        params = model["params"].to(replies[0]["values"].device, copy=True)
        layers = hidden_weights(server.layout)
        for entry, mean in zip(layers, channel_means(replies, layers), strict=True):
            entry.view(params).copy_(mean)
        return {**model, "params": params}

    def _published(self, server: Server) -> None:
        adaptives = server.reduced.get("adaptive")
        if adaptives:
            knowledge = {str(client): tree for client, tree in adaptives.items()}
            server.state = {"knowledge": knowledge, "since": server.round}

    def broadcast(self, server: Server):
        own = server.state
        return {"knowledge": Cached(own["since"], own["knowledge"])} if own else {}

    def _entry(self, layout: Layout, kind: str, entry: Entry) -> Entry:
        return layout.param(registered(self.name, f"{kind}/{entry.name}", personal=True))


def _knowledge(published: dict[str, Tree], layout: Layout) -> Tree:
    """{layer: (S, ...) adaptives} and the clients that published them."""
    holders = sorted(published, key=int)
    vectors = torch.stack([dense(published[holder]) for holder in holders])
    layers = hidden_weights(layout)
    pieces = vectors.split([entry.size for entry in layers], dim=1)
    shaped = {e.name: piece.reshape(-1, *e.shape) for e, piece in zip(layers, pieces, strict=True)}
    return {"holders": torch.tensor([int(holder) for holder in holders]), **shaped}


# composed weights, and the predictions of such a network --------------------------------------------------------------
def composed(base: Tensor, mask: Tensor, fixed: Tensor) -> Tensor:
    """B (.) sigmoid(m) + A."""
    return base * by_channel(mask.sigmoid(), base) + fixed


def by_channel(values: Tensor, like: Tensor) -> Tensor:
    """(C,) values shaped to multiply a weight of C output channels."""
    return values.reshape(-1, *[1] * (like.dim() - 1))


def pruned(values: Tensor, limit: float) -> Tensor:
    """Entries of at most `limit` in size set to 0."""
    return torch.where(values.abs() > limit, values, torch.zeros_like(values))


def large(mask: Tensor, share: float) -> Tensor:
    """(C,) bool: which logits are larger in size than all but the upper 1 - share."""
    return mask.abs() > mask.abs().quantile(share)


def channel_means(replies: Sequence[Tree], layers: Sequence[Entry]) -> Iterable[Tensor]:
    """For every layer, its weights with each channel averaged over the replies that carry it."""
    sizes = [entry.size // entry.shape[0] for entry in layers for _ in range(entry.shape[0])]
    repeats = torch.tensor(sizes, device=replies[0]["kept"].device)
    total = torch.zeros(sum(sizes), dtype=torch.float64, device=repeats.device)
    count = torch.zeros_like(total)
    for reply in replies:
        carried = reply["kept"].repeat_interleave(repeats)
        total[carried] += reply["values"].double()
        count[carried] += 1.0
    means = (total / count.clamp_min(1.0)).float()
    for entry, piece in zip(layers, means.split([entry.size for entry in layers]), strict=True):
        yield piece.reshape(entry.shape)


def predictions(module: nn.Module, x: Tensor, kept: Tree) -> Tensor:
    """(n, classes) log-probabilities over the classes of a task, by its weights; IMPOSSIBLE elsewhere."""
    base = dict(module.named_parameters())
    names = layers_of(module)
    pieces = dense(kept["fixed"]).split([base[name].numel() for name in names])
    tensors: dict[str, Tensor] = dict(kept["own"])
    for name, piece in zip(names, pieces, strict=True):
        tensors[name] = composed(base[name], kept["masks"][name], piece.reshape(base[name].shape))
    outputs = functional_call(module, {**tensors, **_buffers(module, kept)}, (x,)).float()
    classes = kept["classes"]
    predicted = torch.full_like(outputs, IMPOSSIBLE)
    return predicted.index_copy_(1, classes, outputs.index_select(1, classes).log_softmax(1))


def least_entropy(predicted: Sequence[Tensor]) -> Tensor:
    """(n, classes): of the predictions for each sample, the one with the least entropy."""
    stacked = torch.stack(list(predicted))
    entropies = -(stacked.exp() * stacked).sum(2)
    best = entropies.argmin(0)
    return stacked[best, torch.arange(stacked.shape[1], device=stacked.device)]


def _buffers(module: nn.Module, kept: Tree) -> dict[str, Tensor]:
    """The buffers of the network from the vectors that a layout makes of them."""
    floats = [(n, b) for n, b in module.named_buffers() if b.is_floating_point()]
    whole = [(n, b) for n, b in module.named_buffers() if not b.is_floating_point()]
    named: dict[str, Tensor] = {}
    for buffers, vector in ((floats, kept["stats"]), (whole, kept["counters"])):
        pieces = vector.split([b.numel() for _, b in buffers])
        named.update((n, piece.reshape(b.shape)) for (n, b), piece in zip(buffers, pieces, strict=True))
    return named


def layers_of(module: nn.Module) -> list[str]:
    """The names of a network's hidden weights."""
    return hidden_names((name, tuple(p.shape)) for name, p in module.named_parameters())


# vectors that are mostly zero, as trees of their nonzero entries ------------------------------------------------------
def sparse(vector: Tensor) -> Tree:
    """{size, indices (k,) int32, values (k,)}: 8 bytes for each entry that is not 0."""
    if len(vector) >= 2**31:
        raise ValueError(f"a vector of {len(vector)} entries is too long for 32-bit positions")
    indices = vector.nonzero().squeeze(1)
    return {"size": len(vector), "indices": indices.to(torch.int32), "values": vector[indices]}


def dense(tree: Tree) -> Tensor:
    """The vector again."""
    values: Tensor = tree["values"]
    return torch.zeros(tree["size"], device=values.device).index_put_((tree["indices"].long(),), values)
