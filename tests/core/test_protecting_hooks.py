"""Protections: `seal` is the last hook before a reply leaves a client, `release` the first on what was reduced."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from everfed.core.client import Reply
from everfed.core.legacy import Reduced, Weights
from everfed.core.tree import map_tensors
from everfed.core.legacy import MODEL, Context, Data, Method, Part, Phase, Position, Protection, State, Tree, compose
from everfed.methods.aggregate.fedavg import FedAvg
from everfed.methods.project.fedgp import FedGP
from everfed.methods.replay.memory import Memory
from tests.support.toy import Bench


@dataclass(frozen=True)
class Doubles(Protection):
    """Doubles every float that leaves a client, and halves every float that was reduced."""

    name = "doubles"

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
    counted = [
        event["phases"] for event in changed.events if event["event"] == "measure" and event["part"] == "doubles"
    ]
    assert counted == [float(n) for n in range(1, 9)]


@dataclass(frozen=True)
class Inner(Doubles):
    """Has a phase that no round runs by itself."""

    name = "doubles"

    def phases(self) -> tuple[Phase, ...]:
        return (Phase("never", position=Position.INSIDE, run=self._never),)

    def _never(self, client: State, message: dict[str, Tree], data: Data, ctx: Context) -> tuple[None, Tree]:
        raise AssertionError("never")


def test_a_phase_inside_another_is_not_scheduled() -> None:
    outcome = composed(Inner()).run()
    assert {event["phase"] for event in outcome.events if event["event"] == "phase"} == {"train", "reference"}
