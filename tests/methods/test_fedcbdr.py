"""FedCBDR (Qi et al., 2025): leverage scores of all clients' features, and temperatures against imbalance."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everfed.method import Server
from everfed.methods.features.statistics import triangle
from everfed.methods.replay.fedcbdr import FedCBDR, Leverage, allocation, drawn, leverage
from everfed.methods.replay.memory import stored
from tests.support.rehearsal_free import ClassToy
from tests.support.toy import Bench


# leverage scores -----------------------------------------------------------------------------------------------------
def as_published(clients: list[np.ndarray], rng: np.random.Generator) -> list[np.ndarray]:
    """Eq. 1 to 5 on encrypted features; each client undoes its own P."""

    def orthogonal(size: int) -> np.ndarray:
        return np.linalg.qr(rng.standard_normal((size, size)))[0]

    q, own = orthogonal(clients[0].shape[1]), [orthogonal(len(x)) for x in clients]
    u, singular, _ = np.linalg.svd(np.concatenate([p @ x @ q for p, x in zip(own, clients, strict=True)]))
    u = u[:, : (singular > 1e-8 * singular[0]).sum()]
    rows = np.split(u, np.cumsum([len(x) for x in clients])[:-1])
    return [((p.T @ part) ** 2).sum(1) for p, part in zip(own, rows, strict=True)]


def inverted(clients: list[np.ndarray]) -> dict[str, Any]:
    """What the server sends: the inverse of the mean, its rank."""
    grams = [triangle(torch.from_numpy(x.T @ x)) for x in clients]
    size = clients[0].shape[1]
    bench = Bench("fedcbdr", {"memory": {"size": 8, "policy": "fedcbdr"}})
    reduced = {"gram": torch.stack(grams).mean(0)}
    server: Server = bench.server("memory", reduced=reduced)
    assert size == 8  # the features of the toy's network
    Leverage()._invert(server)
    return dict(server.state)


@pytest.mark.parametrize("dead", [0, 3])
def test_the_scores_are_those_of_the_encrypted_features(dead: int) -> None:
    """dead: features that are 0 everywhere, as ReLU makes some."""
    rng = np.random.default_rng(dead)
    clients = [rng.standard_normal((n, 8)) for n in (30, 5, 12)]
    for x in clients:
        x[:, :dead] = 0.0
    sent = inverted(clients)
    found = [leverage(torch.from_numpy(x), sent["inverse"]).numpy() / 3 for x in clients]
    errors = [np.abs(one - other).max() for one, other in zip(found, as_published(clients, rng), strict=True)]
    assert max(errors) < 1e-12
    assert sent["rank"] == 8 - dead == pytest.approx(sum(one.sum() for one in found))


def test_rare_directions_have_high_scores() -> None:
    common, rare = np.tile(np.eye(8)[0], (20, 1)), np.tile(np.eye(8)[1], (2, 1))
    scores = leverage(torch.from_numpy(np.concatenate([common, rare])), inverted([common, rare])["inverse"])
    assert torch.allclose(scores, torch.tensor([2 / 20] * 20 + [2 / 2] * 2, dtype=torch.float64))


# drawing -------------------------------------------------------------------------------------------------------------
def test_the_first_is_drawn_by_its_score_and_zeros_come_last() -> None:
    tau, rng = np.array([1.0, 0.0, 3.0]), np.random.default_rng(0)
    orders = np.array([drawn(tau, rng) for _ in range(2000)])
    assert np.mean(orders[:, 0] == 2) == pytest.approx(0.75, abs=0.03)
    assert (orders[:, 2] == 1).all() and (np.sort(orders) == [0, 1, 2]).all()


@given(st.lists(st.tuples(st.floats(0, 6), st.integers(0, 9)), max_size=6), st.integers(0, 30))
def test_the_buffer_is_filled_and_tasks_only_shrink(tasks: list[tuple[float, int]], size: int) -> None:
    shares, counts = np.array([share for share, _ in tasks]), [count for _, count in tasks]
    rooms = allocation(shares, counts, size)
    assert sum(rooms) == min(size, sum(counts)) and all(map(int.__le__, rooms, counts))
    more = allocation(np.append(shares, 1.0), [*counts, 5], size)
    assert all(map(int.__le__, more[:-1], rooms))


def test_tasks_get_rows_in_proportion_to_their_shares() -> None:
    assert allocation(np.array([1.0, 2.0, 3.0]), [100] * 3, 60) == [10, 20, 30]
    assert allocation(np.array([1.0, 2.0, 3.0]), [100, 4, 100], 60) == [14, 4, 42]


def test_buffers_hold_every_task_and_only_what_a_client_saw() -> None:
    bench = Bench("fedcbdr", {"memory": {"size": 6, "policy": "fedcbdr"}}, ClassToy(tasks=2, sizes={(0, 0): 30}))
    outcome = bench.run(rounds=2)
    shares = [float(state["memory"]["host"]["shares"][0]) for state in outcome.clients.values()]
    assert sum(shares) == pytest.approx(2.0) and shares[0] > shares[1]  # relative to the mean client's
    for number, state in outcome.clients.items():
        kept = stored(state["memory"])
        assert len(kept) == 6
        assert set(kept.ids) <= set(bench.stream.data(number, 0).ids)


def test_an_older_task_keeps_the_first_that_were_drawn() -> None:
    bench = Bench("fedcbdr", {"memory": {"size": 6, "policy": "fedcbdr"}}, ClassToy(tasks=2))
    stream = bench.change(stream=ClassToy(tasks=3, classes=6))
    first, second = stream.run(rounds=2).clients[0]["memory"], stream.run(rounds=4).clients[0]["memory"]
    tasks = second["host"]["task"].numpy()
    assert set(tasks) == {0, 1} and len(tasks) == second["host"]["stored"] == 6
    kept = stored(second).ids[tasks == 0]
    assert len(kept) < len(stored(first)) and (kept == stored(first).ids[: len(kept)]).all()
    assert set(stored(second).y[tasks == 1].tolist()) <= {2, 3}


# temperatures --------------------------------------------------------------------------------------------------------
def loss_from_the_paper(z: np.ndarray, y: np.ndarray, old: int, part: FedCBDR) -> float:
    """Eq. 7 sample by sample; the first `old` classes are old."""
    groups: dict[bool, list[float]] = {True: [], False: []}
    for row, label in zip(z, y, strict=True):
        scaled = np.concatenate([row[:old] / part.old_temperature, row[old:] / part.new_temperature])
        weight = part.old_weight if label < old else part.new_weight
        groups[label < old].append(weight * (np.log(np.exp(scaled).sum()) - scaled[label]))
    return float(sum(np.mean(losses) for losses in groups.values() if losses))


@pytest.mark.parametrize("labels", [[0, 1, 2, 3, 2], [2, 3], [0, 1, 1]])
def test_the_loss_is_eq_7(labels: list[int]) -> None:
    bench = Bench("fedcbdr", stream=ClassToy(tasks=2))
    part, client = FedCBDR(0.8, 1.2, 1.4, 0.7), bench.client("fedcbdr", round_index=2)
    part.start(client)
    z = torch.randn(len(labels), 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    step: Any = SimpleNamespace(state=client.state, all_outputs=z, all_y=torch.tensor(labels))
    expected = loss_from_the_paper(z.numpy(), np.array(labels), 2, part)
    assert float(part.objective(step)) == pytest.approx(expected, rel=1e-6)


def test_the_first_task_is_plain_cross_entropy_over_the_classes_so_far() -> None:
    bench = Bench("fedcbdr", stream=ClassToy(tasks=2))
    client = bench.client("fedcbdr")
    FedCBDR().start(client)
    z, y = torch.randn(5, 4, generator=torch.Generator().manual_seed(2)), torch.tensor([0, 1, 1, 0, 1])
    step: Any = SimpleNamespace(state=client.state, all_outputs=z, all_y=y)
    assert torch.allclose(FedCBDR().objective(step), torch.nn.functional.cross_entropy(z[:, :2], y))
