"""Clients that are killed and come back under the same key, in real processes: `everfed serve` and `everfed join`.

A SuperLink takes a key once at a time and misses a SuperNode that was killed only after a while, so the new one is
refused until then, and outlives that."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from everfed.federation.certificates import CA, SECRETS, make_authority, make_client, make_server
from everfed.federation.joining import KEY_REFUSED
from tests.federation.field import (
    alive,
    descendants,
    events,
    everfed,
    expected,
    outcome,
    runs,
    small_recipe,
    until,
)
from tests.support.ports import free_port
from tests.support.waiting import HANG

pytest.importorskip("flwr", reason="the extra `flower` is not installed")
pytestmark = [pytest.mark.federation, pytest.mark.slow]

METHOD = "fedgp+der"  # phases `train` and `reference` in every round


class Party:
    """A server and two clients, each a command in a terminal of its own; TLS and keys are on."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.out = folder, free_port(), folder / "run"
        make_authority(folder / "pki")
        make_server(folder / "pki", ["localhost"])
        self.recipe = small_recipe(folder, 2, method=METHOD, rounds=2)
        for client in range(2):
            make_client(folder / "pki", f"site-{client}")
        self.server = self.serve()
        self.clients = [self.join(client) for client in range(2)]

    def serve(self) -> subprocess.Popen[bytes]:
        words = ["serve", "small-2.toml", "--method", METHOD, "--set", "method.memory.size=10", "--out", "run"]
        words += ["--certificates", "pki", "--port", str(self.port), "--checkpoint-every", "0"]
        return everfed(words, self.folder, "serve.log")

    def join(self, client: int) -> subprocess.Popen[bytes]:
        words = ["join", "--server", f"localhost:{self.port}", "--certificate", f"pki/{CA}", "--poll", "0.3"]
        words += ["--key", f"pki/{SECRETS}/site-{client}", "--name", f"site-{client}", "--client", str(client)]
        return everfed([*words, "--folder", f"c{client}"], self.folder, f"join-{client}.log")

    def in_the_middle(self, client: int) -> None:
        """Until the client has made a step after the first round's training; its reply may not have left."""
        until(lambda: any(event["phase"] == "train" for event in events(self.out, "phase")) or self.server.poll())
        known = self.steps(client)
        until(lambda: self.steps(client) != known or self.server.poll() is not None)
        assert self.server.poll() is None, self.said("serve.log")

    def steps(self, client: int) -> list[str]:
        return sorted(path.name for path in (self.folder / f"c{client}").glob("*/steps/*.safetensors"))

    def said(self, log: str) -> str:
        return (self.folder / log).read_text(errors="replace")

    def close(self) -> None:
        for one in [self.server, *self.clients]:
            one.terminate()
        for one in [self.server, *self.clients]:
            one.wait(HANG)


@contextmanager
def party(folder: Path) -> Iterator[Party]:
    made = Party(folder)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return expected(tmp_path_factory.mktemp("reference"), METHOD)


def ended(two: Party, reference: dict[str, Any]) -> None:
    """The run is over, with the bits that it must have, and client 1 was there twice under the same name."""
    assert two.server.wait(HANG) == 0, two.said("serve.log")[-3000:]
    assert outcome(two.out) == reference
    reported = [event for event in events(two.out, "client") if event["client"] == 1]
    assert [event["reason"] for event in reported if event["kind"] == "connected"] == ["site-1", "site-1"]
    assert any(event["kind"] == "gone" for event in reported)


def test_a_supernode_killed_rejoins_under_its_key(tmp_path: Path, reference: dict[str, Any]) -> None:
    with party(tmp_path) as two:
        two.in_the_middle(1)
        (node,) = [pid for pid in descendants(two.clients[1].pid) if runs(pid, "flower.supernode")]
        os.kill(node, signal.SIGKILL)
        ended(two, reference)
        # it may have been refused before, when it came earlier than its key was enrolled
        _, killed, said = two.said("join-1.log").partition("the supernode ended with code -9; restarting in ")
        refused = re.findall(r"the supernode ended with code 1 \((.*?)\); restarting in (\d+) s", said)
        assert killed and refused and {why for why, _ in refused} == {KEY_REFUSED}
        waits = [int(said.partition(" ")[0]), *(int(wait) for _, wait in refused)]
        assert all(later == 2 * earlier for earlier, later in pairwise(waits))


@pytest.mark.parametrize("gently", [False, True], ids=["all at once", "the supervisor alone"])
def test_a_whole_client_killed_and_started_anew(gently: bool, tmp_path: Path, reference: dict[str, Any]) -> None:
    """With the same folder and the same key. A supervisor takes its processes with it."""
    with party(tmp_path) as two:
        two.in_the_middle(1)
        supervisor = two.clients[1]
        below = descendants(supervisor.pid)
        for pid in [] if gently else below:
            os.kill(pid, signal.SIGKILL)
        supervisor.kill()
        supervisor.wait()
        until(lambda: not any(alive(pid) for pid in below), what="for the processes of a supervisor that was killed")
        two.clients[1] = two.join(1)
        ended(two, reference)


def test_a_key_that_is_not_enrolled_gets_the_reason(tmp_path: Path) -> None:
    """It keeps asking, less and less often, and the run does not mind."""
    with party(tmp_path) as two:
        make_authority(tmp_path / "other")
        make_client(tmp_path / "other", "site-9")
        words = ["join", "--server", f"localhost:{two.port}", "--certificate", f"pki/{CA}", "--name", "site-9"]
        stranger = everfed([*words, "--key", f"other/{SECRETS}/site-9"], tmp_path, "stranger.log")
        try:
            until(lambda: two.said("stranger.log").count(KEY_REFUSED) >= 2)
            assert stranger.poll() is None
            assert two.server.wait(HANG) == 0, two.said("serve.log")[-3000:]
        finally:
            stranger.terminate()
            stranger.wait(HANG)
        assert {event["reason"] for event in events(two.out, "client")} == {"site-0", "site-1"}
