"""From a recipe to a run: builds the stream, the model, the method and the engine, and drives the runner."""

from __future__ import annotations

import contextlib
import json
import platform
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Protocol

import numpy as np
import safetensors.torch
import torch
from torch import nn

import everfed
from everfed import engines, methods, models, privacy, streams
from everfed.core import keeping
from everfed.core.context import Facts, TrainOptions
from everfed.core.engine import Engine
from everfed.core.extras import attach
from everfed.core.fit import on_device
from everfed.core.intake import Spread
from everfed.core.layout import Layout
from everfed.core.method import Method
from everfed.core.optimizer import Optimizer
from everfed.core.part import Model
from everfed.core.runner import EvalOptions, Event, Runner, RunState
from everfed.core.score import score_value
from everfed.core.stream import Stream
from everfed.core.watch import Watcher
from everfed.core.world import Place, World
from everfed.engines.group import Group
from everfed.engines.rank_checkpoints import RankCheckpoints
from everfed.errors import RecipeError, UserError
from everfed.metrics import convergence, language
from everfed.metrics import matrix as accuracy_matrix
from everfed.metrics.scoring import RULES
from everfed.monitor import DriftMonitor, PageHinkley
from everfed.recipe import Recipe
from everfed.store.checkpoint import Checkpoints, latest, numbers
from everfed.store.clients import ClientStore
from everfed.store.files import digest
from everfed.store.png import png
from everfed.store.run import EventLog, RunFolder

Observer = Callable[[Event], None]
PICTURES = 4  # of every task, where a stream draws them
_MOST_LOOKED_AT = 1000  # clients whose states are read at a task's end for what they keep


@dataclass(frozen=True)
class Assembly:
    """The pieces of a run, checked against each other. `build_module` makes the model with its first weights, the extra
    parameters of the method's parts included."""

    recipe: Recipe
    world: World
    build_module: Callable[[], nn.Module]

    @property
    def stream(self) -> Stream:
        return self.world.stream

    @property
    def method(self) -> Method:
        return self.world.method

    def first_model(self) -> Model:
        """The shared model before the first round."""
        layout = self.world.facts.layout
        model = layout.read(self.build_module())
        return {**model, "params": model["params"][: layout.shared].clone()}


def assemble(recipe: Recipe, data_dir: str | None = None, scale: float = 1.0, stream: Stream | None = None) -> Assembly:
    """Build and check everything. Raises the user's errors: unknown keys, a method that does not fit, missing data."""
    engines.check(recipe.engine)
    method = build_method(recipe)
    options = recipe.stream.model_dump()
    seed = int(options.get("seed") or recipe.seed)
    if stream is None:
        stream = streams.build(options, seed, recipe.train.rounds_per_task, data_dir, scale)
    method.fit_stream(stream)
    if recipe.train.logits != "full" and stream.score != "accuracy":
        raise RecipeError(f"train.logits must be 'full' on a stream that is scored by {stream.score}")
    if recipe.train.logits != "full" and not (stream.boundaries or stream.task_ids):
        raise RecipeError(
            "train.logits must be 'full' on a stream that hides its tasks: their classes would give them away"
        )
    kind = recipe.model.kind
    extra = dict(recipe.model.model_extra or {})
    channels_last = engines.memory_format(recipe.engine) == "channels-last"

    def bare_module() -> nn.Module:
        return models.build(kind, stream.input_shape, stream.classes, recipe.seed, extra, channels_last)

    world = World(method, stream, _facts(recipe, stream, bare_module()), _train_options(recipe), recipe.seed)

    def build_module() -> nn.Module:
        return attach(bare_module(), method.parts, world.server("init"))

    module = build_module()
    layout = Layout.of(module, method.is_personal)
    facts = replace(world.facts, layout=layout, personal=layout.read(module)["params"][layout.shared :].clone())
    world = replace(world, facts=facts)
    privacy.check(world)
    return Assembly(recipe, world, build_module)


def _facts(recipe: Recipe, stream: Stream, module: nn.Module) -> Facts:
    return Facts(
        classes=stream.classes,
        input_shape=stream.input_shape,
        clients=stream.clients,
        tasks=stream.tasks,
        rounds=stream.rounds,
        rounds_per_task=recipe.train.rounds_per_task,
        layout=Layout.of(module),
        blank=stream.test(0).take(np.zeros(0, dtype=np.int64)),
        personal=torch.zeros(0),
        boundaries=stream.boundaries,
        task_ids=stream.task_ids,
        output_shape=() if stream.score == "accuracy" else _output_shape(stream, module),
    )


