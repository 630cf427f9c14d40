"""Every preset gives the same bits when messages, replies and states are bytes and every call gets a fresh method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from everfed.core import tree
from everfed.core.context import TrainOptions
from everfed.core.evaluate import EvalOptions
from everfed.core.handle import Client, Server
from everfed.core.message import Values
from everfed.core.method import Method, compose
from everfed.core.optimizer import Optimizer
from everfed.core.part import Part
from everfed.core.replica import Gradient
from everfed.core.step import Step
from everfed.core.tree import TreeError
from everfed.errors import ClientError, CompositionError
from everfed.methods.aggregate.fedavg import FedAvg
from tests.support.presets import each_kind
from tests.support.toy import Bench, Norm, Outcome, Toy, comparable
from tests.support.wire import crossed, run_over_wire


def assert_same(a: Outcome, b: Outcome) -> None:
    """The same bits everywhere: server, clients, bytes and scores."""
    assert tree.equal(comparable(a.state), comparable(b.state))
    assert a.clients.keys() == b.clients.keys()
    assert all(tree.equal(a.clients[client], b.clients[client]) for client in a.clients)


@pytest.mark.parametrize("name", each_kind())
def test_every_preset_equals_eager_bit_for_bit(name: str) -> None:
    bench = Bench(name, train=TrainOptions(1, 5, Optimizer(lr=0.1)))
    assert_same(bench.run(), run_over_wire(bench))


@pytest.mark.parametrize("name", each_kind())
def test_with_batchnorm_dropout_augmentation_and_partial_participation(name: str) -> None:
    stream = Toy(clients=2, augmented=True, cohorts={0: (0, 1), 1: (1,), 2: (0,), 3: (0, 1)})
    bench = Bench(name, stream=stream, module=Norm, seed=3)
    assert_same(bench.run(), run_over_wire(bench))


@pytest.mark.parametrize(
    "train",
    [
        TrainOptions(1, 5, Optimizer(lr=0.05, momentum=0.9, state="kept")),
        TrainOptions(1, 5, Optimizer("adam", lr=0.01, state="kept", schedule="linear")),
        TrainOptions(1, 5, Optimizer(lr=0.05), sync_every=2),
        TrainOptions(1, 5, Optimizer(lr=0.05), batchnorm="local", drop_last=True),
    ],
    ids=["momentum kept", "adam kept", "equalised", "local statistics"],
)
def test_every_way_of_keeping_things_on_the_client(train: TrainOptions) -> None:
    bench = Bench("fedgp+der", stream=Toy(clients=2), module=Norm, train=train, evaluation=EvalOptions(every=2))
    assert_same(bench.run(), run_over_wire(bench))


def test_a_wire_run_is_not_vacuous() -> None:
    outcome = run_over_wire(Bench("fedgp+der"))
    assert not torch.equal(outcome.params, Bench().model()["params"])
    assert set(outcome.state.rows) == {0, 1}
    assert torch.equal(crossed({"x": outcome.params})["x"], outcome.params)


# parts that keep state on themselves ---------------------------------------------------------------------------------
@dataclass(frozen=True)
class KeepsOnInstance(Part):
    """Damps each step by how many came before, counted on the part itself."""

    steps: list[int] = field(default_factory=list)
    name: ClassVar[str] = "keeps"

    def gradient(self, step: Step, gradient: Gradient) -> Tensor:
        self.steps.append(1)
        return gradient.vector / len(self.steps)


@dataclass(frozen=True)
class KeepsOnClass(Part):
    """The same on its class, where a fresh instance finds it again."""

    steps: ClassVar[list[int]] = []
    name: ClassVar[str] = "keeps"

    def gradient(self, step: Step, gradient: Gradient) -> Tensor:
        self.steps.append(1)
        return gradient.vector / len(self.steps)


@dataclass(frozen=True)
class KeepsOnServer(Part):
    """Broadcasts how often it was asked."""

    asked: list[int] = field(default_factory=list)
    name: ClassVar[str] = "keeps"

    def broadcast(self, server: Server) -> Values:
        self.asked.append(1)
        return {"count": torch.tensor(float(len(self.asked)))}

    def gradient(self, step: Step, gradient: Gradient) -> Tensor:
        count: Tensor = step.message["count"]
        return gradient.vector / count


@dataclass(frozen=True)
class KeepsInState(Part):
    """The right way: the count lives in the client's state."""

    name: ClassVar[str] = "keeps"

    def init(self, side: Client | Server) -> None:
        if isinstance(side, Client):
            side.state["steps"] = torch.zeros(())

    def gradient(self, step: Step, gradient: Gradient) -> Tensor:
        steps: Tensor = step.state["steps"]
        return gradient.vector / (steps + 1)

    def after(self, step: Step) -> None:
        step.state["steps"] += 1


@dataclass(frozen=True)
class SharesAnObject(Part):
    """Puts something into its state that no wire can carry."""

    name: ClassVar[str] = "shares"

    def reply(self, client: Client) -> Values:
        client.state["data"] = client.data
        return {}


def with_part(part: Callable[[], Part]) -> Bench:
    def build() -> Method:
        return compose(FedAvg(), part(), name="with a part")

    return Bench(build)


@pytest.mark.parametrize("part", [KeepsOnInstance, KeepsOnClass, KeepsOnServer])
def test_a_part_that_keeps_state_on_itself_is_caught(part: Callable[[], Part]) -> None:
    KeepsOnClass.steps.clear()
    with pytest.raises((ClientError, CompositionError), match=r"changed its attribute '(steps|asked)' .*state\['"):
        with_part(part).run()


def test_the_same_state_in_the_clients_is_fine() -> None:
    bench = with_part(KeepsInState)
    outcome = bench.run()
    assert_same(outcome, run_over_wire(bench))
    assert outcome.clients[0]["keeps"]["steps"] == 4 * 2 * 3  # rounds x epochs x minibatches of 12 samples by 5


def test_a_part_that_shares_objects_is_refused() -> None:
    with_part(SharesAnObject).run()
    with pytest.raises(TreeError, match="not Data"):
        run_over_wire(with_part(SharesAnObject))
