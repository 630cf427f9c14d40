"""`everfed export`: a trained network in another format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from everfed.commands import options


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A finished run, or a client's folder of `everfed join`.")],
    to: Annotated[str, typer.Option(metavar="FORMAT", help="torch, torch-export, onnx, hf or peft.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="A new folder (default: export-FORMAT in RUN).")
    ] = None,
    client: Annotated[
        int | None, typer.Option(metavar="ID", min=0, help="The personal model of this client of a simulation.")
    ] = None,
    data: options.Data = None,
    stream: Annotated[
        str | None, typer.Option(metavar="MODULE:FUNCTION", help="With a client's folder: its `join --data`.")
    ] = None,
    allow_code: Annotated[
        list[str] | None, typer.Option(metavar="MODULE", help="A module of your own that the folder may run.")
    ] = None,
) -> None:
    """Write a run's trained network in the format of others, with its input form and class names beside it.

    The network is read back and compared on random samples before the folder is
    kept. torch: the state_dict; torch-export and onnx: the network with the
    run's normalisation before it; hf: a folder of transformers; peft: the
    adapter alone. The data is needed for personal models only.

    \b
    Examples:
      everfed export runs/demo-fedavg-0 --to onnx
      everfed export runs/mine --to torch-export --client 3
      everfed export my-site --to torch
    """
    from everfed.session.export import export as write

    module, description = _network(run, client, data, stream, allow_code or [])
    folder = out or run / f"export-{to}"
    difference = write(module, description, to, folder)
    typer.echo(f"{to}: {folder} (outputs differ by at most {difference:.1e})")


def _network(
    run: Path, client: int | None, data: Path | None, stream: str | None, allow_code: list[str]
) -> tuple[Any, Any]:
    from everfed import api

    if not (run / "recipe.toml").exists():
        from everfed.federation.client_model import client_model, is_client_folder
        from everfed.federation.runtime import RuntimeBuilder

        if is_client_folder(run):  # its recipe is a server's
            from everfed.data.sources import data_folder
            from everfed.naming import files_inside, restricted
            from everfed.session.saved_model import OWN_CODE

            own = (stream,) if stream else ()
            with restricted((*OWN_CODE, *own, *allow_code)), files_inside(data_folder(data)):
                return client_model(run, RuntimeBuilder(data_dir=None if data is None else str(data), data=stream))
    loaded = api.load(run, client=client, data_dir=data, allow_code=allow_code)
    return loaded.model, loaded.description
