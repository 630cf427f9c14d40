"""The library's front door: run a recipe, resume a run, load what it left. Light to import; torch comes when needed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everfed.errors import USERS, RecipeError, UserError, exit_code, sentence
from everfed.recipe import (
    Places,
    Reading,
    Recipe,
    Sets,
    Source,
    from_table,
    placed,
    read,
    read_placed,
    scaled,
    settled,
    to_toml,
)
from everfed.reports.result import Result
from everfed.store.run import RunError, RunFolder

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from everfed.core.events import Observer
    from everfed.core.stream import Stream
    from everfed.session.saved_model import Description

    Observers = Sequence[Observer] | Callable[[Path], Sequence[Observer]]  # or a function from the run folder to them

CHECKPOINT_EVERY = 5.0
IN_PYTHON = "python:"  # what stream.dataset or model.kind begins with where the stream or the network is an object


@dataclass(frozen=True)
class LoadedRun:
    """A finished run with its trained model, in eval mode. description: what the model's file says of its inputs and
    classes (`everfed.session.saved_model.Description`)."""

    model: nn.Module
    result: dict[str, Any]
    recipe: Recipe
    description: Description

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.description.class_names

    def outputs(self, samples: Any, batch_size: int = 256) -> Tensor:
        """(n, ...) outputs of the network, logits for a classifier. samples: as the run's own: images of 0 to 255 in
        any usual layout, a list of images, features or tokens. They are resized and normalised as in the run."""
        import torch

        from everfed.session import saved_model

        held = saved_model.as_samples(self.description, samples)
        with torch.no_grad():
            parts = [self.model(saved_model.normalised(self.description, part)) for part in held.split(batch_size)]
        return torch.cat(parts)

    def predict(self, samples: Any, batch_size: int = 256) -> np.ndarray:
        """(n,) the most likely class of every sample, as a number; `class_names` has the names. For several labels a
        sample (n, labels) true where a label's probability is above 0.5, for regression (n, targets) numbers."""
        score = self.description.score
        if score not in ("accuracy", "f1", "mse"):
            raise RunError(f"predict is for classifiers and regression; this run is scored by {score}: use `outputs`")
        outputs: np.ndarray = self.outputs(samples, batch_size).numpy()
        return outputs.argmax(1) if score == "accuracy" else outputs > 0 if score == "f1" else outputs


def default_folder(recipe: Recipe) -> Path:
    """runs/<recipe>-<method>-<seed>."""
    method = (recipe.method.name or "parts").replace(":", ".")
    return Path("runs") / f"{recipe.name.replace('/', '-')}-{method}-{recipe.seed}"


def check(
    recipe: Source | Reading,
    data_dir: str | Path | None = None,
    scale: float = 1.0,
    stream: Stream | None = None,
) -> None:
    """Raise what `run` would refuse, without running anything."""
    recipe, model = _without_object(recipe)
    _assembled(fitted(_reading(recipe), stream, scale), data_dir, scale, stream, model)


def estimate(
    recipe: Source | Reading,
    *,
    data_dir: str | Path | None = None,
    scale: float = 1.0,
    stream: Stream | None = None,
) -> dict[str, Any]:
    """Shapes, time, memory and bytes of a run, from its first two rounds; nothing is left behind. Raises what `run`
    would refuse."""
    from everfed import session

    recipe, model = _without_object(recipe)
    reading = fitted(_reading(recipe), stream, scale)
    with users_errors(reading.places):
        return session.estimate(_assembled(reading, data_dir, scale, stream, model))


def _assembled(
    reading: Reading, data_dir: str | Path | None, scale: float, stream: Stream | None, model: nn.Module | None
) -> Any:
    """The pieces of a run (`everfed.session.Run`)."""
    from everfed.session import assemble

    with users_errors(reading.places):
        return assemble(scaled(reading.recipe, scale), _text(data_dir), scale, stream, model)


