"""FL+SI: synaptic intelligence on every client (Zenke et al., 2017; federated as in the FedSSI paper's baselines), and
what FedSSI shares with it.

A parameter's contribution s is the loss it took away along a training path; its importance Omega is s per squared
distance, summed over tasks; the penalty holds important parameters at the global model of the previous task:

    L(w) = L_data(w) + c * sum_i Omega_i (w_i - anchor_i)^2            (FedSSI, Eq. 2; no factor 1/2)
    Omega <- max(0, Omega + s / (D + eps)),  D = squared distance      (FedSSI, Eq. 3, rectified as by SI's authors)
    s = - sum over steps of g_i (w_i after - w_i before)               (FedSSI, Eq. 6, with the sign that it omits)

The two methods differ only in which path s comes from. SI accumulates it in all local steps of a task in which the
client took part; the distance is that of the aggregated models.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from everfed.core.tree import on_device
from everfed.method import END, FIRST, Client, Cohort, Gradient, Part, Phase, Schedule, Step, Tree, When, option

SCRATCH = ("before", "gradient")  # what a step notes to follow its path


@dataclass(frozen=True)
class PathRegulariser(Part, ABC):
    reg_strength: float = option(0.1, at_least=0, about="c")
    eps: float = option(1e-3, above=0, about="damps Omega where a parameter hardly moved")

    def phases(self):
        """Every client needs the first model, since importance is contribution per distance from it."""
        return [
            Phase("anchor", Cohort.ALL, FIRST, When.BEFORE, run=self.anchor),
            Phase("consolidate", Cohort.BOUNDARY, END, in_last_round=False, run=self.consolidate),
        ]

    def receive(self, client: Client) -> None:
        """A client that joined after the first round starts from the model it first gets."""
        client.state.setdefault("anchor", client.received["params"])

    def anchor(self, client: Client) -> None:
        client.state = on_device({"anchor": client.received["params"], **client.state}, client.device)

    def consolidate(self, client: Client) -> None:
        """Update the importance; the model at the task's end is the new anchor."""
        client.model = on_device(client.model, client.device)
        self.anchor(client)
        w = client.model["params"]
        contribution, squared_distance = self.path(client)
        omega = client.state.get("omega", torch.zeros_like(w))
        client.state = {"omega": importance(omega, contribution, squared_distance, self.eps), "anchor": w}

    @abstractmethod
    def path(self, client: Client) -> tuple[Tensor, Tensor]:
        """(s, D) of the task that ends; `client.model` is the global model at its end, state["anchor"] that at its
        beginning."""

    def penalty(self, step: Step, gradient: Gradient) -> Gradient | Tensor:
        """`gradient` with the penalty's: 2 c Omega (w - anchor)."""
        own = step.state
        if "omega" not in own or self.reg_strength == 0:
            return gradient
        moved = step.params - own["anchor"]
        return gradient.vector.addcmul(own["omega"], moved, value=2.0 * self.reg_strength)  # Eq. 2


@dataclass(frozen=True)
class SynapticIntelligence(PathRegulariser):
    """Put it before other parts that add to the gradient: it takes the gradient that it gets for that of the data
    loss."""

    name = "si"
    changes = frozenset({"contribution", *SCRATCH})

    def plan(self, client: Client, schedule: Schedule) -> None:
        anchor = client.state["anchor"]
        client.state = {"contribution": torch.zeros_like(anchor), **client.state, **scratch(anchor)}

    def gradient(self, step: Step, gradient: Gradient) -> Gradient | Tensor:
        begin_step(step.state, step.params, gradient.vector)
        return self.penalty(step, gradient)

    def after(self, step: Step) -> None:
        end_step(step.state, step.params)

    def reply(self, client: Client) -> None:
        client.state = {key: value for key, value in client.state.items() if key not in SCRATCH}

    def path(self, client: Client) -> tuple[Tensor, Tensor]:
        moved = client.model["params"] - client.state["anchor"]
        return client.state.get("contribution", torch.zeros_like(moved)), moved.square()


def importance(omega: Tensor, contribution: Tensor, squared_distance: Tensor, eps: float) -> Tensor:
    """Omega after a task. A parameter without contribution keeps its importance."""
    gained = contribution / (squared_distance + eps)  # Eq. 3
    return torch.where(contribution == 0, omega, omega + gained).clamp_min(0.0)


def scratch(params: Tensor) -> Tree:
    """The buffers that `begin_step` writes."""
    return {name: torch.zeros_like(params) for name in SCRATCH}


def begin_step(own: Tree, params: Tensor, gradient: Tensor) -> None:
    """Record where a step starts, and the gradient of the data loss there."""
    own["before"].copy_(params)
    own["gradient"].copy_(gradient)


def end_step(own: Tree, params: Tensor) -> None:
    """Add the step to the contribution: the actual change of the parameters, whatever the optimiser made of it."""
    own["contribution"].addcmul_(own["gradient"], params - own["before"], value=-1.0)  # Eq. 6
