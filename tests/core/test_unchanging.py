"""A part keeps nothing on itself: what changes after a method is composed is refused, and the message says where to."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from everfed.core.method import compose
from everfed.errors import CompositionError
from everfed.method import Part
from everfed.methods.aggregate.fedavg import FedAvg


class Own(Part):
    """As people write their first part: no dataclass, attributes of any kind."""

    name: ClassVar[str] = "own"

    def __init__(self, held: Any) -> None:
        self.held = held

    @cached_property
    def table(self) -> list[int]:
        return [1, 2, 3]


def changed_in_place(held: Any, change: Callable[[Any], object]) -> None:
    part = Own(held)
    method = compose(FedAvg(), part)
    method.check_unchanged()
    change(part.held)
    method.check_unchanged()


@pytest.mark.parametrize(
    ("held", "change"),
    [
        ([], lambda x: x.append(1)),
        ([1, 2], lambda x: x.reverse()),
        ({}, lambda x: x.update(a=1)),
        ({"a": [1]}, lambda x: x["a"].append(2)),
        ({"a": 1}, lambda x: x.update(a=2)),
        (set(), lambda x: x.add(1)),
        (deque([1]), lambda x: x.rotate(1) or x.append(2)),
        (Counter(), lambda x: x.update("a")),
        (np.zeros(3), lambda x: x.__setitem__(1, 5)),
        (np.random.default_rng(0), lambda x: x.random()),
        (random.Random(0), lambda x: x.random()),
        (torch.Generator(), lambda x: torch.rand(1, generator=x)),
        (torch.zeros(2), lambda x: x.add_(1)),
        (nn.Linear(2, 1), lambda x: nn.init.zeros_(x.weight)),
        (([1], 2), lambda x: x[0].append(1)),
        (Own([]), lambda x: x.held.append(1)),
    ],
    ids=lambda held: type(held).__name__,
)
def test_what_changes_in_place_is_noticed(held: Any, change: Callable[[Any], object]) -> None:
    with pytest.raises(
        CompositionError, match=r"attribute 'held' .* client\.state\['held'\] or server\.state\['held'\]"
    ):
        changed_in_place(held, change)


@pytest.mark.parametrize("held", [1, "a", (1, 2), [1], {"a": {"b": 1}}, np.zeros(2), torch.zeros(2), float("nan")])
def test_what_stays_as_it_is_is_not(held: Any) -> None:
    changed_in_place(held, lambda _: None)


def test_a_new_value_is_refused_where_it_is_assigned() -> None:
    part = Own(1)
    part.held += 1  # before: a part of one's own is made in steps
    compose(FedAvg(), part)
    with pytest.raises(CompositionError, match=r"part 'own' \(Own\) changed its attribute 'held'"):
        part.held += 1
    with pytest.raises(CompositionError, match="attribute 'more'"):
        part.more = 1  # type: ignore[attr-defined]


def test_what_is_computed_once_may_be_kept() -> None:
    part = Own(1)
    method = compose(FedAvg(), part)
    assert part.table == [1, 2, 3]
    method.check_unchanged()


def test_attributes_of_a_class_count_too() -> None:
    class Counting(Part):
        name = "counting"
        calls = 0

    method = compose(FedAvg(), Counting())
    Counting.calls += 1
    with pytest.raises(CompositionError, match="attribute 'calls'"):
        method.check_unchanged()


def test_a_field_that_is_left_out_of_comparisons_belongs_to_a_test() -> None:
    @dataclass(frozen=True)
    class Watching(Part):
        name: ClassVar[str] = "watching"
        seen: list[int] = field(default_factory=list, compare=False)

    part = Watching()
    method = compose(FedAvg(), part)
    part.seen.append(1)
    method.check_unchanged()
