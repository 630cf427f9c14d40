"""Ridge regression on frozen features by sums: closed forms, and the same head for any partition, order and engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from everfed.core.engine import ClientError
from everfed.core.optimizer import Optimizer
from everfed.method import CompositionError, TrainOptions, compose
from everfed.methods import registry as methods
from everfed.methods.features.ridge import (
    GRID,
    Ridge,
    best_penalty,
    grouped_gram,
    held_out_errors,
    projection,
    solve_ridge,
)
from everfed.methods.features.statistics import held_out, rounded, symmetric, triangle
from everfed.models.vit import ViT
from everfed.privacy.secure_client import secured
from everfed.session.result import HasSummary
from tests.support.flaky import secure_run
from tests.support.rehearsal_free import ClassToy
from tests.support.toy import Bench, Given, Linear, Norm, Outcome, Toy

CLASSES, POOL = 3, 26
PENALTY = {"ridge": {"penalty": 1.0}}
Table = Mapping[tuple[int, int], tuple[Tensor, Tensor]]


def pool(seed: int = 0, features: int = 4) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.normal(size=(POOL, features)).astype(np.float32))
    return x, torch.from_numpy(rng.integers(0, CLASSES, POOL))


def bench(
    table: Table, options: Mapping[str, Any] | None = None, *, name: str = "ridge", rounds: int = 1, **more: Any
) -> Bench:
    clients, tasks = (max(key[axis] for key in table) + 1 for axis in (0, 1))
    stream = Given(clients=clients, tasks=tasks, rounds_per_task=rounds, classes=CLASSES, table=table, **more)
    return Bench(name, options if options is not None else PENALTY, stream, module=Linear)


def divided(x: Tensor, y: Tensor, owners: Sequence[tuple[int, int]], clients: int, tasks: int) -> Table:
    """Sample i belongs to client and task owners[i]; some have none."""
    chosen = np.array([client * tasks + task for client, task in owners])
    return {
        (client, task): (x[chosen == client * tasks + task], y[chosen == client * tasks + task])
        for client in range(clients)
        for task in range(tasks)
    }


def ridge(h: Tensor, y: Tensor, penalty: float) -> Tensor:
    """(M, C) in float64, by numpy, on all samples at once."""
    h, labels = h.double().numpy(), np.eye(CLASSES)[y.numpy()]
    return torch.from_numpy(np.linalg.solve(h.T @ h + penalty * np.eye(h.shape[1]), h.T @ labels))


def fixed(h: Tensor, bits: int = 10) -> Tensor:
    return rounded(h, bits)[0] / 2**bits


def weight(outcome: Outcome, features: int = 4) -> Tensor:
    return outcome.params.reshape(CLASSES, features).T.double()


# closed forms --------------------------------------------------------------------------------------------------------
def test_three_samples_by_hand() -> None:
    """G + I = [[3, 1], [1, 3]], Q = [[1, 1], [0, 2]]."""
    x, y = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), torch.tensor([0, 1, 1])
    found = weight(bench({(0, 0): (x[:1], y[:1]), (1, 0): (x[1:], y[1:])}).run(), features=2)
    assert found[:, :2].tolist() == [[0.375, 0.125], [-0.125, 0.625]]
    assert found[:, 2].tolist() == [0.0, 0.0]  # a class that was never seen


def test_a_large_penalty_leaves_the_class_sums() -> None:
    x, y = pool()
    found = weight(bench({(0, 0): (x, y)}, {"ridge": {"penalty": 1e9}}).run())
    sums = fixed(x).T @ torch.eye(CLASSES, dtype=torch.float64)[y]
    assert torch.allclose(found * 1e9, sums, rtol=1e-5)


def test_class_means_come_from_the_same_sums() -> None:
    x, y = pool()
    found = weight(bench({(0, 0): (x, y)}, {"ridge": {"classifier": "means"}}).run())
    means = torch.stack([fixed(x)[y == label].mean(0) for label in range(CLASSES)], 1)
    assert torch.allclose(found, means / means.norm(dim=0), atol=1e-7)


def test_the_held_out_error_is_exact() -> None:
    (x, y), (vx, vy) = pool(1), pool(2)
    pairs = [
        (h.double().T @ h.double(), h.double().T @ torch.eye(CLASSES, dtype=torch.float64)[t])
        for h, t in ((x, y), (vx, vy))
    ]
    found = held_out_errors(*(torch.stack(both) for both in zip(*pairs, strict=True)), POOL)
    direct = [(vx.double() @ ridge(x, y, penalty) - torch.eye(CLASSES)[vy]).square().sum() for penalty in GRID]
    assert torch.allclose(found, torch.stack(direct), rtol=1e-10, atol=1e-10)


def test_the_penalty_with_the_least_held_out_error_is_taken_and_recorded() -> None:
    x, y = pool(3)
    case = bench({(0, 0): (x, y)}, {})
    outcome, (part,) = case.run(), [p for p in case.build_method().parts if isinstance(p, Ridge)]
    test = held_out(x)
    assert 0 < int(test.sum()) < POOL
    errors = [
        (fixed(x[test]) @ ridge(fixed(x[~test]), y[~test], p) - torch.eye(CLASSES)[y[test]]).square().sum()
        for p in GRID
    ]
    best = GRID[int(torch.stack(errors).argmin())]
    assert isinstance(part, HasSummary)
    assert part.summary(outcome.state.server) == {
        "penalties": {"0": best}, "penalty_from": "sums", "samples": POOL, "clipped": 0,
    }  # fmt: skip
    assert torch.allclose(weight(outcome), ridge(fixed(x), y, best), atol=1e-6)


def test_without_held_out_samples_the_penalty_is_one() -> None:
    assert best_penalty(torch.zeros(2, 3, 3), torch.zeros(2, 3, 2), 0.0) == 1.0


def test_a_singular_gram_matrix_is_solved_too() -> None:
    h = torch.tensor([[1e3, 1e3]], dtype=torch.float64)
    found = solve_ridge(h.T @ h, h.T, 1e-12)
    assert torch.allclose(h @ found, torch.ones(1, 1, dtype=torch.float64))


def test_the_first_penalty_is_one_where_all_samples_are_fitted() -> None:
    gram = triangle(torch.stack([torch.eye(2), torch.zeros(2, 2)]))
    total = {"gram": gram, "products": torch.ones(2, 2, 2), "counts": torch.tensor([[3.0, 3.0], [0.0, 0.0]])}
    assert Ridge(sums="float").solve(total)[1] == 1.0


def test_what_was_clipped_is_counted_over_all_rounds() -> None:
    """Features of 1e9 are beyond what whole numbers of 2^-10 may be: two of every sample, in both tasks."""
    x, y = torch.full((4, 2), 1e9), torch.tensor([0, 1, 0, 1])
    stream = {(client, task): (x, y) for client in range(1) for task in range(2)}
    assert bench(stream, PENALTY).run().state.server["ridge"]["clipped"] == 2 * 4 * 2


def test_features_are_rounded_and_clipped() -> None:
    found, over = rounded(torch.tensor([0.25, 0.2501, -15.9999, 17.0, -400.0]), 10)
    assert (found.tolist(), int(over)) == ([256.0, 256.0, -16384.0, 16384.0, -16384.0], 2)


@given(st.integers(1, 5))
def test_a_triangle_is_a_symmetric_matrix(size: int) -> None:
    square = torch.randn(2, size, size, generator=torch.Generator().manual_seed(size))
    whole = square + square.transpose(1, 2)
    assert triangle(whole).shape == (2, size * (size + 1) // 2)
    assert torch.equal(symmetric(triangle(whole), size), whole)


# the same head for any partition and order ----------------------------------------------------------------------------
places = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=POOL, max_size=POOL)


@given(places, st.integers(1, 3), st.booleans())
@settings(deadline=None, max_examples=25)
def test_any_partition_order_and_number_of_rounds(owners: list[tuple[int, int]], rounds: int, chosen: bool) -> None:
    """Clients and tasks may be empty. The sums agree to the bit, W with the centralised solution to 1e-6."""
    x, y = pool()
    options: dict[str, Any] = {} if chosen else PENALTY
    scattered = bench(divided(x, y, owners, 3, 3), options, rounds=rounds).run()
    together = bench({(0, 0): (x, y)}, options).run()
    for key in ("gram", "products", "counts"):
        assert torch.equal(scattered.state.server["ridge"][key], together.state.server["ridge"][key])
    assert torch.equal(scattered.params, together.params)
    penalty = list(together.state.server["ridge"]["penalties"].values())[-1]
    assert torch.allclose(weight(scattered), ridge(fixed(x), y, penalty), rtol=1e-6, atol=1e-6)


@given(places)
@settings(deadline=None, max_examples=10)
def test_plain_float_sums_give_the_centralised_solution(owners: list[tuple[int, int]]) -> None:
    x, y = pool()
    outcome = bench(divided(x, y, owners, 3, 3), {"ridge": {"penalty": 1.0, "sums": "float"}}).run()
    assert torch.allclose(weight(outcome), ridge(x, y, 1.0), rtol=1e-6, atol=1e-7)
    solved = Ridge(penalty=1.0, sums="float").solve(outcome.state.server["ridge"])[0]
    assert torch.allclose(solved, ridge(x, y, 1.0), rtol=0, atol=1e-8)


def networks(outcome: Outcome, part: str) -> tuple[Tensor, ...]:
    return tuple(outcome.state.server[part][key] for key in ("gram", "products", "counts"))


def frozen_vit(shape: tuple[int, ...], classes: int) -> ViT:
    module = ViT(shape, classes, patch=2, width=8, depth=2, heads=2).requires_grad_(False)
    module.head.requires_grad_(True)
    return module


@pytest.mark.parametrize("name", ["ridge", "ranpac"])
@pytest.mark.parametrize("module", [None, Norm, frozen_vit], ids=["mlp", "convolution", "transformer"])
def test_features_of_a_network_do_not_depend_on_the_partition(name: str, module: Any) -> None:
    """Networks round differently in minibatches of other sizes; sums of their features must not."""
    toy, rng = Toy(clients=1, tasks=1, samples=150), np.random.default_rng(5)
    x, y = toy.data(0, 0).x.float() / 255.0, toy.data(0, 0).y
    options = {name: {"penalty": 1.0, **({"width": 20} if name == "ranpac" else {})}}
    found = []
    for clients, tasks in ((1, 1), (4, 1), (3, 2)):
        owners = list(zip(rng.integers(0, clients, 150), rng.integers(0, tasks, 150), strict=True))
        stream = Given(clients=clients, tasks=tasks, classes=4, table=divided(x, y, owners, clients, tasks))
        found.append(networks(Bench(name, options, stream, module=module).run(), name))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_who_takes_part_in_a_round_does_not_matter() -> None:
    few = Toy(cohorts={0: (0,), 1: (2,), 2: (1,), 3: (0,)})
    assert torch.equal(Bench("ridge", stream=few).run().params, Bench("ridge", stream=Toy()).run().params)


def test_a_client_that_is_removed_was_never_there() -> None:
    x, y = pool()
    owners = [(index % 3, 0) for index in range(POOL)]
    table = divided(x, y, owners, 3, 1)
    alone = bench({(0, 0): table[2, 0]}).run().state.server["ridge"]
    all_of_them = bench(table).run().state.server["ridge"]
    left = {key: all_of_them[key] - alone[key] for key in ("gram", "products", "counts")}
    without, _ = Ridge(penalty=1.0).solve(left)
    expected = bench({key: value for key, value in table.items() if key[0] < 2}).run()
    assert torch.equal(without.float(), weight(expected).float())


# the same as the papers' own forms ------------------------------------------------------------------------------------
def test_the_recursive_form_gives_the_same_weights() -> None:
    """ACIL: R <- R - R X^T (I + X R X^T)^-1 X R, W <- W + R X^T (Y - X W), task by task."""
    x, y = pool()
    h, labels, r = fixed(x), torch.eye(CLASSES, dtype=torch.float64)[y], torch.eye(4, dtype=torch.float64)
    w = torch.zeros(4, CLASSES, dtype=torch.float64)
    for rows in torch.arange(POOL).split(7):
        some, target = h[rows], labels[rows]
        r = r - r @ some.T @ torch.linalg.inv(torch.eye(len(some), dtype=torch.float64) + some @ r @ some.T) @ some @ r
        w = w + r @ some.T @ (target - some @ w)
    outcome = bench({(0, task): (x[rows], y[rows]) for task, rows in enumerate(torch.arange(POOL).split(7))}).run()
    assert torch.allclose(w, Ridge(penalty=1.0).solve(outcome.state.server["ridge"])[0], atol=1e-12)


@given(st.permutations(range(4)))
@settings(deadline=None)
def test_the_absolute_aggregation_law_of_afl(order: list[int]) -> None:
    """Clients send W_k and C_k = G_k + gamma I; merging them in any order is ridge with K gamma, and taking the K gamma
    away again is least squares."""
    x, y = pool()
    gamma, eye = 0.5, torch.eye(4, dtype=torch.float64)
    shares = [
        (x[rows].double(), torch.eye(CLASSES, dtype=torch.float64)[y[rows]]) for rows in torch.arange(POOL).chunk(4)
    ]
    sent = [(h.T @ h + gamma * eye, torch.linalg.solve(h.T @ h + gamma * eye, h.T @ t)) for h, t in shares]

    def merge(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        total = a[0] + b[0]
        return total, torch.linalg.solve(total, a[0] @ a[1] + b[0] @ b[1])

    total, merged = reduce(merge, [sent[k] for k in order])
    assert torch.allclose(merged, ridge(x, y, 4 * gamma), atol=1e-10)
    cleaned = merged + 4 * gamma * torch.linalg.solve(total - 4 * gamma * eye, merged)
    assert torch.allclose(cleaned, ridge(x, y, 0.0), atol=1e-9)
    ours = solve_ridge(x.double().T @ x.double(), x.double().T @ torch.eye(CLASSES, dtype=torch.float64)[y], 4 * gamma)
    assert torch.allclose(ours, merged, atol=1e-10)


# the random layer -----------------------------------------------------------------------------------------------------
def test_with_the_identity_for_a_random_layer_it_is_ridge(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = pool()
    x = x.abs()
    monkeypatch.setattr("everfed.methods.features.ridge.projection", lambda seed, f, m, device: torch.eye(f))
    ours = bench({(0, 0): (x, y)}, {"ranpac": {"penalty": 1.0, "width": 4, "bits": 10}}, name="ranpac").run()
    head = ours.params[: CLASSES * 4].reshape(CLASSES, 4)
    plain = bench({(0, 0): (x, y)}).run()
    assert torch.equal(head, plain.params.reshape(CLASSES, 4))
    assert not ours.params[CLASSES * 4 :].any()  # the network's own head is out of use


def test_the_random_layer_is_the_same_everywhere() -> None:
    found = projection(0, 3, 5, torch.device("cpu"))
    expected = [
        [32.0, -39.0, 119.0, -74.0, -433.0],
    ]
    assert torch.equal(found[:1] * 256, torch.tensor(expected))
    assert torch.equal(found * 256, (found * 256).round())
    wide = projection(1, 64, 4000, torch.device("cpu"))
    assert (float(wide.mean()), float(wide.std())) == pytest.approx((0.0, 1.0), abs=0.01)


def test_outputs_are_those_of_the_random_features() -> None:
    x, y = pool()
    case = bench({(0, 0): (x, y)}, {"ranpac": {"penalty": 1.0, "width": 30}}, name="ranpac")
    outcome = case.run()
    outputs = case.trainer().outputs(outcome.state.model, x)
    h = fixed((fixed(x) @ projection(0, 4, 30, torch.device("cpu")).double()).relu(), 5)
    assert torch.allclose(outputs.double(), h @ ridge(h, y, 1.0), atol=0.02)  # scored features are not rounded


# STSA and STSA-E: weights of unit length, and G from first-order sums -------------------------------------------------
def groups_of(h: Tensor, order: Sequence[int], groups: int) -> tuple[Tensor, Tensor]:
    """sums (groups, 1, M) and counts (groups, 1) of one class, in groups of consecutive samples of an order."""
    parts = h[list(order)].chunk(groups)
    return torch.stack([part.sum(0) for part in parts]).unsqueeze(1), torch.tensor([[len(p)] for p in parts]).double()


def test_one_sample_a_group_is_exact() -> None:
    h = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)).double()
    assert torch.allclose(grouped_gram(*groups_of(h, range(6), 6)), h.T @ h, atol=1e-12)


def test_the_mean_over_all_orders_is_the_gram_matrix() -> None:
    """720 orders of 6 samples in 3 groups of 2."""
    h = torch.randn(6, 3, generator=torch.Generator().manual_seed(1)).double()
    found = [grouped_gram(*groups_of(h, order, 3)) for order in permutations(range(6))]
    assert len(found) == 720 and torch.allclose(torch.stack(found).mean(0), h.T @ h, atol=1e-12)


@given(counts=st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=50)
def test_the_estimate_is_no_less_than_what_the_groups_show(counts: list[int], seed: int) -> None:
    """G_c - sum s s^T / n has no negative eigenvalue, for any group sizes; with one group it is 0."""
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(count, 4, generator=generator).double() for count in counts]
    sums, sizes = torch.stack([part.sum(0) for part in parts]).unsqueeze(1), torch.tensor(counts).double().unsqueeze(1)
    seen = sum(torch.outer(part.sum(0), part.sum(0)) / len(part) for part in parts if len(part))
    assert torch.linalg.eigvalsh(grouped_gram(sums, sizes) - seen).min() > -1e-9


def test_groups_leave_sums_of_classes_exact_and_send_first_order_sums() -> None:
    """groups x classes x (M + 1) whole numbers, and which classes they are; the server sees them all."""
    options = {"ranpac": {"width": 16, "penalty": 1e6, "classifier": "cosine", "groups": 5}}
    case, exact = (Bench("ranpac", {"ranpac": {**options["ranpac"], "groups": g}}, ClassToy()) for g in (5, 0))
    ours, plain = case.run(), exact.run()
    for key in ("products", "counts"):
        assert torch.equal(ours.state.server["ranpac"][key].long(), plain.state.server["ranpac"][key])
    assert ours.state.traffic.up["ranpac"] == 2 * 2 * 8 * (5 * 2 * (16 + 1) + 2)
    assert case.build_method().reveals() == {"statistics": ["ranpac"]} and exact.build_method().reveals() == {}


def test_as_many_groups_as_samples_give_the_exact_head() -> None:
    stream = ClassToy(samples=5, rounds_per_task=1)
    found = [Bench("ridge", {"ridge": {"penalty": 1.0, "groups": groups}}, stream).run().params for groups in (5, 0)]
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


def test_penalties_are_chosen_from_groups_too() -> None:
    outcome = Bench("ridge", {"ridge": {"groups": 3}}, ClassToy()).run()
    assert torch.isfinite(outcome.params).all() and len(outcome.state.server["ridge"]["penalties"]) == 2


def test_weights_of_the_cosine_have_unit_length() -> None:
    """The direction of every class is ridge's; predictions by cosine."""
    heads = []
    for kind in ("ridge", "cosine"):
        case = Bench("ridge", {"ridge": {"penalty": 1e6, "classifier": kind}}, ClassToy())
        heads.append(case.layout().named(case.run().params)["head.weight"])
    torch.testing.assert_close(heads[1], functional.normalize(heads[0], dim=1), rtol=1e-4, atol=1e-6)
    assert torch.allclose(heads[1].norm(dim=1), torch.ones(4))


