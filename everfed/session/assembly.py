"""Assembling: the stream, the model and the method that a recipe names, checked against each other."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from everfed import engines, models, privacy, streams
from everfed.core.context import Context, Facts, Setup
from everfed.core.evaluate import scored_on_clients
from everfed.core.handle import Server
from everfed.core.layout import Layout, attach
from everfed.core.message import Model
from everfed.core.method import Method
from everfed.core.metric import METRICS, Metric, Metrics
from everfed.core.optimizer import Optimizer
from everfed.core.option import TrainOptions
from everfed.core.stream import Stream, digest_of
from everfed.data.sources import data_folder
from everfed.errors import RecipeError, SettingError, described, place_of
from everfed.methods import monitor
from everfed.methods import registry as methods
from everfed.metrics.scores import METRICS as SHOWN
from everfed.naming import load_object, nearest, with_options
from everfed.recipe import Recipe, share
from everfed.store.files import digest

IDENTITY = "identity"  # of [model]: digest of a network made in Python
FROZEN = "frozen_sha256"  # of [model] in the recipe that a server sends


class OtherWeights(RecipeError):
    """The frozen weights on this machine are not those of the run."""


@dataclass(frozen=True)
class Run:
    """The pieces of a run, checked against each other. `build_module` makes the model with its first weights, the extra
    parameters of the method's parts included. first: its vectors. scale: of the recipe's work. frozen: SHA-256 of the
    frozen parameters, which every machine must hold; "" where all train."""

    recipe: Recipe
    setup: Setup
    build_module: Callable[[], nn.Module]
    first: Model
    scale: float = 1.0
    frozen: str = ""

    @property
    def stream(self) -> Stream:
        return self.setup.stream

    @property
    def method(self) -> Method:
        return self.setup.method

    def first_model(self) -> Model:
        """The shared model before the first round."""
        return {**self.first, "params": self.first["params"][: self.setup.facts.layout.shared].clone()}


def assemble(
    recipe: Recipe,
    data_dir: str | None = None,
    scale: float = 1.0,
    stream: Stream | None = None,
    model: nn.Module | None = None,
) -> Run:
    """Build and check everything. Raises the user's errors: unknown keys, a method that does not fit, missing data.
    stream, model: made in Python, instead of those that the recipe names."""
    engines.check(recipe.engine)
    method = build_method(recipe)
    if stream is None:
        table = recipe.stream.model_dump()
        stream = streams.build(table, recipe.seed, recipe.train.rounds_per_task, data_dir, share(scale))
    if not isinstance(stream, Stream):
        raise RecipeError(f"a stream of your own derives from everfed.method.Stream; got a {type(stream).__name__}")
    method.fit_stream(stream)
    if recipe.train.logits != "full":
        _check_masking(stream)
    kind = model if model is not None else recipe.model.kind
    extra = dict(recipe.model.model_extra or {})
    expected, folder = extra.pop(FROZEN, ""), data_folder(data_dir)
    extra.pop(IDENTITY, None)
    channels_last = engines.memory_format(recipe.engine) == "channels-last"

    def bare_module() -> nn.Module:
        return models.build(kind, stream.input_shape, stream.classes, recipe.seed, extra, channels_last, folder)

    module = bare_module()
    if not any(True for _ in module.parameters()):
        raise models.ModelError(f"model.kind = {recipe.model.kind!r} has no parameters, so there is nothing to train")
    facts, options = _facts(recipe, stream, module), _train_options(recipe)
    ctx = Context(recipe.seed, facts, options, phase="init")

    def handle(part: str) -> Server:
        return Server(part, {}, ctx)

    module = attach(module, method.parts, handle)
    layout = Layout.of(module, method.is_personal)
    frozen = _checked_frozen(module, expected)  # parts may have frozen some
    first = layout.read(module)
    facts = replace(facts, layout=layout, personal=first["params"][layout.shared :].clone())
    _check_groups(options.optimizer, layout)
    metrics = Metrics.tried(build_metrics(recipe), facts)
    setup = Setup(method, stream, facts, options, recipe.seed, metrics)
    _check_scored_on_clients(setup)
    privacy.check(setup)
    return Run(recipe, setup, lambda: attach(bare_module(), method.parts, handle), first, scale, frozen)


def build_metrics(recipe: Recipe) -> list[Metric]:
    """The metrics that eval.metrics names. Raises SettingError."""
    found: list[Metric] = []
    for entry in recipe.eval.metrics:
        table = {"metric": entry} if isinstance(entry, str) else dict(entry)
        name = table.pop("metric")
        kind: Any = METRICS.get(name) or (load_object(name, "eval.metrics") if ":" in name else None)
        if not (isinstance(kind, type) and issubclass(kind, Metric)):
            known = f"allowed: {', '.join(METRICS)}, or package.module:Name of a class that derives from Metric"
            raise RecipeError(f"eval.metrics: {name!r} is no metric;{nearest(name, METRICS)} {known}")
        if not is_dataclass(kind) and table:
            raise RecipeError(f"eval.metrics: {name!r} has no options; make it a dataclass, and its fields are")
        made = with_options(kind, table, f"eval.metrics.{name}", error=RecipeError) if is_dataclass(kind) else kind()
        if not made.name or made.name in SHOWN or made.name in [other.name for other in found]:
            raise RecipeError(f"eval.metrics: {name!r} needs a name of its own; got {made.name!r}")
        found.append(made)
    return found


def _check_scored_on_clients(setup: Setup) -> None:
    """Raises RecipeError for metrics by client where one model is scored on one test set that is nobody's."""
    by_client = [metric.name for metric in setup.metrics.metrics if metric.by_client]
    if by_client and not scored_on_clients(setup) and setup.stream.owners(0) is None:
        raise RecipeError(
            f"eval.metrics: {by_client[0]!r} needs tests that are a client's: a partition by column, a scenario "
            "whose clients have tests of their own (own, task-pool), or a personalised method"
        )


