"""Hooks that few parts use: declined phases, changing the model on the server, extra parameters, scoring when told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from everfed.core.context import Context
from everfed.core.data import Data
from everfed.core.extras import Extras, registered
from everfed.core.message import MODEL
from everfed.core.method import Method, compose
from everfed.core.part import Model, Part, State
from everfed.core.phase import BEGIN, END, Cohort, Phase, Position
from everfed.core.tree import Tree, tensor_bytes
from everfed.parts.aggregate.average import FedAvg
from tests.support.toy import Bench, Toy


def with_parts(*parts: Part, stream: Toy | None = None) -> Bench:
    def build() -> Method:
        return compose(FedAvg(), *parts, name="with parts")

    return Bench(build, stream=stream or Toy())


@dataclass(frozen=True)
class AtTaskEnds(Part):
    """Has a phase at every task's end, and wants it only before the last."""

    name: ClassVar[str] = "ends"

    def phases(self) -> tuple[Phase, ...]:
        return (Phase("work", owner=self.name, cohort=Cohort.ALL, when=END),)

    def wanted(self, phase: str, ctx: Context) -> bool:
        return ctx.round + 1 < ctx.facts.rounds

    def run(self, client: State, phase: str, message: dict[str, Tree], data: Data, ctx: Context) -> tuple[Tree, Tree]:
        return {}, {}


def test_a_phase_that_its_part_declines_does_not_run_and_costs_nothing() -> None:
    stream = Toy(tasks=3, cohorts={i: (0,) for i in range(6)})
    outcome, plain = with_parts(AtTaskEnds(), stream=stream).run(), Bench("fedavg", stream=stream).run()
    ran = [e["round"] for e in outcome.events if e["event"] == "phase" and e["phase"] == "work"]
    assert ran == [1, 3]
    extra = sum(outcome.state.traffic.down.values()) - sum(plain.state.traffic.down.values())
    assert extra == 2 * 2 * tensor_bytes(Bench().model())  # two boundaries, two clients that did not just take part


@dataclass(frozen=True)
class Halved(Part):
    """Goes half the way that aggregation went."""

    name: ClassVar[str] = "halved"

    def transform(self, server: State, model: Model, ctx: Context) -> Model:
        return {**model, "params": (server[MODEL]["params"] + model["params"]) / 2}


@dataclass(frozen=True)
class Shifted(Part):
    """Adds one to everything."""

    name: ClassVar[str] = "shifted"

    def transform(self, server: State, model: Model, ctx: Context) -> Model:
        return {**model, "params": model["params"] + 1.0}


def test_what_aggregation_made_is_transformed_in_part_order() -> None:
    start, plain = Bench().model()["params"], Bench().run(rounds=1).params
    halved = with_parts(Halved(), Shifted()).run(rounds=1).params
    assert torch.allclose(halved, (start + plain) / 2 + 1.0)
    shifted = with_parts(Shifted(), Halved()).run(rounds=1).params
    assert torch.allclose(shifted, (start + plain + 1.0) / 2)


@dataclass(frozen=True)
class Restores(Part):
    """At a task's end puts the model back to where the task began; in other rounds it only looks."""

    name: ClassVar[str] = "restores"

    def phases(self) -> tuple[Phase, ...]:
        server = {"owner": self.name, "cohort": Cohort.SERVER}
        return (Phase("keep", when=BEGIN, position=Position.BEFORE, **server), Phase("restore", when=END, **server))

    def update(self, server: State, phase: str, reduced: Tree, ctx: Context) -> Tree:
        return {"kept": dict(server[MODEL])} if phase == "keep" else server[self.name]

    def revise(self, server: State, phase: str, model: Model, ctx: Context) -> Model:
        return dict(server[self.name]["kept"]) if phase == "restore" else model


def test_a_phase_may_revise_the_model_and_clients_receive_the_new_version() -> None:
    bench = with_parts(Restores())
    start, plain = bench.model()["params"], Bench().run(rounds=1)
    between, restored = bench.run(rounds=1), bench.run(rounds=2)
    assert torch.equal(between.params, plain.params)
    assert torch.equal(restored.params, start)
    assert (between.state.version, restored.state.version) == (1, 3)  # two aggregations and a restored model
    assert restored.state.traffic.down["fedavg"] == 2 * 3 * tensor_bytes(bench.model())
    assert not torch.equal(bench.run(rounds=3).params, start)


@dataclass(frozen=True)
class Offset(Part):
    """Adds a trained number to all outputs: one that is shared, or one of the client's own."""

    own: bool = False

    name: ClassVar[str] = "offset"

    def extra_parameters(self, ctx: Context) -> dict[str, Tensor]:
        return {} if self.own else {"by.class": torch.zeros(ctx.facts.classes)}

    def personal_parameters(self, ctx: Context) -> dict[str, Tensor]:
        return {"by.class": torch.full((ctx.facts.classes,), 0.5)} if self.own else {}

    def forward(self, module: nn.Module, x: Tensor, own: Tree, message: Tree) -> Tensor:
        offset: Tensor = cast(Extras, module.extras)[self.name]["by.class"]
        return module(x) + offset + float(own.get("host", {}).get("bonus", 0.0))  # type: ignore[no-any-return]

    def told(self, own: Tree, task: int) -> Tree:
        return {**own, "host": {"bonus": float(task)}}


def test_shared_extra_parameters_are_trained_and_averaged() -> None:
    bench = with_parts(Offset())
    outcome = bench.run()
    entry = bench.layout().param(registered("offset", "by.class", personal=False))
    assert bench.layout().shared == bench.layout().size == len(outcome.params)
    assert entry.view(outcome.params).abs().max() > 0


def test_personal_ones_stay_on_their_clients() -> None:
    bench = with_parts(Offset(own=True))
    outcome = bench.run()
    layout = bench.layout()
    assert (layout.shared, layout.size) == (len(outcome.params), len(outcome.params) + 4)
    kept = [outcome.clients[client]["client"]["personal"] for client in range(3)]
    assert all(len(values) == 4 and not torch.equal(values, torch.full((4,), 0.5)) for values in kept)
    assert not torch.equal(kept[0], kept[1])
    plain = Bench().run().state.traffic
    assert outcome.state.traffic.up["fedavg"] == plain.up["fedavg"]  # not one of them is sent


def test_only_parts_that_ask_are_told_the_task() -> None:
    outcome = with_parts(Offset(own=True)).run()
    for row in outcome.state.rows.values():
        for counts in row:
            assert counts is None or counts[1] == counts[2] == counts[3]  # a bonus for all classes changes no answer
    assert Part().told({"a": 1}, 3) == {"a": 1}
