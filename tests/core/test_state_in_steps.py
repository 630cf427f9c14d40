"""What a training step writes into a part's state is kept, or refused with what to do instead; nothing is lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from everfed.core.engine import ClientError
from everfed.core.handle import Client
from everfed.core.method import compose
from everfed.core.part import Part
from everfed.core.step import Step
from everfed.core.tree import Tree
from everfed.errors import CompositionError
from everfed.methods.aggregate.fedavg import FedAvg
from tests.support.toy import Bench


@dataclass(frozen=True)
class Counts(Part):
    """Counts its steps as its author says: in which hook, how, and with a first value or without one."""

    how: str = "in place"
    where: str = "after"
    first: bool = True

    name: ClassVar[str] = "counts"

    def receive(self, client: Client) -> None:
        if self.first:
            client.state.setdefault("n", torch.zeros(1))

    def _count(self, where: str, state: Tree) -> None:
        if where != self.where:
            return
        if self.how == "in place":
            state["n"] += 1
        elif self.how == "pop":
            del state["n"]
        elif self.how == "scratch":
            state["scratch"] = torch.ones(1)
            state["n"].add_(state.pop("scratch"))
        else:
            state["n"] = state.get("n", torch.zeros(1)) + 1

    def loss(self, step: Step) -> Tensor | None:
        self._count("loss", step.state)
        return None

    def after(self, step: Step) -> None:
        self._count("after", step.state)


@dataclass(frozen=True)
class NoAfter(Part):
    """Writes in place without `after`, so that no copy was made for it."""

    name: ClassVar[str] = "no_after"

    def receive(self, client: Client) -> None:
        client.state.setdefault("n", torch.zeros(1))

    def loss(self, step: Step) -> Tensor | None:
        step.state["n"].add_(1)
        return None


@dataclass(frozen=True)
class NotNamed(Counts):
    """Writes what its `changes` does not name."""

    name: ClassVar[str] = "not_named"
    changes: ClassVar[frozenset[str]] = frozenset({"other"})


def refused(part: Part) -> str:
    with pytest.raises(ClientError) as caught:
        Bench(lambda: compose(FedAvg(), part)).run()
    assert isinstance(caught.value.cause, CompositionError)
    return str(caught.value.cause)


@pytest.mark.parametrize("how", ["in place", "scratch"])
@pytest.mark.parametrize("where", ["loss", "after"])
def test_a_count_in_place_is_kept_over_rounds(how: str, where: str) -> None:
    outcome = Bench(lambda: compose(FedAvg(), Counts(how, where))).run()
    trained = outcome.clients[0]["counts"]["n"].item()
    assert trained > 1


@pytest.mark.parametrize("where", ["loss", "after"])
def test_a_new_key_in_a_step_says_where_its_first_value_goes(where: str) -> None:
    said = refused(Counts("new", where, first=False))
    assert said.startswith("part 'counts' (Counts) wrote the new key 'n' of its state in a training step")
    assert "client.state['n'] = ..." in said and "`start` or `plan`" in said and "`init`" in said


@pytest.mark.parametrize(("how", "word"), [("new", "replaced"), ("pop", "removed")])
def test_a_value_that_is_replaced_or_removed_in_a_step(how: str, word: str) -> None:
    assert refused(Counts(how)).startswith(f"part 'counts' (Counts) {word} 'n' of its state in a training step")


def test_a_part_without_after_may_not_write_in_place() -> None:
    assert "(NoAfter) changed 'n' of its state in a training step, but it defines no `after`" in refused(NoAfter())


def test_what_changes_does_not_name_may_not_be_written() -> None:
    assert "(NotNamed) changed 'n' of its state in a training step, but `changes` does not name" in refused(NotNamed())
