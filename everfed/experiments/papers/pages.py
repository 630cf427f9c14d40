"""REPRODUCIBILITY.md and docs/results/: what the records in results/ say, with what the notes know beside them."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from everfed.experiments.papers import writing
from everfed.experiments.papers.judging import NOT_JUDGED, Judged, Runs, runs_of
from everfed.experiments.papers.overview import Plan, by_first_table, effects_of, levels_of, planned
from everfed.experiments.papers.records import FOLDER, Record, read_all
from everfed.experiments.papers.tables import Disagreement, Notes, Paper, notes, papers, tables
from everfed.metrics.statistics import (
    CONFIRMED,
    CONTRADICTED,
    DIFFERS,
    EFFECTS,
    EQUIVALENT,
    UNCLAIMED,
    UNRESOLVED,
    Spread,
    interval,
)
from everfed.reports.charts import ticks
from everfed.reports.formats import markdown_table
from everfed.store.files import write_atomic

SCREEN, PAGES = "REPRODUCIBILITY.md", "docs/results"
MADE = "<!-- written by `everfed record --pages .` from results/ and the notes beside tables.toml; not to be edited -->"


@dataclass(frozen=True)
class Findings:
    """What the records give of a paper. tables: its tables that have records, with their printed cells; a number that
    several tables print counts in the first. left: what is planned."""

    key: str
    paper: Paper
    notes: Notes
    tables: dict[str, list[Judged]]
    left: list[Plan]

    @property
    def measured(self) -> list[Judged]:
        return [one for own in self.tables.values() for one in own]

    @property
    def cells(self) -> list[Judged]:
        """Those whose level is judged."""
        return [one for one in self.measured if one.level]

    @property
    def levels(self) -> dict[str, int]:
        return levels_of(self.cells)

    @property
    def effects(self) -> dict[str, int]:
        return effects_of(self.measured)

    @property
    def claimed(self) -> int:
        """Effects that the paper claims and that are judged."""
        return sum(self.effects[verdict] for verdict in EFFECTS)

    def filled(self, sentence: str) -> str:
        """A sentence of the notes with its counts."""
        counts = {name: self.levels[name] for name in (EQUIVALENT, DIFFERS, UNRESOLVED)}
        counts |= {"confirmed": self.effects[CONFIRMED], "contradicted": self.effects[CONTRADICTED]}
        return sentence.format(**counts, claimed=self.claimed, judged=len(self.cells))


def write(root: Path, folder: Path = FOLDER) -> list[Path]:
    """Write every page below `root` from the records in `folder`."""
    made = []
    for name, text in pages(read_all(folder)).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text.encode(), shared=True)
        made.append(path)
    return made


def pages(records: Sequence[Record]) -> dict[str, str]:
    """{path: text} of every page that is made from records."""
    runs = runs_of(records)
    found = [findings(key, runs) for key in papers()]
    made = {SCREEN: _screen(found, len(records))}
    for one in found:
        drawing = dot_plot(_drawn(one))
        made[f"{PAGES}/{one.key}.md"] = _page(one, records, runs, bool(drawing))
        if drawing:
            made[f"{PAGES}/{one.key}.svg"] = drawing
    return made


def findings(key: str, runs: Runs) -> Findings:
    """What these runs give of a paper."""
    own = [table for table in tables().values() if table.key == key and not table.item.nothing]
    return Findings(key, papers()[key], notes(key), by_first_table(own, runs), planned(key, runs))


# the screen --------------------------------------------------------------------------------------------------------


def _screen(found: Sequence[Findings], records: int) -> str:
    rows = [
        [
            f"[{one.paper.name}]({PAGES}/{one.key}.md)",
            f"{one.effects[CONFIRMED]} of {one.claimed}",
            str(one.effects[CONTRADICTED]),
            *(str(one.levels[level]) for level in (EQUIVALENT, DIFFERS, UNRESOLVED)),
            str(len(one.cells)),
            one.notes.question,
        ]
        for one in found
    ]
    columns = ["Paper", "Effects confirmed", "Contradicted", "Equivalent", "Differ", "Unresolved", "Cells judged"]
    minutes = sum(plan.minutes for one in found for plan in one.left)
    about = (
        f"everfed runs the tables of five papers, and {records} runs have a record in `results/`. This screen counts\n"
        "what the records say. A page for each paper has the answer in three sentences, a plot, every cell and what\n"
        "is open."
    )
    left = (
        f"What is planned takes about {minutes:,.0f} minutes of one H200; `everfed reproduce --status` lists the\n"
        "runs. Numbers from before there were records are on [a page of their own](docs/results/earlier.md); no\n"
        "verdict rests on them."
    )
    table = markdown_table([*columns, "Open question"], rows)
    return "\n\n".join(["# Reproducibility", MADE, about, table, _RULES, left, _AGAIN]) + "\n"


_RULES = """## What a verdict says

