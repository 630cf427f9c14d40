"""A local training in closed form: loss terms, gradient rules, moments between trainings, masked logits."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from everfed.core import tree
from everfed.core.client import run_client
from everfed.core.context import Place, TrainOptions
from everfed.core.method import Method, compose
from everfed.core.optimizer import Optimizer
from everfed.core.part import Part
from everfed.core.replica import Gradient
from everfed.core.step import Batch, Step
from everfed.core.stream import cross_entropy
from everfed.methods.aggregate.fedavg import FedAvg
from tests.support.rehearsal_free import one_parameter
from tests.support.toy import Bench, Linear, Norm, Toy

LR = 0.25


def quadratic(method: Method | None = None, optimizer: Optimizer | None = None, rounds: int = 1) -> Bench:
    """One weight v from 0, L(v) = (v - 4)^2 / 2 in the first task and (v + 8)^2 / 2 in the second."""
    stream = one_parameter({0: 4.0, 1: -8.0}, rounds)
    train = TrainOptions(1, 1, optimizer or Optimizer(lr=LR))
    return Bench((lambda: method) if method else "fedavg", stream=stream, train=train, module=Linear)


@dataclass(frozen=True)
class Term(Part):
    """Adds weight * (v + 1) to the loss."""

    weight: float = 2.0
    name: ClassVar[str] = "term"

    def loss(self, step: Step) -> Tensor | None:
        return self.weight * (step.replica.trainable[0].sum() + 1.0)


@dataclass(frozen=True)
class Twice(Part):
    name: ClassVar[str] = "twice"

    def gradient(self, step: Step, gradient: Gradient) -> Tensor:
        return 2.0 * gradient.vector


@dataclass(frozen=True)
class Plus(Part):
    name: ClassVar[str] = "plus"

    def gradient(self, step: Step, gradient: Gradient) -> Tensor:
        return gradient.vector + 1.0


def test_the_loss_is_the_sum_of_the_objective_and_all_terms() -> None:
    """dL/dv at 0 is -4 + 2 + 2, and the reported loss is 8 + 2 + 2."""

    @dataclass(frozen=True)
    class Another(Term):
        name: ClassVar[str] = "another"

    outcome = quadratic(compose(FedAvg(), Term(), Another())).run(rounds=1)
    assert outcome.params.tolist() == [0.0]
    assert outcome.events[0]["loss"] == pytest.approx(8.0 + 2.0 + 2.0)
    assert quadratic(compose(FedAvg(), Term(1.0))).run(rounds=1).params.tolist() == [-LR * (-4.0 + 1.0)]


def test_gradient_rules_work_on_each_others_results_in_the_order_of_the_parts() -> None:
    after = {
        "twice, plus": quadratic(compose(FedAvg(), Twice(), Plus())).run(rounds=1).params.item(),
        "plus, twice": quadratic(compose(FedAvg(), Plus(), Twice())).run(rounds=1).params.item(),
    }
    assert after == {"twice, plus": -LR * (2 * -4.0 + 1), "plus, twice": -LR * 2 * (-4.0 + 1)}


@pytest.mark.parametrize(
    ("state", "kept"), [("fresh", (False, False)), ("task", (True, False)), ("kept", (True, True))]
)
def test_momentum_lives_for_a_round_a_task_or_for_ever(state: str, kept: tuple[bool, bool]) -> None:
    """Three steps by hand, the third in the second task; momentum 0.5 goes on where `kept` says so."""
    targets, v, momentum = (4.0, 4.0, -8.0), 0.0, 0.0
    for target, goes_on in zip(targets, (False, *kept), strict=True):
        momentum = (0.5 * momentum if goes_on else 0.0) + (v - target)
        v -= LR * momentum
    case = quadratic(optimizer=Optimizer(lr=LR, momentum=0.5, state=state), rounds=2)
    assert case.run(rounds=3).params.tolist() == [v]


@pytest.mark.parametrize("optimizer", [Optimizer(lr=0.1, momentum=0.9, state="kept"), Optimizer("adam", state="kept")])
def test_a_training_changes_nothing_that_it_was_given(optimizer: Optimizer) -> None:
    """The same call twice gives the same, moments included, and leaves the state before it alone."""
    bench = Bench("der", stream=Toy(clients=1), train=TrainOptions(1, 5, optimizer))
    setup, first = bench.setup(), bench.run(rounds=1)
    state, message = first.clients[0], {"model": dict(first.state.model)}
    before = tree.clone(state)
    place, trainer = Place(1, bench.stream.round(1)), bench.trainer(setup)
    phase = setup.method.train_phase()
    ctx = setup.client(0, phase, place, trainer)
    ends = [run_client(setup.method, phase, state, message, bench.stream.data(0, 0), ctx) for _ in range(2)]
    assert tree.equal(state, before)
    assert tree.equal(ends[0][0], ends[1][0]) and tree.equal(ends[0][1].values, ends[1][1].values)
    assert not tree.equal(ends[0][0], before)


def test_a_label_outside_the_allowed_ones_competes_with_them() -> None:
    """Equal logits: -log(1/2) for a label of the two allowed classes, -log(1/3) for a replayed one beside them."""
    trainer = Bench().trainer()
    loss = trainer.masked_loss(torch.tensor([0.0, 0.0, -torch.inf, -torch.inf]))
    assert loss(torch.zeros(1, 4), torch.tensor([1])).item() == pytest.approx(math.log(2))
    assert loss(torch.zeros(1, 4), torch.tensor([3])).item() == pytest.approx(math.log(3))


@dataclass(frozen=True)
class Halves(Toy):
    """Two classes a task."""

    def labels(self, task: int) -> tuple[int, ...]:
        return (2 * task, 2 * task + 1)


@pytest.mark.parametrize(
    ("logits", "allowed"), [("full", [None, None]), ("seen", [(0, 1), (0, 1, 2, 3)]), ("task", [(0, 1), (2, 3)])]
)
def test_the_classes_that_compete_in_a_task(logits: str, allowed: list[tuple[int, ...] | None]) -> None:
    bench = Bench(stream=Halves(rounds_per_task=1), train=TrainOptions(logits=logits))
    assert [bench.context(round_index=task).allowed_labels for task in range(2)] == allowed


def test_classes_compete_that_the_client_itself_has_in_a_task() -> None:
    class Own(Toy):
        def labels_of(self, client: int, task: int) -> tuple[int, ...]:
            return (client, 3)

    bench = Bench(stream=Own(), train=TrainOptions(logits="task"))
    assert [bench.context(client).allowed_labels for client in range(3)] == [(0, 3), (1, 3), (2, 3)]


@dataclass(frozen=True)
class Brings(Part):
    """Brings two samples into every step."""

    joined: bool = True
    name: ClassVar[str] = "brings"

    def batches(self, step: Step) -> dict[str, Batch]:
        return {"two": Batch(step.x[:2], step.y[:2], joined=self.joined)}


@dataclass(frozen=True)
class Apart(Brings):
    joined: bool = False
    name: ClassVar[str] = "apart"


@dataclass(frozen=True)
class Looks(Part):
    """Notes what a step shows: the samples of all outputs and labels, the statistics received, what was handed on."""

    seen: list[tuple[int, int, Tensor, bool]] = field(default_factory=list, compare=False)
    name: ClassVar[str] = "looks"

    def loss(self, step: Step) -> Tensor | None:
        statistics = step.received_model["stats"].clone()
        self.seen.append((len(step.all_outputs), len(step.all_y), statistics, "mark" in step.handed))
        step.handed["mark"] = step.y
        return None


def test_separate_samples_are_no_part_of_the_objective() -> None:
    """With joined ones beside them, in one forward pass; five samples a minibatch."""
    looks = Looks()
    Bench(lambda: compose(FedAvg(), Brings(), Apart(), looks), train=TrainOptions(1, 6)).run(rounds=1)
    assert {counts[:2] for counts in looks.seen} == {(8, 8)}


def test_what_is_handed_on_ends_with_its_step() -> None:
    looks = Looks()
    Bench(lambda: compose(FedAvg(), looks), train=TrainOptions(1, 4)).run(rounds=1)
    assert [handed for *_, handed in looks.seen] == [False] * 9


def test_a_step_sees_the_statistics_that_stay_on_its_client() -> None:
    looks = Looks()
    options = TrainOptions(1, 12, batchnorm="local")
    bench = Bench(lambda: compose(FedAvg(), looks), stream=Toy(clients=1), module=Norm, train=options)
    kept = bench.run(rounds=1).clients[0]["client"]["stats"]
    looks.seen.clear()
    bench.run(rounds=2)
    assert torch.equal(looks.seen[1][2], kept) and not torch.equal(looks.seen[0][2], kept)


def test_a_rate_of_its_own_holds_in_every_step() -> None:
    """A training beside the client's own, at rate 0, where the run's rates move with the steps."""
    client = Bench(train=TrainOptions(1, 4, Optimizer(lr=0.1, by="step"))).client("fedavg")
    assert torch.equal(client.fit((), rate=0.0, tag="still").model["params"], client.model["params"])
    assert not torch.equal(client.fit((), tag="moves").model["params"], client.model["params"])


def test_targets_of_minus_100_count_for_nothing() -> None:
    outputs = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    assert torch.equal(cross_entropy(outputs, torch.tensor([0, -100])), cross_entropy(outputs[:1], torch.tensor([0])))


def test_dropout_in_a_gradient_depends_on_its_tag_alone() -> None:
    bench = Bench(module=Norm)
    ctx, data = bench.context(), bench.stream.data(0, 0)
    a, b, again = (ctx.train.gradient(ctx, bench.model(), data.x, data.y, tag=tag) for tag in ("a", "b", "a"))
    assert torch.equal(a, again) and not torch.equal(a, b)


def test_outputs_of_no_samples_have_the_shape_of_outputs() -> None:
    bench = Bench()
    outputs = bench.trainer().outputs(bench.model(), bench.stream.data(0, 0).x[:0])
    assert outputs.shape == (0, 4) and outputs.dtype == torch.float32
