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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from everfed.core.client import synchronises
from everfed.core.legacy import (
    END,
    MODEL,
    Aggregator,
    Cohort,
    CompositionError,
    Context,
    Data,
    Fitted,
    Layout,
    Mean,
    Message,
    Model,
    Once,
    Optimizer,
    Part,
    Phase,
    Reducer,
    Slots,
    State,
    Sum,
    Tree,
    refuse_personal,
)
from everfed.methods.common.checks import at_least, one_of
from everfed.methods.common.features import head_entries
from everfed.methods.pretrained.grams import damped, input_grams, over, packed, split_like, times, unpacked
from everfed.methods.pretrained.lora import LoRA, at_task
from everfed.methods.pretrained.piecewise import task_of


@dataclass(frozen=True)
class LoRM(LoRA, Aggregator):
    """head_alpha: what off-diagonal entries of the head's Gram matrix are multiplied by; 0 sends its diagonal alone.
    gram_at: the network whose inputs are summed, the "trained" one, or the "merged" one with the mean of all tasks'
    updates (the authors' code). Other options as those of LoRA."""

    head_alpha: float = 0.5
    gram_at: str = "trained"

    name = "lorm"
    merge = "grams"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 0, "head_alpha")
        if self.head_alpha > 1:
            raise ValueError(f"head_alpha must be at most 1; got {self.head_alpha}")
        one_of(self, gram_at=("trained", "merged"))

    def check(self, parts: Sequence[Part], optimizer: Optimizer) -> Iterable[str]:
        refuse_personal(self, parts)
        if any(part.name == "fedgp" for part in parts):
            raise CompositionError(
                "part 'fedgp' keeps the gradient of one round's parameters for the next round, but 'lorm' trains other "
                "factors in it; use fedgp+lora"
            )
        return ()

    # which factor, which classes -------------------------------------------------------------------------------------
    def phases(self) -> tuple[Phase, ...]:
        end = Phase(
            "grams",
            cohort=Cohort.ALL,
            when=END,
            reduce={"grams": Sum()},
            run=self._task_grams,
            update=self._keep,
            update_model=self._merge_tasks,
        )
        return *super().phases(), end

    def _begin(self, server: State, reduced: Tree, ctx: Context) -> Tree:
        return {"since": ctx.round, "classes": torch.tensor(ctx.train.stream.labels(task_of(ctx)))}

    def _next(self, server: State, model: Model, ctx: Context) -> tuple[Slots, Model]:
        return server[self.name], at_task(model, ctx)

    def factor(self, server: State, ctx: Context) -> str:
        """The one that this round trains."""
        rounds = ctx.round - server.get(self.name, {}).get("since", 0)
        return "BA"[rounds // ctx.options.sync_every % 2]

    def trained(self, piece: str, server: State, ctx: Context) -> bool:
        idle = {"B": "A/", "A": "B/"}[self.factor(server, ctx)]
        return super().trained(piece, server, ctx) and not piece.startswith(idle)

    def broadcast(self, server: State, ctx: Context) -> dict[str, Any]:
        own = server.get(self.name)  # empty before the first task began
        return {"factor": self.factor(server, ctx), "classes": Once(task_of(ctx), own["classes"])} if own else {}

    # clients ---------------------------------------------------------------------------------------------------------
    def reply(self, client: State, message: Message, fitted: Fitted, data: Data, ctx: Context) -> tuple[Slots, Tree]:
        slots, _ = super().reply(client, message, fitted, data, ctx)
        if self.name not in message or not synchronises(ctx):
            return slots, {}
        layout, device, own = ctx.facts.layout, ctx.train.device, message[self.name]
        weight, *bias = head_entries(layout)
        inner, head = layers_of(layout), weight.name.rpartition(".")[0]
        thin = [*inner, *([] if self.head_alpha else [head])]
        found = input_grams(ctx, fitted.model, data, [*inner, head], thin, self.gram_at == "merged")
        old, new = (layout.named(v.to(device)) for v in (message[MODEL]["params"], fitted.model["params"]))
        grams = [factor_gram(old, name, found[name], own["factor"], task_of(ctx)) for name in inner]
        key = f"lora_{own['factor']}"
        moved = [(new[f"{name}.{key}"] - old[f"{name}.{key}"])[task_of(ctx)] for name in inner]
        rows = own["classes"].to(device)
        head_gram = damped(found[head], self.head_alpha) if self.head_alpha else found[head]
        sent = {
            f"{own['factor']}/products": torch.cat([times(m, g).flatten() for m, g in zip(moved, grams, strict=True)]),
            f"{own['factor']}/grams": packed(grams),
            "head/products": times((new[weight.name] - old[weight.name])[rows], head_gram),
            "head/grams": packed([head_gram]),
        }
        if bias:
            sent["bias"] = new[bias[0].name][rows]
        return slots, sent

    def upload(self, model: Model, message: Message, ctx: Context) -> Tree:
        """Nothing: all that is sent is in `reply`."""
        return {}

    def _task_grams(self, client: State, message: Message, data: Data, ctx: Context) -> tuple[None, Tree]:
        names = layers_of(ctx.facts.layout)
        if len(data) == 0:
            return None, {}
        found = input_grams(ctx, message[MODEL], data, names, names, self.gram_at == "merged")
        return None, {"grams": packed([found[name] for name in names])}

    # the server -------------------------------------------------------------------------------------------------------
    def reducers(self) -> Mapping[str, Reducer]:
        sums = (f"{kind}/{key}" for kind in ("A", "B", "head") for key in ("products", "grams"))
        return {**{key: Sum() for key in sums}, "bias": Mean(weighted=True)}

    def aggregate(self, server: State, reduced: Tree, ctx: Context) -> Model:
        model, layout, factor = server[MODEL], ctx.facts.layout, self.factor(server, ctx)
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
            new[f"{name}.lora_{factor}"][task_of(ctx)] += over(products[name], gram).to(params.dtype)
        self._merge_head(new, reduced, server[self.name]["classes"].to(params.device), layout)
        return {**model, "params": params}

    def _merge_head(self, new: dict[str, Tensor], reduced: Tree, rows: Tensor, layout: Layout) -> None:
        weight, *bias = head_entries(layout)
        width = weight.shape[1]
        (gram,) = unpacked(reduced["head/grams"], [(width, width) if self.head_alpha else (width,)])
        new[weight.name][rows] += over(reduced["head/products"], gram).to(torch.float32)
        for entry in bias:
            new[entry.name][rows] = reduced["bias"]

    def _keep(self, server: State, reduced: Tree, ctx: Context) -> Slots:
        return None if reduced.get("grams") is None else {**server[self.name], "grams": reduced["grams"]}

    def _merge_tasks(self, server: State, model: Model, ctx: Context) -> tuple[Slots, Model]:
        """Put the task's sums of squares into the network, which merges the tasks by them."""
        own = dict(server[self.name])
        grams, layout = own.pop("grams", None), ctx.facts.layout
        entries = {e.name.removesuffix(GRAMS): e for e in layout.params if e.name.endswith(GRAMS)}
        if grams is None or not entries:
            return own, model
        params = model["params"].clone()
        for entry, values in zip(entries.values(), grams.split([e.shape[1] for e in entries.values()]), strict=True):
            entry.view(params)[task_of(ctx)] = values.to(params)
        return own, {**model, "params": params}


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
