"""`everfed ui`: a live page of the runs in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def ui(
    runs_dir: Annotated[Path, typer.Argument(metavar="RUNS_DIR", help="The folder that holds run folders.")] = Path(
        "runs"
    ),
    host: Annotated[str, typer.Option(metavar="H", help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="P", min=0, max=65535, help="The port; 0 takes a free one.")] = 8765,
    token: Annotated[
        str | None,
        typer.Option(
            metavar="T", envvar="EVERFED_UI_TOKEN", help="Token that visitors must give; on loopback made by default."
        ),
    ] = None,
) -> None:
    """Serve a page that shows runs while they train, compares them and offers reports for download.

    It reads the folder and changes nothing. By default only this machine can
    open it, and only with the address that is printed, which has a token; with
    another --host name a token: open the address with ?token=T once.

    \b
    Examples:
      everfed ui runs
      everfed ui runs --port 0
      EVERFED_UI_TOKEN=secret everfed ui runs --host 0.0.0.0
    """
    from everfed.reports.server import serve

    try:
        serve(runs_dir, host, port, token, lambda address: typer.echo(f"dashboard: {address} (ctrl-C ends it)"))
    except KeyboardInterrupt:
        raise typer.Exit from None
