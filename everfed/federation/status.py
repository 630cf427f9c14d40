"""The status of a federated run and its clients, read from its folder."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from everfed.federation.roster import ROSTER
from everfed.federation.serving import IDENTITY
from everfed.store.event_log import clients_of, events, read_log
from everfed.store.run import RunError, RunFolder

TROUBLES = ("failed", "rejected", "late")


def status(run: Path) -> dict[str, Any]:
    """{state, round, epoch, clients: [{client, name, state, answers, failures, trouble}]}. Raises RunError."""
    folder = RunFolder.open(run)
    if not (run / IDENTITY).exists():
        raise RunError(f"{run} is not a federation, or has not begun: it has no {IDENTITY}")
    names = json.loads((run / ROSTER).read_text()) if (run / ROSTER).exists() else {}
    phases, failed = events(run, "phase"), read_log(run).last_kind == "fault"
    answers = Counter(
        client for event in phases for client in clients_of(event) if str(client) not in event.get("absent", {})
    )
    happened = defaultdict[int, list[dict[str, Any]]](list)
    for event in events(run, "client"):
        happened[event["client"]].append(event)
    return {
        "state": "finished" if folder.result.exists() else "failed" if failed else "unfinished",
        "round": phases[-1]["round"] + 1 if phases else 0,
        "epoch": json.loads((run / IDENTITY).read_text())["epoch"],
        "clients": [
            _client(client, name, answers[client], happened[client])
            for name, client in sorted(names.items(), key=lambda one: one[1])
        ],
    }


def _client(client: int, name: str, answers: int, own: list[dict[str, Any]]) -> dict[str, Any]:
    moves = [event["kind"] for event in own if event["kind"] in ("connected", "gone")]
    troubles = [event["reason"] for event in own if event["kind"] in TROUBLES]
    return {
        "client": client,
        "name": name,
        "state": moves[-1] if moves else "unknown",
        "answers": answers,
        "failures": len(troubles),
        "trouble": troubles[-1] if troubles else "",
    }
