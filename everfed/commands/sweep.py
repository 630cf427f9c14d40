"""`everfed sweep`: a grid over recipe keys, chosen on data held out of the training set, never on test data."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from everfed.commands import options
from everfed.errors import RecipeError

if TYPE_CHECKING:
    from everfed.experiments import Comparison


def sweep(
    recipe: options.Recipe,
    grid: Annotated[
        list[str], typer.Option(metavar="KEY=V,V,...", help="A recipe key and its values; give it again for more keys.")
    ],
    trials: Annotated[
        int, typer.Option("--trials", metavar="N", min=0, help="Only so many combinations; values may be LOW..HIGH.")
    ] = 0,
    search: Annotated[
        str, typer.Option("--search", metavar="S", help="How trials are chosen: random, or tpe (the extra `search`).")
    ] = "random",
    method: options.Method = None,
    seeds: options.Seeds = None,
    sets: options.Sets = [],  # noqa: B006 (typer copies it)
    data: options.Data = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the run folders (default: runs/RECIPE-METHOD-sweep)."),
    ] = None,
    scale: options.Scale = 1.0,
    stop_early: Annotated[
        bool, typer.Option("--stop-early", help="End runs that are behind the median of finished ones at a task's end.")
    ] = False,
    checkpoint_every: options.CheckpointEvery = 5.0,
    jobs: options.Jobs = 0,
    as_json: options.Json = False,
) -> None:
    """Try every combination of values and show which is best on the validation split.

    Cells are scored on data held out of the training set (stream.validation;
    0.1 when the recipe holds out none), so that the choice never sees test
    data. The best cell is printed as --set arguments, ready to paste.

    With --trials only so many combinations are tried, and a value may be a
    range LOW..HIGH. They are drawn at random, or proposed by Optuna's TPE from
    the scores so far. The same command goes on where it stopped; a larger
    --trials adds to what is there.

    With --stop-early a run ends at the end of a task where its mean score so
    far is below the median of at least three finished runs of its seed. The
    table says so; the same command without --stop-early finishes these runs.

    \b
    Examples:
      everfed sweep demo --grid train.optimizer.lr=0.01,0.03,0.1
      everfed sweep demo --grid method.der.weight=0.5,1 --seeds 0,1
      everfed sweep demo --grid train.optimizer.lr=0.001..1 --trials 20
      everfed sweep demo --grid train.optimizer.lr=0.001..1 --trials 20 --search tpe
      everfed sweep demo --grid train.optimizer.lr=0.001..1 --trials 20 --stop-early
      everfed sweep demo --method fedprox --grid method.fedprox.mu=0.01,0.1
    """
    from everfed.commands.terminal import Terminal
    from everfed.experiments.grid import plan_sweep
    from everfed.experiments.jobs import JobSettings

    planned = plan_sweep(
        recipe,
        [axis(entry) for entry in grid],
        options.parse_seeds(seeds),
        out,
        method=method,
        sets=sets,
        scale=scale,
        trials=trials,
        search=search,
        jobs=jobs,
    )
    if planned.held_out and not as_json:
        typer.echo(f"the recipe holds out no validation data; using {planned.held_out}")
    settings = JobSettings(options.absolute(data), scale, checkpoint_every, as_json, jobs=jobs, stop_early=stop_early)
    found = planned.run(settings, Terminal(as_json))
    _print_result(found, as_json)
    if not found.best:
        raise typer.Exit(1)


def axis(entry: str) -> list[str]:
    """The `--set` entries of one `--grid`."""
    key, equals, values = entry.partition("=")
    if not equals or not values.strip():
        raise RecipeError(f"--grid {entry}: write it as key=value,value, such as train.optimizer.lr=0.01,0.1")
    return [f"{key.strip()}={value}" for value in split_values(values)]


def split_values(text: str) -> list[str]:
    """Values at commas, but not at those inside brackets, braces or quotes."""
    pieces = re.findall(r"""(?:\[[^\]]*\]|\{[^}]*\}|"[^"]*"|'[^']*'|[^,])+""", text)
    return [piece.strip() for piece in pieces]


def _print_result(found: Comparison, as_json: bool) -> None:
    from everfed.commands.output import show_table
    from everfed.experiments import comparison as tables

    folder, best, rows = found.folder, found.best, found.rows
    if as_json:
        typer.echo(json.dumps({"event": "sweep", "folder": str(folder), "best": best, "rows": tables.as_dict(rows)}))
        return
    show_table(*tables.table(rows, found.heading))
    typer.echo(f"{found.note}; written to {folder}: sweep.json, sweep.md, sweep.csv")
    typer.echo(f"best: {best}" if best else "no cell finished")
