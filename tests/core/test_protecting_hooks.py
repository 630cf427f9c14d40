"""seal: the last word on what leaves a client. release: the first look at what was reduced."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from everfed.core.client import Reply
from everfed.core.context import Context
from everfed.core.message import MODEL
from everfed.core.method import Method, compose
from everfed.core.part import Part, Reduced, State, Weights
from everfed.core.phase import Phase, Position
from everfed.core.tree import Tree, map_tensors
from everfed.parts.aggregate.average import FedAvg
from everfed.parts.memory.buffer import Memory
from everfed.parts.project.fedgp import FedGP
from tests.support.toy import Bench


@dataclass(frozen=True)
class Doubles(Part):
    """Doubles every float that leaves a client, and halves every float that was reduced."""

    name: ClassVar[str] = "doubles"

    def seal(
        self, client: State, phase: Phase, message: dict[str, Tree], reply: Reply, ctx: Context
    ) -> tuple[Tree, Reply]:
        assert MODEL in message
        times = client.get(self.name, {}).get("sealed", 0)
        return {"sealed": times + 1}, replace(reply, values=scaled(reply.values, 2.0))

    def release(
        self, server: State, phase: Phase, reduced: Reduced, weights: Weights, ctx: Context
    ) -> tuple[Tree, Reduced]:
        log = server.get(self.name, {}).get("log", "")
        return {"log": f"{log}{phase.name}:{weights[phase.owner]} "}, scaled(reduced, 0.5)

    def measure(self, server: State, reduced: Tree, ctx: Context) -> dict[str, float]:
        return {"phases": float(server[self.name]["log"].count(":{"))} if self.name in server else {}

    def conclude(self, server: State) -> dict[str, Any]:
        return {"log": server[self.name]["log"]}


def scaled(values: Tree, factor: float) -> Tree:
    return map_tensors(lambda t: t * factor if t.is_floating_point() else t, values)


def composed(*more: Part) -> Bench:
    def build() -> Method:
        return compose(FedAvg(), Memory(8), FedGP(), *more, name="m")

    return Bench(build)


def test_every_phase_is_sealed_on_clients_and_released_on_the_server() -> None:
    plain, changed = composed().run(), composed(Doubles()).run()
    assert torch.equal(plain.params, changed.params)  # 2 and 1/2 are exact
    assert changed.clients[0]["doubles"] == {"sealed": 8}  # 4 rounds of train and reference
    log = changed.state.server["doubles"]["log"].split(" ")
    assert log.count("reference:{'gradient':") == 4 and changed.state.server["doubles"]["log"].count("3.0") == 16
    told = [event["phases"] for event in changed.events if event["event"] == "measure" and event["part"] == "doubles"]
    assert told == [float(n) for n in range(1, 9)]


@dataclass(frozen=True)
class Inner(Doubles):
    """Has a phase that no agenda runs."""

    name: ClassVar[str] = "doubles"

    def phases(self) -> tuple[Phase, ...]:
        return (Phase("never", owner=self.name, position=Position.INSIDE),)


def test_a_phase_inside_another_is_not_on_the_agenda() -> None:
    outcome = composed(Inner()).run()
    assert {event["phase"] for event in outcome.events if event["event"] == "phase"} == {"train", "reference"}
