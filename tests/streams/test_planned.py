"""The base that every stream shares stands alone; what divides a data set says what it leaves open."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from everfed.core.data import Data
from everfed.core.stream import Stream
from everfed.streams.incremental import IncrementalStream
from everfed.streams.options import OptionError, Options
from everfed.streams.planned import PlannedStream


class Constant(PlannedStream):
    """Every client sees its own number, plus the task's."""

    scenario, about = "constant", "the smallest stream there is"
    name, classes, input_shape = "constant", 2, (3,)

    def data(self, client: int, task: int) -> Data:
        ids = np.arange(10, dtype=np.int64) + 10 * task
        return Data(torch.full((10, 3), float(client + task)), torch.zeros(10, dtype=torch.int64), ids)

    def test(self, task: int, split: str = "test") -> Data:
        return self.data(0, task)

    def labels(self, task: int) -> tuple[int, ...]:
        return (0, 1)

    def describe(self) -> dict[str, Any]:
        return self.outline()


def constant(**options: Any) -> Constant:
    return Constant(Options(tasks=2, clients=3, **options), seed=0, rounds_per_task=4)


def test_a_stream_needs_nothing_but_its_samples() -> None:
    stream = constant(availability={"kind": "table", "rounds": {"2": [[0, 1]]}})
    assert isinstance(stream, Stream)
    assert (stream.rounds, stream.round(3).evaluate, stream.round(4).task) == (8, True, 1)
    assert (stream.round(0).participants, stream.round(1).participants) == ((0, 1, 2), (0, 1))
    assert (stream.clock_of(0, 5), stream.describe()["clients_per_round"]) == ((1, 4), 3)
    assert stream.inputs(stream.data(1, 0).x).eq(1.0).all()


def test_drift_mixes_what_the_stream_gives() -> None:
    """With 3 rounds of drift, shares 1/4, 1/2, 3/4 of the next task."""
    stream = constant(boundaries=False, drift=3)
    assert [int((stream.data_in(0, i).x[:, 0] == 1.0).sum()) for i in (1, 2, 3)] == [2, 5, 8]
    assert not stream.round(0).drifting


@pytest.mark.parametrize("wrong", [{"seed": -1}, {"rounds_per_task": 0}, {"scale": 1.5}])
def test_what_cannot_be_planned_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))):
        Constant(Options(), **{"seed": 0, "rounds_per_task": 1, **wrong})


def test_a_scenario_of_a_data_set_says_its_facts_and_changes_what_it_wants() -> None:
    assert {"facts"} == IncrementalStream.__abstractmethods__
    assert {"data", "test", "labels", "describe"} == PlannedStream.__abstractmethods__
