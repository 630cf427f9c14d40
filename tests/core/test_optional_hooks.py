"""What few parts use: phases that skip the last round, changing the model on the server, extra parameters, scoring with
a known task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from everfed.core.handle import Client, Handle, Server
from everfed.core.layout import EXTRAS, AddsParameters, Extras, registered
from everfed.core.message import Values
from everfed.core.method import Method, compose
from everfed.core.part import Part, Personal
from everfed.core.phase import BEGIN, END, Cohort, Phase, Reducer, Sum, When
from everfed.core.tree import Tree, tensor_bytes
from everfed.methods.aggregate.fedavg import FedAvg
from tests.support.toy import Bench, Toy


def with_parts(*parts: Part, stream: Toy | None = None) -> Bench:
    def build() -> Method:
        return compose(FedAvg(), *parts, name="with parts")

    return Bench(build, stream=stream or Toy())


@dataclass(frozen=True)
class AtTaskEnds(Part):
    """Has a phase at every task's end but the last."""

    name: ClassVar[str] = "ends"

    def phases(self) -> tuple[Phase, ...]:
        return (Phase("work", cohort=Cohort.ALL, rounds=END, in_last_round=False, run=self._work),)

    def _work(self, client: Client) -> Values:
        return {}


def test_a_phase_that_skips_the_last_round_costs_nothing_there() -> None:
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

    def update(self, server: Server) -> None:
        server.model = {**server.model, "params": (server.before["params"] + server.model["params"]) / 2}


@dataclass(frozen=True)
class Shifted(Part):
    """Adds one to everything."""

    name: ClassVar[str] = "shifted"

    def update(self, server: Server) -> None:
        server.model = {**server.model, "params": server.model["params"] + 1.0}


def test_the_aggregate_is_changed_in_part_order() -> None:
    start, plain = Bench().model()["params"], Bench().run(rounds=1).params
    halved = with_parts(Halved(), Shifted()).run(rounds=1).params
    assert torch.allclose(halved, (start + plain) / 2 + 1.0)
    shifted = with_parts(Shifted(), Halved()).run(rounds=1).params
    assert torch.allclose(shifted, (start + plain + 1.0) / 2)


@dataclass(frozen=True)
class Restores(Part):
    """At a task's end puts the model back to where the task began."""

    name: ClassVar[str] = "restores"

    def phases(self) -> tuple[Phase, ...]:
        return (
            Phase("keep", Cohort.SERVER, BEGIN, When.BEFORE, update=self._keep),
            Phase("restore", Cohort.SERVER, END, update=self._restore),
        )

    def _keep(self, server: Server) -> None:
        server.state = {"kept": dict(server.model)}

    def _restore(self, server: Server) -> None:
        server.model = dict(server.state["kept"])
        server.state = {"restored": 1}


def test_a_phase_may_change_the_model_and_clients_receive_the_new_version() -> None:
    bench = with_parts(Restores())
    start, plain = bench.model()["params"], Bench().run(rounds=1)
    between, restored = bench.run(rounds=1), bench.run(rounds=2)
    assert torch.equal(between.params, plain.params)
    assert torch.equal(restored.params, start)
    assert restored.state.server["restores"] == {"restored": 1}  # state and model together
    assert (between.state.version, restored.state.version) == (1, 3)  # two aggregations and a restored model
    assert restored.state.traffic.down["fedavg"] == 2 * 3 * tensor_bytes(bench.model())
    assert not torch.equal(bench.run(rounds=3).params, start)


@dataclass(frozen=True)
class Offset(AddsParameters, Part):
    """Adds a trained number, shared by all clients, to all outputs."""

    name: ClassVar[str] = "offset"

    def parameters(self, server: Server) -> dict[str, Tensor]:
        return {"by.class": torch.zeros(server.facts.classes)}

    def forward(self, module: nn.Module, x: Tensor, state: Tree, message: Tree) -> Tensor:
        offset: Tensor = cast(Extras, module.extras)[self.name]["by.class"]
        return module(x) + offset + float(state.get("host", {}).get("bonus", 0.0))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class OwnOffset(Offset, Personal):
    """The same with a number of each client's own; scored with a bonus where the task is known."""

    def parameters(self, server: Server) -> dict[str, Tensor]:
        return {"by.class": torch.full((server.facts.classes,), 0.5)}

    def is_personal(self, parameter: str) -> bool:
        return parameter.startswith(EXTRAS)

    def state_for_task(self, state: Tree, task: int) -> Tree:
        return {**state, "host": {"bonus": float(task)}}


def test_shared_extra_parameters_are_trained_and_averaged() -> None:
    bench = with_parts(Offset())
    outcome = bench.run()
    entry = bench.layout().param(registered("offset", "by.class", personal=False))
    assert bench.layout().shared == bench.layout().size == len(outcome.params)
    assert entry.view(outcome.params).abs().max() > 0


def test_personal_ones_stay_on_their_clients() -> None:
    bench = with_parts(OwnOffset())
    outcome = bench.run()
    layout = bench.layout()
    assert (layout.shared, layout.size) == (len(outcome.params), len(outcome.params) + 4)
    kept = [outcome.clients[client]["client"]["personal"] for client in range(3)]
    assert all(len(values) == 4 and not torch.equal(values, torch.full((4,), 0.5)) for values in kept)
    assert not torch.equal(kept[0], kept[1])
    plain = Bench().run().state.traffic
    assert outcome.state.traffic.up["fedavg"] == plain.up["fedavg"]  # not one of them is sent


def test_a_bonus_for_all_classes_of_a_known_task_changes_no_answer() -> None:
    outcome = with_parts(OwnOffset()).run()
    for row in outcome.state.rows.values():
        for counts in row:
            assert counts is None or counts[1] == counts[2] == counts[3]


@dataclass(frozen=True)
class Replaces(Part):
    """Ends every local training at zero, and sends one number."""

    name: ClassVar[str] = "replaces"

    def reducers(self) -> Mapping[str, Reducer]:
        return {"one": Sum()}

    def reply(self, client: Client) -> Values:
        assert torch.equal(client.fitted.start["params"], client.received["params"])
        client.model = {**client.model, "params": torch.zeros_like(client.model["params"])}
        return {"one": 1.0}


def test_a_reply_may_replace_the_trained_model() -> None:
    outcome = with_parts(Replaces()).run(rounds=1)
    assert not outcome.params.any()
    assert outcome.state.traffic.up["fedavg"] == Bench().run(rounds=1).state.traffic.up["fedavg"]


@dataclass(frozen=True)
class Remembers(Part):
    """Writes its state in round 0, leaves it alone in round 1, empties it in round 2."""

    name: ClassVar[str] = "remembers"

    def _write(self, side: Handle) -> None:
        if side.round == 0:
            side.state["a"] = 1
        elif side.round == 2:
            side.state = {}

    def update(self, server: Server) -> None:
        self._write(server)

    def reply(self, client: Client) -> Values:
        self._write(client)
        return {}


def test_state_stays_until_it_is_written_and_an_empty_one_is_removed_on_both_sides() -> None:
    for rounds, expected in ((1, {"a": 1}), (2, {"a": 1}), (3, None)):
        outcome = with_parts(Remembers()).run(rounds=rounds)
        assert outcome.state.server.get("remembers") == expected
        assert outcome.clients[0].get("remembers") == expected
