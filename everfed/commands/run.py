"""`everfed run`: one recipe, one run folder."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from everfed.commands import options
from everfed.commands.output import interrupt_message, print_result, show_table, stdout

if TYPE_CHECKING:
    from everfed.core.events import Observer
    from everfed.recipe import Reading


def run(
    recipe: options.Recipe,
    method: options.Method = None,
    seed: options.Seed = None,
    sets: options.Sets = [],  # noqa: B006 (typer copies it)
    data: options.Data = None,
    out: options.RunOut = None,
    scale: options.Scale = 1.0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Remove a run that is in the folder.")] = False,
    resume_or_run: Annotated[
        bool, typer.Option("--resume-or-run", help="Go on with a run of this recipe that is in the folder.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check, run two rounds, and print shapes, time, memory and bytes.")
    ] = False,
    checkpoint_every: options.CheckpointEvery = 5.0,
    track: options.Track = [],  # noqa: B006 (typer copies it)
    as_json: options.Json = False,
) -> None:
    """Run a recipe; the run folder holds the recipe, events, checkpoints, the model and result.json.

    RECIPE is a TOML file or the name of a shipped recipe (everfed list
    recipes). A run that is killed goes on with everfed resume, to the same
    bits; a script may repeat its command with --resume-or-run. Without --out
    the folder gets a number where its name is taken.

    \b
    Examples:
      everfed run demo
      everfed run demo --method fedavg --seed 1 --out runs/mine
      everfed run fedgp/table1-rotated-mnist --data ~/data --scale 0.1
      everfed run my.toml --set train.rounds_per_task=5 --set stream.tasks=3
      everfed run demo --track tensorboard
      everfed run my.toml --dry-run
      everfed run my.toml --out runs/job-17 --resume-or-run
    """
    from everfed import api
    from everfed.recipe import read_placed, unused_settings
    from everfed.reports.progress import watching
    from everfed.store.run import RunFolder

    reading = read_placed(recipe, method=method, seed=seed, sets=sets)
    if unused := unused_settings(reading.recipe):
        entries = " ".join(f"--set {shlex.quote(entry)}" for entry in unused)
        typer.echo(f"`everfed compare` runs {reading.recipe.method.name} with settings of its own: {entries}", err=True)
    if dry_run:
        _show_estimate(reading, data, scale, as_json)
        return
    folder = out or api.default_folder(reading.recipe)
    if resume_or_run and RunFolder(folder).result.exists() and not as_json:
        typer.echo(f"{folder} is already finished; nothing was done", err=True)

    def remedy() -> str:
        if RunFolder(folder).recipe.exists():
            return f"`everfed resume {folder}` goes on where it stopped"
        return "no round had begun, so nothing was kept; the same command begins anew"

    def observers(chosen: Path) -> list[Observer]:
        nonlocal folder
        folder = chosen
        return [observer, interrupts]

    with interrupt_message(remedy) as interrupts, watching(stdout(), as_json) as observer:
        result = api.run(
            reading,
            out,
            data_dir=options.absolute(data),
            scale=scale,
            overwrite=overwrite,
            resume_or_run=resume_or_run,
            progress=False,
            track=track,
            observers=observers,
            checkpoint_every=checkpoint_every,
        )
    print_result(result.folder, result.data, as_json)


def _show_estimate(reading: Reading, data: Path | None, scale: float, as_json: bool) -> None:
    from everfed import api

    found = api.estimate(reading, data_dir=options.absolute(data), scale=scale)
    if as_json:
        typer.echo(json.dumps({"event": "estimate", **found}))
        return
    show_table(["what", "value"], _lines(found))
    typer.echo("nothing was kept; run it without --dry-run")


def _lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    from everfed.privacy.reveals import sentence
    from everfed.reports.formats import clock, size

    return [
        ("method", f"{found['method']}, of the parts {', '.join(found['parts'])}"),
        ("stream", f"{found['stream']}: {found['tasks']} tasks, {found['clients']} clients, {found['rounds']} rounds"),
        ("samples", f"{found['samples']} in the first round, each {tuple(found['input_shape'])}"),
        ("model", f"{found['model']}: {found['parameters']:,} parameters, outputs {tuple(found['output_shape'])}"),
        ("server sees", sentence(found["reveals"])),
        ("time", f"{clock(found['seconds'])}, {found['seconds_per_round']:.2f} s a round on this machine"),
        ("memory", f"{size(found['peak_memory_bytes'])} at the peak, in this process"),
        ("bytes", f"{size(found['bytes_up'])} up, {size(found['bytes_down'])} down in all"),
    ]
