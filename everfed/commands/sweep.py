"""`everfed sweep`: a grid over recipe keys, chosen on data held out of the training set, never on test data."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from everfed.commands import options
from everfed.errors import RecipeError

if TYPE_CHECKING:
    from everfed.commands.cells import Cell
    from everfed.commands.summary import Row
    from everfed.recipe import Recipe

VALIDATION = 0.1  # share of the training data to hold out when the recipe holds out none
SPLIT = "eval.split"


def sweep(
    recipe: options.Recipe,
    grid: Annotated[
        list[str], typer.Option(metavar="KEY=V,V,...", help="A recipe key and its values; give it again for more keys.")
    ],
    method: options.Method = None,
    seeds: options.Seeds = None,
    sets: options.Sets = [],  # noqa: B006 (typer copies it)
    data: options.Data = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the run folders (default: runs/RECIPE-METHOD-sweep)."),
    ] = None,
    scale: options.Scale = 1.0,
    checkpoint_every: options.CheckpointEvery = 5.0,
    jobs: options.Jobs = 0,
    as_json: options.Json = False,
) -> None:
    """Try every combination of values and show which is best on the validation split.

    Cells are scored on data held out of the training set (stream.validation;
    0.1 when the recipe holds out none), so that the choice never sees test
    data. The best cell is printed as --set arguments, ready to paste.

    \b
    Examples:
      everfed sweep demo --grid train.optimizer.lr=0.01,0.03,0.1
      everfed sweep demo --grid method.der.weight=0.5,1 --seeds 0,1
      everfed sweep demo --method fedprox --grid method.fedprox.mu=0.01,0.1
    """
    from everfed.commands import cells, summary
    from everfed.recipe import read

    settings = cells.Settings(options.absolute(data), scale, checkpoint_every, as_json, jobs=jobs)
    combinations = _combinations(grid)
    base = read(recipe, method=method, sets=[*sets, *combinations[0]])
    held_out = _held_out(base, [*sets, *combinations[0]])
    if held_out.keys() - {SPLIT} and not as_json:
        typer.echo(f"the recipe holds out no validation data; using {', '.join(held_out.values())}")
    folder = out or Path("runs") / f"{base.name.replace('/', '-')}-{base.method.name or 'parts'}-sweep"
    numbers = cells.parse_seeds(seeds) if seeds is not None else [base.seed]
    found = _cells(recipe, method, [*sets, *held_out.values()], combinations, numbers, folder)
    cells.check(found, settings)
    rows = summary.rows(cells.run(found, settings))
    best = rows[0].name if rows[0].spreads else ""
    facts = {"recipe": base.name, "scale": scale, "seeds": numbers, "split": "validation", "best": best}
    summary.write(folder, "sweep", rows, "Cell", facts)
    _print_result(folder, rows, best, as_json)
    if not best:
        raise typer.Exit(1)


def _held_out(base: Recipe, sets: Sequence[str]) -> dict[str, str]:
    """{key: --set} that make a run score on validation data, holding some out where the recipe does not."""
    from everfed.commands.cells import key_of_set

    if any(".".join(key_of_set(entry)) == SPLIT for entry in sets):
        raise RecipeError(f"{SPLIT} cannot be set here: a sweep chooses on validation data, never on test data")
    needed = {SPLIT: f"{SPLIT}=validation"}
    if not (base.stream.model_extra or {}).get("validation"):
        needed["stream.validation"] = f"stream.validation={VALIDATION}"
    return needed


def _combinations(grid: Sequence[str]) -> list[tuple[str, ...]]:
    """Every combination of the grid's values, each as `--set` entries."""
    axes = []
    for entry in grid:
        key, equals, values = entry.partition("=")
        if not equals or not values.strip():
            raise RecipeError(f"--grid {entry}: write it as key=value,value, such as train.optimizer.lr=0.01,0.1")
        axes.append([f"{key.strip()}={value}" for value in split_values(values)])
    return list(itertools.product(*axes))


def split_values(text: str) -> list[str]:
    """Values at commas, but not at those inside brackets, braces or quotes."""
    pieces = re.findall(r"""(?:\[[^\]]*\]|\{[^}]*\}|"[^"]*"|'[^']*'|[^,])+""", text)
    return [piece.strip() for piece in pieces]


def _cells(
    recipe: str,
    method: str | None,
    sets: Sequence[str],
    combinations: Sequence[tuple[str, ...]],
    seeds: Sequence[int],
    folder: Path,
) -> list[Cell]:
    from everfed.commands.cells import new_cell

    found = []
    for combination in combinations:
        for seed in seeds:
            place, row = folder / f"{folder_name(combination)}-{seed}", as_arguments(combination)
            found.append(new_cell(row, recipe, place, method=method, seed=seed, sets=[*sets, *combination]))
    return found


def as_arguments(combination: Sequence[str]) -> str:
    """A cell as arguments that can be pasted into a shell."""
    return " ".join(f"--set {shlex.quote(entry)}" for entry in combination)


def folder_name(combination: Sequence[str]) -> str:
    """A cell's folder: its settings as they are where a file name can hold them, else shortened with a hash."""
    text = ",".join(combination)
    safe = re.sub(r"[^A-Za-z0-9._=,+-]", "_", text)
    if safe == text and len(text) <= 120:
        return text
    return f"{safe[:100]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _print_result(folder: Path, rows: list[Row], best: str, as_json: bool) -> None:
    from everfed.commands import summary
    from everfed.commands.output import show_table

    if as_json:
        typer.echo(json.dumps({"event": "sweep", "folder": str(folder), "best": best, "rows": summary.as_dict(rows)}))
        return
    show_table(*summary.table(rows, "Cell"))
    typer.echo(f"scored on validation data; written to {folder}: sweep.json, sweep.md, sweep.csv")
    typer.echo(f"best: {best}" if best else "no cell finished")
