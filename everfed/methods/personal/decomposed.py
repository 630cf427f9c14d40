"""Weights composed of shared, masked and task-adaptive pieces, and the predictions of such a network (FedWeIT)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from everfed.core.legacy import Entry, Tree
from everfed.methods.common.layers import hidden_names
from everfed.methods.personal.sparse import dense

IMPOSSIBLE = -1e4  # far below any real log-probability


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