def run(
    recipe: Source | Reading,
    out: str | Path | None = None,
    *,
    method: str | None = None,
    seed: int | None = None,
    sets: Sets = (),
    data_dir: str | Path | None = None,
    scale: float = 1.0,
    stream: Stream | None = None,
    overwrite: bool = False,
    resume_or_run: bool = False,
    progress: bool | None = None,
    track: Sequence[str] = (),
    observers: Observers = (),
    checkpoint_every: float = CHECKPOINT_EVERY,
) -> Result:
    """Run a recipe (a Recipe, a dict, a path or a shipped name) and leave a run folder behind.

    A dict may hold classes and parts themselves: {"model": {"kind": Net}, "method": {"parts": ["fedavg", Clip(0.5)]}}.
    The run folder has them by name, `package.module:Name`, so they must stand at the top level of a module.
    model.kind may be a network, too, with the weights it has: {"model": {"kind": net}}. `resume` and `load` of such a
    run need a network of the same class again (model=net).
    out: the run folder; without it runs/RECIPE-METHOD-SEED, with a number where that is taken.
    method, seed, sets: as --method, --seed and --set of the command line; sets may be a dict {"train.batch_size": 8}.
    stream: a stream of your own (from `everfed.streams.from_arrays`, say) instead of the recipe's; such a run cannot be
    resumed from the command line, only with `resume(folder, stream=...)`.
    overwrite: remove a run that is in the folder. resume_or_run: go on with a run of the same recipe that is in the
    folder, or return its result if it is finished.
    progress: show how far it is; None: in a terminal and in Jupyter. track: also write to "tensorboard", "mlflow" or
    "wandb". observers: called with every event.
    Raises UserError for everything that you can correct; a run that fails before its first round leaves nothing behind.
    """
    recipe, model = _without_object(recipe)
    reading = fitted(_reading(recipe, method, seed, sets), stream, scale)
    recipe, path = reading.recipe, Path(out) if out is not None else default_folder(reading.recipe)
    if overwrite and resume_or_run:
        raise UserError("--overwrite and --resume-or-run exclude each other")
    if resume_or_run and RunFolder(path).recipe.exists():
        _require_same_run(RunFolder(path), recipe, scale)
        how: dict[str, Any] = {"track": track, "observers": observers, "checkpoint_every": checkpoint_every}
        return resume(path, stream=stream, model=model, progress=progress, data_dir=data_dir, **how)
    # followers of a torchrun must find the leader's folder by its name alone
    numbered = out is None and not (overwrite or resume_or_run) and recipe.engine.kind != "ranks"
    settings = {"data_dir": _text(data_dir), "scale": scale, "own_stream": stream is not None}
    with users_errors(reading.places), _shown(progress) as shown:
        if overwrite and recipe.engine.leads:
            _assembled(reading, data_dir, scale, stream, model)  # nothing is removed for a run that is refused
            RunFolder.discard(path)
        # the folder comes first, before heavy imports, so that a run killed at any later moment can be resumed
        with RunFolder.new(path, to_toml(recipe), settings, recipe.engine.leads, numbered) as folder:
            everyone = [*shown, *_observers(observers, track, folder.path, recipe)]
            from everfed.session import assemble, execute

            made = assemble(scaled(recipe, scale), _text(data_dir), scale, stream, model)
            return Result(folder.path, execute(made, folder, everyone, checkpoint_every))


def resume(
    folder: str | Path,
    *,
    tasks: int | None = None,
    stream: Stream | None = None,
    model: nn.Module | None = None,
    progress: bool | None = None,
    track: Sequence[str] = (),
    observers: Observers = (),
    checkpoint_every: float = CHECKPOINT_EVERY,
    data_dir: str | Path | None = None,
) -> Result:
    """Go on with a run from its newest checkpoint. A finished run is returned as it is. stream, model: those that the
    run was started with, where they are objects. data_dir: where the data lies now, if not where it did. tasks: go on
    with a finished run until it has so many tasks, to the same bits as a run that had them from the start; refused
    where it could not be that run."""
    opened = RunFolder.open(Path(folder))
    if tasks is not None:
        _extend(opened, tasks, model, data_dir)
    data = opened.read_result()
    if data is None and opened.read_settings().get("federated"):
        raise RunError(
            f"{folder} is a federation: its clients' state is theirs; go on with `everfed serve --out {folder}`"
        )
    if data is None:
        reading = read_placed(opened.recipe)
        with users_errors(reading.places), opened.held(leads=reading.recipe.engine.leads):
            data = opened.read_result()
            if data is None:
                from everfed.session import execute

                with _shown(progress) as shown:
                    everyone = [*shown, *_observers(observers, track, opened.path, reading.recipe)]
                    made = reassemble(opened, stream, data_dir, model=model)
                    data = execute(made, opened, everyone, checkpoint_every)
    return Result(opened.path, data)


def _extend(folder: RunFolder, tasks: int, model: nn.Module | None, data_dir: str | Path | None) -> None:
    """Give a finished run further tasks. Raises RunError."""
    from everfed.session.extension import extend

    settings = folder.read_settings()
    if settings.get("own_stream") or settings.get("federated"):
        what = "ran on a stream made in Python" if settings.get("own_stream") else "is a federation"
        raise RunError(f"{folder.path} {what}: what it had cannot be compared with more tasks. Run it anew")
    reading = read_placed(folder.recipe, sets=[f"stream.tasks={tasks}"])
    with users_errors(reading.places), folder.held():
        run = reassemble(folder, None, data_dir, model=model)
        if run.stream.tasks != tasks:
            longer = reassemble(folder, None, data_dir, model=model, recipe=reading.recipe)
            extend(folder, run, longer, to_toml(reading.recipe))


