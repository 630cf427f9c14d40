"""The library's front door: run a recipe, resume a run, load what it left. Light to import; torch comes when needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everfed.errors import RecipeError
from everfed.recipe import Recipe, from_table, read, scaled, to_toml
from everfed.recipe.objects import named
from everfed.store.run import RunError, RunFolder

if TYPE_CHECKING:
    from torch import nn

    from everfed.core.stream import Stream

Observer = Callable[[dict[str, Any]], None]
CHECKPOINT_EVERY = 5.0
IN_PYTHON = "python:"  # what stream.dataset begins with in the recipe of a run on a stream made in Python


@dataclass(frozen=True)
class Result:
    """A finished run. data: the content of result.json."""

    folder: Path
    data: dict[str, Any]

    @property
    def metrics(self) -> dict[str, float | None]:
        metrics: dict[str, float | None] = self.data["metrics"]
        return metrics


@dataclass(frozen=True)
class LoadedRun:
    """A finished run with its trained model, in eval mode."""

    model: nn.Module
    result: dict[str, Any]
    recipe: Recipe


def default_folder(recipe: Recipe) -> Path:
    """runs/<recipe>-<method>-<seed>."""
    method = recipe.method.name or "parts"
    return Path("runs") / f"{recipe.name.replace('/', '-')}-{method}-{recipe.seed}"


def check(recipe: Recipe, data_dir: str | Path | None = None, scale: float = 1.0) -> None:
    """Raise what `run` would refuse, without running anything."""
    from everfed.session import assemble

    assemble(scaled(recipe, scale), _text(data_dir), scale)


def run(
    recipe: Recipe | dict[str, Any] | str | Path,
    out: str | Path | None = None,
    *,
    data_dir: str | Path | None = None,
    scale: float = 1.0,
    stream: Stream | None = None,
    observers: Sequence[Observer] = (),
    checkpoint_every: float = CHECKPOINT_EVERY,
) -> Result:
    """Run a recipe (a Recipe, a dict, a path or a shipped name) and leave a run folder behind.

    A dict may hold classes and parts themselves: {"model": {"kind": Net}, "method": {"parts": ["fedavg", Clip(0.5)]}}.
    The run folder has them by name, `package.module:Name`, so they must stand at the top level of a module.
    stream: a stream of your own (from `everfed.streams.from_arrays`, say) instead of the recipe's; such a run cannot be
    resumed from the command line, only with `resume(folder, stream=...)`.
    """
    recipe = _as_recipe(recipe) if stream is None else _fitted(_as_recipe(recipe), stream, scale)
    path = Path(out) if out is not None else default_folder(recipe)
    settings = {"data_dir": _text(data_dir), "scale": scale, "own_stream": stream is not None}
    # the folder comes first, before heavy imports, so that a run killed at any later moment can be resumed
    with RunFolder.new(path, to_toml(recipe), settings, recipe.engine.leads) as folder:
        from everfed.session import assemble, execute

        assembly = assemble(scaled(recipe, scale), _text(data_dir), scale, stream)
        return Result(path, execute(assembly, folder, observers, checkpoint_every))


def resume(
    folder: str | Path,
    *,
    stream: Stream | None = None,
    observers: Sequence[Observer] = (),
    checkpoint_every: float = CHECKPOINT_EVERY,
) -> Result:
    """Go on with a run from its newest checkpoint. A finished run is returned as it is."""
    opened = RunFolder.open(Path(folder))
    data = opened.read_result()
    if data is None and opened.read_settings().get("federated"):
        raise RunError(
            f"{folder} is a federation: its clients' state is theirs; go on with `everfed serve --out {folder}`"
        )
    if data is None:
        with opened.held(leads=read(opened.recipe).engine.leads):
            data = opened.read_result()
            if data is None:
                from everfed.session import execute

                data = execute(reassemble(opened, stream), opened, observers, checkpoint_every)
    return Result(opened.path, data)


def load(folder: str | Path, *, stream: Stream | None = None) -> LoadedRun:
    """The trained model, on the CPU, and the results of a finished run, whichever engine and machine it ran on."""
    from everfed.session import load_module

    opened = RunFolder.open(Path(folder))
    data = opened.read_result()
    if data is None:
        raise RunError(f"{folder} is not finished; go on with `everfed resume {folder}`")
    assembly = reassemble(opened, stream, on_cpu=True)
    recipe = assembly.recipe.model_copy(update={"engine": read(opened.recipe).engine})
    return LoadedRun(load_module(opened, assembly), data, recipe)


def reassemble(
    folder: RunFolder, stream: Stream | None = None, data_dir: str | Path | None = None, on_cpu: bool = False
) -> Any:
    """The pieces of a run that is there already (`everfed.session.Assembly`); vectors keep the order they were made in,
    whatever this machine prefers. data_dir: instead of the run's. on_cpu: to look at, not to go on with it."""
    from everfed.session import assemble

    settings, recipe = folder.read_settings(), read(folder.recipe)
    changes = {"kind": "eager", "device": "cpu"} if on_cpu else {}
    changes |= {key: settings[key] for key in ("memory_format",) if key in settings}
    recipe = recipe.model_copy(update={"engine": recipe.engine.model_copy(update=changes)})
    if settings.get("own_stream") and stream is None:
        raise RunError(f"{folder.path} ran on a stream made in Python; pass the same stream again")
    known = (recipe.stream.model_extra or {}).get("identity")
    if stream is not None and known is not None and stream.identity() != known:
        raise RunError(f"{folder.path} ran on other data, or other settings of the stream; pass the same stream again")
    scale = float(settings.get("scale", 1.0))
    return assemble(scaled(recipe, scale), _text(data_dir) or settings.get("data_dir"), scale, stream)


def _as_recipe(recipe: Recipe | dict[str, Any] | str | Path) -> Recipe:
    if isinstance(recipe, Recipe):
        return recipe
    return from_table(named(recipe)) if isinstance(recipe, dict) else read(recipe)


def _fitted(recipe: Recipe, stream: Stream, scale: float) -> Recipe:
    """The recipe of a run on a stream of the user's own: its [stream] names that stream and its data, so that two runs
    on other data are two experiments; the stream says itself how many rounds a task has."""
    if scale != 1.0:
        raise RecipeError("scale shrinks the stream a recipe names; make your own as small as you like")
    rounds, given = stream.rounds_per_task or recipe.train.rounds_per_task, recipe.train.rounds_per_task
    if rounds != given and "rounds_per_task" in recipe.train.model_fields_set:
        raise RecipeError(f"train.rounds_per_task = {given}, but the stream has {rounds}; make them equal")
    table = recipe.model_dump(exclude_none=True)
    own = {"dataset": f"{IN_PYTHON}{stream.name}", "scenario": "own", "identity": stream.identity()}
    return from_table({**table, "stream": own, "train": {**table["train"], "rounds_per_task": rounds}})


def _text(data_dir: str | Path | None) -> str | None:
    return None if data_dir is None else str(data_dir)
