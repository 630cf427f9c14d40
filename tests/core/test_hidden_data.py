"""A client has the data of its current task and no other: neither its own of earlier tasks, nor another client's, nor
the tests. A part that asks for them is refused with an error that says what it may declare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from everfed.core.context import Context, Hidden, Place
from everfed.core.data import Data
from everfed.core.engine import ClientError
from everfed.core.handle import Client, Server
from everfed.core.message import Model
from everfed.core.method import compose
from everfed.core.part import HELD_OUT, Part, Personal
from everfed.core.phase import Cohort, Phase
from everfed.core.step import Step
from everfed.core.stream import _VISIBLE, HeldOut, RoundPlan
from everfed.methods.aggregate.fedavg import FedAvg
from everfed.streams import build
from tests.support.toy import Bench, Toy

STEALS: dict[str, Callable[[Context], Any]] = {
    "its own past": lambda ctx: ctx.train.stream.data(ctx.client, 0),
    "another client's data": lambda ctx: ctx.train.stream.data(1, ctx.task),
    "the tests": lambda ctx: ctx.train.stream.test(0),
    "the plan of a round": lambda ctx: ctx.train.stream.round(0),
    "scoring's own tests": lambda ctx: ctx.held_out.get(None, 0, "test", ctx.train.device),
    "the past without a word": lambda ctx: ctx.history(),
}


@dataclass(frozen=True)
class Thief(Part):
    """Tries to read what it should not, in one of its hooks and in the second task."""

    what: str = ""
    where: str = "receive"

    name: ClassVar[str] = "thief"

    def _steal(self, where: str, ctx: Context) -> None:
        if where == self.where and ctx.current_task == 1:
            STEALS[self.what](ctx)

    def receive(self, client: Client) -> None:
        self._steal("receive", client.context)

    def start(self, client: Client) -> None:
        self._steal("start", client.context)

    def loss(self, step: Step) -> torch.Tensor | None:
        self._steal("loss", step.context)
        return None


@pytest.mark.parametrize("where", ["receive", "start", "loss"])
@pytest.mark.parametrize("what", sorted(STEALS))
def test_a_part_that_reads_what_is_not_its_own_is_refused(what: str, where: str) -> None:
    with pytest.raises(ClientError, match=r"client 0 failed .* needs (HISTORY|HELD_OUT)") as caught:
        Bench(lambda: compose(FedAvg(), Thief(what, where))).run()
    assert isinstance(caught.value.cause, Hidden)


def test_hooks_that_run_while_models_are_scored_do_not_see_the_tests_either() -> None:
    @dataclass(frozen=True)
    class Cheat(Personal):
        name: ClassVar[str] = "cheat"

        def personalise(self, client: Client) -> Model:
            tests = client.held_out.get(None, 0, "test", client.device)
            return {**client.model, "params": client.model["params"] * len(tests)}

    with pytest.raises(ClientError, match="test sets are for scoring"):
        Bench(lambda: compose(FedAvg(), Cheat())).run()


def test_a_part_that_declares_it_measures_on_the_tests() -> None:
    @dataclass(frozen=True)
    class Looks(Part):
        name: ClassVar[str] = "looks"

        def needs(self) -> set[str]:
            return {HELD_OUT}

        def receive(self, client: Client) -> None:
            client.state["seen"] = len(client.held_out.get(client.id, 1, "test", client.device))

    run = Bench(lambda: compose(FedAvg(), Looks())).run()
    assert run.clients[0]["looks"] == {"seen": len(Toy().test(1))}


def test_on_the_server_too() -> None:
    @dataclass(frozen=True)
    class Watches(Part):
        name: ClassVar[str] = "watches"
        declares: bool = True

        def needs(self) -> set[str]:
            return {HELD_OUT} if self.declares else set()

        def phases(self) -> tuple[Phase, ...]:
            return (Phase("watch", Cohort.SERVER, update=self._watch),)

        def _watch(self, server: Server) -> None:
            tests = server.held_out.get(None, 0, "test", server.device)
            right = server.trainer.outputs(server.model, tests.x).argmax(1) == tests.y
            server.report("accuracy", float(right.float().mean()))

    run = Bench(lambda: compose(FedAvg(), Watches())).run()
    assert [event["accuracy"] for event in run.events if event.get("part") == "watches"][-1] > 0.3
    with pytest.raises(Hidden, match="needs HELD_OUT"):
        Bench(lambda: compose(FedAvg(), Watches(declares=False))).run()


def test_what_training_needs_of_a_stream_is_visible() -> None:
    """On a stream with data of its own, whose rows and sources are hidden."""
    options = {"dataset": "digits", "scenario": "class-incremental", "tasks": 5, "clients": 3}
    stream = build(options, 0, 2, None, 0.1)
    view = Bench(stream=stream).context().train.stream  # type: ignore[arg-type]
    assert (view.classes, view.input_shape, view.labels(1)) == (10, stream.input_shape, stream.labels(1))
    x = stream.test(0).x
    assert torch.equal(view.inputs(x), stream.inputs(x))
    assert view.takes_part(0, 0) and not view.takes_part(3, 0)
    for name in sorted(n for n in dir(stream) if not n.startswith("_") and n not in _VISIBLE):
        with pytest.raises(Hidden, match=name):
            getattr(view, name)
    with pytest.raises(AttributeError, match="no 'nonsense'"):
        _ = view.nonsense


@pytest.mark.parametrize("name", ["tasks", "labels", "labels_of"])
def test_what_the_tasks_are_is_hidden_with_them(name: str) -> None:
    """The classes of a task, a client's own included, tell which tasks there are."""
    hidden = Bench(stream=Toy(boundaries=False, task_ids=False)).context().train.stream
    with pytest.raises(Hidden, match=f"may not use '{name}'"):
        getattr(hidden, name)
    for known in (Toy(boundaries=False), Toy(task_ids=False)):
        getattr(Bench(stream=known).context().train.stream, name)


