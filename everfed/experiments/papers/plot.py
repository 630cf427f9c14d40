"""A dot plot as SVG: ours above the paper's for every cell, each with the 95 % interval of its mean."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from everfed.experiments.papers.judging import Judged
from everfed.metrics.statistics import Spread, interval
from everfed.reports.charts import ticks

WIDTH, LABEL, ROW, GAP, COLUMNS = 960, 118, 22, 46, 2
STYLE = (
    "text{font:12px sans-serif;fill:#444}.t{font-weight:bold}.g{stroke:#9994;stroke-width:1}"
    ".o{fill:#1769aa;stroke:#1769aa}.h{fill:#fff;stroke:#1769aa;stroke-width:2}.p{fill:#c2571a;stroke:#c2571a}path.o,path.p{stroke-width:1.5}"
    "@media(prefers-color-scheme:dark){text{fill:#ccc}.o{fill:#6cb4ee;stroke:#6cb4ee}.h{fill:#111;stroke:#6cb4ee}"
    ".p{fill:#f0a36b;stroke:#f0a36b}}"
)


def dot_plot(panels: Mapping[str, Sequence[Judged]]) -> str:
    """The panels, two side by side, with their titles; nothing where there are none."""
    if not panels:
        return ""
    width = WIDTH / COLUMNS
    drawn, top = [], 42.0
    names = list(panels)
    for start in range(0, len(names), COLUMNS):
        row = names[start : start + COLUMNS]
        drawn += [_panel(name, panels[name], at * width, top, width) for at, name in enumerate(row)]
        top += max(len(panels[name]) for name in row) * ROW + GAP
    legend = (
        f'<circle class="o" cx="12" cy="12" r="4"/>{_text(22, 16, "ours")}'
        f'<circle class="h" cx="72" cy="12" r="3.5"/>{_text(82, 16, "ours, not judged")}'
        f'<path class="p" d="{_diamond(202, 12)}"/>{_text(212, 16, "the paper; lines: 95 % intervals of the mean")}'
    )
    about = f"Ours and the paper's: {'; '.join(names)}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top:.0f}" role="img" '
        f'aria-label="{html.escape(about)}">\n<style>{STYLE}</style>\n{legend}\n' + "\n".join(drawn) + "\n</svg>\n"
    )


def _panel(title: str, cells: Sequence[Judged], left: float, top: float, width: float) -> str:
    spans = [(_span(one.spread), _span(_printed(one))) for one in cells]
    ends = [end for pair in spans for span in pair for end in span]
    marked = ticks(min(ends), max(min(ends) + 1.0, *ends))
    low, high = marked[0], marked[-1]
    inner, bottom = width - LABEL - 24, top + 8 + len(cells) * ROW

    def x(value: float) -> float:
        return left + LABEL + inner * (value - low) / (high - low)

    parts = [_text(left + LABEL, top, title, "t")]
    for value in marked:
        parts.append(f'<path class="g" d="M{x(value):.1f} {top + 6:.1f}V{bottom:.1f}"/>')
        parts.append(_text(x(value), bottom + 14, f"{value:g}", anchor="middle"))
    for row, (one, (ours, paper)) in enumerate(zip(cells, spans, strict=True)):
        y = top + 8 + (row + 0.5) * ROW
        parts.append(_text(left + LABEL - 8, y + 4, one.cell.method, anchor="end"))
        if one.spread is None or one.paper is None:
            continue
        parts.append(f'<path class="o" d="M{x(ours[0]):.1f} {y - 4:.1f}H{x(ours[1]):.1f}"/>')
        kind = 'class="o" r="4"' if one.level else 'class="h" r="3.5"'
        parts.append(f'<circle {kind} cx="{x(one.spread.mean):.1f}" cy="{y - 4:.1f}"/>')
        parts.append(f'<path class="p" d="M{x(paper[0]):.1f} {y + 5:.1f}H{x(paper[1]):.1f}"/>')
        parts.append(f'<path class="p" d="{_diamond(x(one.paper), y + 5)}"/>')
    return "".join(parts)


def _printed(one: Judged) -> Spread | None:
    """The paper's number; without an interval where it prints none over seeds."""
    if one.paper is None or one.cell.target is None:
        return None
    std = one.cell.target.std
    known = std is not None and one.cell.over_seeds and one.cell.seeds > 1
    return Spread(one.paper, std if known and std is not None else 0.0, one.cell.seeds if known else 1)


def _span(spread: Spread | None) -> tuple[float, float]:
    """The 95 % interval of the mean; a point for one seed."""
    if spread is None:
        return (0.0, 0.0)
    return interval(spread) if spread.count > 1 else (spread.mean, spread.mean)


def _diamond(x: float, y: float) -> str:
    return f"M{x:.1f} {y - 4:.1f}l4 4l-4 4l-4 -4z"


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "") -> str:
    attributes = (f' class="{kind}"' if kind else "") + (f' text-anchor="{anchor}"' if anchor else "")
    return f'<text x="{x:.1f}" y="{y:.1f}"{attributes}>{html.escape(text)}</text>'
