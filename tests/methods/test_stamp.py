"""STAMP: matching over tasks on clients. Single steps are written down by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from everfed.core import tree
from everfed.core.context import TrainOptions
from everfed.core.data import Data
from everfed.core.method import compose
from everfed.core.optimizer import Optimizer
from everfed.core.part import EAGER
from everfed.errors import CompositionError
from everfed.methods import registry as methods
from everfed.methods.aggregate.fedavg import FedAvg
from everfed.methods.project.matching import match_gradients
from everfed.methods.project.matching_solvers import SoftmaxSGD
from everfed.methods.project.stamp import STAMP, balanced, per_class
from tests.support.toy import Bench, Given, Linear, Norm, Outcome, Toy, mean_square

TRAIN = TrainOptions(2, 5, Optimizer(lr=0.1))


def bench(options: dict[str, Any] | None = None, name: str = "stamp", **fields: Any) -> Bench:
    return Bench(name, {"stamp": {"exemplars": 2, **(options or {})}}, **fields)


def pool(outcome: Outcome, client: int = 0) -> dict[str, Any]:
    return outcome.clients[client]["stamp"]["host"]["pool"]


# what it reduces to --------------------------------------------------------------------------------------------------
def test_the_first_task_is_local_training_and_server_matching() -> None:
    one = Toy(tasks=1)
    assert torch.equal(bench(stream=one).run().params, Bench("fedomg", stream=one).run().params)


def test_without_exemplars_it_is_fedomg_and_without_matching_fedavg() -> None:
    assert torch.equal(bench({"exemplars": 0}).run().params, Bench("fedomg").run().params)
    off = Bench("stamp", {"stamp": {"exemplars": 0}, "fedomg": {"kappa": 0.0}}).run()
    assert torch.allclose(off.params, Bench("fedavg").run().params, atol=1e-6)


def test_the_ablations_differ_from_each_other() -> None:
    params = [b.run().params for b in (Bench("fedavg"), Bench("fedomg"), bench(name="stamp-temporal"), bench())]
    for i, a in enumerate(params):
        assert not any(torch.allclose(a, b, atol=1e-5) for b in params[i + 1 :])


@pytest.mark.parametrize(("scale", "rho"), [("none", 1.0), ("1+k", 1.25), ("1+k2", 1.0625)])
def test_clones_that_do_not_move_lengthen_the_step(scale: str, rho: float) -> None:
    """clone_from = after_current, no epochs: all updates are equal, theta_u = theta_0 + (1 + kappa) / rho Delta."""
    stream = Toy(clients=1, rounds_per_task=1)
    start = Bench(stream=stream).run(rounds=1).params
    plain = Bench(stream=stream).run().params
    moved = bench({"epochs": 0, "scale": scale}, "stamp-temporal", stream=stream).run().params
    assert torch.allclose(moved, start + 1.25 / rho * (plain - start), atol=1e-5)


# traffic and the pool ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("cohorts", [{}, {0: (0, 1), 1: (1,), 2: (0,), 3: (0, 2)}])
def test_traffic_is_fedavgs(cohorts: dict[int, tuple[int, ...]]) -> None:
    stream = Toy(cohorts=cohorts)
    plain, ours = (b.run().state.traffic.as_dict() for b in (Bench(stream=stream), bench(stream=stream)))
    assert (ours["bytes_up"], ours["bytes_down"]) == (plain["bytes_up"], plain["bytes_down"])


def test_the_pool_grows_by_13_per_class_and_task() -> None:
    stream = Toy(clients=2, tasks=3, samples=120, rounds_per_task=2)
    sizes = []
    for rounds in range(1, 7):
        outcome = Bench("stamp", {}, stream).run(rounds=rounds)
        held = pool(outcome)
        assert list(held) == [str(task) for task in range(rounds // 2)]  # never the current task before its end
        sizes.append(sum(len(kept["y"]) for kept in held.values()))
        assert outcome.store.bytes() == sum(tree.tensor_bytes(pool(outcome, c)) for c in range(2))
    assert sizes == [0, 52, 52, 104, 104, 156]  # 13 of each of 4 classes
    assert tree.tensor_bytes(held) == 156 * (16 + 8)  # 4 x 4 bytes of image and one int64 label each


def test_exemplars_come_from_their_task() -> None:
    outcome, stream = bench().run(), Toy()
    for task in (0, 1):
        kept, data = pool(outcome, 1)[str(task)], stream.data(1, task)
        rows = {(bytes(x.numpy().tobytes()), int(y)) for x, y in zip(data.x, data.y, strict=True)}
        assert {(bytes(x.numpy().tobytes()), int(y)) for x, y in zip(kept["x"], kept["y"], strict=True)} <= rows


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(1, 15), st.integers(0, 1000))
def test_per_class_takes_so_many_of_each(labels: list[int], count: int, seed: int) -> None:
    y = np.array(labels)
    rows = per_class(y, count, np.random.default_rng(seed))
    assert len(set(rows.tolist())) == len(rows)
    for label in set(labels):
        assert (y[rows] == label).sum() == min(count, (y == label).sum())


def test_statistics_are_the_mean_of_the_clients() -> None:
    stream = Toy(clients=2, rounds_per_task=1)
    outcome = bench(stream=stream, module=Norm).run(rounds=1)
    averaged = Bench(stream=stream, module=Norm).run(rounds=1)
    assert torch.equal(outcome.state.model["stats"], averaged.state.model["stats"])


# direction -----------------------------------------------------------------------------------------------------------
def quadratic(tasks: int = 2) -> Given:
    table = {
        (0, 0): (torch.tensor([[1.0, 0.0], [1.0, 0.1]]), torch.tensor([2.0, 2.0])),
        (0, 1): (torch.tensor([[0.0, 1.0], [0.1, 1.0]]), torch.tensor([-1.0, -1.0])),
    }
    return Given(clients=1, tasks=tasks, rounds_per_task=1, classes=1, table=table, objective=mean_square)


def loss(params: Tensor, task: int) -> float:
    x, y = quadratic().table[0, task]
    return float(mean_square(x @ params.reshape(-1, 1), y))


def test_one_round_on_a_quadratic_decreases_the_loss() -> None:
    train = TrainOptions(1, 2, Optimizer(lr=0.2))
    for options in ({}, {"clone_from": "round_start", "combine": "sum"}, {"granularity": "step"}):
        part = {"stamp": {"exemplars": 5, **options}}
        before = Bench("stamp", part, quadratic(), train, Linear).run(rounds=1).params
        assert loss(before, 0) < loss(torch.zeros(2), 0)
        after = Bench("stamp", part, quadratic(), train, Linear).run().params
        assert loss(after, 1) < loss(before, 1)


def one_gradient(params: Tensor, task: int) -> Tensor:
    x, y = quadratic().table[0, task]
    return (x * (x @ params - y).unsqueeze(1)).mean(0)


@pytest.mark.parametrize("clone_from", ["after_current", "round_start"])
@pytest.mark.parametrize("combine", ["mean", "sum"])
@pytest.mark.parametrize("balance", [False, True])
def test_the_client_step_by_hand(clone_from: str, combine: str, balance: bool) -> None:
    """Full batches of both samples and one epoch: every training is one gradient step that can be written down."""
    options = {"clone_from": clone_from, "combine": combine, "balance": balance, "exemplars": 5, "rate": 0.7}
    train, lr = TrainOptions(1, 2, Optimizer(lr=0.2)), 0.2
    make = Bench("stamp-temporal", {"stamp": options}, quadratic(), train, Linear)
    theta = make.run(rounds=1).params
    current = theta - lr * one_gradient(theta, 1)
    origin = current if clone_from == "after_current" else theta
    clone = origin - lr * one_gradient(origin, 0)
    updates = [clone - theta, current - theta]
    updates = balanced(updates) if balance else updates
    step = match_gradients(updates, 0.25, "1+k2") * (2 if combine == "sum" else 1)
    assert torch.allclose(make.run().params, theta + 0.7 * step, atol=1e-6)


def test_matching_every_step_by_hand() -> None:
    train = TrainOptions(1, 2, Optimizer(lr=0.2))
    options = {"stamp": {"granularity": "step", "exemplars": 5}}
    make = Bench("stamp-temporal", options, quadratic(), train, Linear)
    theta = make.run(rounds=1).params
    matched = match_gradients([one_gradient(theta, 0), one_gradient(theta, 1)], 0.25, "1+k2")
    assert torch.allclose(make.run().params, theta - 0.2 * matched, atol=1e-6)


def test_balanced_updates_have_the_mean_norm() -> None:
    scaled = balanced([torch.tensor([3.0, 4.0]), torch.tensor([0.0, 1.0]), torch.zeros(2)])
    assert [float(u.norm()) for u in scaled] == pytest.approx([2.0, 2.0, 0.0])


@pytest.mark.parametrize(
    ("size", "drop_last", "steps"),
    [(3, True, 1), (3, False, 2), (8, True, 1)],  # of 5 samples: 3 and a tail of 2 that is dropped or kept; all at once
)
def test_clones_cut_their_exemplars_as_training_does(size: int, drop_last: bool, steps: int) -> None:
    """A tail of few samples at the full rate can throw a clone far away (4 of 260 exemplars at 0.05, CIFAR-100); a pool
    below one minibatch is never dropped."""
    one, lr = torch.tensor([1.0, 0.5]), 0.2
    stream = replace(quadratic(), table={**quadratic().table, (0, 0): (one.repeat(5, 1), torch.full((5,), 2.0))})
    train = TrainOptions(1, size, Optimizer(lr=lr), drop_last=drop_last)
    make = Bench("stamp-temporal", {"stamp": {"exemplars": 5}}, stream, train, Linear)
    theta = make.run(rounds=1).params
    clone = current = theta - lr * one_gradient(theta, 1)
    for _ in range(steps):
        clone = clone - lr * one * (one @ clone - 2.0)
    step = match_gradients([clone - theta, current - theta], 0.25, "1+k2")
    assert torch.allclose(make.run().params, theta + step, atol=1e-6)


@pytest.mark.parametrize("moments", ["fresh", "copied"])
@pytest.mark.parametrize("clone_from", ["after_current", "round_start"])
def test_clones_may_copy_the_optimizer(moments: str, clone_from: str) -> None:
    """Momentum 0.5 that is kept: v_0 after the first task, v_1 after the current one. A clone goes on with the momentum
    of the model it starts from: v_1 after current training, v_0 at the round's start."""
    options = {"stamp": {"moments": moments, "clone_from": clone_from, "exemplars": 5}}
    train, lr = TrainOptions(1, 2, Optimizer(lr=0.2, momentum=0.5, state="kept")), 0.2
    make = Bench("stamp-temporal", options, quadratic(), train, Linear)
    v_0 = one_gradient(torch.zeros(2), 0)
    theta = -lr * v_0
    assert torch.allclose(make.run(rounds=1).params, theta)
    v_1 = 0.5 * v_0 + one_gradient(theta, 1)
    current = theta - lr * v_1
    origin, v = (current, v_1) if clone_from == "after_current" else (theta, v_0)
    v = v if moments == "copied" else torch.zeros(2)
    clone = origin - lr * (0.5 * v + one_gradient(origin, 0))
    step = match_gradients([clone - theta, current - theta], 0.25, "1+k2")
    assert torch.allclose(make.run().params, theta + step, atol=1e-6)


