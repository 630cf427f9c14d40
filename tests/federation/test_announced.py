"""Real processes: a SuperNode that announces its reply and dies before it sends it delays only its own client."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from tests.federation.field import Field, Site, events, field

pytestmark = [pytest.mark.federation, pytest.mark.slow]
DYING = """
import os
from everfed.federation.flower import supernode


class Dying(supernode.SuperNode):
    def _send(self, reply, seconds):
        if not reply.has_content() or reply.content["header"]["kind"] != "hello":
            supernode.push_objects = lambda *values, **named: os._exit(1)  # the reply is announced by then
        super()._send(reply, seconds)


supernode.SuperNode = Dying
supernode.main()
"""


def dying(site: Site) -> None:
    """From now on this client's SuperNode dies in the middle of every reply to the server's requests."""
    child = site.child("supernode")
    child.command = [sys.executable, "-c", DYING, *list(child.command)[3:]]
    site.kill("supernode")


def test_a_deadline_holds_whatever_one_client_does(tmp_path: Path) -> None:
    with field(tmp_path, 3) as made:
        _serve(made)
    phases = [event for event in events(tmp_path / "run", "phase") if event["phase"] == "train"]
    assert len(phases) == 2 and all(event["absent"].keys() == {"2"} for event in phases)
    # the server waited for a reply that was announced, 180 s and more, with a deadline of 15 s
    assert max(event["seconds"] for event in phases) < 180


def _serve(made: Field) -> None:
    begun: list[Any] = []

    def observe(event: dict[str, Any]) -> None:
        if event["event"] == "start" and not begun:
            begun.append(event)
            dying(made.sites[2])

    made.serve(made.recipe("federation.deadline=25.0"), "run", observe)