def _check_groups(optimizer: Optimizer, layout: Layout) -> None:
    """Raises RecipeError for a pattern of optimizer.groups that matches no parameter."""
    try:
        optimizer.scales(layout, torch.device("cpu"))
    except ValueError as error:
        raise RecipeError(f"train.{error}") from error


def _checked_frozen(module: nn.Module, expected: str) -> str:
    """The digest of the frozen parameters. Raises OtherWeights where the run has others (`expected`; "": any)."""
    found = models.frozen_digest(module)
    if expected not in ("", found):
        raise OtherWeights(
            f"model.{FROZEN}: this run's frozen weights have SHA-256 {expected[:16]}..., those built here "
            f"{found[:16] or 'none'}...; the files that model.weights and model.kind name must be the server's"
        )
    return found


def _check_masking(stream: Stream) -> None:
    """Raises RecipeError where training cannot leave some logits out."""
    if stream.score != "accuracy":
        raise RecipeError(f"train.logits must be 'full' on a stream that is scored by {stream.score}")
    if not (stream.boundaries or stream.task_ids):
        raise RecipeError(
            "train.logits must be 'full' on a stream that hides its tasks: their classes would give them away"
        )


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
        output_shape=_output_shape(recipe.model.kind, stream, module),
    )


def _output_shape(kind: str, stream: Stream, module: nn.Module) -> tuple[int, ...]:
    """The shape of the network's output for one sample, from a batch of two. Raises ModelError where the network cannot
    take the stream's samples, or the stream's loss its outputs."""
    sample = stream.test(0).take(np.arange(min(2, len(stream.test(0)))))
    if len(sample) == 0:  # tests are the clients' own
        return (stream.classes,)
    try:
        with torch.no_grad():
            outputs: Tensor = module.eval()(stream.inputs(sample.x))
            stream.loss(outputs, sample.y)
    except (ValueError, RuntimeError, IndexError, TypeError, AttributeError) as error:
        raise models.ModelError(
            f"model.kind = {kind!r} does not fit {stream.name!r}, whose inputs are {tuple(stream.input_shape)}: "
            f"{str(error).splitlines()[0]} ({place_of(error)})"
        ) from error
    if stream.score == "accuracy" and outputs.shape[1:] != (stream.classes,):
        raise models.ModelError(
            f"model.kind = {kind!r} gives outputs of shape {tuple(outputs.shape)} for {len(sample)} samples of "
            f"{stream.classes} classes; it must be ({len(sample)}, {stream.classes})"
        )
    if not stream.checked:
        _check_score(stream, outputs, sample.y)
    return tuple(outputs.shape[1:])


