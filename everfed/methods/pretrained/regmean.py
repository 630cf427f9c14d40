"""RegMean: linear layers merged by the Gram matrices of their inputs, all else averaged by samples (Jin et al., 2023).

The merged layer reproduces each client's layer on that client's own inputs X_k at its trained network, in least
squares:

    W = (sum_k W_k G_k)(sum_k G_k)^+,   G_k = X_k X_k^T                                             (RegMean, Eq. 2)

Clients send (W_k - W) G_k, so that the server needs sums only, and inputs that nobody has keep their old weights. With
off-diagonal entries times `alpha`; alpha = 0 needs the diagonal alone. All sums are float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from everfed.core.layout import Spans, cut, pasted, rest
from everfed.method import (
    SHARED,
    AddsParameters,
    Aggregator,
    Client,
    CompositionError,
    Layout,
    Mean,
    Model,
    Server,
    Sum,
    Tells,
    option,
)
from everfed.methods.common.layers import in_precision, network
from everfed.models.lora import LoRALinear

AT_ONCE = 256  # samples in a pass over a client's data


@dataclass(frozen=True)
class RegMean(AddsParameters, Aggregator):
    alpha: float = option(
        0.5, at_least=0, at_most=1, about="factor of the Gram matrices' off-diagonal entries; 0 sends diagonals alone"
    )

    name = "regmean"

    def needs(self):
        return {SHARED}

    def adapt(self, module: nn.Module, server: Server) -> None:
        """Refuse networks with matrices that are no linear layer's."""
        for name in matrices(server.layout):
            layer = module.get_submodule(name)
            if not isinstance(layer, nn.Linear):
                raise CompositionError(
                    f"part {self.name!r} merges linear layers, but {name} is a {type(layer).__name__}; freeze it or "
                    "use method fedavg"
                )

    def reducers(self):
        mean = Mean(weighted=True)
        sums, others = Sum(tells=Tells.MOMENTS), replace(mean, tells=Tells.GRADIENTS)
        return {"products": sums, "grams": sums, "others": others, "stats": mean, "counters": mean}

    def reply(self, client: Client):
        if not client.synchronises:
            return None
        names = matrices(client.layout)
        found = input_grams(client, names, () if self.alpha else names)
        grams = [damped(found[name], self.alpha) if self.alpha else found[name] for name in names]
        old, new = named_before_and_after(client)
        moved = [new[f"{name}.weight"] - old[f"{name}.weight"] for name in names]
        products = [times(update, gram).flatten() for update, gram in zip(moved, grams, strict=True)]
        return {"products": torch.cat(products), "grams": packed(grams)}

    def upload(self, client: Client):
        """What is averaged: biases, norms, embeddings of positions, statistics."""
        statistics = {key: value for key, value in super().upload(client).items() if key != "params"}
        return {"others": cut(client.model["params"], _others(client.layout)), **statistics}

    def aggregate(self, server: Server) -> Model:
        model, layout, reduced = server.model, server.layout, server.reduced
        if reduced.get("products") is None:
            return model
        params = pasted(model["params"], _others(layout), reduced["others"])
        shapes = {name: layout.param(f"{name}.weight").shape for name in matrices(layout)}
        grams = unpacked(reduced["grams"], [self._gram_shape(shape[1]) for shape in shapes.values()])
        new = layout.named(params)
        for (name, products), gram in zip(split_like(reduced["products"], shapes).items(), grams, strict=True):
            new[f"{name}.weight"].add_(over(products, gram).to(params.dtype))
        return {**super().aggregate(server), "params": params}

    def _gram_shape(self, inputs: int) -> tuple[int, ...]:
        return (inputs, inputs) if self.alpha else (inputs,)


def matrices(layout: Layout) -> list[str]:
    """The layers whose weight is a matrix, by name, in order."""
    return [e.name.removesuffix(".weight") for e in network(layout) if len(e.shape) == 2 and e.name.endswith(".weight")]


def _others(layout: Layout) -> Spans:
    weights = [layout.param(f"{name}.weight") for name in matrices(layout)]
    return rest((slice(entry.start, entry.start + entry.size) for entry in weights), layout.shared)


