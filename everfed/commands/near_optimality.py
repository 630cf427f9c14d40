"""`everfed near-optimality`: compares selection policies with the best possible choice, with the paper's plot."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from everfed.commands.options import Json
from everfed.commands.output import show_table
from everfed.errors import UserError

if TYPE_CHECKING:
    from everfed.methods.replay.near_optimality import Choice


def near_optimality(
    sizes: Annotated[str, typer.Option(metavar="N,N,...", help="Numbers of samples to choose from.")] = "10,30,50",
    keep: Annotated[int, typer.Option(min=1, help="How many are kept.")] = 5,
    repetitions: Annotated[int, typer.Option(min=1, help="Clients drawn for every number of samples.")] = 1000,
    reading: Annotated[
        str, typer.Option(help="How the generator normalises: per-vector, per-coordinate (as printed), or both.")
    ] = "both",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the drawn gradients.")] = 0,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the numbers and the plot.")] = Path(
        "runs/near-optimality"
    ),
    as_json: Json = False,
) -> None:
    """Compare selection policies with the best of all subsets, on synthetic gradients.

    Figures 1 and 4 of "Coordinated Replay Sample Selection for Continual
    Federated Learning": the sum of cosines among the samples that a policy
    keeps, divided by the least that any choice has. Writes every ratio
    (near_optimality.csv), their means (near_optimality.json) and, where
    matplotlib is installed, the plot (near_optimality.png). The paper's 1,000
    clients for 10, 30 and 50 samples take some minutes.

    \b
    Examples:
      everfed near-optimality --repetitions 100
      everfed near-optimality --sizes 50 --reading per-vector
    """
    from everfed.methods.replay.near_optimality import READINGS, near_optimality

    chosen = tuple(READINGS) if reading == "both" else (reading,)
    if reading not in (*READINGS, "both"):
        raise UserError(f"--reading must be one of {', '.join(READINGS)} or both; got {reading!r}")
    numbers = _whole(sizes)
    if min(numbers) < keep:
        raise UserError(f"--keep {keep} is more than the {min(numbers)} samples of --sizes")
    out.mkdir(parents=True, exist_ok=True)  # fails before the minutes of computation
    rows = list(near_optimality(numbers, chosen, repetitions, keep=keep, seed=seed))
    write(rows, out, {"keep": keep, "repetitions": repetitions, "seed": seed})
    plot = find_spec("matplotlib") is not None
    if plot:
        draw(rows, out / "near_optimality.png")
    _report(rows, out, plot, as_json)


def _whole(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UserError(f"--sizes {text}: write positive whole numbers with commas between, such as 10,30,50")
    return [int(part) for part in parts]


def write(rows: Sequence[Choice], folder: Path, facts: dict[str, int]) -> None:
    """near_optimality.csv with a line per choice, near_optimality.json with the mean ratios."""
    from everfed.methods.replay.near_optimality import mean_ratios

    with open(folder / "near_optimality.csv", "w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["reading", "samples", "repetition", "policy", "objective", "optimum", "ratio"])
        lines.writerows([*asdict(row).values(), row.ratio] for row in rows)
    means = [
        {"reading": reading, "samples": samples, "policy": policy, "mean_ratio": ratio}
        for (reading, samples, policy), ratio in mean_ratios(rows).items()
    ]
    (folder / "near_optimality.json").write_text(json.dumps({**facts, "means": means}, indent=2) + "\n")


def draw(rows: Sequence[Choice], path: Path) -> None:
    """A panel for every reading and number of samples: the distribution of every policy's ratios, as lines of the share
    of clients below a ratio."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    readings, sizes = list(dict.fromkeys(r.reading for r in rows)), list(dict.fromkeys(r.samples for r in rows))
    size = (4 * len(sizes), 3.2 * len(readings))
    figure, panels = pyplot.subplots(len(readings), len(sizes), figsize=size, squeeze=False, sharey=True)
    for i, reading in enumerate(readings):
        for j, samples in enumerate(sizes):
            _panel(panels[i][j], [row for row in rows if (row.reading, row.samples) == (reading, samples)])
    panels[0][0].set_ylabel("share of clients")
    panels[0][0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _panel(axes: Any, rows: Sequence[Choice]) -> None:
    for policy in dict.fromkeys(row.policy for row in rows):
        ratios = sorted(row.ratio for row in rows if row.policy == policy)
        axes.step(ratios, [(k + 1) / len(ratios) for k in range(len(ratios))], where="post", label=policy)
    axes.set_title(f"n = {rows[0].samples}, {rows[0].reading}")
    axes.set_xlabel("objective / optimum")


def _report(rows: Sequence[Choice], folder: Path, plot: bool, as_json: bool) -> None:
    from everfed.methods.replay.near_optimality import mean_ratios

    means = mean_ratios(rows)
    if as_json:
        for (reading, samples, policy), ratio in means.items():
            line = {"reading": reading, "samples": samples, "policy": policy, "mean_ratio": ratio}
            typer.echo(json.dumps({"event": "near_optimality", **line}))
        return
    policies = list(dict.fromkeys(policy for _, _, policy in means))
    cells = list(dict.fromkeys((reading, samples) for reading, samples, _ in means))
    lines = [[reading, str(n), *(f"{means[reading, n, policy]:.3f}" for policy in policies)] for reading, n in cells]
    show_table(["reading", "n", *policies], lines)
    without = "" if plot else " (no plot: pip install 'everfed[plots]')"
    typer.echo(f"written to {folder}{without}")
