"""The exact solver of gradient matching where float64 ends: floors, vanishing sums, results worse than gbar."""

from __future__ import annotations

import numpy as np
import pytest

from everfed.methods.project import matching_solvers
from everfed.methods.project.matching_solvers import Dual, Vector, exact

HALF = np.array([0.5, 0.5])


def opposite(residue: float) -> Dual:
    """Two unit updates whose mean has the norm `residue`."""
    product = -1.0 + 2.0 * residue**2
    return Dual(np.array([[1.0, product], [product, 1.0]]), HALF, 0.5)


@pytest.mark.parametrize(("residue", "vanishes"), [(5e-9, True), (5e-8, True), (5e-7, False), (0.5, False)])
def test_a_sum_vanishes_where_the_rounding_of_inner_products_hides_it(residue: float, vanishes: bool) -> None:
    """1e-8 is the floor; up to 1e-7 of its terms a norm is noise, for its square is 1e-14 of theirs."""
    assert opposite(residue).vanishes(HALF) is vanishes


def test_coarser_floors_are_tried_until_one_is_good_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    floors: list[float] = []

    def walked(dual: Dual) -> tuple[Vector, float, int]:
        floors.append(dual.floor)
        return HALF, {1e-8: 1.0, 1e-6: 0.1, 1e-4: 0.01}[dual.floor], 2

    monkeypatch.setattr(matching_solvers, "_active_set", walked)
    assert exact(opposite(0.5), 0.5)[2] == 4 and floors == [1e-8, 1e-6]
    floors.clear()
    assert exact(opposite(0.5), 1e-9)[2] == 6 and floors == [1e-8, 1e-6, 1e-4]


@pytest.mark.parametrize(("gamma", "used"), [((0.5, 0.5), True), ((1.0, 0.0), False)])
def test_weights_that_serve_an_update_worse_than_the_mean_are_not_used(
    gamma: tuple[float, float], used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """<g_i, gbar> = 0.05 for both; with Gamma = (1, 0) the second falls to 0.05 - 0.9 lam."""
    dual = Dual(np.array([[1.0, -0.9], [-0.9, 1.0]]), HALF, 0.5)
    monkeypatch.setattr(matching_solvers, "_active_set", lambda dual: (np.array(gamma), 0.0, 1))
    assert (exact(dual, 1e-9)[1] > 0) is used
