"""Steps of a part's own around the training step: what each one moves, in which order, with which optimiser."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from everfed.core.context import TrainOptions
from everfed.core.handle import Server
from everfed.core.layout import AddsParameters, Layout
from everfed.core.method import Method, compose
from everfed.core.optimizer import Optimizer
from everfed.core.option import ParameterGroup
from everfed.core.part import Part
from everfed.core.step import Step, Substep, Substeps
from everfed.methods.aggregate.fedavg import FedAvg
from tests.parity.test_wire import assert_same
from tests.support.rehearsal_free import one_parameter
from tests.support.toy import Bench, Linear, Toy
from tests.support.wire import run_over_wire


@dataclass(frozen=True)
class Follower(AddsParameters, Part):
    """A number of its own that runs after the model's parameter v: its loss is 0.5 (u - v)^2."""

    after_it: bool = True
    alone: bool = True
    optimizer: Optimizer | None = None

    name: ClassVar[str] = "follower"

    def parameters(self, server: Server) -> dict[str, Tensor]:
        return {"u": torch.zeros(1)}

    def substeps(self, layout: Layout) -> tuple[Substep, ...]:
        def owns(name: str) -> bool:
            return name.endswith("/u")

        return (Substep("follow", owns, self._follow, self.optimizer, self.alone, self.after_it),)

    def _follow(self, step: Step) -> Tensor:
        v, u = step.replica.trainable
        return 0.5 * (u - v.detach()).square().sum()


def chased(part: Follower, optimizer: Optimizer, epochs: int = 1) -> list[float]:
    """v and u after training on 0.5 (v - 1)^2 from 0."""

    def build() -> Method:
        return compose(FedAvg(), part, name="chase")

    bench = Bench(build, stream=one_parameter({0: 1.0}), module=Linear, train=TrainOptions(epochs, 1, optimizer))
    found: list[float] = bench.run(rounds=1).params.tolist()
    return found


def test_a_substep_after_sees_the_parameters_that_the_step_left() -> None:
    # v: 0 -> 0.5; then u: 0 -> 0.5 * 0.5
    assert chased(Follower(), Optimizer(lr=0.5)) == [0.5, 0.25]
    # before: u is moved while v is still 0
    assert chased(Follower(after_it=False), Optimizer(lr=0.5)) == [0.5, 0.0]


def test_two_steps_in_order() -> None:
    # v: 0.5, 0.75; u: 0.25, 0.25 + 0.5 * (0.75 - 0.25)
    assert chased(Follower(), Optimizer(lr=0.5), epochs=2) == [0.75, 0.5]


def test_a_substep_has_its_own_optimiser_and_rate() -> None:
    assert chased(Follower(optimizer=Optimizer(lr=0.1)), Optimizer(lr=0.5)) == pytest.approx([0.5, 0.05])
    # Adam's first step is its rate
    assert chased(Follower(optimizer=Optimizer("adam", lr=0.1)), Optimizer(lr=0.5)) == pytest.approx([0.5, 0.1])


def test_a_substep_by_the_runs_optimiser_has_its_groups() -> None:
    # u's rate is 0.25 in place of 0.5: v 0 -> 0.5, then u 0 -> 0.25 * 0.5
    groups = (ParameterGroup(("*/u",), lr=0.25),)
    assert chased(Follower(), Optimizer(lr=0.5, groups=groups)) == [0.5, 0.125]


def test_what_a_substep_moves_alone_the_training_step_leaves_bit_for_bit() -> None:
    decay = Optimizer(lr=0.5, weight_decay=0.5)
    still = Follower(after_it=False, optimizer=Optimizer(lr=0.0))
    start = torch.tensor([0.0, 0.75])
    for part, ends in ((still, 0.75), (Follower(after_it=False, alone=False, optimizer=Optimizer(lr=0.0)), 0.5625)):
        bench = Bench(lambda part=part: compose(FedAvg(), part), stream=one_parameter({0: 1.0}), module=Linear)
        ctx = bench.context()
        model = {**bench.model(), "params": start}
        fitted = ctx.train.fit(
            ctx, (part,), model, start, {}, {}, bench.stream.data(0, 0), epochs=1, optimizer=decay, rate=0.5
        )
        assert fitted.model["params"][1].item() == ends


def test_moments_are_kept_with_those_of_the_run() -> None:
    optimizer = Optimizer("adam", lr=0.1, state="kept")
    bench = Bench(
        lambda: compose(FedAvg(), Follower()), stream=one_parameter({0: 1.0, 1: 1.0}), module=Linear,
        train=TrainOptions(1, 1, optimizer),
    )  # fmt: skip
    moments = bench.run().clients[0]["client"]["moments"]
    assert set(moments) == {"m", "v", "t", "follower/follow/m", "follower/follow/v", "follower/follow/t"}
    assert moments["m"].shape == moments["follower/follow/m"].shape == (1,)
    assert moments["follower/follow/t"].item() == 2.0


def test_moments_of_a_task_end_with_it() -> None:
    steps = {}
    for state in ("kept", "task"):
        bench = Bench(stream=Toy(rounds_per_task=3), train=TrainOptions(1, 12, Optimizer("adam", lr=0.1, state=state)))
        outcomes = bench.after(1, 3, 4, 6)
        steps[state] = [outcome.clients[0]["client"]["moments"]["t"].item() for outcome in outcomes]
    assert steps == {"kept": [1, 3, 4, 6], "task": [1, 3, 1, 3]}


def test_substeps_cross_the_wire() -> None:
    train = TrainOptions(2, 5, Optimizer("adam", lr=0.05, state="task"))
    bench = Bench(lambda: compose(FedAvg(), Trailing()), train=train)
    assert_same(bench.run(), run_over_wire(bench))


@dataclass(frozen=True)
class Trailing(Part):
    """Draws the network's last bias to its outputs' mean."""

    name: ClassVar[str] = "trailing"

    def substeps(self, layout: Layout) -> tuple[Substep, ...]:
        return (Substep("trail", lambda name: name == "head.bias", self._trail),)

    def _trail(self, step: Step) -> Tensor:
        return step.forward(step.x).mean().square()


def test_parameters_of_a_substep_must_exist_and_lie_together() -> None:
    layout = Layout.of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))

    @dataclass(frozen=True)
    class Some(Part):
        names: tuple[str, ...] = ()
        name: ClassVar[str] = "some"

        def substeps(self, layout: Layout) -> tuple[Substep, ...]:
            return (Substep("move", lambda name: name in self.names, lambda step: step.outputs.sum(), alone=True),)

    assert Substeps.of([Some(("0.weight", "0.bias"))], layout).main == slice(6, 12)
    assert Substeps.of([], layout) == Substeps(slice(0, 12))
    with pytest.raises(ValueError, match="substep 'move' of part 'some' moves no parameter"):
        Substeps.of([Some(("2.weight",))], layout)
    with pytest.raises(ValueError, match="do not lie together"):
        Substeps.of([Some(("0.weight", "1.weight"))], layout)
