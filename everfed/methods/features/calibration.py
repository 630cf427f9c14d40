"""Heads that the server re-trains on virtual features: CCVR (Luo et al., 2021) and HGP (Salami et al., 2024).

Clients with few classes bias the head most. They send Gaussians of their features, class by class; the server draws
features from them, as many of every class, and trains the head, and nothing else, on these.

CCVR sends sums at the end of a task: n, sum f and sum f f^T (or its diagonal) of every class. From the sums of all
clients, mu = sum f / n and Sigma = (sum f f^T - n mu mu^T) / (n - 1), to which the paper merges clients' moments.

HGP re-trains in every round, on a mixture of two levels: a class, uniformly, then a client by its number of samples of
that class. Clients send n, mean and variance of every class of which they have two samples or more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from everfed.method import (
    END,
    Client,
    Cohort,
    Collect,
    Facts,
    Layout,
    Mean,
    Phase,
    Reducer,
    Server,
    State,
    Sum,
    Tells,
    Tree,
    option,
)
from everfed.methods.common.layers import head_entries, head_weight
from everfed.methods.features.statistics import (
    ReplacesHead,
    class_moments,
    class_numbers,
    columns_of,
    feature_rows,
    of_all_classes,
    rounded,
    symmetric,
    task_classes,
    triangle,
)

Draw = Callable[[Tensor, torch.Generator], Tensor]  # classes (n,), generator -> features (n, F)
_BITS = 10
_MOMENTS = {"counts": Tells.COUNTS, "sums": Tells.SUMS, "squares": Tells.MOMENTS}  # by class


@dataclass(frozen=True)
class Calibration(ReplacesHead):
    """A server that trains the head by SGD."""

    per_class: int = option(256, at_least=1, about="virtual features of every class in an epoch")
    epochs: int = option(5, at_least=1, about="of the head's SGD")
    batch: int = option(256, at_least=1, about="of the head's SGD")
    lr: float = option(0.01, above=0, about="of the head's SGD")
    momentum: float = option(0.9, at_least=0, about="of the head's SGD")
    weight_decay: float = option(0.0, at_least=0, about="of the head's SGD")
    temperature: float = option(
        0.0, at_least=0, about="the logits are divided by their norm and by it; 0: plain cross-entropy"
    )

    def retrain(self, server: Server, known: Tensor, draw: Draw) -> None:
        """Train the head's rows of the `known` classes (k,) on features of these; all other parameters stay. draw:
        called with positions among these classes."""
        params, entries = server.model["params"].clone(), head_entries(server.layout)
        trained = [entry.view(params)[known].clone().requires_grad_() for entry in entries]
        generator = torch.Generator().manual_seed(server.key("virtual features"))
        optimizer = torch.optim.SGD(trained, self.lr, self.momentum, weight_decay=self.weight_decay)
        for _ in range(self.epochs):
            for y in self._labels(len(known), generator).split(self.batch):
                features = draw(y, generator).to(params.device)
                loss = self._loss(functional.linear(features, *trained), y.to(params.device))
                for tensor, gradient in zip(trained, torch.autograd.grad(loss, trained), strict=True):
                    tensor.grad = gradient
                optimizer.step()
        for entry, tensor in zip(entries, trained, strict=True):
            entry.view(params)[known] = tensor.detach()
        server.model = {**server.model, "params": params}

    def _labels(self, classes: int, generator: torch.Generator) -> Tensor:
        """An epoch's labels, in random order."""
        labels = torch.arange(classes).repeat_interleave(self.per_class)
        return labels[torch.randperm(len(labels), generator=generator)]

    def _loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(scaled(logits, self.temperature), y)


def scaled(logits: Tensor, temperature: float) -> Tensor:
    """Logits divided by their norm and by the temperature; unchanged where that is 0."""
    return logits if not temperature else functional.normalize(logits, dim=1) / temperature


