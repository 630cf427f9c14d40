"""LoRM: closed-form merging of low-rank adapters (Salami et al., 2025).

RegMean on a product B A has infinitely many solutions; with one factor shared and frozen, the other has one. So rounds
alternate: even rounds of a task train B and the head, odd ones A and the head. With g_k the sums of squares of a
layer's inputs at client k (the diagonal of its Gram matrix) and S_k = A diag(g_k) A^T:

    B = (sum_k B_k S_k)(sum_k S_k)^+          A = (sum_k A_k diag(g_k))(sum_k diag(g_k))^+

The head's rows of the task are merged by RegMean with their Gram matrix, the biases averaged by samples. At a task's
end its clients send g at the merged network; the tasks' updates are merged by the same rule, still as factors:

    W + sum_j B_j A_j diag(g_j) / sum_j diag(g_j)

Clients send products of differences, so the server needs sums only. Until a task ends, what is scored is the plain mean
of the tasks' updates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from everfed.method import (
    END,
    SHARED,
    Aggregator,
    Cached,
    Client,
    Cohort,
    CompositionError,
    Layout,
    Mean,
    Model,
    Phase,
    Server,
    Sum,
    Tells,
    option,
)
from everfed.methods.common.layers import head_entries
from everfed.methods.pretrained.lora import LoRA
from everfed.methods.pretrained.piecewise import task_of
from everfed.methods.pretrained.regmean import (
    damped,
    input_grams,
    named_before_and_after,
    over,
    packed,
    split_like,
    times,
    unpacked,
)


@dataclass(frozen=True)
class LoRM(LoRA, Aggregator):
    """Other options as those of LoRA."""

    head_alpha: float = option(
        0.5,
        at_least=0,
        at_most=1,
        about="factor of the off-diagonal entries of the head's Gram matrix; 0 sends its diagonal alone",
    )
    gram_at: str = option(
        "trained",
        one_of=("trained", "merged"),
        about="whose inputs are summed: the trained network's, or those of the one with the mean of all tasks' updates "
        "(the authors' code)",
    )

    name = "lorm"
    merge = "grams"

    def check(self, parts, optimizer):
        if any(part.name == "fedgp" for part in parts):
            raise CompositionError(
                "part 'fedgp' keeps the gradient of one round's parameters for the next round, but 'lorm' trains other "
                "factors in it; use fedgp+lora"
            )

    def needs(self):
        return {*super().needs(), SHARED}

    # which factor, which classes -------------------------------------------------------------------------------------
    def phases(self):
        end = Phase(
            "grams",
            cohort=Cohort.ALL,
            rounds=END,
            reduce={"grams": Sum(tells=Tells.MOMENTS)},
            run=self._task_grams,
            update=self._merge_tasks,
        )
        return *super().phases(), end

    def begin(self, server: Server) -> None:
        super().begin(server)
        labels = server.trainer.stream.labels(task_of(server))
        server.state = {"since": server.round, "classes": torch.tensor(labels)}

    def factor(self, server: Server) -> str:
        """The one that this round trains."""
        rounds = server.round - server.state.get("since", 0)
        return "BA"[rounds // server.options.sync_every % 2]

    def trained(self, piece: str, server: Server) -> bool:
        idle = {"B": "A/", "A": "B/"}[self.factor(server)]
        return super().trained(piece, server) and not piece.startswith(idle)

    def broadcast(self, server: Server):
        if not server.state:  # before the first task began
            return {}
        return {"factor": self.factor(server), "classes": Cached(task_of(server), server.state["classes"])}

    # clients ---------------------------------------------------------------------------------------------------------
    def reply(self, client: Client):
        super().reply(client)
        own = client.message
        if not own or not client.synchronises:
            return None
        weight, *bias = head_entries(client.layout)
        inner, head = layers_of(client.layout), weight.name.rpartition(".")[0]
        thin = [*inner, *([] if self.head_alpha else [head])]
        found = input_grams(client, [*inner, head], thin, self.gram_at == "merged")
        old, new = named_before_and_after(client)
        grams = [factor_gram(old, name, found[name], own["factor"], task_of(client)) for name in inner]
        key = f"lora_{own['factor']}"
        moved = [(new[f"{name}.{key}"] - old[f"{name}.{key}"])[task_of(client)] for name in inner]
        rows = own["classes"].to(client.device)
        head_gram = damped(found[head], self.head_alpha) if self.head_alpha else found[head]
        sent = {
            f"{own['factor']}/products": torch.cat([times(m, g).flatten() for m, g in zip(moved, grams, strict=True)]),
            f"{own['factor']}/grams": packed(grams),
            "head/products": times((new[weight.name] - old[weight.name])[rows], head_gram),
            "head/grams": packed([head_gram]),
        }
        if bias:
            sent["bias"] = new[bias[0].name][rows]
        return sent

    def upload(self, client: Client):
        """Nothing: all that is sent is in `reply`."""
        return {}

    def _task_grams(self, client: Client):
        names = layers_of(client.layout)
        if len(client.data) == 0:
            return {}
        found = input_grams(client, names, names, self.gram_at == "merged")
        return {"grams": packed([found[name] for name in names])}

    # the server -------------------------------------------------------------------------------------------------------
    def reducers(self):
        sums = (f"{kind}/{key}" for kind in ("A", "B", "head") for key in ("products", "grams"))
        return {**{key: Sum(tells=Tells.MOMENTS) for key in sums}, "bias": Mean(weighted=True, tells=Tells.GRADIENTS)}

    def aggregate(self, server: Server) -> Model:
        model, layout, reduced, factor = server.model, server.layout, server.reduced, self.factor(server)
        if reduced.get("head/products") is None:
            return model
        params = model["params"].to(reduced["head/products"].device, copy=True)
        new, names = layout.named(params), layers_of(layout)
        shapes = {name: layout.param(f"{name}.lora_{factor}").shape[1:] for name in names}
        rank = layout.param(f"{names[0]}.lora_A").shape[1]
        gram_shapes = [(rank, rank) if factor == "B" else (shapes[name][1],) for name in names]
        grams = unpacked(reduced[f"{factor}/grams"], gram_shapes)
        products = split_like(reduced[f"{factor}/products"], shapes)
        for name, gram in zip(names, grams, strict=True):
            new[f"{name}.lora_{factor}"][task_of(server)] += over(products[name], gram).to(params.dtype)
        self._merge_head(new, reduced, server.state["classes"].to(params.device), layout)
        return {**model, "params": params}

    def _merge_head(self, new: dict[str, Tensor], reduced: Mapping[str, Tensor], rows: Tensor, layout: Layout) -> None:
        weight, *bias = head_entries(layout)
        width = weight.shape[1]
        (gram,) = unpacked(reduced["head/grams"], [(width, width) if self.head_alpha else (width,)])
        new[weight.name][rows] += over(reduced["head/products"], gram).to(torch.float32)
        for entry in bias:
            new[entry.name][rows] = reduced["bias"]

    def _merge_tasks(self, server: Server) -> None:
        """Put the task's sums of squares into the network, which merges the tasks by them."""
        grams = server.reduced.get("grams")
        entries = [entry for entry in server.layout.params if entry.name.endswith(GRAMS)]
        if grams is None or not entries:
            return
        params = server.model["params"].clone()
        for entry, values in zip(entries, grams.split([e.shape[1] for e in entries]), strict=True):
            entry.view(params)[task_of(server)] = values.to(params)
        server.model = {**server.model, "params": params}


GRAMS = ".lora_merge.grams"


def layers_of(layout: Layout) -> list[str]:
    """The names of all LoRA layers, in order."""
    return [entry.name.removesuffix(".lora_A") for entry in layout.params if entry.name.endswith(".lora_A")]


def factor_gram(named: Mapping[str, Tensor], layer: str, gram: Tensor, factor: str, task: int) -> Tensor:
    """By what a factor is merged, from the sums of squares (i,) of the layer's inputs: they themselves for A, and
    S = A diag(g) A^T (r, r) for B."""
    if factor == "A":
        return gram
    down = named[f"{layer}.lora_A"][task].double()
    return (down * gram) @ down.T