A cell is a printed number: a method on a data set under one metric. A number that several tables print counts once.

* **Effect.** The method less its baseline, seed by seed. *Confirmed*: the 95 % interval over seeds excludes 0 and has
  the paper's sign. *Contradicted*: it excludes 0 with the other sign. Else the effect is unresolved. A printed
  difference of 2 points or less claims nothing; where ours is larger and sure, the page lists it as not in the paper.
* **Level.** *Equivalent*: two one-sided tests at 5 % place the difference between our mean and the paper's within 3
  points. *Differ*: Welch's test says so, with Holm's correction over the table. Else the level is unresolved: seeds
  differ too much to tell. A run that diverged is a result and is counted as such.
* **Not judged**: fewer than three seeds, or runs that are not the paper's experiment. Other data, another encoder,
  size or network, fewer rounds or epochs count as another experiment; `everfed reproduce` finds that from the run's
  own facts.

Deviations are those of the population, ours and the papers': FedGP's code computes them so, the other papers do not
say. The papers' comparisons are unpaired. Here every method of a seed sees the same stream, so seeds differ more than
methods do."""

_AGAIN = """## Again

```console
everfed reproduce fedgp/table1 --data ~/data --columns MNIST
everfed record runs/reproduce --pages .
everfed reproduce --status
```

