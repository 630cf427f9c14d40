"""The projection of A-GEM and FedGP (Dai et al., 2023, Eq. 4): algebra and the first-order guarantee."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from everfed.core.replica import project
from everfed.methods.project.fedgp import finite


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """(g, reference) of 1 to 50 float32 numbers: plain, sparse, of very different sizes, or nearly opposite."""
    size, kind = draw(st.integers(1, 50)), draw(st.sampled_from(["plain", "sparse", "uneven", "opposite"]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    g, reference = rng.normal(size=(2, size))
    if kind == "sparse":
        g, reference = g * rng.integers(0, 2, size), reference * rng.integers(0, 2, size)
        reference[0] = 1.0
    if kind == "uneven":
        g, reference = g * 10.0 ** rng.integers(-4, 3, size), reference * 10.0 ** rng.integers(-4, 3, size)
    if kind == "opposite":
        g = -reference * rng.uniform(0.1, 10) + 1e-3 * g
    return torch.from_numpy(g).float(), torch.from_numpy(reference).float()


@given(pairs())
@settings(max_examples=300)
def test_the_result_never_conflicts(pair: tuple[Tensor, Tensor]) -> None:
    g, reference = pair
    projected = project(g, reference)
    product = float(projected.double() @ reference.double())
    assert product >= -1e-6 * float(g.norm() * reference.norm())


@given(pairs())
@settings(max_examples=300)
def test_without_a_conflict_nothing_changes(pair: tuple[Tensor, Tensor]) -> None:
    g, reference = pair
    if g.double() @ reference.double() < 0:
        g = -g
    if torch.dot(g, reference) >= 0:
        assert torch.equal(project(g, reference), g)


@given(pairs())
@settings(max_examples=300)
def test_it_never_lengthens(pair: tuple[Tensor, Tensor]) -> None:
    g, reference = pair
    assert project(g, reference).norm() <= g.norm() * (1 + 1e-6)


@given(pairs())
@settings(max_examples=300)
def test_projecting_twice_is_projecting_once(pair: tuple[Tensor, Tensor]) -> None:
    g, reference = pair
    once = project(g, reference)
    assert torch.allclose(project(once, reference), once, rtol=1e-5, atol=1e-5 * float(g.norm()) + 1e-12)


@given(pairs(), st.floats(1e-3, 1e3))
@settings(max_examples=300)
def test_the_length_of_the_reference_does_not_matter(pair: tuple[Tensor, Tensor], scale: float) -> None:
    g, reference = pair[0].double(), pair[1].double()
    assert torch.allclose(project(g, scale * reference), project(g, reference), rtol=1e-9, atol=1e-9)


@given(pairs(), st.floats(1e-2, 1e2))
@settings(max_examples=200)
def test_the_opposite_of_the_reference_becomes_zero(pair: tuple[Tensor, Tensor], scale: float) -> None:
    reference = pair[1].double()
    projected = project(-scale * reference, reference)
    assert projected.norm() <= 1e-12 * scale * reference.norm()


@pytest.mark.parametrize(("g", "reference", "expected"), [(-3.0, 2.0, 0.0), (3.0, 2.0, 3.0), (0.0, 2.0, 0.0)])
def test_one_parameter(g: float, reference: float, expected: float) -> None:
    assert project(torch.tensor([g]), torch.tensor([reference])).tolist() == [expected]


def test_two_parameters() -> None:
    assert project(torch.tensor([1.0, -1.0]), torch.tensor([0.0, 1.0])).tolist() == [1.0, 0.0]
    assert project(torch.tensor([1.0, 0.0]), torch.tensor([-1.0, 1.0])).tolist() == [0.5, 0.5]


def test_no_reference_and_a_zero_reference_leave_the_gradient_alone() -> None:
    g = torch.tensor([1.0, -2.0])
    assert project(g, None) is g
    assert torch.equal(project(g, torch.zeros(2)), g)
    assert torch.equal(project(torch.zeros(2), torch.tensor([1.0, -1.0])), torch.zeros(2))


def test_a_reference_too_small_to_square_counts_as_zero() -> None:
    g = torch.tensor([1.0, -1.0])
    assert torch.equal(project(g, torch.tensor([0.0, 1e-20])), g)


def test_the_gradient_is_not_changed_in_place() -> None:
    g, reference = torch.tensor([1.0, -1.0]), torch.tensor([0.0, 1.0])
    project(g, reference)
    assert g.tolist() == [1.0, -1.0] and reference.tolist() == [0.0, 1.0]


def test_long_vectors_are_multiplied_in_float64() -> None:
    """A million ones and a small conflict: in float32 the product of 1e-3 would drown."""
    size = 1_500_000
    g, reference = torch.ones(size), torch.ones(size)
    g[size // 2 :] = -1.0
    g[-1] -= 0.5
    projected = project(g, reference)
    assert float(projected.double() @ reference.double()) >= -1e-6 * float(g.norm() * reference.norm())
    assert not torch.equal(projected, g)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_reference_that_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(FloatingPointError, match="the reference is not finite"):
        finite(torch.tensor([1.0, bad]), "the reference")
    fine = torch.ones(2)
    assert finite(fine, "the reference") is fine


@pytest.mark.parametrize("step", [1e-2, 1e-3, 1e-4])
@given(seed=st.integers(0, 10_000))
@settings(max_examples=40)
def test_first_order_guarantee(step: float, seed: int) -> None:
    """L(w - a Project(g)) <= L(w) + C a^2 on a quadratic, with C the curvature along the step."""
    generator = torch.Generator().manual_seed(seed)
    a, b, w, g = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((8, 5), (8,), (5,), (5,)))

    def loss(at: Tensor) -> Tensor:
        return 0.5 * (a @ at - b).square().sum()

    reference = a.t() @ (a @ w - b)
    projected = project(g, reference)
    curvature = 0.5 * (a @ projected).square().sum()
    assert loss(w - step * projected) <= loss(w) + (1 + 1e-9) * curvature * step**2 + 1e-12


def test_without_projection_the_guarantee_fails() -> None:
    a, w, step = torch.eye(2, dtype=torch.float64), torch.tensor([1.0, 0.0], dtype=torch.float64), 1e-3

    def loss(at: Tensor) -> float:
        return float(0.5 * (a @ at).square().sum())

    reference, g = w, torch.tensor([-1.0, 1.0], dtype=torch.float64)
    allowed = loss(w) + 0.5 * float(g.square().sum()) * step**2
    assert loss(w - step * g) > allowed
    assert loss(w - step * project(g, reference)) <= allowed