def _output_shape(stream: Stream, module: nn.Module) -> tuple[int, ...]:
    """What the network gives for one sample, asked of it: other networks than classifiers know it alone."""
    x = stream.test(0).x[:1]
    with torch.no_grad():
        return tuple(module.eval()(stream.inputs(x)).shape[1:])


def build_method(recipe: Recipe) -> Method:
    """The recipe's method; `method.weighting` is an option of whichever part aggregates."""
    section = recipe.method
    options: dict[str, dict[str, Any]] = {}
    for name, value in (section.model_extra or {}).items():
        if not isinstance(value, dict):
            raise methods.MethodError(f"method.{name} must be a table with the options of part {name!r}; got {value!r}")
        options[name] = dict(value)
    if section.weighting != "uniform":
        aggregator = methods.build(section.name, parts=section.parts).aggregator.name
        options.setdefault(aggregator, {}).setdefault("weighting", section.weighting)
    method = methods.build(section.name, options, section.parts, Optimizer(**recipe.train.optimizer.model_dump()))
    return privacy.protect(method, recipe.privacy)


def _train_options(recipe: Recipe) -> TrainOptions:
    train = recipe.train
    return TrainOptions(
        local_epochs=train.local_epochs,
        batch_size=train.batch_size,
        optimizer=Optimizer(**train.optimizer.model_dump()),
        sync_every=train.sync_every,
        logits=train.logits,
        drop_last=train.drop_last,
        batchnorm=recipe.model.batchnorm,
    )


class BuildEngine(Protocol):
    """Makes the engine of a run whose clients are elsewhere. durable: from where a run that is killed now goes on."""

    def __call__(self, assembly: Assembly, notify: Observer, durable: Callable[[], Place]) -> Engine: ...


def execute(
    assembly: Assembly,
    folder: RunFolder,
    observers: Sequence[Observer],
    checkpoint_every: float,
    build_engine: BuildEngine | None = None,
) -> dict[str, Any]:
    """Run, or go on from the newest checkpoint, to the end; returns what result.json holds. The engine is the recipe's,
    or what `build_engine` makes."""
    torch.set_num_threads(1)  # results are exact only at one thread; engines use the cores in other ways
    group = engines.join(assembly.recipe.engine)
    if group is not None and not group.leads:
        return _drive(assembly, folder, lambda event: None, checkpoint_every, group)
    if not numbers(folder.checkpoint):  # a resumed run, wherever it goes on, must read vectors as they were written
        folder.note(memory_format=engines.memory_format(assembly.recipe.engine))
    log = EventLog(folder.events)
    told: list[Observer] = [log, *observers]
    try:
        return _drive(assembly, folder, _fan_out(told), checkpoint_every, group, build_engine)
    except BaseException as error:
        fault = folder.fault(error) or error
        _tell_fault(told, fault)
        if fault is not error:
            raise fault from error
        raise
    finally:
        log.close()


def _drive(
    assembly: Assembly,
    folder: RunFolder,
    notify: Observer,
    checkpoint_every: float,
    group: Group | None,
    build_engine: BuildEngine | None = None,
) -> dict[str, Any]:
    recipe, world, fingerprint = assembly.recipe, assembly.world, _fingerprint(assembly)
    store = ClientStore(folder.clients, int(recipe.engine.state_memory * 2**30))
    alone = Checkpoints(folder.checkpoint, store, checkpoint_every, fingerprint)
    state = latest(folder.checkpoint, store, fingerprint)
    checkpoints = alone if group is None else RankCheckpoints(alone, group)
    engine: Engine
    if build_engine is not None:
        alone.durable = state.place if state is not None else alone.durable
        engine = build_engine(assembly, notify, lambda: alone.durable)
    else:
        engine = engines.build(recipe.engine, world, store, assembly.build_module, notify, group)
    engine = privacy.wrap(engine, world, str(engines.device(recipe.engine)), notify)
    try:
        where = engines.device(recipe.engine)
        if state is not None:
            state.server = {name: on_device(slots, where) for name, slots in state.server.items()}
        _announce(notify, assembly, state)
        tell_kept = _keeping(world, store, group, notify) if build_engine is None else None
        runner = Runner(
            world,
            engine,
            on_device(assembly.first_model(), where),
            EvalOptions(**recipe.eval.model_dump()),
            notify,
            _saver(checkpoints, notify, tell_kept),
            state,
            _watchers(recipe),
        )
        final = runner.run()
        checkpoints.wait()
        state_bytes = engine.total(store.bytes()) if isinstance(engine, Spread) else store.bytes()
        result = _result(assembly, final, engine.describe(), state_bytes)
        if group is None or group.leads:
            _save_model(folder, assembly, final)
            _save_pictures(folder, assembly.stream, engine, final)
            folder.write_result(result)
        notify({"event": "end", "metrics": result["metrics"], "seconds": final.seconds})
        return result
    finally:
        engine.close()
        checkpoints.close()