def forget(
    folder: str | Path,
    *,
    clients: Sequence[int] = (),
    classes: Sequence[int] = (),
    samples: Sequence[int] = (),
    stream: Stream | None = None,
    model: nn.Module | None = None,
    data_dir: str | Path | None = None,
) -> Result:
    """Withdraw training samples from a finished run of ridge or RanPAC: its model, sums and scores are then, bit for
    bit, those of the run that never saw them. A sample is withdrawn if all that is given names it: its client, its
    class, its id (of one client). The data must be there as in the run. `forgotten.jsonl` says what was done.
    """
    opened = RunFolder.open(Path(folder))
    if opened.read_result() is None:
        raise RunError(f"{folder} is not finished; go on with `everfed resume {folder}`")
    if opened.read_settings().get("federated"):
        raise RunError(
            f"{folder} is a federation: its clients' data are theirs, and no server may pick samples of them"
        )
    reading = read_placed(opened.recipe)
    with users_errors(reading.places), opened.held():
        from everfed.session import forget as withdraw

        made = reassemble(opened, stream, data_dir, model=model)
        given = {"clients": list(clients), "classes": list(classes), "samples": list(samples)}
        return Result(opened.path, withdraw(made, opened, given, lambda event: None))


def load(
    folder: str | Path,
    *,
    stream: Stream | None = None,
    model: nn.Module | None = None,
    client: int | None = None,
    task: int | None = None,
    data_dir: str | Path | None = None,
    allow_code: Sequence[str] = (),
) -> LoadedRun:
    """The trained model and the results of a finished run; its data is not needed.

    stream: the run's, where it was made in Python; checked, not used. model: a network of the same class, where the run
    began with an object. client: the personal model of this client of a simulation instead; it needs the run's data,
    from data_dir where that is not the run's own. task: the model as it was at the end of this task, from 1, of a run
    with eval.snapshots. allow_code: the modules that the folder may name beside everfed's
    own networks and methods: naming a class or a function runs its code, so say this of folders that you trust.
    """
    from everfed.naming import restricted
    from everfed.session import saved_model

    opened = RunFolder.open(Path(folder))
    data = opened.read_result()
    if data is None:
        raise RunError(f"{folder} is not finished; go on with `everfed resume {folder}`")
    recipe = read(opened.recipe)
    if stream is not None:
        _require_same_stream(opened, recipe, stream)
    if task is not None and client is not None:
        raise RunError("snapshots are of the shared model: give task or client, not both")
    file = opened.model if task is None else opened.snapshot(task - 1)
    if not file.exists():
        raise RunError(f"{folder} has no {file.name}; with eval.snapshots = true a run keeps one at every task's end")
    description = saved_model.read_description(file)
    with restricted((*saved_model.OWN_CODE, *allow_code)):
        if client is not None or description is None:  # None: of an earlier version
            made = reassemble(opened, stream, data_dir, on_cpu=True, model=model)
            description = saved_model.describe(made, made.build_module())
            return LoadedRun(saved_model.client_model(opened, made, client), data, recipe, description)
        return LoadedRun(saved_model.load(file, description, model), data, recipe, description)


def reassemble(
    folder: RunFolder,
    stream: Stream | None = None,
    data_dir: str | Path | None = None,
    on_cpu: bool = False,
    model: nn.Module | None = None,
    recipe: Recipe | None = None,
) -> Any:
    """The pieces of a run that is there already (`everfed.session.Run`); vectors keep the order they were made in,
    whatever this machine prefers. data_dir: instead of the run's. on_cpu: to look at, not to go on with it. recipe:
    instead of the run's."""
    from everfed.session import assemble

    settings, recipe = folder.read_settings(), recipe or read(folder.recipe)
    changes = {"kind": "eager", "device": "cpu"} if on_cpu else {}
    changes |= {key: settings[key] for key in ("memory_format",) if key in settings}
    recipe = recipe.model_copy(update={"engine": recipe.engine.model_copy(update=changes)})
    if settings.get("own_stream") and stream is None:
        raise RunError(
            f"{folder.path} ran on a stream made in Python; pass the same stream again, from Python: "
            f"everfed.resume({str(folder.path)!r}, stream=...)"
        )
    if stream is not None:
        _require_same_stream(folder, recipe, stream)
    if recipe.model.kind.startswith(IN_PYTHON):
        _require_same(folder, recipe, model)
    scale = float(settings.get("scale", 1.0))
    return assemble(scaled(recipe, scale), _text(data_dir) or settings.get("data_dir"), scale, stream, model)


