"""Arguments and options that several commands share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from everfed.errors import RecipeError

Recipe = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A TOML file, or a shipped recipe (everfed list recipes).")
]
Method = Annotated[str | None, typer.Option("--method", metavar="M", help="Another method than the recipe's own.")]
Seed = Annotated[int | None, typer.Option("--seed", metavar="S", help="Another seed than the recipe's own.")]
RunOut = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="The run folder itself (default: runs/RECIPE-METHOD-SEED)."),
]
Sets = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the recipe, such as train.rounds_per_task=5."),
]
Data = Annotated[
    Path | None,
    typer.Option("--data", metavar="DIR", help="Folder of data sets; else what EVERFED_DATA names."),
]
Scale = Annotated[
    float,
    typer.Option("--scale", metavar="F", help="Share of the work, above 0 and at most 1."),
]
CheckpointEvery = Annotated[
    float, typer.Option("--checkpoint-every", metavar="S", min=0.0, help="Seconds of work between checkpoints.")
]
Json = Annotated[bool, typer.Option("--json", help="Write JSON lines, for machines.")]
Jobs = Annotated[
    int,
    typer.Option(
        "--jobs", metavar="N", min=0, help="Runs side by side, in processes; 0: what is fastest here (a GPU: measured)."
    ),
]
Seeds = Annotated[str | None, typer.Option("--seeds", metavar="S,S,...", help="Seeds, such as 0,1,2.")]


class Tracker(StrEnum):
    """What `--track` can name."""

    tensorboard = "tensorboard"
    mlflow = "mlflow"
    wandb = "wandb"


Track = Annotated[
    list[Tracker],
    typer.Option("--track", metavar="T", help="Also write to tensorboard, mlflow or wandb; may be given again."),
]


def absolute(folder: Path | None) -> Path | None:
    """An absolute path: a run may be resumed from another folder."""
    return None if folder is None else folder.expanduser().absolute()


def parse_seeds(text: str | None) -> list[int] | None:
    """`0,1,2`; None where nothing is said. Raises RecipeError."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise RecipeError(f"--seeds {text}: write whole numbers of at least 0 with commas between, such as 0,1,2")
    return list(dict.fromkeys(int(part) for part in parts))