def named_before_and_after(client: Client) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The received tensors and the trained ones, by name, on the client's device."""
    received, trained = (model["params"].to(client.device) for model in (client.received, client.model))
    return client.layout.named(received), client.layout.named(trained)


# Gram matrices of layers' inputs --------------------------------------------------------------------------------------
def input_grams(
    client: Client, layers: Sequence[str], diagonal: Sequence[str] = (), merged: bool = False
) -> dict[str, Tensor]:
    """(i, i) sums of x x^T over all inputs of each layer, samples and tokens; (i,), the diagonal alone, of those in
    `diagonal`. Eval mode, without augmentation; LoRA layers as they are in training, or with their tasks `merged`."""
    trainer = client.trainer
    trainer.replica.load(client.model)
    module = trainer.replica.module.eval()
    found: dict[str, Tensor] = {}
    with _recorded(module, layers, set(diagonal), found), _current_tasks(module, merged):
        for x in client.data.x.split(AT_ONCE):
            with torch.no_grad(), in_precision(trainer):
                module(trainer.stream.inputs(x.to(trainer.device)))
    return found


@contextmanager
def _recorded(module: nn.Module, layers: Sequence[str], diagonal: set[str], found: dict[str, Tensor]) -> Iterator[None]:
    def recorder(name: str) -> torch.utils.hooks.RemovableHandle:
        def record(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            rows = arguments[0].detach().flatten(0, -2).double()
            gram = rows.square().sum(0) if name in diagonal else rows.T @ rows
            found[name] = found[name] + gram if name in found else gram

        return module.get_submodule(name).register_forward_pre_hook(record)

    handles = [recorder(name) for name in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _current_tasks(module: nn.Module, merged: bool) -> Iterator[None]:
    """LoRA layers of a module in eval mode use the current task's factors alone, as in training."""
    own = [layer for layer in module.modules() if isinstance(layer, LoRALinear) and not merged]
    for layer in own:
        layer.training = True
    try:
        yield
    finally:
        for layer in own:
            layer.training = False


# merging --------------------------------------------------------------------------------------------------------------
def damped(gram: Tensor, alpha: float) -> Tensor:
    """alpha G + (1 - alpha) diag(G)."""
    return alpha * gram + (1.0 - alpha) * gram.diagonal().diag()


def times(update: Tensor, gram: Tensor) -> Tensor:
    """(o, i) update times a gram (i, i), or its diagonal (i,), in float64."""
    return update.double() * gram if gram.dim() == 1 else update.double() @ gram


def over(products: Tensor, gram: Tensor) -> Tensor:
    """(o, i) products times the pseudo-inverse of a summed gram: 0 for inputs that nobody had."""
    if gram.dim() == 1:
        return torch.where(gram > 0, products / torch.where(gram > 0, gram, 1.0), 0.0)
    return products @ torch.linalg.pinv(gram, hermitian=True)


def packed(grams: Sequence[Tensor]) -> Tensor:
    """Grams as one vector; of square ones the upper triangle."""
    return torch.cat([g if g.dim() == 1 else g[_triangle(len(g), g.device)] for g in grams])


def unpacked(vector: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """The inverse of `packed`, for grams of these shapes."""
    sizes = [shape[0] if len(shape) == 1 else shape[0] * (shape[0] + 1) // 2 for shape in shapes]
    return [_square(p, shape) for p, shape in zip(vector.split(sizes), shapes, strict=True)]


def _square(piece: Tensor, shape: tuple[int, ...]) -> Tensor:
    if len(shape) == 1:
        return piece
    gram = piece.new_zeros(shape)
    gram[_triangle(shape[0], piece.device)] = piece
    return gram + gram.triu(1).T


def _triangle(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    rows, columns = torch.triu_indices(size, size, device=device)
    return rows, columns


def split_like(vector: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Tensors by name of a vector in which they lie one after the other."""
    sizes = [torch.Size(shape).numel() for shape in shapes.values()]
    pieces = zip(shapes.items(), vector.split(sizes), strict=True)
    return {name: piece.reshape(shape) for (name, shape), piece in pieces}
