"""`everfed run`: one recipe, one run folder."""

from __future__ import annotations

from everfed.commands import options, tracking
from everfed.commands.interrupts import interrupt_message
from everfed.commands.output import print_result, stdout


def run(
    recipe: options.Recipe,
    method: options.Method = None,
    seed: options.Seed = None,
    sets: options.Sets = [],  # noqa: B006 (typer copies it)
    data: options.Data = None,
    out: options.RunOut = None,
    scale: options.Scale = 1.0,
    checkpoint_every: options.CheckpointEvery = 5.0,
    track: tracking.Track = [],  # noqa: B006 (typer copies it)
    as_json: options.Json = False,
) -> None:
    """Run a recipe; the run folder holds the recipe, events, checkpoints, the model and result.json.

    RECIPE is a TOML file or the name of a shipped recipe (everfed list
    recipes). A run that is killed goes on with everfed resume, to the same
    bits.

    \b
    Examples:
      everfed run demo
      everfed run demo --method fedavg --seed 1 --out runs/mine
      everfed run fedgp/table1-rotated-mnist --data ~/data --scale 0.1
      everfed run my.toml --set train.rounds_per_task=5 --set stream.tasks=3
      everfed run demo --track tensorboard
    """
    from everfed import api
    from everfed.progress import watching
    from everfed.recipe import placed, read_placed
    from everfed.store.run import RunFolder

    reading = read_placed(recipe, method=method, seed=seed, sets=sets)
    folder = out or api.default_folder(reading.recipe)

    def remedy() -> str:
        if RunFolder(folder).recipe.exists():
            return f"`everfed resume {folder}` goes on where it stopped"
        return "no round had begun, so nothing was kept; the same command begins anew"

    with placed(reading.places):
        trackers = tracking.observers(track, folder, reading.recipe)
    showing = watching(stdout(), as_json)
    with placed(reading.places), interrupt_message(remedy) as interrupts, showing as observer:
        result = api.run(
            reading.recipe,
            folder,
            data_dir=options.absolute(data),
            scale=scale,
            observers=[observer, *trackers, interrupts],
            checkpoint_every=checkpoint_every,
        )
    print_result(result.folder, result.data, as_json)
