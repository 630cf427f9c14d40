"""FedRAN (Arockiaraj et al., 2026): ridge regression on random features from low-rank summaries."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everfed.errors import CompositionError
from everfed.methods import registry as methods
from everfed.methods.common.layers import head_inputs
from everfed.methods.features.fedran import FedRAN, merged, solve_low_rank
from everfed.methods.features.ridge import projection
from tests.support.rehearsal_free import ClassToy
from tests.support.toy import Bench, Outcome

M = 12


def bench(**options: object) -> Bench:
    return Bench("fedran", {"fedran": {"width": M, "rank": M, "penalty": 3.0, **options}}, stream=ClassToy(tasks=2))


def hidden(one: Bench, client: int, task: int) -> tuple[np.ndarray, np.ndarray]:
    """(H, Y) of a client's samples of a task, at the first model, which nothing trains."""
    data = one.stream.data(client, task)
    module = one.build_module().eval()
    with torch.no_grad(), head_inputs(module) as seen:
        module(one.stream.inputs(data.x))
    found = seen[0].double().numpy()
    matrix = projection(0, found.shape[1], M, torch.device("cpu")).double().numpy()
    return np.maximum(found @ matrix, 0.0), np.eye(4)[data.y.numpy()]


def head(one: Bench, outcome: Outcome) -> np.ndarray:
    entry = next(entry for entry in one.layout().params if entry.name.endswith("random"))
    return entry.view(outcome.params).double().numpy().T


def test_with_full_rank_the_head_is_the_ridge_regression_of_all_data() -> None:
    one = bench()
    parts = [hidden(one, client, task) for task in range(2) for client in range(2)]
    h, y = (np.concatenate(rows) for rows in zip(*parts, strict=True))
    expected = np.linalg.solve(h.T @ h + 3.0 * np.eye(M), h.T @ y)
    error = np.abs(head(one, one.run()) - expected).max() / np.abs(expected).max()
    assert error < 1e-6  # the head is stored in float32
    cosine = head(one, bench(classifier="cosine").run())
    assert np.abs(cosine - expected / np.linalg.norm(expected, axis=0)).max() < 1e-6


@pytest.mark.parametrize("rank", [1, 3, 5])
def test_truncated_summaries_are_merged_over_clients_then_over_tasks(rank: int) -> None:
    """By eigenvectors of G, which numpy finds: the same subspaces."""

    def cut(gram: np.ndarray) -> np.ndarray:
        values, vectors = np.linalg.eigh(gram)
        return (vectors[:, -rank:] * values[-rank:]) @ vectors[:, -rank:].T

    one, total, products = bench(rank=rank), np.zeros((M, M)), np.zeros((M, 4))
    for task in range(2):
        parts = [hidden(one, client, task) for client in range(2)]
        spatial = cut(sum(cut(h.T @ h) for h, _ in parts))
        total = cut(total + spatial)
        products += sum(h.T @ y for h, y in parts)
    outcome = one.run()
    summary = outcome.state.server["fedran"]["summary"]
    assert summary.shape == (M, rank)
    assert np.abs((summary @ summary.T).numpy() - total).max() < 1e-4 * np.abs(total).max()  # features are float32
    expected = np.linalg.solve(total + 3.0 * np.eye(M), products)
    assert np.abs(head(one, outcome) - expected).max() < 1e-4 * np.abs(expected).max()


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 1000))
def test_nothing_is_lost_while_the_rank_suffices(sizes: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    summaries = [torch.from_numpy(rng.standard_normal((6, size))) for size in sizes]
    gram = torch.stack([summary @ summary.T for summary in summaries]).sum(0)
    found = merged(summaries, 6)
    assert torch.allclose(found @ found.T, gram, atol=1e-10)
    assert torch.allclose(merged(summaries[::-1], 6) @ merged(summaries[::-1], 6).T, gram, atol=1e-10)
    products = torch.from_numpy(rng.standard_normal((6, 2)))
    exact = torch.linalg.solve(gram + 0.5 * torch.eye(6).double(), products)
    assert torch.allclose(solve_low_rank(found, products, 0.5), exact, atol=1e-9)


def test_a_client_sends_r_columns() -> None:
    one = bench(rank=2)
    client = one.client("fedran", phase="statistics")
    sent = FedRAN(width=M, rank=2)._sums(client)
    assert sent["summary"].shape == (M, 2) and sent["products"].shape == (M, 2) and "gram" not in sent


def test_groups_are_refused_and_the_server_sees_every_summary() -> None:
    with pytest.raises(CompositionError, match="groups"):
        methods.build("fedran", {"fedran": {"groups": 3}})
    assert methods.build("fedran").reveals() == {"statistics": ["fedran"]}
