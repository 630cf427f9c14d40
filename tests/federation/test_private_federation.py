"""Protections on real Flower processes: the same bits as the protected simulation, from nothing but masked vectors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.federation.field import Field, events, field, outcome, simulated

pytest.importorskip("flwr", reason="the extra `flower` is not installed")
pytestmark = [pytest.mark.federation, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Field]:
    with field(tmp_path_factory.mktemp("private"), 3) as made:
        yield made


@pytest.mark.parametrize(
    ("name", "method", "sets"),
    [
        ("secure", "fedgp+der", ["privacy.secure_aggregation=true"]),
        ("both", "fedavg", ["privacy.secure_aggregation=true", "privacy.dp.noise=0.5", "privacy.dp.seed=1"]),
        ("local", "fedavg", ["privacy.dp.kind=local", "privacy.dp.noise=0.1", "privacy.dp.seed=1"]),
    ],
)
def test_protected_clients_equal_a_protected_simulation(three: Field, name: str, method: str, sets: list[str]) -> None:
    recipe = three.recipe(*sets, method=method)
    out = three.serve(recipe, name)
    assert outcome(out) == outcome(simulated(recipe, three.folder / f"{name}-reference"))
    assert all("absent" not in event for event in events(out, "phase"))


def test_a_client_killed_in_the_middle_of_the_protocol_comes_back(three: Field, tmp_path: Path) -> None:
    recipe = three.recipe("privacy.secure_aggregation=true", method="fedavg", rounds=2)
    killed = []

    def hurt(event: dict[str, object]) -> None:
        if event["event"] == "phase" and not killed:
            killed.append(three.sites[1].kill("worker"))

    out = three.serve(recipe, "hurt", hurt)
    assert killed and outcome(out)["model"] == outcome(simulated(recipe, tmp_path / "reference"))["model"]
