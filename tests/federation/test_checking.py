"""Replies that must not be taken in are refused, each with its own reason; honest ones never are."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everfed.core.client import Reply
from everfed.core.context import Place, TrainOptions
from everfed.core.message import Model
from everfed.core.optimizer import Optimizer
from everfed.core.phase import EVALUATE, TRAIN, Phase
from everfed.core.server import Runner
from everfed.core.tree import TreeError, from_bytes, to_bytes
from everfed.federation.checking import Expected, Limits, Reason, Spec, check_reply, expected_reply, uploaded_tensors
from everfed.federation.cross_checks import find_other_forms, find_outliers
from everfed.federation.engine import OUTLIER, _sent_model
from everfed.methods import registry as methods
from tests.support.toy import Bench, Norm
from tests.support.wire import Wire

EXPECTED = Expected(
    {"fedavg": frozenset({"params", "stats"}), "gap": frozenset({"correct"}), "pool": frozenset({"all"})},
    {"fedavg/params": Spec(torch.float32, (4,))},
    frozenset({"fedavg/params", "fedavg/stats", "gap/correct"}),
    Limits(bytes=1000, magnitude=1e4, samples=100, steps=50),
)
HONEST = Reply({"fedavg": {"params": torch.ones(4)}, "gap": {"correct": 3}}, 10, 5, 2.5)


def reason(reply: Any) -> Reason | None:
    refusal = check_reply(reply, EXPECTED)
    return refusal.reason if refusal else None


def with_values(values: Any) -> Reply:
    return replace(HONEST, values=values)


def params(value: Any) -> Reply:
    return with_values({"fedavg": {"params": value}})


def test_an_honest_reply_is_taken() -> None:
    assert reason(HONEST) is None
    assert reason(Reply({})) is None  # a client may have nothing to say
    assert reason(params(None)) is None
    assert reason(with_values({"pool": {"all": {"0": torch.ones(2), "name": "x"}}})) is None
    assert reason(replace(HONEST, loss=torch.tensor(1.0))) is None


@pytest.mark.parametrize(
    ("expected", "reply"),
    [
        (Reason.MALFORMED, None),
        (Reason.MALFORMED, with_values([1])),
        (Reason.MALFORMED, with_values({"fedavg": 1})),
        (Reason.MALFORMED, with_values({"fedgp": {"gradient": torch.ones(1)}})),
        (Reason.MALFORMED, with_values({"fedavg": {"secret": torch.ones(1)}})),
        (Reason.MALFORMED, params(1.0)),
        (Reason.MALFORMED, with_values({"gap": {"correct": {"deep": 1}}})),
        (Reason.MALFORMED, with_values({"gap": {"correct": "3"}})),
        (Reason.MALFORMED, replace(HONEST, samples=-1)),
        (Reason.MALFORMED, replace(HONEST, samples=1.5)),  # type: ignore[arg-type]
        (Reason.MALFORMED, replace(HONEST, steps=True)),
        (Reason.MALFORMED, replace(HONEST, loss="low")),  # type: ignore[arg-type]
        (Reason.MALFORMED, replace(HONEST, loss=torch.ones(2))),
        (Reason.WRONG_SHAPE, params(torch.ones(5))),
        (Reason.WRONG_SHAPE, params(torch.ones(4, 1))),
        (Reason.WRONG_SHAPE, params(torch.ones(0))),
        (Reason.WRONG_DTYPE, params(torch.ones(4, dtype=torch.float64))),
        (Reason.WRONG_DTYPE, params(torch.ones(4, dtype=torch.int32))),
        (Reason.WRONG_DTYPE, with_values({"fedavg": {"stats": torch.ones(1, dtype=torch.complex64)}})),
        (Reason.NOT_FINITE, params(torch.tensor([0.0, math.nan, 0.0, 0.0]))),
        (Reason.NOT_FINITE, params(torch.tensor([0.0, 0.0, -math.inf, 0.0]))),
        (Reason.NOT_FINITE, with_values({"gap": {"correct": math.inf}})),
        (Reason.NOT_FINITE, with_values({"pool": {"all": {"deep": {"x": torch.tensor(math.nan)}}}})),
        (Reason.NOT_FINITE, replace(HONEST, loss=math.nan)),
        (Reason.TOO_LARGE, params(torch.full((4,), 2e4))),
        (Reason.TOO_LARGE, params(torch.full((4,), -2e4))),
        (Reason.NOT_FINITE, with_values({"gap": {"correct": 10**400}})),
        (Reason.TOO_LARGE, replace(HONEST, samples=101)),
        (Reason.TOO_LARGE, replace(HONEST, samples=10**5000)),
        (Reason.TOO_LARGE, replace(HONEST, steps=51)),
        (Reason.TOO_LARGE, with_values({"pool": {"all": torch.zeros(251)}})),
    ],
)
def test_everything_else_is_refused_by_name(expected: Reason, reply: Any) -> None:
    assert reason(reply) is expected


def test_a_refusal_is_a_short_sentence() -> None:
    refusal = check_reply(params(torch.ones(5)), EXPECTED)
    assert str(refusal) == "wrong shape: fedavg/params is (5,), not (4,)"
    long = check_reply(with_values({"x" * 10_000: {}}), EXPECTED)
    assert len(str(long)) < 200


@pytest.mark.parametrize("odd", [torch.ones(2), torch.ones(3, 1), torch.ones(3, dtype=torch.float64), 5, True])
@pytest.mark.parametrize("liar", [0, 1, 2])
def test_what_is_added_up_has_the_form_that_most_clients_send(liar: int, odd: Any) -> None:
    """Whoever lies: the first client does not choose the form of all others."""
    replies = {client: with_values({"fedavg": {"stats": torch.ones(3)}}) for client in range(3)}
    replies[liar] = with_values({"fedavg": {"stats": odd}})
    assert all(check_reply(reply, EXPECTED) is None for reply in replies.values())
    [(client, refusal)] = find_other_forms(EXPECTED, replies).items()
    assert client == liar and refusal.reason is Reason.WRONG_SHAPE
    assert str(refusal).endswith(f"of client {liar} and torch.float32 (3,) of most")


SPARSE = {"size": 9, "0": torch.ones(2), "indices": torch.tensor([1, 2])}


@pytest.mark.parametrize("liar", [0, 1, 2])
@pytest.mark.parametrize(
    "odd",
    [
        torch.ones(2),
        5,
        "text",
        {},
        {**SPARSE, "0": 3.0},
        {**SPARSE, "0": torch.ones(2, 1)},
        {**SPARSE, "indices": torch.ones(2)},
        {**SPARSE, "more": 1},
    ],
)
def test_what_is_collected_has_the_structure_that_most_clients_send(liar: int, odd: Any) -> None:
    """Other clients may receive it: what one cannot read would end the run for all of them."""
    replies = {client: with_values({"pool": {"all": SPARSE}}) for client in range(3)}
    replies[liar] = with_values({"pool": {"all": odd}})
    [(client, refusal)] = find_other_forms(EXPECTED, replies).items()
    assert client == liar and refusal.reason is Reason.WRONG_SHAPE


def test_sizes_and_numbered_names_of_collected_values_may_differ_and_values_may_be_absent() -> None:
    few = {"size": 7, "0": torch.ones(5), "3": torch.ones(1), "indices": torch.tensor([1])}
    replies = {0: with_values({"pool": {"all": SPARSE}}), 1: with_values({"pool": {"all": few}})}
    assert find_other_forms(EXPECTED, {**replies, 2: with_values({"fedavg": {"stats": None}})}) == {}


# what a run really sends ---------------------------------------------------------------------------------------------
class Checked(Wire):
    """Bytes in between, and a checker at the server's end."""

    runner: Runner
    seen = 0
    model: Model | None = None  # as it was last sent: whole, or the pieces that are trained

    def exchange(self, phase, clients, message, place):  # type: ignore[no-untyped-def]
        self.model = _sent_model(message) or self.model
        assert self.model is not None
        expected = expected_reply(self.runner.setup, phase, place, self.model)
        replies = dict(super().exchange(phase, clients, message, place))
        assert find_other_forms(expected, replies) == {}
        unmoved = uploaded_tensors(self.runner.setup, place, self.model) if phase.name == TRAIN else {}
        assert find_outliers(expected, unmoved, replies, OUTLIER) == {}
        for client, reply in replies.items():
            assert check_reply(reply, expected) is None
            self.seen += 1
            yield client, reply


