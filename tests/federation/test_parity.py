"""A SuperLink and SuperNodes as real processes on loopback give the eager engine's bits."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path

import pytest

from tests.federation.field import Field, Site, events, field, outcome, simulated
from tests.support.waiting import HANG

pytest.importorskip("flwr", reason="the extra `flower` is not installed")
pytestmark = pytest.mark.federation


@pytest.mark.usefixtures("patient")
def test_two_clients_equal_a_simulation_bit_for_bit(tmp_path: Path) -> None:
    with field(tmp_path, 2) as small:
        recipe = small.recipe(method="fedgp+der")
        out = small.serve(recipe, "run")
        assert outcome(out) == outcome(simulated(recipe, tmp_path / "reference"))
        connected = [event for event in events(out, "client") if event["kind"] == "connected"]
        assert {event["reason"] for event in connected} == {"site-0", "site-1"}  # again after a pause, perhaps
        assert all(site.steps() for site in small.sites.values())
        for site in small.sites.values():
            assert_answers_nobody_else(site)


def assert_answers_nobody_else(site: Site) -> None:
    """The SuperNode listens on loopback alone: for its own calls of the SuperLink, and for its executor, which has a
    secret. The worker's unix socket belongs to the owner alone."""
    found = {child.name: listening(child.process.pid) for child in site.children if child.process}
    assert found["the worker"] == set()
    assert sorted(status(port) for port in found["the supernode"]) == [403, 404]
    assert stat.S_IMODE((site.folder / "worker.sock").stat().st_mode) == 0o600


def status(port: int) -> int:
    """What a caller without the secret is answered."""
    connection = HTTPConnection("127.0.0.1", port, timeout=HANG)
    connection.request("POST", "/v1/runtime/acquire-task", body=b"")
    return connection.getresponse().status


def listening(pid: int) -> set[int]:
    """The TCP ports on which a process listens."""
    sockets = set()
    for number in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            sockets.add(os.readlink(f"/proc/{pid}/fd/{number}"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:  # the state of a socket that listens
                found.add(int(fields[1].rpartition(":")[2], 16))
    return found


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
