"""Analytic learning: the head is the ridge regression of one-hot labels on frozen features (AFL: He et al., 2025; AFCL:
Tang et al., 2025; ACIL: Zhuang et al., 2022), after a random layer in RanPAC (McDonnell et al., 2023).

With h the features of a sample and y its one-hot label, clients send sums over samples not yet counted, once a task:

    G = sum h h^T,   Q = sum h y^T,   W = (G + penalty I)^-1 Q

The server adds up the sums of all clients and tasks, so W is that of all data in one place, whatever the partition, the
order of tasks and who takes part in which round. No gradient step is taken. Sums are whole numbers (`statistics.py`),
so secure aggregation adds them exactly.

The penalty is chosen from sums, too: a fifth of the samples have sums G_v, Q_v of their own, and

    |H_v W - Y_v|^2 = n_v - 2 <W, Q_v> + <W, G_v W>

is the squared error on them of any W. The head is then solved for on all samples.

STSA-E ("Spatial-Temporal Statistics Aggregation", 2025) sends first-order sums alone: clients split their samples at
random into groups, and send s_jc, the sum of h, and n_jc of every group j and class c. With N and P their sums over the
K_c groups of all clients that are not empty, the server estimates, without bias where groups are random,

    G_c = (N - 1) / (K_c - 1) sum_j s_j s_j^T / n_j - (N - K_c) / ((K_c - 1) N) P P^T,   G = sum_c G_c;   Q is exact
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from everfed.core import random
from everfed.core.layout import TrainsPieces, head_name
from everfed.data.withdrawn import Withdrawn
from everfed.errors import Fault
from everfed.method import (
    ALWAYS,
    END,
    ON_REQUEST,
    AddsParameters,
    Client,
    Cohort,
    Collect,
    CompositionError,
    Data,
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
    overrides,
)
from everfed.methods.common.layers import head_entries, head_weight
from everfed.methods.features.statistics import (
    MOST_SAMPLES,
    ReplacesHead,
    class_numbers,
    columns_of,
    feature_rows,
    held_out,
    rounded,
    symmetric,
    task_classes,
    triangle,
)

GRID = tuple(10.0**exponent for exponent in range(-8, 9))
_TRAINING = ("batches", "objective", "loss", "gradient", "after", "update")  # hooks that change it
_ADDING = ("er", "ideal")  # parts that add samples to train on
_FINE = 8  # bits of the random layer's weights after the point


@dataclass(frozen=True)
class Ridge(ReplacesHead):
    penalty: float | None = option(
        None,
        above=0,
        about="of the squared weights; by default the one of 10^-8 ... 10^8 with the least error on the held-out fifth",
    )
    classifier: str = option(
        "ridge",
        one_of=("ridge", "cosine", "means"),
        about="cosine: weights of unit length (STSA); means: the nearest class mean by cosine, from the same sums",
    )
    exchange: str = option(
        "task",
        one_of=("task", "round"),
        about="sums are sent at the end of a task, or in every round with new samples, which needs no boundaries",
    )
    train_first: bool = option(
        False, about="the first task trains the network as the other parts say; then it is frozen"
    )
    sums: str = option("fixed", one_of=("fixed", "float"), about="fixed: whole numbers")
    bits: int = option(10, at_least=0, about="of a feature after the point")
    groups: int = option(
        0, at_least=0, about="0, or into how many groups a client splits its samples for STSA-E's estimate of G"
    )

    name = "ridge"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.train_first and self.exchange == "round":
            raise ValueError(
                "train_first must be false with exchange = 'round': features still change in the first task"
            )

    def check(self, parts, optimizer):
        super().check(parts, optimizer)
        after = parts[parts.index(self) + 1 :]
        for part in parts:
            if isinstance(part, TrainsPieces):
                raise CompositionError(
                    f"part {self.name!r} needs features that stay as they are; {part.name!r} changes the network with "
                    "every task"
                )
            if not self.train_first and any(overrides(part, hook) for hook in _TRAINING):
                raise CompositionError(
                    f"part {part.name!r} changes training, but {self.name!r} trains nothing; leave it out, or let the "
                    f"first task be trained with method.{self.name}.train_first = true"
                )
            if part in after and part.name in _ADDING:
                raise CompositionError(f"part {part.name!r} adds samples to train on: it belongs before {self.name!r}")

    def init(self, side: Client | Server) -> None:
        super().init(side)
        if self.train_first and side.options.batchnorm == "local":
            raise CompositionError(f"part {self.name!r} needs the same features on every client: batchnorm = 'mean'")

    # no training -----------------------------------------------------------------------------------------------------
    def _trains(self, client: Client) -> bool:
        return self.train_first and not client.task

    def receive(self, client: Client) -> None:
        """Nothing to train on, but in a first task that adapts the network."""
        if not self._trains(client):
            client.data = client.data.take(np.zeros(0, dtype=np.int64))

    def start(self, client: Client) -> None:
        if not self._trains(client):
            raise CompositionError(f"a part after {self.name!r} adds samples to train on: it belongs before it")

    # the sums --------------------------------------------------------------------------------------------------------
    def phases(self):
        """Clients whose task ends (exchange = "task"), or all that are there."""
        own: dict[str, Reducer] = {
            "gram": Sum(self._numbers, Tells.MOMENTS),
            "products": Sum(tells=Tells.MOMENTS),
            "counts": Sum(tells=Tells.COUNTS),
        }
        if self.groups:
            own = {"sums": Collect(self._numbers, Tells.SUMS), "counts": Collect(tells=Tells.COUNTS)}
        whole = {**own, "classes": Mean(tells=Tells.CLASSES), "clipped": Sum(tells=Tells.AMOUNT)}
        who = (Cohort.BOUNDARY, END) if self.exchange == "task" else (Cohort.ALL, ALWAYS)
        statistics = Phase("statistics", *who, reduce=whole, run=self._sums, update=self._new_head)
        if self.sums != "fixed" or self.groups or self.train_first:
            return (statistics,)
        withdraw = Phase(
            "withdraw", Cohort.ALL, ON_REQUEST, reduce=whole, run=self._withdrawn_sums, update=self._take_out
        )
        return (statistics, withdraw, Phase("refit", Cohort.SERVER, ON_REQUEST, update=self._solve_again))

    @property
    def pairs(self) -> int:
        """How many pairs (G, Q) are sent: one, or one to fit and one to choose the penalty."""
        return 2 if self.penalty is None and self.classifier != "means" else 1

    def _numbers(self, facts: Facts) -> int:
        """Of all that is sent."""
        size = self.size(facts.layout)
        columns = facts.classes * max(1, self.groups)
        return self.pairs * (size * columns + (0 if self.groups else size * (size + 1) // 2))

    def _sums(self, client: Client):
        """Sums over the samples that were not counted before, by id."""
        counted = client.state.get("host", {}).get("counted", torch.zeros(0, dtype=torch.int64)).numpy()
        data = client.data.take(np.flatnonzero(~np.isin(client.data.ids, counted)))
        if len(data) == 0:
            return {}
        self.check_head(client)
        client.state = {"host": {"counted": torch.from_numpy(np.concatenate([counted, data.ids]))}}
        return self._group_sums(client, data) if self.groups else self._whole_sums(client, data)

    def _withdrawn_sums(self, client: Client):
        """Sums over the samples that were counted and are withdrawn; they count no longer. Zeros of a client that has
        none: under secure aggregation nobody sees whose samples they are."""
        if client.attempt is not None:
            raise CompositionError(f"part {self.name!r}: a server may not ask a client for the sums of chosen samples")
        counted = client.state.get("host", {}).get("counted", torch.zeros(0, dtype=torch.int64)).numpy()
        chosen = Withdrawn.from_tree(client.message).mask(client.id, client.data)
        data = client.data.take(np.flatnonzero(chosen & np.isin(client.data.ids, counted)))
        if len(data):
            client.state = {"host": {"counted": torch.from_numpy(counted[~np.isin(counted, data.ids)])}}
            return self._whole_sums(client, data)
        classes, size = self._classes(client), self.size(client.layout)
        shapes = {"gram": (size * (size + 1) // 2,), "products": (size, len(classes)), "counts": (len(classes),)}
        zeros = {key: torch.zeros(self.pairs, *shape, dtype=self._kind) for key, shape in shapes.items()}
        return {**zeros, "classes": classes, "clipped": 0}

    def _group_sums(self, client: Client, data: Data):
        """{sums (pairs, groups, classes, M), counts (pairs, groups, classes)} of random groups of samples."""
        classes = self._classes(client)
        columns = columns_of(classes, client.facts.classes)
        pair = held_out(data.x).long() if self.pairs == 2 else torch.zeros(len(data), dtype=torch.int64)
        group = torch.from_numpy(client.rng("groups").permutation(len(data)) % self.groups)
        shape = (self.pairs, self.groups, len(classes))
        counts, sums = torch.zeros(shape, dtype=torch.float64), None
        clipped, start = 0, 0
        for features, y in feature_rows(client, data):
            h, over = self.hidden(features)
            rows = slice(start, start + len(y))
            places = (pair[rows], group[rows], columns[y.cpu()])
            sums = torch.zeros(*shape, h.shape[1], dtype=torch.float64) if sums is None else sums
            sums.index_put_(places, h.cpu(), accumulate=True)
            counts.index_put_(places, torch.ones(len(y), dtype=torch.float64), accumulate=True)
            clipped, start = clipped + int(over), start + len(y)
        assert sums is not None  # there are samples
        return {"sums": sums.to(self._kind), "counts": counts.to(self._kind), "classes": classes, "clipped": clipped}

    def _classes(self, client: Client) -> Tensor:
        return task_classes(client) if self.exchange == "task" else torch.arange(client.facts.classes)

    @property
    def _kind(self) -> torch.dtype:
        return torch.int64 if self.sums == "fixed" else torch.float64

    def _whole_sums(self, client: Client, data: Data):
        """{gram (pairs, M (M + 1) / 2), products (pairs, M, classes), counts (pairs, classes)}."""
        classes = self._classes(client)
        columns = columns_of(classes, client.facts.classes)
        group = held_out(data.x) if self.pairs == 2 else torch.zeros(len(data), dtype=torch.bool)
        gram: Tensor | None = None
        clipped, start = 0, 0
        for features, y in feature_rows(client, data):
            h, over = self.hidden(features)
            labels = functional.one_hot(columns.to(y.device)[y], len(classes)).double()
            if gram is None:
                gram = h.new_zeros(self.pairs, h.shape[1], h.shape[1])
                products, counts = (
                    h.new_zeros(self.pairs, h.shape[1], len(classes)),
                    h.new_zeros(self.pairs, len(classes)),
                )
            for pair, rows in enumerate(self._split(group[start : start + len(y)].to(y.device))):
                gram[pair].addmm_(h[rows].T, h[rows])
                products[pair].addmm_(h[rows].T, labels[rows])
                counts[pair] += labels[rows].sum(0)
            clipped, start = clipped + int(over), start + len(y)
        assert gram is not None  # there are samples
        sent = {"gram": triangle(gram), "products": products, "counts": counts, "classes": classes}
        return {**{key: value.cpu().to(self._kind) for key, value in sent.items()}, "clipped": clipped}

    def _split(self, group: Tensor) -> list[Tensor]:
        return [~group, group] if self.pairs == 2 else [~group]

    def hidden(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """(h (n, M) in float64, in whole steps of 2^-bits where sums are fixed; how many were clipped)."""
        if self.sums == "fixed":
            return rounded(features, self.bits)
        return features.double(), torch.zeros((), dtype=torch.int64)

    # the head --------------------------------------------------------------------------------------------------------
    def _new_head(self, server: Server) -> None:
        """G and Q of all clients and tasks so far, and the head that they give."""
        held, new = server.state, self._reduced(server)
        if new is None:
            return
        total = {key: value + held[key] if key in held else value for key, value in new.items()}
        if total["counts"].sum() >= MOST_SAMPLES:
            raise ValueError(f"{self.name}: sums of {MOST_SAMPLES:,} samples or more are no longer exact")
        clipped = int(server.reduced["clipped"]) + held.get("clipped", 0)
        server.state = {**total, "penalties": held.get("penalties", {}), "clipped": clipped}
        self._solve_again(server)

    def _reduced(self, server: Server) -> Tree | None:
        """The sums that arrived, over all classes."""
        reduced, every = server.reduced, server.facts.classes
        classes = None if reduced.get("counts") is None else class_numbers(reduced["classes"], every)
        if classes is None:
            return None
        if self.groups:
            reduced = self._estimated(reduced, self.size(server.layout))
        size, kind = reduced["products"].shape[1], reduced["gram"].dtype
        products = torch.zeros(self.pairs, size, every, dtype=kind)
        counts = torch.zeros(self.pairs, every, dtype=kind)
        products[..., classes], counts[..., classes] = reduced["products"], reduced["counts"]
        return {"gram": reduced["gram"], "products": products, "counts": counts}

    def _take_out(self, server: Server) -> None:
        """Whole numbers: what is left are the sums of the other samples, to the bit."""
        found = self._reduced(server)
        if found is None:
            raise Fault(f"part {self.name!r}: no client's sums of withdrawn samples arrived; nothing was withdrawn")
        left = {key: server.state[key] - value for key, value in found.items()}
        server.state = {**server.state, **left, "clipped": server.state["clipped"] - int(server.reduced["clipped"])}

    def _solve_again(self, server: Server) -> None:
        """The head of the sums that there are."""
        held, params = server.state, server.model["params"].clone()
        weights, penalty = self.solve(held, params.device)
        held["penalties"] = {**held["penalties"], str(server.round): penalty}
        server.model = {**server.model, "params": self.write(params, weights.float().T, server.layout)}

    def _estimated(self, reduced: Mapping[str, Any], size: int) -> Tree:
        """G from the groups of all clients, Q and counts as their sums; a client whose sums have another form than they
        must have is left out."""
        shape = (self.pairs, self.groups, len(reduced["classes"]))
        replies = zip(reduced["sums"].values(), reduced["counts"].values(), strict=True)
        fitting = [(s, n) for s, n in replies if s.shape[:-1] == n.shape == shape and s.shape[-1] == size]
        sums = torch.cat([s.double() for s, _ in fitting], 1) if fitting else torch.zeros(*shape, size).double()
        counts = torch.cat([n.double() for _, n in fitting], 1) if fitting else torch.zeros(shape).double()
        gram = torch.stack([grouped_gram(s, n) for s, n in zip(sums, counts, strict=True)])
        products = {"products": sums.sum(1).transpose(1, 2), "counts": counts.sum(1)}
        return {**reduced, "gram": triangle(gram), **products}

    def size(self, layout: Layout) -> int:
        """M, the number of features that the head works on."""
        return head_weight(layout).shape[1]

    def solve(self, total: Tree, device: torch.device | str = "cpu") -> tuple[Tensor, float]:
        """(W (M, C) in float64, the penalty). On a GPU where there is one: it costs M^3, minutes of a CPU at 10,000."""
        gram, products, counts = (total[key].to(device).double() for key in ("gram", "products", "counts"))
        step = 2.0**-self.bits if self.sums == "fixed" else 1.0
        grams, products = symmetric(gram, products.shape[1]) * step**2, products * step
        if self.classifier == "means":
            return functional.normalize(products.sum(0), dim=0).cpu(), 0.0
        penalty = self.penalty or best_penalty(grams, products, float(counts[-1].sum()))
        weights = solve_ridge(grams.sum(0), products.sum(0), penalty).cpu()
        return functional.normalize(weights, dim=0) if self.classifier == "cosine" else weights, penalty

    def write(self, params: Tensor, weight: Tensor, layout: Layout) -> Tensor:
        """The parameters with the head's weight (C, M) replaced and its bias 0."""
        own, *biases = head_entries(layout)
        own.view(params).copy_(weight)
        for bias in biases:
            bias.view(params).zero_()
        return params

    def summary(self, server: State) -> dict[str, Any]:
        """For result.json: the penalties and how they were chosen, the samples, the features that were clipped."""
        own = server.get(self.name)
        if not own:
            return {}
        chosen = {"penalty_from": "sums" if self.pairs == 2 else "recipe"} if self.classifier != "means" else {}
        samples = int(own["counts"].sum())
        return {"penalties": own["penalties"], **chosen, "samples": samples, "clipped": own["clipped"]}


