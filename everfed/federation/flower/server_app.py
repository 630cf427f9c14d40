"""The ServerApp, for a SuperLink that runs apps itself: `flwr run` with the recipe and the run folder in its config."""

from __future__ import annotations

from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the recipe; an existing run folder is resumed."""
    from everfed import api
    from everfed.federation.flower.replies import OneByOne
    from everfed.federation.serving import Serving, serve
    from everfed.recipe import read

    config = context.run_config
    recipe = read(str(config["recipe"]))
    folder = Path(str(config["out"])) if config.get("out") else api.default_folder(recipe)
    data_dir = str(config["data-dir"]) or None
    every = float(config["checkpoint-every"])
    serve(Serving(recipe, folder, data_dir, float(config["scale"]), checkpoint_every=every), lambda: OneByOne(grid))