The first runs a table, the second keeps its runs as records and writes these pages, the third shows what is left.
A test fails when the pages and the records differ. [The papers' tables](docs/reproduction.md) explains every option."""


# a paper -----------------------------------------------------------------------------------------------------------


def _page(found: Findings, records: Sequence[Record], runs: Runs, drawn: bool) -> str:
    parts = [f"# {found.paper.name}", MADE, f"{found.paper.title}.", " ".join(map(found.filled, found.notes.answer))]
    if drawn:
        about = "ours and the paper's with 95 % intervals of the mean; hollow: not judged"
        parts.append(f"![{', '.join(found.notes.plot)}: {about}]({found.key}.svg)")
    parts += _effects(found)
    parts += _section("Our choices", "What the paper leaves open, and where ours is another.", _choices(found.notes))
    parts += [part for one in found.notes.disagreements for part in _disagreement(one)]
    parts += _left(found)
    parts += _cells(found, runs)
    parts += _recipes(found, records)
    parts += _commands(found)
    return "\n\n".join(parts) + "\n"


def _effects(found: Findings) -> list[str]:
    """Every effect that is judged, and those that the paper does not have."""
    judged = [one for one in found.measured if one.effect and one.effect.verdict in (*EFFECTS, UNCLAIMED)]
    if not judged:
        return ["## Effects", "No effect is judged yet."]
    columns = ["Data", "Metric", "Method", "Ours", "Paper", "Effect", "Holds the paper's"]
    rows = [
        [
            one.cell.dataset,
            one.cell.metric,
            f"{one.cell.method} over {effect.baseline}",
            writing.interval(effect),
            f"{effect.paper:+.2f}",
            effect.verdict,
            "yes" if effect.covers else "no",
        ]
        for one in judged
        if (effect := one.effect) and effect.paper is not None
    ]
    covered = sum(bool(one.effect and one.effect.covers) for one in judged)
    about = (
        f"{found.effects[CONFIRMED]} of {found.claimed} are confirmed, {found.effects[CONTRADICTED]} contradicted; "
        f"{found.effects[UNCLAIMED]} are not in the paper. {covered} of the {len(judged)} intervals hold the paper's "
        "difference."
    )
    return _section("Effects over the baseline", about, markdown_table(columns, rows))


def _choices(known: Notes) -> str:
    rows = [[one.what, one.ours, one.why] for one in known.choices]
    return markdown_table(["What", "Ours", "Why"], rows) if rows else ""


def _disagreement(one: Disagreement) -> Iterator[str]:
    yield f"## Open: {one.question}" if not one.settled else f"## Settled: {one.question}"
    for title, sentences in (("Seen", one.seen), ("Ruled out", one.ruled_out), ("Not tried", one.not_tried)):
        if sentences:
            yield "\n".join([f"**{title}**\n", *(f"* {sentence}" for sentence in sentences)])
    if one.settled:
        yield f"**Settled.** {one.settled}"
    elif one.next:
        cost = f" ({one.minutes:,.0f} min of an H200)" if one.minutes else ""
        yield f"**Next**{cost}. Predicted: {one.predicted}"
        yield f"    {one.next}"


def _left(found: Findings) -> list[str]:
    """What is planned, but for the runs that decide a disagreement, which stand there."""
    deciding = {one.next for one in found.notes.disagreements}
    rows = [plan.line()[:3] for plan in found.left if plan.command not in deciding]
    if not rows:
        return []
    return _section("Planned runs", "", markdown_table(["What", "Done", "Minutes of an H200 left"], rows))


def _cells(found: Findings, runs: Runs) -> list[str]:
    parts = ["## Every cell"]
    if found.tables:
        parts.append("A number that several tables print is shown in the first.")
    else:
        return [*parts, "No table of this paper has a record."]
    for name, judged in found.tables.items():
        columns, lines = writing.cells(judged, effects=False)
        level = columns.index("Level")
        reasons = _numbered(line[level] for line in lines)
        shown = [[*line[:level], reasons.get(line[level], line[level]), *line[level + 1 :]] for line in lines]
        notes = [f"{short.removeprefix(NOT_JUDGED).strip()} {long}" for long, short in reasons.items()]
        parts.append(_folded(f"{name}: {tables()[name].item.about}", markdown_table(columns, shown), *notes))
    elsewhere = found.notes.recipes  # with their hardware
    own = [run for run in _runs_of(found, runs) if run["recipe"] not in elsewhere]
    return [*parts, *([_folded("Hardware of these runs", writing.sources(own))] if own else [])]


def _recipes(found: Findings, records: Sequence[Record]) -> list[str]:
    recorded = {one["recipe"] for one in records}
    own = [
        _folded(f"`{name}`", about, writing.every_run(name, records))
        for name, about in found.notes.recipes.items()
        if name in recorded
    ]
    return ["## Other settings and smaller streams", *own] if own else []


def _commands(found: Findings) -> list[str]:
    lines = "\n".join(f"    {command}" for command in found.notes.commands)
    return ["## Commands", lines] if lines else []


def _runs_of(found: Findings, runs: Runs) -> list[Record]:
    used = dict.fromkeys(one.cell.experiment for one in found.measured)
    return [run.result for experiment in used for run in runs[experiment].values()]


def _section(title: str, about: str, body: str) -> list[str]:
    return [part for part in (f"## {title}", about, body) if part] if body else []


def _folded(title: str, *parts: str) -> str:
    return "\n\n".join(['<details markdown="1">', f"<summary>{title}</summary>", *parts, "</details>"])


def _drawn(found: Findings) -> dict[str, list[Judged]]:
    """The cells of the plot by panel."""
    panels: dict[str, list[Judged]] = {}
    for name in found.notes.plot:
        for one in found.tables.get(name, []):
            if one.spread and one.paper is not None and one.cell.measured.unit == "points":
                panels.setdefault(f"{one.cell.dataset}: {one.cell.metric}", []).append(one)
    return panels


def _numbered(verdicts: Iterable[str]) -> dict[str, str]:
    """A short form for every verdict with reasons: these are long, and shared by many cells."""
    reasons = dict.fromkeys(verdict for verdict in verdicts if verdict.startswith(NOT_JUDGED))
    return {long: f"{NOT_JUDGED} ({number})" for number, long in enumerate(reasons, start=1)}


# ours above the paper's, each with the 95 % interval of its mean -----------------------------------------------------
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
