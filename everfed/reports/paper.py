"""The plots of a report as PNG and PDF files for papers, drawn by matplotlib from the same numbers as the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from everfed.errors import optional_package
from everfed.reports import figures, series
from everfed.reports.charts import Axis
from everfed.reports.colours import COLOURS, ON_LIGHT
from everfed.reports.groups import SeedGroup, score
from everfed.reports.read import LoggedRun

SIZE = (5.0, 3.2)  # inches
DPI = 200
DASHES = ("-", "--", ":", "-.")
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "legend.fontsize": 8,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.constrained_layout.use": True,
    "pdf.fonttype": 42,  # fonts as journals accept them
}


def check() -> None:
    """Raise UserError where matplotlib is missing."""
    optional_package("matplotlib", "plots", "drawing figures as PNG and PDF, which --no-figures leaves out,")


def write(groups: Sequence[SeedGroup], folder: Path) -> list[Path]:
    """All figures with data, as NAME.png and NAME.pdf; returns the files."""
    check()
    from matplotlib import rc_context

    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    with rc_context(STYLE):
        for name, drawn in _all(groups):
            for suffix in ("png", "pdf"):
                path = folder / f"{name}.{suffix}"
                drawn.savefig(path, dpi=DPI, metadata=_metadata(suffix))
                written.append(path)
    return written


def _metadata(suffix: str) -> dict[str, Any]:
    """No date, so that the same runs give the same file."""
    return {"CreationDate": None} if suffix == "pdf" else {"Software": None}


def _all(groups: Sequence[SeedGroup]) -> Iterator[tuple[str, Any]]:
    for kind in figures.CURVES:
        drawn = _curves(kind, groups)
        if drawn is not None:
            yield kind, drawn
    names = [file_name(group.label) for group in groups]
    for i, group in enumerate(groups):
        drawn = _matrix(group)
        if drawn is not None:
            again = f"-{names[:i].count(names[i]) + 1}" if names[i] in names[:i] else ""
            yield f"accuracy_matrix_{names[i]}{again}", drawn
    yield from _costs([group for group in groups if group.finished])
    first = next((run for group in groups for run in group.runs if run.log.phases), None)
    grid = None if first is None else _participation(first)
    if grid is not None:
        yield "who_saw_what", grid


def file_name(label: str) -> str:
    """A label as part of a file name."""
    return "".join(sign if sign.isalnum() or sign in "+-.=" else "_" for sign in label).strip("_")


def _axes(size: tuple[float, float] = SIZE) -> tuple[Any, Any]:
    # the object interface keeps no global list of figures and needs no display
    from matplotlib.figure import Figure

    figure = Figure(figsize=size)
    return figure, figure.subplots()


def _curves(kind: str, groups: Sequence[SeedGroup]) -> Any | None:
    spec = figures.CURVES[kind]
    found = series.mean_lines(groups, spec.points, limit=4 * series.POINTS)
    if not found:
        return None
    y = figures.axis(spec, groups)
    figure, axes = _axes()
    for line in found:
        style = {"color": ON_LIGHT[line.colour % COLOURS], "linestyle": DASHES[line.colour // COLOURS % len(DASHES)]}
        marker = "o" if spec.by_task else None
        axes.plot(line.x, _shown(line.y, y), label=line.label, marker=marker, markersize=3, lw=1.4, **style)
        if line.low is not None and line.high is not None:
            low, high = _shown(line.low, y), _shown(line.high, y)
            axes.fill_between(line.x, low, high, color=style["color"], alpha=0.15, lw=0)
    if not spec.by_task:
        for _, first in series.boundaries([run for group in groups for run in group.runs])[1:]:
            axes.axvline(first, color="grey", lw=0.7, ls=":", zorder=0)
    axes.set_xlabel("Task" if spec.by_task else "Round")
    axes.set_ylabel(f"{y.name} ({y.unit})" if y.unit == "%" else y.name)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False)
    return figure


def _shown(values: Sequence[float], axis: Axis) -> list[float]:
    return [axis.shown(value) for value in values]


def _matrix(group: SeedGroup) -> Any | None:
    entries = series.mean_matrix(group.finished or group.runs)
    if not entries:
        return None
    measured = score([group])
    name, unit = measured.title, measured.unit
    scale = 100 if unit == "%" else 1
    values = [[float("nan") if entry is None else scale * entry[0] for entry in row] for row in entries]
    figure, axes = _axes((4.0, 3.4))
    limits = {"vmin": 0, "vmax": 100} if unit == "%" else {}
    extent = (0.5, len(values[0]) + 0.5, len(values) + 0.5, 0.5)
    image = axes.imshow(values, cmap="Blues", extent=extent, aspect="auto", **limits)
    if len(values[0]) <= 12:
        _write_numbers(axes, values, image)
    figure.colorbar(image, label=f"{name} ({unit})" if unit else name)
    axes.set(xlabel="On task", ylabel="After task", title=group.label)
    axes.grid(False)
    return figure


def _write_numbers(axes: Any, values: Sequence[Sequence[float]], image: Any) -> None:
    for t, row in enumerate(values, start=1):
        for i, value in enumerate(row, start=1):
            if value == value:
                dark = image.norm(value) > 0.5
                axes.text(
                    i, t, f"{value:.1f}", ha="center", va="center", fontsize=7, color="white" if dark else "black"
                )


def _costs(groups: Sequence[SeedGroup]) -> Iterator[tuple[str, Any]]:
    if not groups:
        return
    traffic = [
        (f"{group.label} {way}", {part: size / 1e6 for part, size in series.bytes_by_part(group, way).items()})
        for group in groups
        for way in ("up", "down")
    ]
    yield "traffic", _bars(traffic, "Bytes (MB)")
    yield "time", _bars([(group.label, series.seconds_by_phase(group)) for group in groups], "Seconds")
    for key, name in (("peak_memory_bytes", "Peak memory (MB)"), ("client_state_bytes", "State of all clients (MB)")):
        sizes = [(group.label, series.mean_cost(group, key)) for group in groups]
        known = [(label, {"": size / 1e6}) for label, size in sizes if size is not None]
        if known:
            yield key.removesuffix("_bytes"), _bars(known, name)


def _bars(rows: Sequence[tuple[str, dict[str, float]]], name: str) -> Any:
    figure, axes = _axes((SIZE[0], 1.0 + 0.32 * len(rows)))
    kinds = list(dict.fromkeys(kind for _, table in rows for kind in table))
    left = [0.0] * len(rows)
    for k, kind in enumerate(kinds):
        values = [table.get(kind, 0.0) for _, table in rows]
        axes.barh(range(len(rows)), values, 0.7, left=left, label=kind, color=ON_LIGHT[k % COLOURS])
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set_yticks(range(len(rows)), [label for label, _ in rows])
    axes.invert_yaxis()
    axes.set_xlabel(name)
    axes.grid(False, axis="y")
    axes.set_axisbelow(True)
    if len(kinds) > 1:
        figure.legend(loc="outside upper center", ncols=4, frameon=False)
    return figure


def _participation(run: LoggedRun) -> Any | None:
    start = run.log.start
    grid = series.participation(run, start.clients if start else 0)
    if grid is None:
        return None
    values = [[float("nan") if task is None else task for task in row] for row in grid.cells]
    figure, axes = _axes()
    extent = (0.5, grid.rounds_per_column * len(values[0]) + 0.5, grid.clients_per_row * len(values) - 0.5, -0.5)
    image = axes.imshow(values, cmap="viridis", extent=extent, aspect="auto", interpolation="nearest")
    figure.colorbar(image, label="Task").ax.yaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel="Round", ylabel="Client", title=f"{run.method}, seed {run.seed}")
    axes.grid(False)
    return figure
