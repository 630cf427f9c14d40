"""Streams without boundaries: no hook learns of a task, tasks may drift into each other and come back."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from everfed.api import check
from everfed.core import tree
from everfed.core.context import Context, Hidden, TrainOptions
from everfed.core.evaluate import EvalOptions
from everfed.core.handle import Handle
from everfed.core.method import Method, compose
from everfed.core.optimizer import Optimizer
from everfed.core.part import HOOKS, Part, overrides
from everfed.core.step import Step
from everfed.errors import CompositionError, RecipeError
from everfed.methods import registry as methods
from everfed.recipe import from_table
from everfed.streams.options import OptionError
from tests.parity.test_processes import on_processes
from tests.parity.test_resume import assert_resumes
from tests.support.presets import each_preset
from tests.support.small_stream import small_stream
from tests.support.toy import Bench, comparable, small_memory

Calls = dict[int, set[tuple[str, str, str]]]


def contexts(values: tuple[Any, ...]) -> Iterator[Context]:
    for value in values:
        if isinstance(value, Handle | Step):
            yield value.context


def knows_nothing(ctx: Context) -> None:
    """A hook with this context cannot tell one task from another."""
    assert ctx.current_task is None
    assert ctx.allowed_labels is None
    assert (ctx.facts.tasks, ctx.facts.rounds_per_task) == (1, ctx.facts.rounds)
    assert not (ctx.facts.boundaries or ctx.facts.task_ids)
    with pytest.raises(Hidden):
        _ = ctx.task
    if ctx.trainer is not None:
        for name in ("tasks", "labels", "round", "data", "test", "clocks"):
            with pytest.raises(Hidden):
                getattr(ctx.train.stream, name)


def watched(part: Part, calls: Calls) -> Part:
    """The part, with every hook that it defines under observation."""

    def wrapped(hook: str) -> Any:
        inner = getattr(type(part), hook)

        @functools.wraps(inner)
        def call(self: Part, *values: Any, **named: Any) -> Any:
            for ctx in contexts((*values, *named.values())):
                knows_nothing(ctx)
                calls[ctx.round].add((part.name, hook, ctx.phase))
            return inner(self, *values, **named)

        return call

    kind = type(type(part).__name__, (type(part),), {hook: wrapped(hook) for hook in HOOKS if overrides(part, hook)})
    object.__setattr__(part, "__class__", kind)
    return part


def observed(name: str, calls: Calls) -> Method:
    method = methods.build(name, small_memory(name))
    return compose(*(watched(part, calls) for part in method.parts), name=name)


@pytest.mark.parametrize("name", each_preset())
def test_no_hook_receives_a_task_or_a_call_at_its_end(name: str) -> None:
    stream = small_stream(boundaries=False, rounds_per_task=3, tasks=2)
    calls: Calls = defaultdict(set)
    # scored after every round: scoring at the end of a task is a look from outside, which changes no client's state
    bench = Bench(
        lambda: observed(name, calls),
        stream=stream,
        train=TrainOptions(1, 12, Optimizer(lr=0.05)),
        evaluation=EvalOptions(every=1),
    )
    try:
        methods.build(name).fit_stream(stream)
    except CompositionError as refusal:
        assert "must know when a task begins or ends" in str(refusal)
        return
    bench.run()
    within = set.union(*(calls[index] for index in (1, 3, 4)))
    assert calls[2] <= within, "something is called in the last round of a task only"
    assert calls[3] - calls[0] <= calls[1] - calls[0], "something is called in the first round of a task only"


def test_at_least_the_fedgp_family_runs_without_boundaries() -> None:
    stream = small_stream(boundaries=False)
    for name in ("fedavg", "fedprox", "fedcurv", "er", "der", "der++", "agem", "fedgp", "fedgp+der", "gss-greedy"):
        methods.build(name).fit_stream(stream)


def test_a_hidden_task_incremental_stream_hides_its_task_ids_too() -> None:
    stream = small_stream("task-incremental", boundaries=False)
    assert not stream.task_ids
    assert small_stream("task-incremental").task_ids


def test_the_learning_rate_does_not_reveal_them_either() -> None:
    train = TrainOptions(1, 12, Optimizer(lr=0.1, schedule="linear"))
    hidden = Bench("fedavg", stream=small_stream(boundaries=False), train=train)
    rates = [hidden.context(0, index).rate for index in range(12)]
    assert all(later < earlier for earlier, later in pairwise(rates))
    visible = Bench("fedavg", stream=small_stream(), train=train)
    assert visible.context(0, 4).rate == 0.1


def test_logits_by_task_would_reveal_them_and_are_refused() -> None:
    stream = {"dataset": "digits", "scenario": "class-incremental", "boundaries": False}
    recipe = {"stream": stream, "model": {"kind": "mlp"}, "train": {"logits": "seen"}, "method": {"name": "fedavg"}}
    with pytest.raises(RecipeError, match="train.logits must be 'full' on a stream that hides its tasks"):
        check(from_table(recipe))


def test_the_reservoir_counts_over_the_whole_life() -> None:
    outcome = Bench("er", stream=small_stream(boundaries=False)).run()
    for client, state in outcome.clients.items():
        held = sum(len(small_stream().data(client, task)) for task in range(3))
        assert state["memory"]["host"]["n"] == held


# gradual drift -------------------------------------------------------------------------------------------------------
def test_the_next_task_comes_in_gradually() -> None:
    stream = small_stream(boundaries=False, drift=3, clients=1)
    sizes = []
    for index in range(12):
        plan = stream.round(index)
        data = stream.data_in(0, index) if 0 in plan.drifting else stream.data(0, plan.tasks[0])
        task = index // 4
        sizes.append([int(np.isin(data.y.numpy(), stream.labels(t)).sum()) for t in (task, min(task + 1, 2))])
    # 32 samples a task; shares 1/4, 2/4, 3/4 of the next in the last three rounds
    assert sizes[:8] == [[32, 0], [24, 8], [16, 16], [8, 24]] * 2
    assert [size[0] for size in sizes[8:]] == [32] * 4


def test_a_drifting_client_sees_other_samples_every_round_and_the_same_ones_again() -> None:
    stream = small_stream(boundaries=False, drift=3)
    one, two = stream.data_in(1, 2), stream.data_in(1, 3)
    assert len(np.unique(one.ids)) == len(one)
    assert not np.array_equal(one.ids, two.ids)
    assert np.array_equal(one.ids, small_stream(boundaries=False, drift=3).data_in(1, 2).ids)


def test_drift_is_equal_on_engines_and_over_a_resume() -> None:
    stream = small_stream(boundaries=False, drift=2, asynchronous={"kind": "jitter", "jitter": 1})
    bench = Bench("fedgp+der", stream=stream, train=TrainOptions(1, 12, Optimizer(lr=0.05)))
    eager = bench.run()
    assert tree.equal(comparable(on_processes(bench).state), comparable(eager.state))
    assert_resumes(bench, 5, eager)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drift": 2}, "stream.drift: a task that ends gradually has no boundary; set boundaries = false"),
        ({"drift": 5, "boundaries": False}, "stream.drift: 5 rounds are more than a task has: 4"),
        ({"order": [0, 3]}, r"stream.order: expected a list of task numbers from 0 to 2, got \[0, 3\]"),
        ({"order": []}, "stream.order"),
        ({"without": {"9": [0]}}, "stream.without: client '9' is not one of 0 to 3"),
        ({"without": {"1": [5]}}, "stream.without.1: expected a list of tasks from 0 to 2"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        small_stream(**options)


# recurring tasks -----------------------------------------------------------------------------------------------------
def test_a_task_comes_back_with_its_own_samples_and_is_no_news_to_a_reservoir() -> None:
    stream = small_stream(order=[0, 1, 0, 2])
    assert (stream.tasks, stream.rounds) == (4, 16)
    assert [stream.labels(task) for task in range(4)] == [(0, 1), (2, 3), (0, 1), (4, 5)]
    assert np.array_equal(stream.data(1, 0).ids, stream.data(1, 2).ids)
    assert stream.test(2).y.unique().tolist() == [0, 1]
    outcome = Bench("er", stream=stream).run()
    assert sorted(outcome.state.rows) == [0, 1, 2, 3]
    assert outcome.clients[1]["memory"]["host"]["n"] == sum(len(stream.data(1, task)) for task in (0, 1, 3))
