"""`everfed resume`: go on with a run that was interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from everfed.commands import options
from everfed.commands.output import interrupt_message, print_result, stdout


def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    tasks: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Go on with a finished run until it has so many tasks.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--data", metavar="DIR", help="Folder of data sets, if they lie elsewhere now.")
    ] = None,
    checkpoint_every: options.CheckpointEvery = 5.0,
    track: options.Track = [],  # noqa: B006 (typer copies it)
    as_json: options.Json = False,
) -> None:
    """Go on with a run from its newest checkpoint, to the same bits as if it had never stopped.

    RUN is a run folder. Nothing is done to a finished run, but with --tasks:
    it goes on with further tasks of its stream, to the same bits as a run that
    had them from the start. It is refused, with the reason, where the stream,
    the network or a part depends on the number of tasks.

    \b
    Examples:
      everfed resume runs/demo-fedgp+der-0
      everfed resume runs/demo-der-0 --tasks 7
    """
    from everfed import api
    from everfed.reports.progress import watching
    from everfed.store.run import RunFolder

    if tasks is None and RunFolder.open(run).read_result() is not None and not as_json:
        typer.echo(f"{run} is already finished; nothing was done", err=True)

    def remedy() -> str:
        return f"`everfed resume {run}` goes on where it stopped"

    with interrupt_message(remedy) as interrupts, watching(stdout(), as_json) as observer:
        result = api.resume(
            run,
            tasks=tasks,
            progress=False,
            track=track,
            observers=[observer, interrupts],
            checkpoint_every=checkpoint_every,
            data_dir=data,
        )
    print_result(result.folder, result.data, as_json)
