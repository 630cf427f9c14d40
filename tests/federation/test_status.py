"""The status of a federation, read from its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from everfed.core.spans import NAMED, spans
from everfed.federation.roster import ROSTER
from everfed.federation.serving import IDENTITY
from everfed.federation.status import status


def federation(folder: Path, clients: int, *events: dict[str, Any]) -> Path:
    (folder / "recipe.toml").write_text("")
    (folder / IDENTITY).write_text('{"epoch": 2}')
    (folder / ROSTER).write_text(json.dumps({f"site-{client}": client for client in range(clients)}))
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def phase(index: int, clients: int, **more: Any) -> dict[str, Any]:
    """As a run reports it: names of few clients, a short text for many."""
    numbers = list(range(clients))
    return {"event": "phase", "round": index, "phase": "train", "repeat": 0,
            "clients": numbers if clients <= NAMED else spans(numbers), **more}  # fmt: skip


@pytest.mark.parametrize("clients", [3, NAMED, NAMED + 1, 1000])
def test_answers_are_counted_however_many_clients_there_are(tmp_path: Path, clients: int) -> None:
    absent = {"absent": {"1": "late: no answer in time"}}
    found = status(federation(tmp_path, clients, phase(0, clients), phase(1, clients, **absent), phase(2, clients)))
    assert [one["answers"] for one in found["clients"]] == [3, 2, *[3] * (clients - 2)]
    assert (found["round"], found["epoch"], found["state"]) == (3, 2, "unfinished")


def test_rounds_that_were_run_again_count_once(tmp_path: Path) -> None:
    again = ({"event": "resume", "round": 1}, {"event": "start", "round": 1})
    found = status(federation(tmp_path, 2, *(phase(i, 2) for i in range(3)), *again, phase(1, 2)))
    assert [one["answers"] for one in found["clients"]] == [2, 2]
    assert found["round"] == 2


def test_the_last_trouble_of_a_client_is_named(tmp_path: Path) -> None:
    def happened(client: int, kind: str, reason: str) -> dict[str, Any]:
        return {"event": "client", "client": client, "kind": kind, "reason": reason}

    events = (happened(0, "connected", "site-0"), happened(0, "late", "slow"), happened(0, "failed", "no camera"))
    found = status(federation(tmp_path, 2, *events, happened(0, "gone", "left"), {"event": "fault", "message": "X: y"}))
    assert found["state"] == "failed"
    first, second = found["clients"]
    assert (first["state"], first["failures"], first["trouble"]) == ("gone", 2, "no camera")
    assert (second["state"], second["failures"], second["trouble"]) == ("unknown", 0, "")
