"""`everfed samples`: a labelled sheet of images from a run's generator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from everfed.commands import options


def samples(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder of a method with a generator.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The picture to write (default: samples.png in the run folder).")
    ] = None,
    data: options.Data = None,
    per_class: Annotated[int, typer.Option(min=1, metavar="N", help="Images of each class, at most.")] = 8,
) -> None:
    """Draw images from a run's generator, one row per class, labelled by the frozen model's own answers.

    RUN is a finished run, or one that is under way. No run draws images by
    itself: they may resemble what clients hold. With fedcil labels are the
    generator's inputs, with glfc those read from the clients' gradients.

    \b
    Example:
      everfed samples runs/mfcl-cifar100-small-mfcl-0
    """
    from everfed import api
    from everfed.session.samples import PRIVACY, draw, sample
    from everfed.store.run import RunFolder

    folder = RunFolder.open(run)
    sheet = sample(folder, api.reassemble(folder, data_dir=data, on_cpu=True), per_class)
    typer.echo(f"note: {PRIVACY}", err=True)
    typer.echo(f"samples: {draw(sheet, out or run / 'samples.png')}")