@dataclass(frozen=True)
class RanPAC(AddsParameters, Ridge):
    """Random features h = relu(f P), with P drawn on every client and never sent."""

    bits: int = option(5, at_least=0, about="of a random feature after the point")
    width: int = option(10_000, at_least=1, about="M, how many random features")
    seed: int = option(0, about="from which P is drawn from N(0, 1)")

    name = "ranpac"

    def adapt(self, module: nn.Module, server: Server) -> None:
        """Put the head on random features beside the network's own."""
        name = head_name(module)
        path, weight = name.rpartition(".")[0], module.get_parameter(name)
        if not path or not weight.requires_grad:
            problem = "is frozen: let it be trainable" if path else "is the whole network: wrap it in one"
            raise CompositionError(f"part {self.name!r} replaces the head, but {name} {problem}")
        own, (parent, _, leaf) = module.get_submodule(path), path.rpartition(".")
        matrix = projection(self.seed, weight.shape[1], self.width, weight.device)
        setattr(module.get_submodule(parent), leaf, RandomHead(own, matrix, server.facts.classes))

    def size(self, layout: Layout) -> int:
        return self.width

    def head_layer(self, module: nn.Module) -> nn.Module:
        return module.get_submodule(head_name(module).removesuffix(".own.weight"))

    def hidden(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Products of whole numbers, so that h is the same wherever f, rounded to 10 bits, is."""
        matrix = projection(self.seed, features.shape[1], self.width, features.device).double()
        if self.sums != "fixed":
            return (features.double() @ matrix).relu(), torch.zeros((), dtype=torch.int64)
        whole, over = rounded(features, Ridge.bits)
        h, more = rounded((whole @ (matrix * 2**_FINE)).relu() * 2.0 ** -(Ridge.bits + _FINE), self.bits)
        return h, over + more

    def write(self, params: Tensor, weight: Tensor, layout: Layout) -> Tensor:
        own = head_entries(layout)[0]
        super().write(params, torch.zeros(own.shape), layout)
        layout.param(own.name.removesuffix("own.weight") + "random").view(params).copy_(weight)
        return params


class RandomHead(nn.Module):
    """A network's own head and one on random features: own(f) + W relu(f P). own: 0 as soon as W is solved for. matrix:
    P (F, M), a constant that no file and no message holds: it is drawn again."""

    matrix: Tensor

    def __init__(self, own: nn.Module, matrix: Tensor, classes: int) -> None:
        super().__init__()
        self.random = nn.Parameter(matrix.new_zeros(classes, matrix.shape[1]))
        self.own = own
        self.register_buffer("matrix", matrix, persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        hidden = (features.detach() @ self.matrix.to(features.dtype)).relu()
        outputs: Tensor = self.own(features)
        return outputs + hidden @ self.random.detach().T.to(features.dtype)


@lru_cache(maxsize=2)
def projection(seed: int, features: int, width: int, device: torch.device) -> Tensor:
    """(F, M) standard normal numbers, rounded to multiples of 2^-8: the same with any library of functions."""
    drawn = random.generator("ranpac", seed, features, width).standard_normal((features, width))
    return torch.from_numpy(np.rint(drawn * 2**_FINE) / 2**_FINE).float().to(device)


def solve_ridge(gram: Tensor, products: Tensor, penalty: float) -> Tensor:
    """(G + penalty I)^-1 Q, (M, C)."""
    factor, failed = torch.linalg.cholesky_ex(gram + penalty * torch.eye(len(gram)).to(gram))
    if not failed:
        return torch.cholesky_solve(products, factor)
    values, vectors = torch.linalg.eigh(gram)  # a penalty below the rounding of G
    return vectors @ ((vectors.T @ products) / (values.clamp(min=0.0) + penalty).unsqueeze(1))


def grouped_gram(sums: Tensor, counts: Tensor) -> Tensor:
    """(M, M) the estimate of sum h h^T from sums (groups, classes, M) and counts (groups, classes) of random groups."""
    total = sums.new_zeros(sums.shape[-1], sums.shape[-1])
    for own, count in zip(sums.transpose(0, 1), counts.T, strict=True):
        there = count > 0
        own, count = own[there], count[there]
        groups, samples, whole = len(own), count.sum(), own.sum(0)
        outer = (own / count.unsqueeze(1)).T @ own
        if groups > 1:
            outer = (samples - 1) / (groups - 1) * outer
            outer -= (samples - groups) / ((groups - 1) * samples) * torch.outer(whole, whole)
        total += outer
    return total


def held_out_errors(grams: Tensor, products: Tensor, count: float) -> Tensor:
    """The squared error on the second pair (G, Q), of `count` samples, of the ridge regression on the first, for every
    penalty of GRID. One eigendecomposition serves all."""
    values, vectors = torch.linalg.eigh(grams[0])
    fitted, tested = vectors.T @ products[0], vectors.T @ products[1]
    gram = vectors.T @ grams[1] @ vectors
    errors = []
    for penalty in GRID:
        weights = fitted / (values.clamp(min=0.0) + penalty).unsqueeze(1)
        errors.append(count - 2.0 * (weights * tested).sum() + (weights * (gram @ weights)).sum())
    return torch.stack(errors)


def best_penalty(grams: Tensor, products: Tensor, count: float) -> float:
    """The penalty of GRID with the least held-out error; 1 while no sample is held out."""
    return GRID[int(held_out_errors(grams, products, count).argmin())] if count else 1.0
