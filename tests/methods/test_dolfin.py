"""DOLFIN: adapters in directions that earlier tasks' inputs do not use."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from everfed.core.message import MODEL
from everfed.methods.pretrained.dolfin import DOLFIN, adapted, grown, outside
from tests.support.rehearsal_free import ClassToy
from tests.support.toy import Bench, Outcome, tiny_vit

RANK = 2


def bench(tasks: int = 2, **options: Any) -> Bench:
    chosen = {"dolfin": {"rank": RANK, "threshold": 0.9, **options}}
    return Bench("dolfin", chosen, ClassToy(tasks=tasks, classes=2 * tasks), module=tiny_vit)


def inputs_of(one: Bench, params: Tensor, task: int) -> dict[str, np.ndarray]:
    """{layer: H (inputs, all clients' tokens)} of a task, in float64."""
    module, seen = one.build_module().double().eval(), dict[str, list[Tensor]]()
    for name in adapted(one.layout()):
        module.get_submodule(name).register_forward_pre_hook(
            lambda _, args, name=name: seen.setdefault(name, []).append(args[0].flatten(0, -2))
        )
    x = torch.cat([one.stream.inputs(one.stream.data(client, task).x) for client in range(2)]).double()
    with torch.no_grad():
        torch.func.functional_call(module, one.layout().named(params.double()), x)
    return {name: torch.cat(rows).numpy().T for name, rows in seen.items()}


def factors(one: Bench, params: Tensor, name: str, task: int) -> tuple[np.ndarray, np.ndarray]:
    a, b = (one.layout().param(f"{name}.lora_{kind}").view(params)[task] for kind in "AB")
    return a.double().numpy(), b.double().numpy()


def memory_of(h: np.ndarray, basis: np.ndarray, threshold: float) -> np.ndarray:
    """Gradient projection memory, direction by direction."""
    u = np.linalg.svd(h - basis @ basis.T @ h, full_matrices=False)[0]
    for direction in u.T:
        held = np.linalg.norm(basis.T @ h) ** 2 if basis.size else 0.0
        if held >= threshold * np.linalg.norm(h) ** 2:
            break
        basis = np.concatenate([basis, direction[:, None]], 1)
    return basis


def projector(rows: np.ndarray) -> np.ndarray:
    return rows.T @ rows


def test_directions_and_memory_are_those_of_the_equations() -> None:
    one = bench()
    first, second = one.run(rounds=2), one.run(rounds=3)
    start, trained = one.model()["params"], first.params
    for name, h in inputs_of(one, start, 0).items():
        a = factors(one, trained, name, 0)[0]
        assert np.abs(projector(a) - projector(np.linalg.svd(h)[0][:, :RANK].T)).max() < 1e-5
    bases = {name: memory_of(h, np.zeros((len(h), 0)), 0.9) for name, h in inputs_of(one, trained, 0).items()}
    for name, h in inputs_of(one, trained, 1).items():
        basis = bases[name]
        kept = first.state.server["dolfin"]["bases"][name].numpy()
        assert kept.shape == basis.shape and np.abs(kept @ kept.T - basis @ basis.T).max() < 1e-5
        a = factors(one, second.params, name, 1)[0]
        expected = np.linalg.svd(h - basis @ basis.T @ h)[0][:, :RANK]
        assert np.abs(projector(a) - projector(expected.T)).max() < 1e-4
        assert np.abs(a @ basis).max() < 1e-6  # span(A) is orthogonal to M


def test_a_stays_and_b_is_trained_on_top_of_earlier_tasks() -> None:
    one = bench()
    first, last = one.run(rounds=3), one.run()
    for name in adapted(one.layout()):
        for task in range(2):
            (a, b), (a_last, b_last) = factors(one, first.params, name, task), factors(one, last.params, name, task)
            assert (a == a_last).all() and (b == b_last).all() == (task == 0)
    assert all(layer.together for layer in one.build_module().modules() if hasattr(layer, "together"))


def test_no_directions_left_give_rows_of_zeros() -> None:
    """With a threshold of 1 the memory holds all that a task gave; a client's inputs of the same task leave none."""
    one = bench(threshold=1.0)
    outcome: Outcome = one.run(rounds=2)
    grams = {name: torch.from_numpy(h @ h.T) for name, h in inputs_of(one, outcome.params, 0).items()}
    for name, gram in grams.items():
        basis = outcome.state.server["dolfin"]["bases"][name]
        assert float(outside(gram, basis)[0].max()) <= 1e-6 * float(gram.diagonal().sum())
    server = one.server("dolfin", {MODEL: outcome.state.model, **outcome.state.server}, round_index=2)
    full = {name: torch.eye(len(gram)).double() for name, gram in grams.items()}
    server.state["bases"] = full
    server.reduced = {"grams": DOLFIN(rank=RANK)._grams(one.client("dolfin", round_index=2))["grams"]}
    DOLFIN(rank=RANK)._choose_directions(server)
    assert all((factors(one, server.model["params"], name, 1)[0] == 0).all() for name in full)


@given(st.integers(0, 1000), st.integers(0, 3), st.floats(0.05, 1.0))
def test_the_memory_holds_the_threshold_with_the_fewest_directions(seed: int, held: int, threshold: float) -> None:
    rng = np.random.default_rng(seed)
    h = rng.standard_normal((5, 9)) * rng.uniform(0.1, 3, (5, 1))
    basis = np.linalg.qr(rng.standard_normal((5, 5)))[0][:, :held]
    found = grown(torch.from_numpy(h @ h.T), torch.from_numpy(basis), threshold).numpy()
    assert np.abs(found.T @ found - np.eye(found.shape[1])).max() < 1e-9
    assert found.shape == memory_of(h, basis, threshold - 1e-9).shape
    assert np.linalg.norm(found.T @ h) ** 2 >= (threshold - 1e-8) * np.linalg.norm(h) ** 2
    assert (found[:, :held] == basis).all()


def test_a_round_without_replies_changes_nothing() -> None:
    one = bench()
    server = one.server("dolfin", {MODEL: one.model()}, reduced={"grams": None})
    DOLFIN(rank=RANK)._choose_directions(server)
    assert torch.equal(server.model["params"], one.model()["params"])
    assert pytest.approx(0) == len(server.state.get("bases", {}))
