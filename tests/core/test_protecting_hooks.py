"""Protections: `seal` is the last hook before a reply leaves a client, `release` the first on what was reduced."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from everfed.core.client import Reply
from everfed.core.message import Values
from everfed.core.part import Reduced, Weights
from everfed.core.tree import map_tensors
from everfed.method import MODEL, Client, Method, Part, Phase, Protection, Server, Tree, When, compose
from everfed.methods.aggregate.fedavg import FedAvg
from everfed.methods.project.fedgp import FedGP
from everfed.methods.replay.memory import Memory
from tests.support.toy import Bench


@dataclass(frozen=True)
class Doubles(Protection):
    """Doubles every float that leaves a client, and halves every float that was reduced."""

    name = "doubles"

    def seal(self, client: Client, phase: Phase, reply: Reply) -> Reply:
        assert MODEL in client.messages
        client.state["sealed"] = client.state.get("sealed", 0) + 1
        return replace(reply, values=scaled(reply.values, 2.0))

    def release(self, server: Server, phase: Phase, reduced: Reduced, weights: Weights) -> Reduced:
        log = server.state.get("log", "") + f"{phase.name}:{weights[phase.owner]} "
        server.state["log"] = log
        server.report("phases", float(log.count(":{")))
        return scaled(reduced, 0.5)


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
        return (Phase("never", when=When.INSIDE, run=self._never),)

    def _never(self, client: Client) -> Values:
        raise AssertionError("never")


def test_a_phase_inside_another_is_not_scheduled() -> None:
    outcome = composed(Inner()).run()
    assert {event["phase"] for event in outcome.events if event["event"] == "phase"} == {"train", "reference"}