# CCVR ----------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class CCVR(Calibration):
    covariance: str = option("diagonal", one_of=("diagonal", "full"), about="full: F (F + 1) / 2 numbers a class")
    per_class: int = option(2000, at_least=1, about="virtual features of every class in an epoch")
    epochs: int = option(10, at_least=1, about="of the head's SGD")
    lr: float = option(1e-3, above=0, about="of the head's SGD")
    weight_decay: float = option(1e-5, at_least=0, about="of the head's SGD")

    name = "ccvr"

    def phases(self):
        numbers = {"squares": self._numbers}
        reduce: dict[str, Reducer] = {key: Sum(numbers.get(key), about) for key, about in _MOMENTS.items()}
        reduce["classes"] = Mean(tells=Tells.CLASSES)
        who = (Cohort.BOUNDARY, END)
        return (Phase("calibrate", *who, reduce=reduce, run=self._moments, update=self._calibrate),)

    def _numbers(self, facts: Facts) -> int:
        """Of the squares."""
        size = head_weight(facts.layout).shape[1]
        return facts.classes * (size if self.covariance == "diagonal" else size * (size + 1) // 2)

    def _moments(self, client: Client):
        """Whole numbers, as in `statistics.py`: they do not depend on the partition."""
        if len(client.data) == 0:
            return {}
        self.check_head(client)
        classes = task_classes(client)
        size, columns = head_weight(client.layout).shape[1], columns_of(classes, client.facts.classes)
        shape = (size,) if self.covariance == "diagonal" else (size, size)
        counts, sums = torch.zeros(len(classes)), torch.zeros(len(classes), size).double()
        squares = torch.zeros(len(classes), *shape).double()
        for features, y in feature_rows(client, client.data):
            whole, labels = rounded(features, _BITS)[0].cpu(), columns[y.cpu()]
            for label in labels.unique():
                rows = whole[labels == label]
                counts[label] += len(rows)
                sums[label] += rows.sum(0)
                squares[label] += rows.square().sum(0) if self.covariance == "diagonal" else rows.T @ rows
        sent = {"counts": counts, "sums": sums, "squares": squares if len(shape) == 1 else triangle(squares)}
        return {**{key: value.long() for key, value in sent.items()}, "classes": classes}

    def _add(self, server: Server) -> None:
        held, reduced, count = server.state, server.reduced, server.facts.classes
        classes = None if reduced.get("counts") is None else class_numbers(reduced["classes"], count)
        if classes is None:
            return
        total = {key: of_all_classes(reduced[key], classes, count) for key in _MOMENTS}
        server.state = {key: value + held[key] if held else value for key, value in total.items()}

    def _calibrate(self, server: Server) -> None:
        self._add(server)
        own = server.state
        if not own:
            return
        known = own["counts"].nonzero().flatten()
        means, spreads = self.gaussians({key: value[known] for key, value in own.items()})

        def draw(y: Tensor, generator: torch.Generator) -> Tensor:
            noise = torch.randn(len(y), means.shape[1], generator=generator)
            if self.covariance == "diagonal":
                return means[y] + spreads[y] * noise
            return means[y] + torch.einsum("nij,nj->ni", spreads[y], noise)

        self.retrain(server, known, draw)

    def gaussians(self, sums: Tree) -> tuple[Tensor, Tensor]:
        """(means (k, F), spreads) in float32; a spread is a deviation (k, F) or a root of the covariance (k, F, F). A
        class with a single sample has none."""
        count = sums["counts"].double().unsqueeze(1)
        means, squares = (sums[key].double() * 2.0 ** (-_BITS * power) for key, power in (("sums", 1), ("squares", 2)))
        means = means / count
        if self.covariance == "diagonal":
            variance = (squares - count * means.square()) / (count - 1).clamp(min=1)
            return means.float(), variance.clamp(min=0.0).sqrt().float()
        count = count.unsqueeze(2)
        outer = means.unsqueeze(2) * means.unsqueeze(1)
        covariance = (symmetric(squares, means.shape[1]) - count * outer) / (count - 1).clamp(min=1)
        values, vectors = torch.linalg.eigh(covariance)
        return means.float(), (vectors * values.clamp(min=0.0).sqrt().unsqueeze(1)).float()


# HGP -----------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class HGP(Calibration):
    levels: int = option(
        2,
        one_of=(1, 2),
        about="2: a mixture over clients, which the server sees one by one; 1: one Gaussian of every class from sums",
    )
    lr: float = option(0.001, above=0, about="of the head's SGD (0.001 in the authors' code)")
    variance_scale: float = option(3.0, above=0, about="by what variances are multiplied (3 in the authors' code)")
    temperature: float = option(
        0.1, at_least=0, about="the logits are divided by their norm and by it; 0: plain cross-entropy"
    )

    name = "hgp"

    def reply(self, client: Client):
        """Of the trained model and the task's classes, without augmentation, in float64, which secure aggregation does
        not clip."""
        if not client.synchronises:
            return {}
        self.check_head(client)
        classes = task_classes(client)
        found = class_moments(client)
        return {**{key: v[classes] for key, v in zip(_MOMENTS, found, strict=True)}, "classes": classes}

    def reducers(self):
        kind, of_classes = (Collect, Collect) if self.levels == 2 else (Sum, Mean)
        moments = {key: kind(tells=about) for key, about in _MOMENTS.items()}
        return {**moments, "classes": of_classes(tells=Tells.CLASSES)}

    def update(self, server: Server) -> None:
        """The newest Gaussian of every class that has one, by client (two levels) or of all (one)."""
        held, reduced, layout, count = server.state, server.reduced, server.layout, server.facts.classes
        if reduced.get("counts") is None:
            return
        one_by_one = reduced if self.levels == 2 else {key: {0: value} for key, value in reduced.items()}
        for client, classes in one_by_one["classes"].items():
            moments = [one_by_one[key][client] for key in _MOMENTS]
            if not _fit(classes, moments, layout, count):
                continue
            new = gaussian(*(of_all_classes(moment, classes.long(), count) for moment in moments))
            old, there = held.get(str(client)), new["counts"] > 0
            held[str(client)] = {
                key: torch.where(there if value.dim() == 1 else there.unsqueeze(1), value, old[key]) if old else value
                for key, value in new.items()
            }

    def phases(self):
        return (Phase("rebalance", Cohort.SERVER, update=self._rebalance),)

    def _rebalance(self, server: Server) -> None:
        held = list(server.state.values())
        if not held:
            return
        counts = torch.stack([one["counts"] for one in held])  # (clients, classes)
        known = counts.sum(0).nonzero().flatten()
        if len(known) == 0:
            return
        means, variances = (torch.stack([one[key] for one in held])[:, known] for key in ("means", "variances"))
        shares = counts[:, known].T

        def draw(y: Tensor, generator: torch.Generator) -> Tensor:
            return self.features(y, shares, means, variances, generator)

        self.retrain(server, known, draw)

    def _labels(self, classes: int, generator: torch.Generator) -> Tensor:
        return torch.randint(classes, (classes * self.per_class,), generator=generator)

    def features(
        self, y: Tensor, shares: Tensor, means: Tensor, variances: Tensor, generator: torch.Generator
    ) -> Tensor:
        """(n, F): for every label a client by its share (classes, clients), then its Gaussian (clients, classes, F)."""
        client = torch.multinomial(shares[y], 1, generator=generator).squeeze(1)
        spread = (self.variance_scale * (variances[client, y] + 1e-8)).sqrt()
        return means[client, y] + spread * torch.randn(spread.shape, generator=generator)

    def summary(self, server: State) -> dict[str, Any]:
        """For result.json."""
        return {"levels": self.levels, "variance_scale": self.variance_scale}


def _fit(classes: Tensor, moments: Sequence[Tensor], layout: Layout, count: int) -> bool:
    """False for a reply that cannot be used: collected values come from anyone who takes part."""
    shapes = [(len(classes),), *[(len(classes), head_weight(layout).shape[1])] * 2]
    in_range = bool(((classes >= 0) & (classes < count)).all())
    return in_range and [tuple(moment.shape) for moment in moments] == shapes


def gaussian(counts: Tensor, sums: Tensor, squares: Tensor) -> Tree:
    """{counts (C,), means and variances (C, F)} in float32; a class with fewer than two samples has a count of 0."""
    n = counts.unsqueeze(1)
    means = sums / n.clamp(min=1)
    variances = ((squares - n * means.square()) / (n - 1).clamp(min=1)).clamp(min=0.0)
    enough = counts > 1
    return {
        "counts": torch.where(enough, counts, 0.0).float(),
        "means": torch.where(enough.unsqueeze(1), means, 0.0).float(),
        "variances": torch.where(enough.unsqueeze(1), variances, 0.0).float(),
    }
