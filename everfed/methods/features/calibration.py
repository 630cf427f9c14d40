"""Heads that the server re-trains on virtual features: CCVR (Luo et al., 2021) and HGP (Salami et al., 2024).

Clients with few classes bias the head most. They send Gaussians of their features, class by class; the server draws
features from them, as many of every class, and trains the head, and nothing else, on these.

CCVR sends sums at the end of a task: n, sum f and sum f f^T (or its diagonal) of every class. From the sums of all
clients, mu = sum f / n and Sigma = (sum f f^T - n mu mu^T) / (n - 1), to which the paper merges clients' moments.

HGP re-trains in every round, on a mixture of two levels: a class, uniformly, then a client by its number of samples of
that class. Clients send n, mean and variance of every class of which they have two samples or more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from everfed.core.client import synchronises
from everfed.core.legacy import (
    END,
    MODEL,
    Cohort,
    Collect,
    Context,
    Data,
    Fitted,
    Mean,
    Message,
    Model,
    Phase,
    Reducer,
    Slots,
    State,
    Sum,
    Tree,
)
from everfed.methods.common.checks import at_least, one_of, positive
from everfed.methods.common.features import head_weight
from everfed.methods.features.statistics import (
    ReplacesHead,
    class_moments,
    class_numbers,
    columns_of,
    feature_rows,
    head_entries,
    of_all_classes,
    rounded,
    symmetric,
    task_classes,
    triangle,
)

Draw = Callable[[Tensor, torch.Generator], Tensor]  # classes (n,), generator -> features (n, F)
_BITS = 10
_MOMENTS = ("counts", "sums", "squares")  # by class


@dataclass(frozen=True)
class Calibration(ReplacesHead):
    """per_class: virtual features of every class in an epoch. epochs, batch, lr, momentum, weight_decay: of the head's
    SGD. temperature: 0 for plain cross-entropy; otherwise the logits are divided by their norm and by it."""

    per_class: int = 256
    epochs: int = 5
    batch: int = 256
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 0.0
    temperature: float = 0.0

    def __post_init__(self) -> None:
        at_least(self, 1, "per_class", "epochs", "batch")
        positive(self, "lr")
        at_least(self, 0, "momentum", "weight_decay", "temperature")

    def retrained(self, model: Model, known: Tensor, draw: Draw, ctx: Context) -> Model:
        """The model with a head that was trained on features of the `known` classes (k,), all other parameters as they
        are. draw: called with positions among these."""
        params = model["params"].clone()
        weight, bias = head_entries(ctx.facts.layout)
        trained = [entry.view(params)[known].clone().requires_grad_() for entry in (weight, bias) if entry is not None]
        generator = torch.Generator().manual_seed(ctx.key("virtual features"))
        optimizer = torch.optim.SGD(trained, self.lr, self.momentum, weight_decay=self.weight_decay)
        for _ in range(self.epochs):
            for y in self._labels(len(known), generator).split(self.batch):
                features = draw(y, generator).to(params.device)
                loss = self._loss(functional.linear(features, *trained), y.to(params.device))
                for tensor, gradient in zip(trained, torch.autograd.grad(loss, trained), strict=True):
                    tensor.grad = gradient
                optimizer.step()
        for entry, tensor in zip((weight, bias), trained, strict=False):
            assert entry is not None
            entry.view(params)[known] = tensor.detach()
        return {**model, "params": params}

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
    """covariance: "diagonal", or "full": F (F + 1) / 2 numbers a class. The others as in `Calibration`."""

    covariance: str = "diagonal"
    per_class: int = 2000
    epochs: int = 10
    lr: float = 1e-3
    weight_decay: float = 1e-5

    name = "ccvr"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self, covariance=("diagonal", "full"))

    def phases(self) -> tuple[Phase, ...]:
        reduce: dict[str, Reducer] = {"counts": Sum(), "sums": Sum(), "squares": Sum(), "classes": Mean()}
        calibrate = Phase(
            "calibrate",
            Cohort.BOUNDARY,
            END,
            reduce=reduce,
            run=self._moments,
            update=self._add,
            update_model=self._head,
        )
        return (calibrate,)

    def _moments(self, client: State, message: Message, data: Data, ctx: Context) -> tuple[None, Tree]:
        """Whole numbers, as in `statistics.py`: they do not depend on the partition."""
        if len(data) == 0:
            return None, {}
        self.check_head(ctx, data)
        classes = task_classes(ctx)
        size, columns = head_weight(ctx.facts.layout).shape[1], columns_of(classes, ctx.facts.classes)
        shape = (size,) if self.covariance == "diagonal" else (size, size)
        counts, sums = torch.zeros(len(classes)), torch.zeros(len(classes), size).double()
        squares = torch.zeros(len(classes), *shape).double()
        for features, y in feature_rows(client, message, data, ctx):
            whole, labels = rounded(features, _BITS)[0].cpu(), columns[y.cpu()]
            for label in labels.unique():
                rows = whole[labels == label]
                counts[label] += len(rows)
                sums[label] += rows.sum(0)
                squares[label] += rows.square().sum(0) if self.covariance == "diagonal" else rows.T @ rows
        sent = {"counts": counts, "sums": sums, "squares": squares if len(shape) == 1 else triangle(squares)}
        return None, {**{key: value.long() for key, value in sent.items()}, "classes": classes}

    def _add(self, server: State, reduced: Tree, ctx: Context) -> Slots:
        classes = None if reduced.get("counts") is None else class_numbers(reduced["classes"], ctx.facts.classes)
        if classes is None:
            return None
        held = server.get(self.name, {})
        total = {key: of_all_classes(reduced[key], classes, ctx.facts.classes) for key in _MOMENTS}
        return {key: value + held[key] if held else value for key, value in total.items()}

    def _head(self, server: State, model: Model, ctx: Context) -> tuple[None, Model]:
        own = server.get(self.name)
        if not own:
            return None, model
        known = own["counts"].nonzero().flatten()
        means, spreads = self.gaussians({key: value[known] for key, value in own.items()})

        def draw(y: Tensor, generator: torch.Generator) -> Tensor:
            noise = torch.randn(len(y), means.shape[1], generator=generator)
            if self.covariance == "diagonal":
                return means[y] + spreads[y] * noise
            return means[y] + torch.einsum("nij,nj->ni", spreads[y], noise)

        return None, self.retrained(model, known, draw, ctx)

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
    """levels: 2, a mixture over clients, which the server sees one by one; 1, one Gaussian of every class from sums.
    variance_scale: by what variances are multiplied (3 in the authors' code). The others as in `Calibration`."""

    levels: int = 2
    variance_scale: float = 3.0
    temperature: float = 0.1

    name = "hgp"

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "variance_scale")
        if self.levels not in (1, 2):
            raise ValueError(f"levels must be 1 or 2; got {self.levels}")

    def reply(self, client: State, message: Message, fitted: Fitted, data: Data, ctx: Context) -> tuple[Slots, Tree]:
        """Of the trained model and the task's classes, without augmentation, in float64, which secure aggregation does
        not clip."""
        if not synchronises(ctx):
            return None, {}
        self.check_head(ctx, data)
        classes = task_classes(ctx)
        found = class_moments(client, {**message, MODEL: fitted.model}, data, ctx)
        return None, {**{key: v[classes] for key, v in zip(_MOMENTS, found, strict=True)}, "classes": classes}

    def reducers(self) -> Mapping[str, Reducer]:
        how: Reducer = Collect() if self.levels == 2 else Sum()
        return {**dict.fromkeys(_MOMENTS, how), "classes": Collect() if self.levels == 2 else Mean()}

    def update(self, server: State, reduced: Tree, ctx: Context) -> Slots:
        """The newest Gaussian of every class that has one, by client (two levels) or of all (one)."""
        if reduced.get("counts") is None:
            return None
        one_by_one = reduced if self.levels == 2 else {key: {0: value} for key, value in reduced.items()}
        held = dict(server.get(self.name, {}))
        for client, classes in one_by_one["classes"].items():
            moments = [one_by_one[key][client] for key in _MOMENTS]
            if not self._fit(classes, moments, ctx):
                continue
            new = gaussian(*(of_all_classes(moment, classes.long(), ctx.facts.classes) for moment in moments))
            old, there = held.get(str(client)), new["counts"] > 0
            held[str(client)] = {
                key: torch.where(there if value.dim() == 1 else there.unsqueeze(1), value, old[key]) if old else value
                for key, value in new.items()
            }
        return held

    @staticmethod
    def _fit(classes: Tensor, moments: Sequence[Tensor], ctx: Context) -> bool:
        """False for a reply that cannot be used: collected values come from anyone who takes part."""
        shapes = [(len(classes),), *[(len(classes), head_weight(ctx.facts.layout).shape[1])] * 2]
        in_range = bool(((classes >= 0) & (classes < ctx.facts.classes)).all())
        return in_range and [tuple(moment.shape) for moment in moments] == shapes

    def phases(self) -> tuple[Phase, ...]:
        return (Phase("rebalance", Cohort.SERVER, update_model=self._head),)

    def _head(self, server: State, model: Model, ctx: Context) -> tuple[None, Model]:
        held = list(server.get(self.name, {}).values())
        if not held:
            return None, model
        counts = torch.stack([one["counts"] for one in held])  # (clients, classes)
        known = counts.sum(0).nonzero().flatten()
        if len(known) == 0:
            return None, model
        means, variances = (torch.stack([one[key] for one in held])[:, known] for key in ("means", "variances"))
        shares = counts[:, known].T

        def draw(y: Tensor, generator: torch.Generator) -> Tensor:
            return self.features(y, shares, means, variances, generator)

        return None, self.retrained(model, known, draw, ctx)

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