def test_a_client_without_data_keeps_no_exemplars() -> None:
    outcome = bench(stream=Toy(sizes={(0, 0): 0})).run()
    assert list(pool(outcome, 0)) == ["1"] and list(pool(outcome, 1)) == ["0", "1"]


def test_the_exemplars_of_every_earlier_task_are_matched(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the third task there are three updates: of the current task and of clones on both earlier ones."""
    counts: list[int] = []
    matched = STAMP._matched

    def counted(self: STAMP, updates: list[Tensor]) -> Tensor:
        counts.append(len(updates))
        return matched(self, updates)

    monkeypatch.setattr(STAMP, "_matched", counted)
    bench(name="stamp-temporal", stream=Toy(clients=1, tasks=3, rounds_per_task=1)).run()
    assert counts == [2, 3]


@pytest.mark.parametrize("solver", ["exact", "softmax_sgd"])
def test_the_first_task_may_be_matched_too(solver: str) -> None:
    """The released code makes the only update longer: 2 (1 + kappa) / (1 + kappa^2) = 2.353 times at its rate of 2."""
    options = {"match_first": True, "rate": 2.0, "solver": solver}
    one = Toy(clients=1, tasks=1, rounds_per_task=1)
    start, plain = Bench(stream=one).model()["params"], Bench(stream=one).run().params
    moved = bench(options, "stamp-temporal", stream=one).run().params
    assert torch.allclose(moved - start, 2 * 1.25 / 1.0625 * (plain - start), atol=1e-5)


def test_the_solver_of_the_released_code_takes_25_steps_on_clients() -> None:
    options = {"solver": "softmax_sgd", "solver_steps": 25, "solver_momentum": 0.1, "exemplars": 5}
    train = TrainOptions(1, 2, Optimizer(lr=0.2))
    make = Bench("stamp-temporal", {"stamp": options}, quadratic(), train, Linear)
    theta = make.run(rounds=1).params
    current = theta - 0.2 * one_gradient(theta, 1)
    updates = [current - 0.2 * one_gradient(current, 0) - theta, current - theta]
    sgd = SoftmaxSGD(steps=25, momentum=0.1)
    expected = match_gradients(updates, 0.25, "1+k2", solver="softmax_sgd", sgd=sgd)
    assert torch.allclose(make.run().params, theta + expected, atol=1e-6)


# refusals ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "match"),
    [({"clone_from": "x"}, "after_current, round_start"), ({"combine": "x"}, "mean, sum"), ({"epochs": -1}, "epochs"),
     ({"granularity": "x"}, "round, step"), ({"moments": "x"}, "fresh, copied"), ({"exemplars": -1}, "exemplars"),
     ({"kappa": 1.5}, "kappa"), ({"scale": "x"}, "scale"), ({"solver_steps": 0}, "solver_steps"),
     ({"solver_momentum": 1.0}, "solver_momentum")],
)  # fmt: skip
def test_options_are_checked(options: dict[str, object], match: str) -> None:
    with pytest.raises(methods.MethodError, match=match):
        methods.build("stamp", {"stamp": options})


def test_hidden_boundaries_are_refused() -> None:
    with pytest.raises(CompositionError, match="when a task begins or ends"):
        methods.build("stamp").fit_stream(Toy(boundaries=False))


def test_it_needs_an_aggregator_and_step_matching_is_not_captured() -> None:
    assert EAGER not in compose(FedAvg(), STAMP()).parts[1].needs()
    assert EAGER in STAMP(granularity="step").needs()
    with pytest.raises(CompositionError, match="own aggregation"):
        compose(STAMP())


def test_the_pool_is_storage_form() -> None:
    kept = pool(bench().run())["0"]
    blank = Toy().data(0, 0)
    assert (kept["x"].dtype, kept["x"].shape[1:]) == (blank.x.dtype, blank.x.shape[1:])
    assert isinstance(blank, Data)


def test_personal_parameters_are_not_matched() -> None:
    """With FedDBE's vectors: they end as the current task's training left them, and clones run the changed network."""

    def build(epochs: int) -> Bench:
        options = {"stamp": {"exemplars": 2, "epochs": epochs, "scale": "1+k"}, "dbe": {"weight": 1.0}}
        return Bench(lambda: methods.build("", options, ["fedavg", "dbe", "stamp"]), stream=Toy(clients=2))

    still, plain = build(0).run(), Bench("feddbe", {"dbe": {"weight": 1.0}}, stream=Toy(clients=2)).run()
    # clones that do not move, and 1 + kappa divided out: matching is the identity on the shared part
    assert torch.allclose(still.params, plain.params, atol=1e-5)
    for client in range(2):
        vectors = [outcome.clients[client]["client"]["personal"] for outcome in (still, plain)]
        assert torch.allclose(*vectors, atol=1e-5)
    assert not torch.allclose(build(2).run().params, plain.params, atol=1e-5)
