"""Protections on real Flower processes: the same bits as the protected simulation, from nothing but masked vectors."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from everfed.privacy.secure_server import TooFewClients
from everfed.recipe import Recipe, to_toml
from tests.federation.field import Field, Site, events, field, outcome, simulated
from tests.support.waiting import HANG

pytest.importorskip("flwr", reason="the extra `flower` is not installed")
pytestmark = [pytest.mark.federation, pytest.mark.slow]


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


SERVER = """
import os, signal, sys
from pathlib import Path
from everfed.federation.flower.link import Address, open_grid
from everfed.federation.serving import Serving, serve
from everfed.recipe import read

def observe(event):
    if event["event"] == "phase":  # the sum is opened, and no checkpoint has it yet
        os.kill(os.getpid(), signal.SIGKILL)

recipe, out, port = sys.argv[1:]
serve(Serving(read(Path(recipe)), Path(out)), lambda: open_grid(Address("127.0.0.1", int(port))), [observe])
"""


def serve_until_a_sum_is_opened(four: Field, recipe: Recipe, out: Path) -> None:
    """A server process that is killed at the worst moment."""
    path = four.folder / "killed.toml"
    path.write_text(to_toml(recipe))
    command = [sys.executable, "-c", SERVER, str(path), str(out), str(four.port)]
    assert subprocess.run(command, timeout=HANG).returncode == -signal.SIGKILL


def test_a_server_killed_after_it_opened_a_sum_resumes_with_the_same_clients_only(tmp_path: Path) -> None:
    """The same sum without the client that is away would reveal that client's reply. Once it is back, the run ends in
    the simulation's bits."""
    from everfed.federation.flower.link import Address, open_grid
    from everfed.federation.serving import Serving, serve

    with field(tmp_path, 4) as four:
        recipe = four.recipe("privacy.secure_aggregation=true", "federation.deadline=30", method="fedavg")
        serve_until_a_sum_is_opened(four, recipe, tmp_path / "run")
        four.sites[3].close()
        with pytest.raises(TooFewClients, match="opened before the server was stopped, with clients 0,1,2,3"):
            serve(Serving(recipe, tmp_path / "run", clients=3), lambda: open_grid(Address("127.0.0.1", four.port)))
        four.sites[3] = Site(four.joining(3))
        out = four.serve(recipe, "run")
    assert outcome(out)["model"] == outcome(simulated(recipe, tmp_path / "reference"))["model"]