def _check_score(stream: Stream, outputs: Tensor, y: Tensor) -> None:
    """Raises SettingError for a stream of a user's own whose score cannot be taken of its targets."""
    if stream.score == "accuracy":
        if y.dim() != 1 or y.dtype.is_floating_point:
            raise SettingError(
                f"stream: {stream.name!r} is scored by accuracy, which needs one class number a sample; its targets "
                f"are {str(y.dtype).removeprefix('torch.')} of shape {tuple(y.shape)}. Set the stream's `score` to "
                "another, such as 'mse', and define its `measure(outputs, y)`: how many samples, and the sum of "
                "their scores"
            )
        return
    try:
        sums = stream.measure_all([outputs], y)
        found = [stream.value(score, sums.tolist()) for score in (stream.score, *stream.also)]
    except Exception as error:
        raise SettingError(
            f"stream: {stream.name!r} is scored by {stream.score}, but its `measure` fails on its first test samples: "
            f"{described(error)}"
        ) from error
    if any(value is not None and not isinstance(value, int | float) for value in found):
        raise SettingError(f"stream: {stream.name!r}: `value` must be a number or None; got {found}")


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
    method = methods.build(section.name, options, section.parts, recipe.train.optimizer.as_options(Optimizer))
    _refuse_blind_monitor(recipe)
    return privacy.protect(monitor.reporting(method, recipe.monitor), recipe.privacy)


def _refuse_blind_monitor(recipe: Recipe) -> None:
    """Raises RecipeError for a monitor under a protection that hides from it what it watches."""
    hiding = [key for key in ("secure_aggregation", "dp") if getattr(recipe.privacy, key)]
    if recipe.monitor.kind != "none" and hiding:
        raise RecipeError(
            f"monitor.kind = {recipe.monitor.kind!r} needs a number from every client; with privacy.{hiding[0]} the "
            "server sees none; set monitor.kind = 'none', or leave the protection out"
        )


def _train_options(recipe: Recipe) -> TrainOptions:
    optimizer = recipe.train.optimizer.as_options(Optimizer)
    return recipe.train.as_options(TrainOptions, optimizer=optimizer, batchnorm=recipe.model.batchnorm)


def identity_of(module: nn.Module) -> str:
    """A digest of a network's weights, for one that was made in Python."""
    state = module.state_dict()
    return digest_of(" ".join(state), *state.values())


def fingerprint(run: Run) -> str:
    """Of all that decides a run's numbers, as far as it is known: two runs that differ in it share no checkpoint.
    The engine is left out: a run may go on in another one. Defaults are, too: a later version may have more keys."""
    stream = run.stream
    left_out = {"engine", "federation", "compare", "methods", "monitor"}
    table = run.recipe.model_dump(mode="json", exclude=left_out, exclude_defaults=True)
    facts = [stream.name, stream.tasks, stream.clients, stream.rounds, stream.classes, list(stream.input_shape)]
    facts += [mark for mark in (stream.fingerprint, run.frozen) if mark]
    return digest(json.dumps([table, facts], sort_keys=True).encode())
