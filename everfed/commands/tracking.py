"""`--track`: TensorBoard, MLflow and Weights & Biases as observers of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from everfed.recipe import Recipe


class Tracker(StrEnum):
    """What `--track` can name."""

    tensorboard = "tensorboard"
    mlflow = "mlflow"
    wandb = "wandb"


Track = Annotated[
    list[Tracker],
    typer.Option("--track", metavar="T", help="Also write to tensorboard, mlflow or wandb; may be given again."),
]


def observers(kinds: Sequence[str], folder: Path, recipe: Recipe) -> list[Callable[[dict[str, Any]], None]]:
    """One observer per tracker. Raises UserError, before anything runs, where a tracker's library is missing."""
    if not kinds:
        return []
    from everfed.recipe import settled
    from everfed.reports.trackers import tracker

    return [tracker(str(kind), folder, settled(recipe), _print_error) for kind in kinds]


def _print_error(message: str) -> None:
    typer.echo(message, err=True)
