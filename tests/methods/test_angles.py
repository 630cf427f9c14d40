"""Angles: a part that only measures. What it reports is written down by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from everfed.core.context import TrainOptions
from everfed.core.optimizer import Optimizer
from everfed.methods import registry as methods
from everfed.methods.project.fedomg import mean_cosine
from tests.support.toy import Bench, Given, Linear, Outcome, Toy, mean_square

ANGLES = "everfed.methods.project.angles:Angles"


def measured(*parts: Any, **fields: Any) -> Bench:
    last = {"part": ANGLES, **fields.pop("angles", {})}
    return Bench(lambda: methods.build(parts=[*parts, last]), **fields)


def reported(outcome: Outcome) -> list[dict[str, Any]]:
    return [event for event in outcome.events if event["event"] == "measure"]


def pulls(cosine: float) -> Given:
    """One client and two tasks with one sample each, towards directions with that cosine."""
    direction = torch.tensor([[cosine, (1 - cosine**2) ** 0.5]])
    table = {(0, 0): (torch.tensor([[1.0, 0.0]]), torch.tensor([1.0])), (0, 1): (direction, torch.tensor([1.0]))}
    return Given(clients=1, tasks=2, rounds_per_task=1, classes=1, table=table, objective=mean_square)


@pytest.mark.parametrize("cosine", [0.0, 0.6, -0.8])
@pytest.mark.parametrize("parts", [("fedavg",), ({"part": "fedomg", "kappa": 0.0}, {"part": "stamp", "kappa": 0.0})])
def test_the_angle_in_time_is_that_between_updates_from_the_current_model(cosine: float, parts: Any) -> None:
    """One step on one sample x moves along x. Measured from the round's start both updates would share the current
    one, and a cosine of 0 would come out near 1."""
    train = TrainOptions(1, 1, Optimizer(lr=0.1))
    events = reported(measured(*parts, stream=pulls(cosine), train=train, module=Linear).run())
    assert [event["round"] for event in events] == [1]  # the first task has nothing to compare with
    assert events[0]["temporal_cosine"] == pytest.approx(cosine, abs=1e-5)
    assert events[0]["temporal_cosine_with_self"] == pytest.approx((1 + cosine) / 2, abs=1e-5)


@pytest.mark.parametrize("parts", [("fedavg",), ("fedomg", "stamp"), ("fedweit",), ("fedavg", "af-fcl")])
def test_measuring_changes_nothing_and_reports_from_the_second_task_on(parts: tuple[str, ...]) -> None:
    options = {"af-fcl": {"hidden": 6}} if "af-fcl" in parts else {}
    train = TrainOptions(1, 5, Optimizer(lr=0.1))
    plain = Bench(lambda: methods.build(parts=list(parts), options=options), train=train)
    ours = Bench(lambda: methods.build(parts=[*parts, ANGLES], options=options), train=train).run()
    assert torch.equal(ours.params, plain.run().params)
    events = [event for event in reported(ours) if "spatial_cosine" in event]
    assert ["temporal_cosine" in event for event in events] == [False, False, True, True]


def test_the_angle_in_space_is_that_between_the_clients_updates() -> None:
    stream = Toy(clients=2, tasks=1, rounds_per_task=1)
    event = reported(measured("fedavg", stream=stream).run())[0]
    start, ends = Bench(stream=stream).model()["params"], []
    for client in range(2):
        alone = Bench(stream=Toy(clients=2, tasks=1, rounds_per_task=1, cohorts={0: (client,)}))
        ends.append(alone.run().params)
    assert event["spatial_cosine"] == pytest.approx(mean_cosine([end - start for end in ends]), abs=1e-5)


def test_it_may_measure_now_and_then_and_on_a_few_samples() -> None:
    outcome = measured("fedavg", angles={"every": 2, "samples": 3}).run()
    assert [event["round"] for event in reported(outcome)] == [1, 3]


@pytest.mark.parametrize("options", [{"every": 0}, {"samples": -1}])
def test_options_are_checked(options: dict[str, int]) -> None:
    with pytest.raises(methods.MethodError, match=next(iter(options))):
        methods.build(parts=["fedavg", {"part": ANGLES, **options}])
