"""FedCBDR: class-wise balancing data replay (Qi et al., "Class-wise Balancing Data Replay for Federated
Class-Incremental Learning", NeurIPS 2025).

Global-perspective data replay, the policy `fedcbdr`. X_k (n_k, d) are the features of client k's samples of a task
under the shared model. Clients send P_k X_k Q with random orthogonal P_k and Q (Eq. 1); the server concatenates these
(Eq. 2) and takes the left singular vectors U (Eq. 3), whose rows give the leverage scores of a client's samples

    tau_j = |e_j^T U_k|^2                (Eq. 4, 5)         p_j = tau_j / sum of all tau        (Eq. 6)

by which samples are drawn from all clients' together. The same numbers follow from one sum of matrices:

    G = sum_k X_k^T X_k,    tau_j = x_j^T G^+ x_j,    sum of all tau = rank G

so here clients send X_k^T X_k, the server returns the inverse of their mean, (G / K)^+, and each of the K clients draws
its own part. Q cancels, and so does P_k once a client undoes it, without which Eq. 5 scores mixtures of its samples.
No score leaves a client.

Task-aware temperature scaling, the part `fedcbdr`. From the second task on, with z the outputs of the classes so far,

    L = mean over old samples of  w_old CE(y, softmax([z_old / tau_old, z_new / tau_new]))
      + mean over new samples of  w_new CE(the same)                                             (Eq. 7)

Old: of classes of earlier tasks. In the first task L is cross-entropy (Eq. 8).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from everfed.method import (
    BOUNDARIES,
    CLASSES,
    END,
    TOGETHER,
    Client,
    Cohort,
    Facts,
    Mean,
    Part,
    Phase,
    Server,
    Step,
    Tells,
    Tree,
    option,
)
from everfed.methods.common.layers import features, head_weight
from everfed.methods.common.teacher import among, classes_of, competing, mask_of, tasks_before
from everfed.methods.features.statistics import symmetric, triangle
from everfed.methods.replay import memory
from everfed.methods.replay.memory import Memory, Policy, Pool

_RANK = 1e-10  # singular values of G below this share of the largest are rounding


@dataclass(frozen=True)
class Leverage(Policy):
    """A client's buffer is divided among tasks by the client's share of each task's leverage; an older task keeps those
    of its samples that were drawn first."""

    kind = "fedcbdr"
    about = "samples of high leverage among the features of all clients (FedCBDR)"

    def needs(self):
        return {TOGETHER}

    def init(self, size: int) -> Tree:
        """shares: of every task so far, the client's leverage over the mean client's. task: of every row."""
        return {"shares": torch.zeros(0, dtype=torch.float64), "task": torch.zeros(0, dtype=torch.int64)}

    def phases(self, memory: Memory):
        (choice,) = super().phases(memory)
        reduce = {"gram": Mean(numbers=_numbers, tells=Tells.MOMENTS)}
        gram = Phase(
            "gram", Cohort.BOUNDARY, END, reduce=reduce, in_last_round=False, run=self._gram, update=self._invert
        )
        return gram, replace(choice, broadcast=_send, update=_forget)

    def _gram(self, client: Client):
        if len(client.data) == 0:
            return {}
        x = features(client.trainer, client.model, client.data.x).double()
        return {"gram": triangle(x.T @ x).cpu()}

    def _invert(self, server: Server) -> None:
        entries = server.reduced.get("gram")
        if entries is None:
            return
        gram = symmetric(entries, head_weight(server.layout).shape[1])
        inverse = torch.linalg.pinv(gram, rtol=_RANK, hermitian=True)
        rank = int(torch.linalg.matrix_rank(gram, rtol=_RANK, hermitian=True))
        server.state = {"inverse": inverse, "rank": rank}

    def choose(self, pool: Pool, size: int) -> np.ndarray:
        own, rows = pool.state, pool.state["task"].numpy()
        groups = [pool.new + np.flatnonzero(rows == task) for task in range(len(own["shares"]))]
        if pool.new:
            tau = self._scores(pool)
            share = torch.tensor([tau.sum() / max(1, pool.message["rank"])], dtype=torch.float64)
            own["shares"] = torch.cat([own["shares"], share])
            groups.append(drawn(tau, pool.rng(self.kind)))
        rooms = allocation(own["shares"].numpy(), [len(group) for group in groups], size)
        own["task"] = torch.arange(len(rooms)).repeat_interleave(torch.tensor(rooms, dtype=torch.int64))
        return np.concatenate([np.zeros(0, int), *(group[:room] for group, room in zip(groups, rooms, strict=True))])

    def _scores(self, pool: Pool) -> np.ndarray:
        """K tau of the task's samples."""
        x = features(pool.client.trainer, pool.model, pool.x[: pool.new]).double().cpu()
        return leverage(x, pool.message["inverse"].cpu()).numpy()


def leverage(x: Tensor, inverse: Tensor) -> Tensor:
    """(n,) x_j^T M x_j of the rows (n, d), M an inverse."""
    return ((x @ inverse) * x).sum(1).clamp(min=0.0)


def drawn(tau: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """All positions in the order in which they are drawn without replacement, by tau; those with 0 come last."""
    times = rng.standard_exponential(len(tau))
    return np.argsort(np.divide(times, tau, out=np.full(len(tau), np.inf), where=tau > 0), kind="stable")


def allocation(shares: np.ndarray, counts: Sequence[int], size: int) -> list[int]:
    """How many rows of a buffer every task gets, in proportion to its share, as far as it has samples: row by row to
    the task with the largest share per row."""
    rooms = np.zeros(len(counts), dtype=np.int64)
    for _ in range(min(size, sum(counts))):
        rooms[np.argmax(np.where(rooms < counts, shares / (rooms + 1), -1.0))] += 1
    return rooms.tolist()


def _numbers(facts: Facts) -> int:
    size = int(head_weight(facts.layout).shape[1])
    return size * (size + 1) // 2


def _send(server: Server):
    """The inverse and its rank."""
    return server.state


def _forget(server: Server) -> None:
    """Once clients have chosen, the server keeps nothing."""
    server.state = {}


@dataclass(frozen=True)
class FedCBDR(Part):
    old_temperature: float = option(0.9, above=0, about="tau_old")
    new_temperature: float = option(1.1, above=0, about="tau_new")
    old_weight: float = option(1.1, at_least=0, about="w_old")
    new_weight: float = option(0.9, at_least=0, about="w_new")

    name = "fedcbdr"

    def needs(self):
        return {memory.NAME, BOUNDARIES, CLASSES}

    def start(self, client: Client) -> None:
        """By class: does it compete, is it old, its temperature, its weight; 1 and 1 in the first task (Eq. 8)."""
        earlier, seen = tasks_before(client), competing(client)
        old, first = mask_of(client, classes_of(client, earlier, everyone=True)), len(earlier) == 0
        client.state = {
            "classes": mask_of(client, seen),
            "old": old,
            "temperature": torch.where(old, self.old_temperature, 1.0 if first else self.new_temperature),
            "weight": torch.where(old, self.old_weight, 1.0 if first else self.new_weight),
        }

    def objective(self, step: Step) -> Tensor:
        """Eq. 7"""
        own, y = step.state, step.all_y
        z = among(step.all_outputs / own["temperature"], own["classes"])
        losses = own["weight"][y] * functional.cross_entropy(z, y, reduction="none")
        old = own["old"][y]
        return sum((losses * group).sum() / group.sum().clamp(min=1) for group in (old, ~old))
