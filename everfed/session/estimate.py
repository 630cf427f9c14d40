"""What a run would be and cost: checked, and measured on its first two rounds in a folder that is removed."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from everfed.session.assembly import Assembly
from everfed.session.execution import execute
from everfed.store.run import RunFolder

MEASURED = 2  # rounds; the first has the warm-up in it


class _Enough(Exception):
    """Ends the run after the rounds that are measured."""


def estimate(assembly: Assembly) -> dict[str, Any]:
    """Facts and costs of a run, JSON-ready. Seconds and bytes are those of the last measured round times all rounds;
    scoring is not in them. Raises what the run would raise in its first rounds."""
    events: list[dict[str, Any]] = []

    def measure(event: dict[str, Any]) -> None:
        if event.get("round", 0) >= MEASURED:
            raise _Enough
        events.append(event)

    with TemporaryDirectory(prefix="everfed-") as place, contextlib.suppress(_Enough):
        execute(assembly, RunFolder.create(Path(place) / "run", "", {}), [measure], checkpoint_every=0.0)
    return {**_facts(assembly), **_costs(assembly, events)}


def _facts(assembly: Assembly) -> dict[str, Any]:
    stream, facts, method = assembly.stream, assembly.setup.facts, assembly.method
    return {
        "method": method.name,
        "parts": [part.name for part in method.parts],
        "stream": stream.name,
        "tasks": stream.tasks,
        "clients": stream.clients,
        "rounds": stream.rounds,
        "input_shape": list(stream.input_shape),
        "classes": stream.classes,
        "model": assembly.recipe.model.kind,
        "parameters": len(assembly.first["params"]),
        "output_shape": list(facts.output_shape),
        "reveals": method.reveals(),
    }


def _costs(assembly: Assembly, events: list[dict[str, Any]]) -> dict[str, Any]:
    phases = [event for event in events if event["event"] == "phase"]
    last = max((event["round"] for event in phases), default=0)
    of_round = [event for event in phases if event["round"] == last]
    per_round = {key: sum(event[key] for event in of_round) for key in ("seconds", "bytes_up", "bytes_down")}
    rounds = assembly.stream.rounds
    plan = assembly.stream.round(0)
    return {
        "samples": sum(len(assembly.stream.data(client, 0)) for client in plan.participants),
        "seconds_per_round": per_round["seconds"],
        "seconds": rounds * per_round["seconds"],
        "bytes_up": rounds * per_round["bytes_up"],
        "bytes_down": rounds * per_round["bytes_down"],
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
