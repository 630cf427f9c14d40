"""`everfed forget`: withdraw samples from a finished run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from everfed.commands import options
from everfed.commands.output import print_result


def forget(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    client: Annotated[list[int], typer.Option(help="A client whose samples are withdrawn; may be given again.")] = [],  # noqa: B006
    class_: Annotated[list[int], typer.Option("--class", help="A class, likewise.")] = [],  # noqa: B006
    samples: Annotated[
        str, typer.Option(metavar="ID,ID,...", help="Ids of single samples of the client that is named.")
    ] = "",
    data: options.Data = None,
    as_json: options.Json = False,
) -> None:
    """Withdraw samples from a finished run of ridge or RanPAC, exactly.

    The model is then, bit for bit, the one of a run that never saw them; so
    are the sums that the server keeps. Scores are measured again. The run
    folder's forgotten.jsonl says what was withdrawn, and when. A sample is
    withdrawn if all that is given names it: client, class and id.

    \\b
    Examples:
      everfed forget runs/demo-ridge-0 --client 3
      everfed forget runs/demo-ridge-0 --class 7
      everfed forget runs/demo-ridge-0 --client 3 --samples 120,121
    """
    from everfed import api
    from everfed.errors import UserError

    words = samples.split(",") if samples else []
    if not all(word.strip().isdecimal() for word in words):
        raise UserError(f"--samples must be ids with commas between them; got {samples!r}")
    found = api.forget(run, clients=client, classes=class_, samples=[int(word) for word in words], data_dir=data)
    print_result(found.folder, found.data, as_json)