def _watchers(recipe: Recipe) -> list[Watcher]:
    """Who looks on."""
    if recipe.monitor.kind == "none":
        return []
    return [DriftMonitor(PageHinkley(**recipe.monitor.model_dump(exclude={"kind"})))]


def _fingerprint(assembly: Assembly) -> str:
    """Of all that decides a run's numbers, as far as it can be told: two runs that differ in it share no checkpoint.
    The engine is left out: a run may go on in another one. Defaults are, too: a later version may have more keys."""
    stream = assembly.stream
    left_out = {"engine", "federation", "compare", "monitor"}
    table = assembly.recipe.model_dump(mode="json", exclude=left_out, exclude_defaults=True)
    facts = [stream.name, stream.tasks, stream.clients, stream.rounds, stream.classes, list(stream.input_shape)]
    facts += [files] if (files := getattr(stream, "fingerprint", "")) else []
    return digest(json.dumps([table, facts], sort_keys=True).encode())


def _fan_out(observers: Sequence[Observer]) -> Observer:
    def notify(event: Event) -> None:
        for observer in observers:
            observer(event)

    return notify


def _tell_fault(observers: Sequence[Observer], error: BaseException) -> None:
    """Tell whoever still listens: the log may be what failed."""
    for observer in observers:
        with contextlib.suppress(OSError, UserError):
            observer({"event": "fault", "message": f"{type(error).__name__}: {error}"})


def _keeping(
    world: World, store: ClientStore, group: Group | None, notify: Observer
) -> Callable[[RunState], None] | None:
    """Tells at a task's end from which tasks the samples come that clients keep; None when there is nothing to tell."""
    if not keeping.tells(world):
        return None

    def tell(state: RunState) -> None:
        index, known = state.round - 1, store.clients()
        task = world.stream.round(index).task
        looked = known[:_MOST_LOOKED_AT]
        states = ((client, held) for client in looked if (held := store.peek(client)) is not None)
        note: dict[str, Any] = {"by_task": keeping.kept_by_task(world, states, task + 1)}
        note |= {"clients": len(looked), "of": len(known)}
        notes = [note] if group is None else group.gather(note)
        by_task = [sum(counts) for counts in zip_longest(*(one["by_task"] for one in notes), fillvalue=0)]
        total = {key: sum(one[key] for one in notes) for key in ("clients", "of")}
        notify({"event": "buffer", "round": index, "task": task, "by_task": by_task, **total})

    return tell


def _saver(
    checkpoints: Checkpoints | RankCheckpoints, notify: Observer, tell_kept: Callable[[RunState], None] | None
) -> Callable[[RunState, bool], None]:
    def save(state: RunState, task_end: bool) -> None:
        if task_end and tell_kept is not None:
            tell_kept(state)
        if checkpoints.offer(state, task_end):
            notify({"event": "checkpoint", "round": state.round})

    return save


def _announce(notify: Observer, assembly: Assembly, state: RunState | None) -> None:
    stream = assembly.stream
    if state is not None:
        notify({"event": "resume", "round": state.round})
    notify(
        {
            "event": "start",
            "method": assembly.method.name,
            "recipe": assembly.recipe.name,
            "seed": assembly.recipe.seed,
            "rounds": stream.rounds,
            "tasks": stream.tasks,
            "clients": stream.clients,
            "round": state.round if state else 0,
        }
    )
    for warning in assembly.method.warnings:
        notify({"event": "warning", "message": warning})