@pytest.mark.parametrize("shape", [(1, 5, 2, 7), (1, 4, 2, 8), (1, 5, 3, 8)])
def test_group_sums_of_another_form_are_left_out(shape: tuple[int, ...]) -> None:
    case = Bench("ridge", {"ridge": {"penalty": 1.0, "groups": 5}}, ClassToy())
    part = case.build_method().part("ridge")
    assert isinstance(part, Ridge)
    honest = (torch.ones(1, 5, 2, 8).long(), torch.ones(1, 5, 2).long())
    lie = (torch.ones(shape).long(), torch.ones(shape[:-1]).long())
    given = {"classes": torch.tensor([0, 1]), "clipped": 0}
    both = {"sums": {0: honest[0], 1: lie[0]}, "counts": {0: honest[1], 1: lie[1]}, **given}
    alone = {"sums": {0: honest[0]}, "counts": {0: honest[1]}, **given}
    found, expected = (case.server(part.name, reduced=reduced) for reduced in (both, alone))
    for server in (found, expected):
        part._new_head(server)
    assert torch.equal(found.model["params"], expected.model["params"])
    assert not torch.equal(found.model["params"], case.model()["params"])


# what travels and when ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "size"), [("ridge", 8), ("ranpac", 16)])
@pytest.mark.parametrize("pairs", [1, 2])
def test_one_reply_a_client_and_task_no_step_and_the_bytes(name: str, size: int, pairs: int) -> None:
    """M (M + 1) / 2 + 2 M whole numbers of 8 bytes, the two counts, and the two classes of the task."""
    options: dict[str, Any] = {"penalty": 1.0} if pairs == 1 else {}
    case = Bench(name, {name: {**options, **({"width": 16} if name == "ranpac" else {})}}, ClassToy(rounds_per_task=3))
    outcome = case.run()
    phases = [event for event in outcome.events if event["event"] == "phase"]
    assert [event["round"] for event in phases if event["phase"] == "statistics"] == [2, 5]
    assert all(event["bytes_up"] == 0 and "loss" not in event for event in phases if event["phase"] == "train")
    numbers = pairs * (size * (size + 1) // 2 + 2 * size + 2) + 2
    assert outcome.state.traffic.up == {name: 8 * numbers * 2 * 2}
    down = 4 * len(outcome.params) * 2 * 2  # the first model, and the one with the first task's head
    assert outcome.state.traffic.down == {"fedavg": down}
    assert outcome.state.samples == 0


def test_unseen_classes_never_win_among_the_seen() -> None:
    """After the first of two tasks the columns of the other classes are 0."""
    outcome = Bench("ridge", PENALTY, ClassToy()).run(rounds=2)
    assert not outcome.state.server["ridge"]["products"][..., 2:].any()
    assert outcome.state.rows[0][0][2] >= outcome.state.rows[0][0][1]  # `seen` is at least as good as `full`


def test_every_round_mode_counts_every_sample_once_and_needs_no_boundaries() -> None:
    hidden = Toy(boundaries=False, task_ids=False)
    method = methods.build("ridge")
    with pytest.raises(CompositionError, match="'ridge' must know when a task begins or ends"):
        method.fit_stream(hidden)
    ours = Bench("ridge", {"ridge": {"exchange": "round", "penalty": 1.0}}, hidden).run()
    assert int(ours.state.server["ridge"]["counts"].sum()) == 2 * 3 * 12
    assert torch.equal(ours.params, Bench("ridge", PENALTY, Toy()).run().params)


def test_clients_with_clocks_of_their_own_send_all_columns() -> None:
    class Clocks(ClassToy):
        asynchronous = True

    outcome = Bench("ridge", PENALTY, Clocks()).run()
    assert torch.equal(outcome.params, Bench("ridge", PENALTY, ClassToy()).run().params)
    assert outcome.state.traffic.up["ridge"] > Bench("ridge", PENALTY, ClassToy()).run().state.traffic.up["ridge"]


@pytest.mark.parametrize("name", ["ridge", "ranpac"])
def test_secure_aggregation_adds_the_same_bits(name: str) -> None:
    case = Bench(name, {"ranpac": {"width": 16}} if name == "ranpac" else {})
    plain, ours = case.run(), secure_run(case)
    assert secured(case.build_method()).reveals() == {}
    assert all(torch.equal(a, b) for a, b in zip(networks(plain, name), networks(ours, name), strict=True))
    assert torch.equal(plain.params, ours.params)


def test_the_first_task_may_adapt_the_network() -> None:
    """The first task is FedAvg's, then its network is frozen, with a head of its own sums."""
    case = Bench("ridge", {"ridge": {"train_first": True, "penalty": 1.0}}, module=Norm)
    plain, ours = Bench("fedavg", module=Norm), case.run()
    layout = case.layout()
    one_task = plain.run(rounds=2)
    hidden = slice(0, layout.param("head.weight").start)
    assert torch.equal(ours.params[hidden], one_task.params[hidden])
    assert torch.equal(ours.state.model["stats"], one_task.state.model["stats"])
    assert not torch.equal(ours.params, one_task.params)
    assert int(ours.state.server["ridge"]["counts"].sum()) == 2 * 3 * 12


# what is refused ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("other", ["fedprox", "er", "fedavgm"])
def test_parts_that_change_training_are_refused(other: str) -> None:
    parts = [*methods.build(other).parts, Ridge()]
    with pytest.raises(CompositionError, match="trains nothing; leave it out, or let the first task"):
        compose(*parts)
    compose(*parts[:-1], Ridge(train_first=True))


def test_adapters_of_single_tasks_are_refused() -> None:
    with pytest.raises(CompositionError, match="'lora' changes the network with every task"):
        compose(*methods.build("lora").parts, Ridge(train_first=True))


def test_samples_are_added_before_it() -> None:
    er = methods.build("er", {"er": {"mode": "union"}}).parts
    with pytest.raises(CompositionError, match="'er' adds samples to train on: it belongs before 'ridge'"):
        compose(er[0], Ridge(train_first=True), *er[1:])


def test_personal_models_are_refused() -> None:
    with pytest.raises(CompositionError, match="needs the same features on every client; 'dbe' personalises"):
        compose(*methods.build("feddbe").parts, Ridge(train_first=True))


def test_local_statistics_are_refused_with_adaptation() -> None:
    train = TrainOptions(1, 5, Optimizer(), batchnorm="local")
    with pytest.raises(CompositionError, match="batchnorm = 'mean'"):
        Bench("ridge", {"ridge": {"train_first": True}}, train=train, module=Norm).run()


@pytest.mark.parametrize(
    ("width", "refused", "words"),
    [(5, CompositionError, "the last trainable one here is 1.weight, with 5 outputs for 4 classes"),
     (4, ClientError, r"the head, 2\.weight, is frozen")],
)  # fmt: skip
def test_a_frozen_head_is_refused(width: int, refused: type[Exception], words: str) -> None:
    def frozen(shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, width), torch.nn.Linear(width, classes))
        module[2].requires_grad_(False)
        return module

    with pytest.raises(refused, match=words):
        Bench("ridge", module=frozen).run()


