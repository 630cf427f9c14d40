"""Executing a run in its folder: store, checkpoints, engine and runner, and what is said and kept of it.

`estimate` executes the first rounds alone, to see what a run would cost.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch

from everfed import engines, privacy
from everfed.core.context import PlaceKey
from everfed.core.engine import Engine
from everfed.core.events import Observer
from everfed.core.option import EvalOptions
from everfed.core.phase import EVALUATE
from everfed.core.server import Runner, RunState
from everfed.core.tree import on_device
from everfed.engines.group import Group
from everfed.engines.ranks import RankCheckpoints
from everfed.errors import DataError
from everfed.methods import monitor
from everfed.session import saved_model
from everfed.session.assembly import Run, fingerprint
from everfed.session.reporting import announce, buffer_reporter, fan_out, report_end, report_fault
from everfed.session.result import result, save_pictures
from everfed.store.checkpoint import Checkpoints, latest, numbers
from everfed.store.clients import ClientStore
from everfed.store.event_log import EventLog
from everfed.store.ledger import LedgerFile
from everfed.store.run import RunFolder

LEDGER = "ledger.jsonl"  # of a federation: what its clients were asked to reveal


class BuildEngine(Protocol):
    """Makes the engine of a run whose clients are elsewhere. durable: from where a run that is killed now goes on."""

    def __call__(self, run: Run, notify: Observer, durable: Callable[[], PlaceKey]) -> Engine: ...


def execute(
    run: Run,
    folder: RunFolder,
    observers: Sequence[Observer],
    checkpoint_every: float,
    build_engine: BuildEngine | None = None,
) -> dict[str, Any]:
    """Run, or go on from the newest checkpoint, to the end; returns what result.json holds. The engine is the recipe's,
    or what `build_engine` makes."""
    torch.set_num_threads(1)  # results are exact only at one thread; engines use the cores in other ways
    group = engines.join(run.recipe.engine)
    if group is not None and not group.leads:
        return _drive(run, folder, lambda event: None, checkpoint_every, group)
    if not numbers(folder.checkpoint):  # a resumed run, wherever it goes on, must read vectors as they were written
        folder.note(memory_format=engines.memory_format(run.recipe.engine))
    log = EventLog(folder.events)
    everyone: list[Observer] = [log, *observers]
    try:
        return _drive(run, folder, fan_out(everyone), checkpoint_every, group, build_engine)
    except BaseException as error:
        fault = folder.fault(error) or error
        report_fault(everyone, fault)
        if fault is not error:
            raise fault from error
        raise
    finally:
        log.close()


def _drive(
    run: Run,
    folder: RunFolder,
    notify: Observer,
    checkpoint_every: float,
    group: Group | None,
    build_engine: BuildEngine | None = None,
) -> dict[str, Any]:
    """Open what a run works with, let the runner go to the end, write down what came of it."""
    recipe, setup, of_recipe = run.recipe, run.setup, fingerprint(run)
    store = ClientStore(folder.clients, engines.state_budget(recipe.engine))
    alone = Checkpoints(folder.checkpoint, store, checkpoint_every, of_recipe)
    state = latest(folder.checkpoint, store, of_recipe)
    checkpoints = alone if group is None else RankCheckpoints(alone, group)
    where = engines.device(recipe.engine)
    if state is not None:
        alone.durable = state.place
        state.server = {name: on_device(own, where) for name, own in state.server.items()}
    if build_engine is None:
        engine, ledger = engines.build(recipe.engine, setup, store, run.build_module, notify, group), None
    else:
        engine, ledger = build_engine(run, notify, lambda: alone.durable), LedgerFile(folder.path / LEDGER)
    engine = privacy.wrap(engine, setup, str(where), notify, ledger)
    try:
        announce(notify, run, state)
        report_buffers = buffer_reporter(setup, store, group, notify) if build_engine is None else None
        leads = group is None or group.leads
        account = privacy.accounting(setup, folder.path, notify) if leads else None
        keep = _snapshots(folder, run) if recipe.eval.snapshots and leads else None
        save = _saver(checkpoints, notify, report_buffers, account, keep)
        options = recipe.eval.as_options(EvalOptions)
        first = on_device(run.first_model(), where)
        final = Runner(setup, engine, first, options, notify, save, state, monitor.monitors(recipe.monitor)).run()
        _require_data(run, final)
        checkpoints.wait()
        state_bytes = engine.total(store.bytes())
        summary = result(run, final, engine.describe(), state_bytes)
        if leads:
            _save_results(folder, run, engine, final, summary)
        report_end(notify, run, summary, final.seconds)
        return summary
    finally:
        engine.close()
        checkpoints.close()


def _require_data(run: Run, final: RunState) -> None:
    """Raises DataError when no client sent anything but scores in the whole run, because none had a sample. Sample
    counts alone do not show it: under differential privacy they stay on the clients."""
    sent = sum(size for part, size in final.traffic.up.items() if part != EVALUATE)
    if final.samples == 0 and sent == 0:
        raise DataError(
            f"no client had any sample in the whole run: stream.dataset = {run.recipe.stream.dataset!r} has no "
            "data here. Data that lies on real clients is for `everfed serve` and `everfed join`"
        )


def _save_results(folder: RunFolder, run: Run, engine: Engine, final: RunState, summary: dict[str, Any]) -> None:
    """result.json comes last: a folder that has it is finished, and has the rest."""
    saved_model.save(folder, run, final.model)
    save_pictures(folder, run.stream, engine, final)
    folder.write_result(summary)


def _saver(
    checkpoints: Checkpoints | RankCheckpoints,
    notify: Observer,
    report_buffers: Callable[[RunState], None] | None,
    account: Callable[[RunState], None] | None,
    keep: Callable[[RunState], None] | None,
) -> Callable[[RunState, bool], None]:
    """account: records what was released, before anything is sent that follows from it. keep: of the model at a task's
    end."""

    def save(state: RunState, task_end: bool) -> None:
        if account is not None:
            account(state)
        if task_end and report_buffers is not None:
            report_buffers(state)
        if task_end and keep is not None:
            keep(state)
        if checkpoints.offer(state, task_end):
            notify({"event": "checkpoint", "round": state.round})

    return save


def _snapshots(folder: RunFolder, run: Run) -> Callable[[RunState], None]:
    """Keeps the model at the end of every task, as model-taskN.safetensors."""

    def keep(state: RunState) -> None:
        task = run.stream.round(state.round - 1).task
        saved_model.save(folder, run, state.model, folder.snapshot(task))

    return keep


# a dry run ---------------------------------------------------------------------------------------------------------

MEASURED = 2  # rounds; the first has the warm-up in it


class _Enough(Exception):
    """Ends the run after the rounds that are measured."""


def estimate(run: Run) -> dict[str, Any]:
    """Facts and costs of a run, JSON-ready. Seconds and bytes are those of the last measured round times all rounds;
    scoring is not in them. Raises what the run would raise in its first rounds."""
    events: list[dict[str, Any]] = []

    def measure(event: dict[str, Any]) -> None:
        if event.get("round", 0) >= MEASURED:
            raise _Enough
        events.append(event)

    with TemporaryDirectory(prefix="everfed-") as place, contextlib.suppress(_Enough):
        execute(run, RunFolder.create(Path(place) / "run", "", {}), [measure], checkpoint_every=0.0)
    return {**_facts(run), **_costs(run, events)}


def _facts(run: Run) -> dict[str, Any]:
    stream, facts, method = run.stream, run.setup.facts, run.method
    return {
        "method": method.name,
        "parts": [part.name for part in method.parts],
        "stream": stream.name,
        "tasks": stream.tasks,
        "clients": stream.clients,
        "rounds": stream.rounds,
        "input_shape": list(stream.input_shape),
        "classes": stream.classes,
        "model": run.recipe.model.kind,
        "parameters": len(run.first["params"]),
        "output_shape": list(facts.output_shape),
        "reveals": method.reveals(),
    }


def _costs(run: Run, events: list[dict[str, Any]]) -> dict[str, Any]:
    phases = [event for event in events if event["event"] == "phase"]
    last = max((event["round"] for event in phases), default=0)
    of_round = [event for event in phases if event["round"] == last]
    per_round = {key: sum(event[key] for event in of_round) for key in ("seconds", "bytes_up", "bytes_down")}
    rounds = run.stream.rounds
    plan = run.stream.round(0)
    return {
        "samples": sum(len(run.stream.data(client, 0)) for client in plan.participants),
        "seconds_per_round": per_round["seconds"],
        "seconds": rounds * per_round["seconds"],
        "bytes_up": rounds * per_round["bytes_up"],
        "bytes_down": rounds * per_round["bytes_down"],
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
