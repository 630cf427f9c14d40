"""The status of a federated run and its clients, read from its folder."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from everfed.federation.roster import ROSTER
from everfed.federation.serving import IDENTITY
from everfed.store.run import RunError, RunFolder


def status(run: Path) -> dict[str, Any]:
    """{state, round, epoch, clients: [{client, name, state, answers, failures, trouble}]}. Raises RunError."""
    folder = RunFolder.open(run)
    if not (run / IDENTITY).exists():
        raise RunError(f"{run} is not a federation, or has not begun: it has no {IDENTITY}")
    events = _events(folder.events)
    names = json.loads((run / ROSTER).read_text()) if (run / ROSTER).exists() else {}
    phases = [event for event in events if event["event"] == "phase"]
    faults = [event for event in events if event["event"] == "fault"]
    return {
        "state": "finished"
        if folder.result.exists()
        else "failed"
        if faults and events[-1] is faults[-1]
        else "unfinished",
        "round": phases[-1]["round"] + 1 if phases else 0,
        "epoch": json.loads((run / IDENTITY).read_text())["epoch"],
        "clients": [_client(client, name, events) for name, client in sorted(names.items(), key=lambda one: one[1])],
    }


def _client(client: int, name: str, events: list[dict[str, Any]]) -> dict[str, Any]:
    own = [event for event in events if event["event"] == "client" and event["client"] == client]
    kinds = Counter(event["kind"] for event in own)
    moves = [event["kind"] for event in own if event["kind"] in ("connected", "gone")]
    troubles = [event["reason"] for event in own if event["kind"] in ("failed", "rejected", "late")]
    phases = [event for event in events if event["event"] == "phase" and client in _clients(event)]
    return {
        "client": client,
        "name": name,
        "state": moves[-1] if moves else "unknown",
        "answers": sum(str(client) not in event.get("absent", {}) for event in phases),
        "failures": kinds["failed"] + kinds["rejected"] + kinds["late"],
        "trouble": troubles[-1] if troubles else "",
    }


def _clients(event: dict[str, Any]) -> list[int]:
    clients = event["clients"]
    return clients if isinstance(clients, list) else []


def _events(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines[:-1] if line]
