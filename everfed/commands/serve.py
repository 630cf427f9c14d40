"""`everfed serve`: the server of a federation."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from everfed.commands import options
from everfed.commands.output import interrupt_message, print_result, same_command, stdout


def serve(
    recipe: options.Recipe,
    method: options.Method = None,
    seed: options.Seed = None,
    sets: options.Sets = [],  # noqa: B006 (typer copies it)
    data: options.Data = None,
    out: options.RunOut = None,
    scale: options.Scale = 1.0,
    clients: Annotated[
        int, typer.Option(metavar="N", min=0, help="Clients to wait for before it starts (default: the recipe's).")
    ] = 0,
    host: Annotated[str, typer.Option(metavar="HOST", help="Address of the SuperLink.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="PORT", help="Its port.")] = 8000,
    certificates: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of `everfed federation keys`.")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Neither TLS nor keys; on loopback only.")] = False,
    checkpoint_every: options.CheckpointEvery = 5.0,
    as_json: options.Json = False,
) -> None:
    """Run a recipe on real clients; the run folder is that of any run.

    It starts a SuperLink (or uses the one that you run at HOST:PORT), waits
    for clients, and runs.

    After a kill, the same command resumes the run, with the same result;
    clients rejoin by themselves.

    \b
    Examples:
      everfed serve demo --insecure --clients 2
      everfed serve my.toml --out runs/hospital --host 127.0.0.1 --port 8443 \\
          --certificates pki
    """
    from everfed import api
    from everfed.federation.flower import require_flower

    require_flower()
    from everfed.federation.flower.link import Address, open_grid, register
    from everfed.federation.logs import stamped, stamped_event
    from everfed.federation.security import enrolled, read_security
    from everfed.federation.serving import Serving
    from everfed.federation.serving import serve as run_server
    from everfed.federation.superlink import Settings, running
    from everfed.recipe import placed, read_placed
    from everfed.reports.progress import watching

    say = _say(as_json)
    security = None if insecure else read_security(certificates, lambda text: say(stamped(text, logging.WARNING)))
    names = {} if insecure or certificates is None else enrolled(certificates)
    reading = read_placed(recipe, method=method, seed=seed, sets=sets)
    folder = out or api.default_folder(reading.recipe)
    address = Address(host, port)
    serving = Serving(reading.recipe, folder, _text(options.absolute(data)), scale, clients, names, checkpoint_every)
    link = Settings(host, port, folder.absolute().with_name(f"{folder.name}.superlink"), security)
    watch = watching(stdout(), as_json, stamp=stamped_event)
    interruptible = interrupt_message(same_command)
    with placed(reading.places), interruptible as interrupts, watch as observer, running(link, say):
        if names:
            register(address, names)
        result = run_server(serving, lambda: open_grid(address), [observer, interrupts])
    print_result(folder, result, as_json)


def _say(as_json: bool) -> Callable[[str], None]:
    def say(line: str) -> None:
        if not as_json:
            typer.echo(line, err=True)

    return say


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