def _result(assembly: Assembly, state: RunState, environment: dict[str, Any], state_bytes: int) -> dict[str, Any]:
    """result.json: a stable interface; accuracies are fractions."""
    recipe, stream = assembly.recipe, assembly.stream
    n_test = [int(row[0]) for row in _last_full_row(state) if row is not None]
    curves = _curves(state, stream)
    by_logits = {
        rule: _scores(stream.score, state, column, n_test, curves if rule == recipe.eval.logits else None)
        for column, rule in enumerate(RULES, start=1)
    }
    chosen = by_logits[recipe.eval.logits]
    return {
        "everfed": everfed.__version__,
        "method": assembly.method.name,
        "recipe": recipe.name,
        "stream": stream.describe(),
        "seed": recipe.seed,
        "score": stream.score,
        "logits": recipe.eval.logits,
        "evaluated": "personalised" if assembly.world.personal else "global",
        "split": recipe.eval.split,
        "n_test": n_test,
        "accuracy_matrix": chosen["accuracy_matrix"],
        "metrics": chosen["metrics"],
        "by_logits": by_logits,
        **_further(stream, state, n_test),
        "curves": state.curves,
        **{f"{name}_suspected": memory["suspected"] for name, memory in state.watched.items()},
        "cost": {
            "rounds": state.round,
            "seconds": state.seconds,
            **state.traffic.as_dict(),
            "client_state_bytes": state_bytes,
            "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "samples": state.samples,
            **({"absent": dict(state.absent)} if state.absent else {}),
        },
        **_conclusions(assembly, state),
        "environment": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "machine": platform.machine(),
            "cores": engines.cores(),
            **environment,
        },
    }


def _conclusions(assembly: Assembly, state: RunState) -> dict[str, Any]:
    """What parts say of the run, by part; nothing for most methods."""
    said = {part.name: part.conclude(state.server) for part in assembly.method.parts}
    said = {name: facts for name, facts in said.items() if facts}
    return {"parts": said} if said else {}


def _further(stream: Any, state: RunState, n_test: list[int]) -> dict[str, Any]:
    """by_score: the scores that a stream measures beside its own."""
    names: tuple[str, ...] = getattr(stream, "also", ())
    first = 1 + len(RULES)
    found = {name: _scores(name, state, column, n_test, None) for column, name in enumerate(names, start=first)}
    return {"by_score": found} if found else {}


def _last_full_row(state: RunState) -> list[list[float] | None]:
    return state.rows[max(state.rows)] if state.rows else []


def _curves(state: RunState, stream: Stream) -> convergence.Curves | None:
    """The scores after every round, for metrics that count rounds; None when not every round was scored."""
    if [entry["round"] for entry in state.curves] != list(range(stream.rounds)):
        return None
    return convergence.by_task(state.curves, stream.tasks)


def _scores(
    score: str, state: RunState, column: int, n_test: list[int], curves: convergence.Curves | None
) -> dict[str, Any]:
    rows = [
        [score_value(score, row[column], row[0]) if row else None for row in state.rows[task]]
        for task in sorted(state.rows)
    ]
    return {"accuracy_matrix": rows, "metrics": _summary(score, rows, n_test, curves)}


def _summary(
    score: str, rows: list[list[float | None]], n_test: list[int], curves: convergence.Curves | None
) -> dict[str, float | None]:
    """Metrics by name. Perplexities are summed up over all periods, from the models that were scored on all of them."""
    if score != "perplexity":
        return accuracy_matrix.summary(rows, n_test=n_test, curves=curves)
    return language.summary([[v for v in row if v is not None] for row in rows if None not in row], n_test)


def _save_pictures(folder: RunFolder, stream: Any, engine: Engine, state: RunState) -> None:
    """Some test samples of every task as the stream draws them, with what the trained model says."""
    if not hasattr(stream, "pictures"):
        return
    trainer = engine.workbench()
    drawn: dict[str, bytes] = {}
    for task in range(stream.tasks):
        data = stream.test(task).take(np.arange(min(PICTURES, len(stream.test(task)))))
        found = stream.pictures(trainer.outputs(state.model, data.x).cpu(), data)
        drawn |= {f"task{task + 1}-{number + 1}": png(picture) for number, picture in enumerate(found)}
    folder.write_pictures(drawn)


def _save_model(folder: RunFolder, assembly: Assembly, state: RunState) -> None:
    """The trained model by parameter name, as any PyTorch user expects it; personal parameters as at the beginning."""
    module, facts = assembly.build_module(), assembly.world.facts
    params = torch.cat([state.model["params"].cpu(), facts.personal])
    facts.layout.bind(module, params, *(state.model[key].cpu() for key in ("stats", "counters")))
    tensors = {name: tensor.detach().contiguous().clone() for name, tensor in module.state_dict().items()}
    folder.write_model(safetensors.torch.save(tensors))


def load_module(folder: RunFolder, assembly: Assembly) -> nn.Module:
    """The trained model of a finished run, in eval mode."""
    module = assembly.build_module()
    module.load_state_dict(safetensors.torch.load(folder.model.read_bytes()))
    return module.eval()


__all__ = ["Assembly", "assemble", "execute", "load_module"]