def test_other_names_of_the_same_method() -> None:
    assert [methods.build(name).name for name in ("afl", "afcl", "acil", "fed3r")] == ["ridge"] * 4
    stsa, stsa_e = (methods.build(name).part("ranpac") for name in ("stsa", "stsa-e"))
    assert stsa.classifier == "cosine" and stsa.train_first and stsa_e == replace(stsa, groups=5)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ridge", {"penalty": 0.0}),
        ("ridge", {"classifier": "svm"}),
        ("ridge", {"exchange": "step"}),
        ("ridge", {"sums": "double"}),
        ("ridge", {"bits": -1}),
        ("ridge", {"train_first": True, "exchange": "round"}),
        ("ranpac", {"width": 0}),
    ],
)
def test_options_are_checked(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(methods.MethodError, match=rf"method\.{name}\.{next(iter(options))} must be"):
        methods.build(name, {name: options})


def test_ranpac_leaves_nothing_of_the_networks_own_head() -> None:
    """Outputs are those of the random features alone: the first weights of the head, which are random, are 0 then."""
    case = Bench("ranpac", {"ranpac": {"width": 16, "penalty": 1.0}}, ClassToy())
    (own,) = (entry for entry in case.layout().params if entry.name.endswith("own.weight"))
    assert own.view(case.model()["params"]).any() and not own.view(case.run().params).any()