QUICK = ("fedavg", "fedgp+der", "fedweit", "fedomg", "feddbe", "coordinated")


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in methods.names()]
)
def test_no_preset_has_a_reply_refused(name: str) -> None:
    bench = Bench(name, module=Norm)
    engine = Checked(bench, {})
    engine.runner = Runner(bench.setup(), engine, bench.model(), bench.evaluation)
    engine.runner.run()
    assert engine.seen >= 12


def test_the_form_of_the_model_is_known_before_anybody_answered() -> None:
    bench = Bench("fedgp+der", module=Norm)
    setup, model = bench.setup(), bench.model()
    expected = expected_reply(setup, setup.method.train_phase(), Place(0, bench.stream.round(0)), model)
    assert expected.like == {f"fedavg/{key}": Spec.of(value) for key, value in model.items()}


def test_nothing_is_expected_where_nothing_is_sent() -> None:
    bench = Bench("fedavg", train=TrainOptions(1, 5, Optimizer(lr=0.05), sync_every=2))
    setup = bench.setup()
    silent = expected_reply(setup, setup.method.train_phase(), Place(0, bench.stream.round(0)), bench.model())
    assert silent.declared == {}
    scored = expected_reply(setup, Phase(EVALUATE), Place(0, bench.stream.round(0)), bench.model())
    assert scored.declared == {EVALUATE: {"counts"}}


# fuzzing -------------------------------------------------------------------------------------------------------------
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.sampled_from([torch.ones(4), torch.ones(4, dtype=torch.float64), torch.full((4,), math.nan), torch.ones(0)])
)
names = st.sampled_from(["fedavg", "params", "stats", "gap", "correct", "pool", "all", "?"])
anything = st.recursive(leaves, lambda inner: st.dictionaries(names, inner, max_size=3), max_leaves=6)


@given(anything, anything, anything, anything)
@settings(max_examples=300, deadline=None)
def test_whatever_a_reply_holds_it_is_taken_or_refused_by_name(
    values: Any, samples: Any, steps: Any, loss: Any
) -> None:
    refusal = check_reply(Reply(values, samples, steps, loss), EXPECTED)
    assert refusal is None or refusal.reason in Reason
    if refusal is None:
        assert 0 <= samples <= 100 and 0 <= steps <= 50


@given(st.dictionaries(names, anything, max_size=3))
@settings(max_examples=100, deadline=None)
def test_what_crossed_as_bytes_is_judged_the_same(values: Any) -> None:
    try:
        crossed = from_bytes(to_bytes(values))
    except TreeError:
        return
    here, there = (check_reply(Reply(v), EXPECTED) for v in (values, crossed))
    assert str(here) == str(there)
