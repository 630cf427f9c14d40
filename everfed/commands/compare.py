"""`everfed compare`: several methods and seeds on the same stream, one table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from everfed.commands import options, tracking
from everfed.errors import RecipeError

if TYPE_CHECKING:
    from everfed.commands.cells import Cell, Settings
    from everfed.commands.summary import Row
    from everfed.recipe import Recipe


def compare(
    recipe: options.Recipe,
    methods: Annotated[
        str | None, typer.Option(metavar="M,M,...", help="Methods (default: those the recipe compares).")
    ] = None,
    seeds: options.Seeds = None,
    sets: options.Sets = [],  # noqa: B006 (typer copies it)
    data: options.Data = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the run folders (default: runs/RECIPE-compare).")
    ] = None,
    scale: options.Scale = 1.0,
    checkpoint_every: options.CheckpointEvery = 5.0,
    jobs: options.Jobs = 0,
    track: tracking.Track = [],  # noqa: B006 (typer copies it)
    as_json: options.Json = False,
) -> None:
    """Run several methods over several seeds and print one table, the best first.

    Every cell is an ordinary run folder DIR/METHOD-SEED. When the command is
    repeated, finished cells are kept and interrupted ones resumed; several
    processes may work through one DIR, each taking cells that no other has.
    The table is also written as compare.json, compare.md and compare.csv. An
    option of a part (--set method.PART.OPTION=...) applies to the methods that
    have that part.

    \b
    Examples:
      everfed compare demo --methods fedavg,er,fedgp+er --seeds 0,1,2
      everfed compare fedgp/table1-rotated-mnist --data ~/data
      everfed compare my.toml --methods fedavg,fedprox --set method.fedprox.mu=0.1
    """
    from everfed.commands.cells import Settings

    settings = Settings(options.absolute(data), scale, checkpoint_every, as_json, track, jobs)
    folder, rows = compared(recipe, methods, seeds, sets, out, settings)
    print_comparison(folder, rows, as_json)
    if any(outcome.result is None for row in rows for outcome in row.outcomes):
        raise typer.Exit(1)


def compared(
    recipe: str, methods: str | None, seeds: str | None, sets: Sequence[str], out: Path | None, settings: Settings
) -> tuple[Path, list[Row]]:
    """Run the comparison and write its table; (folder, rows)."""
    from everfed.commands import cells, summary
    from everfed.recipe import read

    base = read(recipe, sets=[entry for entry in sets if not _is_method_option(entry)])
    names, numbers = _methods(methods, base, recipe), _seeds(seeds, base)
    folder = out or Path("runs") / f"{base.name.replace('/', '-')}-compare"
    own = base.compare.options if base.compare else {}
    grid = _cells(recipe, names, numbers, own, sets, folder)
    cells.check(grid, settings)
    rows = summary.rows(cells.run(grid, settings))
    facts = {"recipe": base.name, "scale": settings.scale, "seeds": numbers}
    summary.write(folder, "compare", rows, "Method", facts)
    return folder, rows


def print_comparison(folder: Path, rows: list[Row], as_json: bool) -> None:
    """Print the table, and where it was written."""
    from everfed.commands import summary
    from everfed.commands.output import show_table

    if as_json:
        typer.echo(json.dumps({"event": "comparison", "folder": str(folder), "rows": summary.as_dict(rows)}))
        return
    show_table(*summary.table(rows, "Method"))
    typer.echo(f"written to {folder}: compare.json, compare.md, compare.csv")


def _methods(text: str | None, recipe: Recipe, label: str) -> list[str]:
    if text is not None and not text.strip(", "):
        raise RecipeError("--methods names none; write them with commas between, such as fedavg,der")
    if text is not None:
        return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if recipe.compare is None:
        raise RecipeError(f"{label} has no [compare] table; name the methods with --methods fedavg,der,...")
    return recipe.compare.methods


def _seeds(text: str | None, recipe: Recipe) -> list[int]:
    from everfed.commands.cells import parse_seeds

    if text is not None:
        return parse_seeds(text)
    return recipe.compare.seeds if recipe.compare else [recipe.seed]


def _cells(
    recipe: str,
    methods: Sequence[str],
    seeds: Sequence[int],
    own: Mapping[str, Sequence[str]],
    sets: Sequence[str],
    folder: Path,
) -> list[Cell]:
    """A run for every method and seed. own: settings by method, which those of the command line follow."""
    from everfed.commands.cells import new_cell

    grid, used = [], set()
    for method in methods:
        usable = [entry for entry in sets if _applies(entry, method)]
        used.update(usable)
        given = [*own.get(method, ()), *usable]
        for seed in seeds:
            grid.append(new_cell(method, recipe, folder / f"{method}-{seed}", method=method, seed=seed, sets=given))
    for entry in sets:
        if entry not in used:
            raise RecipeError(f"--set {entry}: none of the methods {', '.join(methods)} has that part")
    return grid


def _is_method_option(entry: str) -> bool:
    """Is this `--set` an option of a part?"""
    from everfed.commands.cells import key_of_set
    from everfed.recipe import MethodSection

    key = key_of_set(entry)
    return key[0] == "method" and len(key) > 1 and key[1] not in MethodSection.model_fields


def _applies(entry: str, method: str) -> bool:
    """Does a `--set` apply to this method? An option of a part does if the method has the part."""
    from everfed import methods
    from everfed.commands.cells import key_of_set

    if not _is_method_option(entry):
        return True
    parts: Any = methods.build(method).parts
    return key_of_set(entry)[1] in {part.name for part in parts}
