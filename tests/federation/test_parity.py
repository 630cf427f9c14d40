"""A SuperLink and SuperNodes as real processes on loopback give the eager engine's bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.federation.field import Field, events, field, outcome, simulated

pytest.importorskip("flwr", reason="the extra `flower` is not installed")
pytestmark = pytest.mark.federation


def test_two_clients_equal_a_simulation_bit_for_bit(tmp_path: Path) -> None:
    with field(tmp_path, 2) as small:
        recipe = small.recipe(method="fedgp+der")
        out = small.serve(recipe, "run")
        assert outcome(out) == outcome(simulated(recipe, tmp_path / "reference"))
        assert {event["reason"] for event in events(out, "client")} == {"site-0", "site-1"}
        assert all(site.steps() for site in small.sites.values())


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Field]:
    with field(tmp_path_factory.mktemp("three"), 3) as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedgp+der", "fedssi", "coordinated", "stamp", "mfcl"])
def test_three_clients_equal_a_simulation(three: Field, method: str) -> None:
    """One federation serves all of them, one after the other."""
    recipe = three.recipe(method=method)
    out = three.serve(recipe, method)
    assert outcome(out) == outcome(simulated(recipe, three.folder / f"{method}-reference"))
