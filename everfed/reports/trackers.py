"""TensorBoard, MLflow and Weights & Biases as observers of a run.

    everfed.run(recipe, folder, observers=[tracker("tensorboard", folder, recipe, print)])

The step of every value is the round, counted from 1. A resumed run goes on in the same place. Each library's own
settings determine where it writes (MLFLOW_TRACKING_URI, WANDB_DIR, ...); Weights & Biases stays offline unless
WANDB_MODE is set, so that nothing leaves the machine by default. A tracker that fails causes a warning and is closed;
it never ends a run.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from everfed.errors import UserError
from everfed.recipe import Recipe, flat

if TYPE_CHECKING:
    from everfed.core.events import Event, Observer

Values = dict[str, float]
PROJECT = "everfed"


class Sink(Protocol):
    """One run in one tracker."""

    def log(self, step: int, values: Values) -> None:
        """Values of a round."""

    def end(self, metrics: Values, failed: bool) -> None:
        """The last call; metrics: those of the result, none where the run failed."""


class TensorBoard:
    """Event files in the folder `tensorboard` of the run."""

    def __init__(self, folder: Path, recipe: Recipe, at: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # steps after `at` that an earlier attempt wrote are hidden: they are run again
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=at + 1 if at else None)
        for key, value in _settings(recipe).items():
            self._writer.add_text(f"recipe/{key}", str(value), at)
        self._last = at

    def log(self, step: int, values: Values) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._last = step

    def end(self, metrics: Values, failed: bool) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(f"final/{name}", value, self._last)
        self._writer.close()


class MLflow:
    """A run of the experiment with the recipe's name."""

    def __init__(self, folder: Path, recipe: Recipe, at: int) -> None:
        import mlflow

        self._client = mlflow.MlflowClient()
        experiment = self._client.get_experiment_by_name(recipe.name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(recipe.name)
        place = str(folder.resolve())
        found = self._client.search_runs([number], f"tags.`everfed.folder` = '{_quoted(place)}'", max_results=1)
        self._run = found[0].info.run_id if found and at else self._new(number, place, folder.name, recipe)
        self._client.update_run(self._run, status="RUNNING")

    def _new(self, experiment: str, place: str, name: str, recipe: Recipe) -> str:
        run = self._client.create_run(experiment, tags={"everfed.folder": place}, run_name=name)
        for key, value in _settings(recipe).items():
            self._client.log_param(run.info.run_id, key, str(value)[:500])
        return str(run.info.run_id)

    def log(self, step: int, values: Values) -> None:
        for name, value in values.items():
            self._client.log_metric(self._run, name, value, step=step)

    def end(self, metrics: Values, failed: bool) -> None:
        for name, value in metrics.items():
            self._client.log_metric(self._run, f"final/{name}", value)
        self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")


class WandB:
    """A run of the project `everfed`, or of WANDB_PROJECT."""

    def __init__(self, folder: Path, recipe: Recipe, at: int) -> None:
        import wandb

        # the same folder is the same run, so that a resumed one goes on
        number = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=number,
            name=folder.name,
            dir=os.environ.get("WANDB_DIR", str(folder)),
            config=_settings(recipe),
            mode=cast(Any, os.environ.get("WANDB_MODE", "offline")),  # one of wandb's own words
            resume="allow" if at else None,
            settings=wandb.Settings(silent=True),
        )

    def log(self, step: int, values: Values) -> None:
        self._run.log(values, step=step)

    def end(self, metrics: Values, failed: bool) -> None:
        self._run.summary.update({f"final/{name}": value for name, value in metrics.items()})
        self._run.finish(exit_code=1 if failed else 0)


def _quoted(text: str) -> str:
    return text.replace("'", "\\'")


def _settings(recipe: Recipe) -> dict[str, Any]:
    """The recipe as dotted keys."""
    return flat(recipe.model_dump(exclude_none=True))


# kind -> (class, the package to look for, what to install)
TRACKERS: dict[str, tuple[Callable[[Path, Recipe, int], Sink], str, str]] = {
    "tensorboard": (TensorBoard, "tensorboard", "tensorboard"),
    "mlflow": (MLflow, "mlflow", "mlflow"),
    "wandb": (WandB, "wandb", "wandb"),
}


def tracker(kind: str, folder: Path, recipe: Recipe, warn: Callable[[str], None]) -> Observer:
    """An observer that writes a run to a tracker. warn: called with a message when the tracker fails.

    Raises UserError for an unknown kind, and for one whose library is not installed, before anything runs.
    """
    from importlib.util import find_spec

    if kind not in TRACKERS:
        raise UserError(f"there is no tracker {kind!r}; allowed: {', '.join(TRACKERS)}")
    make, package, install = TRACKERS[kind]
    if find_spec(package) is None:
        raise UserError(f"tracking with {kind} needs its library: pip install {install}")
    return _Tracking(kind, lambda at: make(folder, recipe, at), warn)


class _Tracking:
    """Feeds a sink from events; it is opened when the run starts, and closed when it ends or fails."""

    def __init__(self, kind: str, make: Callable[[int], Sink], warn: Callable[[str], None]) -> None:
        self._kind, self._make, self._warn = kind, make, warn
        self._sink: Sink | None = None

    def __call__(self, event: Event) -> None:
        try:
            self._process(event)
        except Exception as error:  # a tracker may raise anything; the run goes on
            self._sink = None
            self._warn(f"{self._kind} tracks this run no longer: {type(error).__name__}: {error}")

    def _process(self, event: Event) -> None:
        if event["event"] == "start":
            self._sink = self._make(int(event.get("round", 0)))
        if self._sink is None:
            return
        if event["event"] in ("end", "fault"):
            sink, self._sink = self._sink, None
            sink.end(numbers(event.get("metrics", {})), event["event"] == "fault")
        elif values := scalars(event):
            self._sink.log(int(event["round"]) + 1, values)


def scalars(event: Event) -> Values:
    """The values of an event by the names they have in a tracker; none for events that measure nothing."""
    if event["event"] == "phase":
        phase = event["phase"]
        named = {"loss": event.get("loss"), "clients_trained": event.get("trained"), "seconds": event["seconds"]}
        named |= {"bytes_up": event["bytes_up"], "bytes_down": event["bytes_down"]}
        return numbers({f"{phase}/{name}": value for name, value in named.items()})
    if event["event"] == "evaluation":
        tasks = {f"evaluation/task_{i}": value for i, value in enumerate(event["accuracy"], start=1)}
        score = event.get("score", "accuracy")
        mean = "acc" if score == "accuracy" else score
        return numbers({f"evaluation/{mean}": event["acc"], **tasks})
    if event["event"] == "measure":
        values = {key: value for key, value in event.items() if key not in ("event", "round", "task", "part", "time")}
        return numbers({f"{event['part']}/{key}": value for key, value in values.items()})
    return {}


def numbers(table: dict[str, Any]) -> Values:
    """The numbers of a table as floats; other values are left out."""
    return {key: float(value) for key, value in table.items() if isinstance(value, int | float)}
