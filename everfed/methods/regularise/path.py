"""What FedSSI and synaptic intelligence share: importance from a path, and the penalty that uses it.

A parameter's contribution s is the loss it took away along a training path; its importance Omega is s per squared
distance, summed over tasks; the penalty holds important parameters at the global model of the previous task:

    L(w) = L_data(w) + c * sum_i Omega_i (w_i - anchor_i)^2            (FedSSI, Eq. 2; no factor 1/2)
    Omega <- max(0, Omega + s / (D + eps)),  D = squared distance      (FedSSI, Eq. 3, rectified as by SI's authors)
    s = - sum over steps of g_i (w_i after - w_i before)               (FedSSI, Eq. 6, with the sign that it omits)

The two methods differ only in which path s comes from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from everfed.core.legacy import (
    END,
    FIRST,
    MODEL,
    Cohort,
    Context,
    Data,
    Message,
    Model,
    Part,
    Phase,
    Position,
    Slots,
    State,
    Step,
    Tree,
    on_device,
)
from everfed.methods.common.checks import at_least, positive

SCRATCH = ("before", "gradient")


def importance(omega: Tensor, contribution: Tensor, squared_distance: Tensor, eps: float, cap: float = 0.0) -> Tensor:
    """Omega after a task. cap: upper limit, 0 for none. A parameter without contribution keeps its importance."""
    gained = contribution / (squared_distance + eps)  # Eq. 3
    updated = torch.where(contribution == 0, omega, omega + gained).clamp_min(0.0)
    return updated.clamp_max(cap) if cap else updated


def begin_step(own: Tree, params: Tensor, gradient: Tensor) -> None:
    """Record where a step starts, and the gradient of the data loss there."""
    own["before"].copy_(params)
    own["gradient"].copy_(gradient)


def end_step(own: Tree, params: Tensor) -> None:
    """Add the step to the contribution: the actual change of the parameters, whatever the optimiser made of it."""
    own["contribution"].addcmul_(own["gradient"], params - own["before"], value=-1.0)  # Eq. 6


def scratch(params: Tensor) -> Tree:
    """The buffers that `begin_step` writes."""
    return {name: torch.zeros_like(params) for name in SCRATCH}


@dataclass(frozen=True)
class PathRegulariser(Part, ABC):
    """reg_strength: c. eps: damps Omega where a parameter hardly moved. omega_max: upper limit of Omega (0: none).
    penalise_bn: hold BatchNorm's weights and biases too; its statistics never are."""

    reg_strength: float = 0.1
    eps: float = 1e-3
    omega_max: float = 0.0
    penalise_bn: bool = True

    def __post_init__(self) -> None:
        at_least(self, 0, "reg_strength", "omega_max")
        positive(self, "eps")

    def phases(self) -> tuple[Phase, ...]:
        """Every client needs the first model, since importance is contribution per distance from it."""
        return (
            Phase("anchor", Cohort.ALL, FIRST, Position.BEFORE, run=self._anchor),
            Phase("consolidate", Cohort.BOUNDARY, END, in_last_round=False, run=self._consolidate),
        )

    def receive(self, client: State, message: Message, model: Model, data: Data, ctx: Context) -> tuple[Slots, Model]:
        """A client that joined after the first round starts from the model it first gets."""
        own = client.get(self.name, {})
        return (None if "anchor" in own else {**own, "anchor": message[MODEL]["params"]}), model

    def _anchor(self, client: State, message: Message, data: Data, ctx: Context) -> tuple[Tree, Tree]:
        return on_device({"anchor": message[MODEL]["params"], **client.get(self.name, {})}, ctx.train.device), {}

    def _consolidate(self, client: State, message: Message, data: Data, ctx: Context) -> tuple[Tree, Tree]:
        """Update the importance; the model at the task's end is the new anchor."""
        model = on_device(message[MODEL], ctx.train.device)
        own, _ = self._anchor(client, message, data, ctx)
        omega = own.get("omega", torch.zeros_like(model["params"]))
        contribution, squared_distance = self.path(own, model, data, ctx)
        omega = importance(omega, contribution, squared_distance, self.eps, self.omega_max)
        if not self.penalise_bn:
            omega = omega * not_batchnorm(ctx).to(omega.device)
        return {"omega": omega, "anchor": model["params"]}, {}

    @abstractmethod
    def path(self, own: Tree, model: Model, data: Data, ctx: Context) -> tuple[Tensor, Tensor]:
        """(s, D) of the task that ends; `model` is the global model at its end, own["anchor"] that at its beginning."""

    def penalty(self, step: Step, gradient: Tensor) -> Tensor:
        """`gradient` with the penalty's: 2 c Omega (w - anchor)."""
        own = step.state.get(self.name, {})
        if "omega" not in own or self.reg_strength == 0:
            return gradient
        return gradient.addcmul(own["omega"], step.params - own["anchor"], value=2.0 * self.reg_strength)  # Eq. 2


def not_batchnorm(ctx: Context) -> Tensor:
    """(P,) 1 for every parameter but BatchNorm's."""
    replica = ctx.train.replica
    norms = {name for name, layer in replica.module.named_modules() if isinstance(layer, _BatchNorm)}
    keep = torch.ones(replica.layout.size)
    for entry in replica.layout.params:
        if entry.name.rpartition(".")[0] in norms:
            keep[entry.start : entry.start + entry.size] = 0.0
    return keep