def test_a_stream_may_show_more_of_itself() -> None:
    class Boxes(Toy):
        visible = frozenset({"anchors"})
        anchors = (1, 2, 3)

    view = Bench(stream=Boxes()).context().train.stream
    assert view.anchors == (1, 2, 3)
    with pytest.raises(Hidden):
        _ = view.data


def test_test_sets_are_copied_to_a_device_once_and_within_a_budget() -> None:
    """The device of tensors without storage stands for a GPU."""
    device, stream = torch.device("meta"), Toy()
    size = sum(t.nbytes for t in (stream.test(0).x, stream.test(0).y))
    held_out = HeldOut(stream, budget=size)
    first = held_out.get(None, 0, "test", device)
    assert first.x.device == device and held_out.get(2, 0, "test", device) is first
    assert held_out.get(None, 1, "test", device).x.device == torch.device("cpu")  # no room: as the stream has it
    assert held_out.bytes == size
    assert held_out.get(None, 0, "test", device) is first  # and the first stays
    assert held_out.get(None, 0, "test", torch.device("cpu")).x.device == torch.device("cpu")


@dataclass(frozen=True)
class Drifts(Toy):
    """Client 1 drifts: what it sees is a stream's own affair, round by round."""

    def round(self, index: int) -> RoundPlan:
        return replace(super().round(index), drifting=frozenset({1}))

    def data_in(self, client: int, index: int) -> Data:
        return self.data(client, 0).take(np.array([index]))


def test_a_client_that_drifts_sees_what_the_stream_says_of_the_round() -> None:
    setup = Bench(stream=Drifts()).setup()
    phase = setup.method.train_phase()
    seen = [[setup.data(k, phase, Place(i, setup.stream.round(i))).ids.tolist() for i in range(3)] for k in (0, 1)]
    assert seen == [[list(range(12)), list(range(12)), list(range(10_000, 10_012))], [[0], [1], [2]]]
