"""RegMean as the aggregation of a whole network (Jin et al., 2023): linear layers are merged by the Gram matrices of
their inputs at the trained client (`grams.py`), all else is averaged by samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from everfed.core.client import synchronises
from everfed.core.legacy import (
    MODEL,
    AddsParameters,
    Aggregator,
    CompositionError,
    Context,
    Data,
    Fitted,
    Layout,
    Mean,
    Message,
    Model,
    Optimizer,
    Part,
    Reducer,
    Server,
    Slots,
    State,
    Sum,
    Tree,
    refuse_personal,
)
from everfed.core.pieces import Spans, cut, pasted, rest
from everfed.methods.common.features import network
from everfed.methods.pretrained.grams import damped, input_grams, over, packed, split_like, times, unpacked


@dataclass(frozen=True)
class RegMean(AddsParameters, Aggregator):
    """alpha: what off-diagonal entries of the Gram matrices are multiplied by; 0 sends their diagonals alone."""

    alpha: float = 0.5

    name = "regmean"

    def __post_init__(self) -> None:
        if not 0.0 <= self.alpha <= 1.0:
            raise ValueError(f"alpha must be at least 0 and at most 1; got {self.alpha}")

    def check(self, parts: Sequence[Part], optimizer: Optimizer) -> Iterable[str]:
        refuse_personal(self, parts)
        return ()

    def adapt(self, module: nn.Module, server: Server) -> None:
        """Refuse networks with matrices that are no linear layer's."""
        ctx = server.context
        for name in matrices(ctx.facts.layout):
            layer = module.get_submodule(name)
            if not isinstance(layer, nn.Linear):
                raise CompositionError(
                    f"part {self.name!r} merges linear layers, but {name} is a {type(layer).__name__}; freeze it or "
                    "use method fedavg"
                )

    def reducers(self) -> Mapping[str, Reducer]:
        mean = Mean(weighted=True)
        return {"products": Sum(), "grams": Sum(), "others": mean, "stats": mean, "counters": mean}

    def reply(self, client: State, message: Message, fitted: Fitted, data: Data, ctx: Context) -> tuple[Slots, Tree]:
        if not synchronises(ctx):
            return None, {}
        layout, device, names = ctx.facts.layout, ctx.train.device, matrices(ctx.facts.layout)
        found = input_grams(ctx, fitted.model, data, names, () if self.alpha else names)
        grams = [damped(found[name], self.alpha) if self.alpha else found[name] for name in names]
        old, new = (layout.named(v.to(device)) for v in (message[MODEL]["params"], fitted.model["params"]))
        moved = [new[f"{name}.weight"] - old[f"{name}.weight"] for name in names]
        products = [times(update, gram).flatten() for update, gram in zip(moved, grams, strict=True)]
        return None, {"products": torch.cat(products), "grams": packed(grams)}

    def upload(self, model: Model, message: Message, ctx: Context) -> Tree:
        """What is averaged: biases, norms, embeddings of positions, statistics."""
        sent: Tree = {"others": cut(model["params"], _others(ctx.facts.layout))}
        return sent if ctx.options.batchnorm == "local" else {**sent, **_statistics(model)}

    def aggregate(self, server: State, reduced: Tree, ctx: Context) -> Model:
        model, layout = server[MODEL], ctx.facts.layout
        if reduced.get("products") is None:
            return model
        params = pasted(model["params"], _others(layout), reduced["others"])
        shapes = {name: layout.param(f"{name}.weight").shape for name in matrices(layout)}
        grams = unpacked(reduced["grams"], [self._gram_shape(shape[1]) for shape in shapes.values()])
        new = layout.named(params)
        for (name, products), gram in zip(split_like(reduced["products"], shapes).items(), grams, strict=True):
            new[f"{name}.weight"].add_(over(products, gram).to(params.dtype))
        return {**model, "params": params, **{k: reduced[k] for k in _statistics(model) if reduced.get(k) is not None}}

    def _gram_shape(self, inputs: int) -> tuple[int, ...]:
        return (inputs, inputs) if self.alpha else (inputs,)


def matrices(layout: Layout) -> list[str]:
    """The layers whose weight is a matrix, by name, in order."""
    return [e.name.removesuffix(".weight") for e in network(layout) if len(e.shape) == 2 and e.name.endswith(".weight")]


def _others(layout: Layout) -> Spans:
    weights = [layout.param(f"{name}.weight") for name in matrices(layout)]
    return rest((slice(entry.start, entry.start + entry.size) for entry in weights), layout.shared)


def _statistics(model: Model) -> Tree:
    return {key: model[key] for key in ("stats", "counters")}
