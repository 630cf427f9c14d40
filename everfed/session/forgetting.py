"""Exact unlearning: samples are withdrawn from a finished run, which is then bit for bit the run that never saw them.

A part that can do this has phases on request: clients send what their withdrawn samples added, the server takes it out
again and makes the model anew. Every task's samples are visited, since a client holds those of one task at a time.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from everfed import engines, privacy
from everfed.core.context import Place, Setup
from everfed.core.events import Observer
from everfed.core.option import EvalOptions
from everfed.core.phase import EVALUATE, ON_REQUEST, Cohort, Phase
from everfed.core.server import Runner, plan_of
from everfed.core.stream import RoundPlan
from everfed.core.tree import on_device
from everfed.data.withdrawn import Withdrawn
from everfed.errors import CompositionError, UserError
from everfed.session import saved_model
from everfed.session.assembly import Run, fingerprint
from everfed.session.result import result
from everfed.store.checkpoint import Checkpoints, latest
from everfed.store.clients import ClientStore
from everfed.store.files import file_digest
from everfed.store.ledger import AppendedFile
from everfed.store.run import RunFolder

FORGOTTEN = "forgotten.jsonl"  # in a run's folder: what was withdrawn from it


def require_able(setup: Setup) -> None:
    """Raises CompositionError for a method whose model cannot be freed of single samples exactly."""
    if not any(phase.rounds is ON_REQUEST for phase in setup.method.own_phases):
        raise CompositionError(
            f"method {setup.method.name!r} cannot forget exactly: its model is made of no exact sums over samples, as "
            "those of ridge and ranpac are with sums = 'fixed', groups = 0 and train_first = false. Train again "
            "without the samples: everfed run RUN/recipe.toml --set stream.withdrawn.clients=[3] --out NEW"
        )


def withdraw(runner: Runner, withdrawn: Withdrawn) -> None:
    """Take samples out of what a finished run knows, and make its model anew."""
    setup, index = runner.setup, runner.setup.stream.rounds - 1
    clients = tuple(range(setup.stream.clients))
    position = len(setup.method.own_phases) + 3  # after all phases of the last round
    for number, phase in enumerate(one for one in setup.method.own_phases if one.rounds is ON_REQUEST):
        named = replace(phase, broadcast=lambda server: withdrawn.to_tree())
        tasks = range(1 if phase.cohort is Cohort.SERVER else setup.stream.tasks)
        for task in tasks:
            plan = RoundPlan(task, clients, dict.fromkeys(clients, task))
            runner.phase(named, Place(index, plan, task, position + number))


def forget(run: Run, folder: RunFolder, given: Mapping[str, Any], notify: Observer) -> dict[str, Any]:
    """Withdraw the samples that `given` names from a finished run; returns what result.json holds then."""
    withdrawn = Withdrawn.of(given, run.stream.clients, run.stream.classes)
    recipe, setup, of_recipe, started = run.recipe, run.setup, fingerprint(run), time.monotonic()
    require_able(setup)
    before = file_digest(folder.model)
    store = ClientStore(folder.clients, engines.state_budget(recipe.engine))
    checkpoints = Checkpoints(folder.checkpoint, store, 0.0, of_recipe)
    state, where = latest(folder.checkpoint, store, of_recipe), engines.device(recipe.engine)
    if state is None:
        raise UserError(f"{folder.path} has no checkpoint any more, and with it no sums to withdraw samples from")
    state.server = {name: on_device(own, where) for name, own in state.server.items()}
    engine = engines.build(recipe.engine, setup, store, run.build_module, notify, None)
    engine = privacy.wrap(engine, setup, str(where), notify)
    try:
        runner = Runner(setup, engine, run.first_model(), recipe.eval.as_options(EvalOptions), notify, state=state)
        withdraw(runner, withdrawn)
        last = setup.stream.rounds - 1
        runner.evaluation.run(Phase(EVALUATE), Place(last, plan_of(setup, last)))
        checkpoints.offer(state, must=True)
        checkpoints.wait()
        summary = result(run, state, engine.describe(), store.bytes())
    finally:
        engine.close()
        checkpoints.close()
    for task in range(setup.stream.tasks):  # models of earlier tasks know the samples
        folder.snapshot(task).unlink(missing_ok=True)
    saved_model.save(folder, run, state.model)
    folder.write_result(summary)
    _record(folder.path, withdrawn, before, file_digest(folder.model), time.monotonic() - started)
    return summary


def _record(folder: Path, withdrawn: Withdrawn, before: str, after: str, seconds: float) -> None:
    what: Mapping[str, Any] = {key: list(values) for key, values in asdict(withdrawn).items() if values}
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    digests = {"model_before": before, "model_after": after}
    AppendedFile(folder / FORGOTTEN).add({"time": now, "withdrawn": what, **digests, "seconds": round(seconds, 3)})