def _require_same_stream(folder: RunFolder, recipe: Recipe, stream: Stream) -> None:
    known = (recipe.stream.model_extra or {}).get("identity")
    if known is not None and stream.identity() != known:
        raise RunError(f"{folder.path} ran on other data, or other settings of the stream; pass the same stream again")


def _require_same(folder: RunFolder, recipe: Recipe, model: nn.Module | None) -> None:
    """Raises RunError unless `model` is the network that the run began with."""
    from everfed.session import identity_of

    if model is None or identity_of(model) != (recipe.model.model_extra or {}).get("identity"):
        raise RunError(f"{folder.path} began with a network made in Python; pass it as it was then: model=...")


def _without_object(recipe: Any) -> tuple[Any, nn.Module | None]:
    """The recipe, with the name of a network's class in place of the network, and the network."""
    model: Any = recipe.get("model") if isinstance(recipe, dict) else None
    made = model.get("kind") if isinstance(model, dict) else None
    if made is None or isinstance(made, str | type) or not hasattr(made, "state_dict"):
        return recipe, None
    from everfed.session import identity_of

    named_kind = {"kind": f"{IN_PYTHON}{type(made).__name__}", "identity": identity_of(made)}
    return {**recipe, "model": {**model, **named_kind}}, made


def fitted(reading: Reading, stream: Stream | None, scale: float) -> Reading:
    """The recipe of a run on a stream of the user's own: its [stream] names that stream and its data, so that two runs
    on other data are two experiments; the stream says itself how many rounds a task has. Without a stream: as it is."""
    recipe = reading.recipe
    if stream is None:
        return reading
    if scale != 1.0:
        raise RecipeError("scale shrinks the stream a recipe names; make your own as small as you like")
    rounds, given = stream.rounds_per_task or recipe.train.rounds_per_task, recipe.train.rounds_per_task
    if rounds != given and "rounds_per_task" in recipe.train.model_fields_set:
        raise RecipeError(f"train.rounds_per_task = {given}, but the stream has {rounds}; make them equal")
    table = recipe.model_dump(exclude_none=True)
    own = {"dataset": f"{IN_PYTHON}{stream.name}", "scenario": "own", "identity": stream.identity()}
    table = {**table, "stream": own, "train": {**table["train"], "rounds_per_task": rounds}}
    return Reading(from_table(table), reading.places)


@contextmanager
def users_errors(places: Places) -> Iterator[None]:
    """Raises every error that a user can correct as a UserError, in the words of the command line."""
    try:
        with placed(places):
            yield
    except Exception as error:
        if exit_code(error) == USERS and not isinstance(error, UserError):  # a client's, or a file system's
            raise UserError(sentence(error)) from error
        raise


def _reading(recipe: Source | Reading, method: str | None = None, seed: int | None = None, sets: Sets = ()) -> Reading:
    if isinstance(recipe, Reading) and method is None and seed is None and not sets:
        return recipe
    source = recipe.recipe if isinstance(recipe, Reading) else recipe
    return read_placed(source, method=method, seed=seed, sets=sets)


@contextmanager
def _shown(progress: bool | None) -> Iterator[Sequence[Observer]]:
    """Observers that show a run in a terminal or a notebook, or where `progress` asks for it."""
    if progress is False:
        yield ()
        return
    from everfed.reports.progress import shown

    with shown(progress) as found:
        yield found


def _observers(observers: Observers, track: Sequence[str], folder: Path, recipe: Recipe) -> list[Observer]:
    """All observers of a run. Raises UserError where the library of a tracker is missing."""
    found = list(observers(folder) if callable(observers) else observers)
    if track:
        from everfed.reports.trackers import tracker

        found += [tracker(str(kind), folder, settled(recipe), warnings.warn) for kind in track]
    return found


def _require_same_run(folder: RunFolder, recipe: Recipe, scale: float) -> None:
    """Raises RunError for a folder that holds another run."""
    same_scale = folder.read_settings().get("scale", 1.0) == scale
    if to_toml(read(folder.recipe)) != to_toml(recipe) or not same_scale:
        raise RunError(
            f"{folder.path} belongs to another recipe or --scale; nothing was overwritten. "
            "Choose another --out, or use --overwrite"
        )


def _text(data_dir: str | Path | None) -> str | None:
    return None if data_dir is None else str(data_dir)
