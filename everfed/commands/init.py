"""`everfed init`: a starter folder that runs as it is."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from everfed.errors import UserError

FILES = ("recipe.toml", "my_model.py", "my_part.py")


def init(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="The folder to write to.")] = Path("my-experiment"),
) -> None:
    """Write a starter folder: a recipe, a network and a part of your own, ready to run.

    Nothing that exists is overwritten.

    \b
    Examples:
      everfed init
      everfed init clinic
    """
    taken = [name for name in FILES if (folder / name).exists()]
    if taken:
        raise UserError(f"{folder / taken[0]} is there already; nothing was written. Name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        (folder / name).write_text(
            resources.files("everfed.recipe").joinpath("starter", name).read_text("utf-8"), "utf-8"
        )
    typer.echo(f"written to {folder}: {', '.join(FILES)}")
    typer.echo(f"next: cd {folder} && everfed run recipe.toml")
