"""The personal model of a client of a federation, from its own folder: the last model that it received, with its own
state. Nothing is asked of the server."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from everfed.core.message import MODEL
from everfed.errors import UserError
from everfed.federation.journal import Journal
from everfed.federation.payloads import PayloadCache
from everfed.federation.runs import STEPS, Runs
from everfed.federation.runtime import RuntimeBuilder
from everfed.session.saved_model import Description, describe, personal_module

VECTORS = ("params", "stats", "counters")


def is_client_folder(folder: Path) -> bool:
    return any(folder.glob(f"*/{STEPS}"))


def client_model(folder: Path, build: RuntimeBuilder, run: str = "") -> tuple[nn.Module, Description]:
    """Of the run that was active last, or of `run`, as far as the client has come."""
    known = Runs(folder).known()
    if not known or (run and run not in known):
        raise UserError(f"{folder} has no run {run}; it has: {', '.join(known) or 'none'}")
    place = folder / (run or known[-1])
    journal, payloads = Journal(place / STEPS), PayloadCache(place / "once")
    shared = {key: payloads.newest(MODEL, key) for key in VECTORS}
    if not journal.places or any(value is None for value in shared.values()):
        raise UserError(f"{place} has no model: this client has not taken part in a round yet")
    built = build.assembled((place / "recipe.toml").read_text(), 1.0)
    state = journal.before((journal.places[-1][0] + 1, 0, 0, 0))
    module = personal_module(built, journal.client, state, shared)
    return module, describe(built, module)
