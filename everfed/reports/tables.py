"""The tables of a report, as Markdown, CSV, LaTeX and HTML; full precision in the CSV."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from everfed.metrics.scores import METRICS, Score, ShownMetric, own_metrics, plain_text, score_of
from everfed.metrics.statistics import Spread, mean_and_deviation, paired_by_seed
from everfed.reports import formats
from everfed.reports.formats import Html, markdown_table, tag
from everfed.reports.groups import SeedGroup, StreamRuns, facts, score
from everfed.reports.read import LoggedRun, StoredResult
from everfed.reports.series import lists_of, mean_matrix

NONE = "–"
DIVERGED, STOPPED = "diverged", "stopped early"


@dataclass(frozen=True)
class Column:
    """kind: how numbers read ("percent", "plain", "count", "bytes", "seconds"; "text" holds words).
    better: which way is better, 1 more, -1 less, 0 neither."""

    heading: str
    kind: str = "text"
    better: int = 0


Cell = str | float | Spread | None


@dataclass(frozen=True)
class ReportTable:
    """name: of its files. rows hold one cell per column. anchors: of each row, where its first cell leads to."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    anchors: tuple[str, ...] = ()

    def best(self, column: int) -> set[int]:
        """The rows with the best value, where one way is better and rows differ."""
        better = self.columns[column].better
        values = {i: mean(row[column]) for i, row in enumerate(self.rows)}
        known = {i: better * value for i, value in values.items() if value is not None}
        if not better or len(set(known.values())) < 2:
            return set()
        return {i for i, value in known.items() if value == max(known.values())}


def mean(cell: Cell) -> float | None:
    """The number of a cell; None for words."""
    if isinstance(cell, Spread):
        return cell.mean
    return float(cell) if isinstance(cell, int | float) else None


_TEXT: dict[str, Callable[[float], str]] = {
    "percent": formats.percent,
    "plain": plain_text,
    "count": formats.count,
    "bytes": formats.size,
    "seconds": formats.duration,
}


def cell_text(cell: Cell, kind: str, plus_minus: str = " ± ") -> str:
    """As it is read. The deviation is shown where there is more than one seed, and where it has the mean's unit."""
    if cell is None:
        return NONE
    if isinstance(cell, str):
        return cell
    text = _TEXT[kind]
    if isinstance(cell, Spread):
        if cell.count > 1 and kind == "percent":
            return formats.with_deviation(100 * cell.mean, 100 * cell.deviation, plus_minus)
        if cell.count > 1 and kind == "plain" and cell.deviation:
            return formats.with_deviation(cell.mean, cell.deviation, plus_minus, most=6)
        return text(cell.mean)
    return text(float(cell))


# formats -----------------------------------------------------------------------------------------------------------
def to_markdown(table: ReportTable) -> str:
    """Columns aligned, so that it reads as plain text, too."""
    head = [_heading(column) for column in table.columns]
    body = [[_markdown(cell_text(c, k.kind)) for c, k in zip(row, table.columns, strict=True)] for row in table.rows]
    for i in range(len(head)):
        for row in table.best(i):
            body[row][i] = f"**{body[row][i]}**"
    lines = [f"## {table.title}", "", markdown_table(head, body), *(["", table.note] if table.note else [])]
    return "\n".join(lines) + "\n"


def _markdown(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("*", "\\*").replace("_", "\\_").replace("\n", " ")


def to_csv(table: ReportTable) -> str:
    """Full precision: fractions, bytes and seconds. A column with deviations becomes mean, deviation and seeds."""
    spread = [any(isinstance(row[i], Spread) for row in table.rows) for i in range(len(table.columns))]
    head = [_csv_names(column, wide) for column, wide in zip(table.columns, spread, strict=True)]
    rows = [[_csv_cells(cell, wide) for cell, wide in zip(row, spread, strict=True)] for row in table.rows]
    return formats.csv_text([value for values in row for value in values] for row in (head, *rows))


def _csv_names(column: Column, wide: bool) -> list[str]:
    name = column.heading.lower().replace(" ", "_")
    return [f"{name}_mean", f"{name}_deviation", f"{name}_seeds"] if wide else [name]


def _csv_cells(cell: Cell, wide: bool) -> list[str]:
    if isinstance(cell, Spread):
        return [repr(cell.mean), repr(cell.deviation), str(cell.count)]
    text = "" if cell is None else cell if isinstance(cell, str) else repr(cell)
    return [text, "", ""] if wide else [text]


def to_latex(table: ReportTable) -> str:
    """A tabular in the style of booktabs; the best values are bold."""
    align = "".join("l" if column.kind == "text" else "r" for column in table.columns)
    head = " & ".join(_latex(_heading(column)) for column in table.columns)
    best = [table.best(i) for i in range(len(table.columns))]
    body = [
        " & ".join(_latex_cell(cell, table.columns[i].kind, r in best[i]) for i, cell in enumerate(row))
        for r, row in enumerate(table.rows)
    ]
    note = [f"% {line}" for line in [table.title, table.note] if line]
    rules = [r"\toprule", head + r" \\", r"\midrule", *(line + r" \\" for line in body), r"\bottomrule"]
    lines = [*note, r"% needs \usepackage{booktabs}", rf"\begin{{tabular}}{{{align}}}", *rules, r"\end{tabular}"]
    return "\n".join(lines) + "\n"


def _latex_cell(cell: Cell, kind: str, best: bool) -> str:
    if cell is None or isinstance(cell, str):
        return "--" if cell is None else _latex(cell)
    text = cell_text(cell, kind, r" \pm ")
    text = f"${text}$" if kind in ("percent", "plain") else text
    return rf"\textbf{{\boldmath {text}}}" if best else text


_LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{sign: f"\\{sign}" for sign in "&%$#_"},
}


def _latex(text: str) -> str:
    return "".join(_LATEX.get(sign, sign) for sign in text)


def to_html(table: ReportTable, titled: bool = True) -> Html:
    """The table for a page; it scrolls by itself where it is too wide. titled: False right below a heading."""
    best = [table.best(i) for i in range(len(table.columns))]
    head = tag("tr", *(tag("th", _heading(c), scope="col", class_=_kind_class(c)) for c in table.columns))
    rows = [
        tag(
            "tr",
            _html_head(row[0], table.anchors[r] if table.anchors else ""),
            *(_html_cell(cell, table.columns[i], r in best[i]) for i, cell in enumerate(row[1:], start=1)),
        )
        for r, row in enumerate(table.rows)
    ]
    note = tag("p", table.note, class_="note") if table.note else None
    grid = tag(
        "table", tag("caption", table.title) if titled else None, tag("thead", head), tag("tbody", *rows), class_="data"
    )
    window = tag("div", grid, class_="scroll", tabindex=0, role="region", aria_label=table.title)
    return tag("div", window, note, id=f"table-{table.name}")


def _html_head(cell: Cell, anchor: str) -> Html:
    text = cell_text(cell, "text")
    return tag("th", tag("a", text, href=f"#{anchor}") if anchor else text, scope="row")


def _html_cell(cell: Cell, column: Column, best: bool) -> Html:
    text = cell_text(cell, column.kind)
    return tag("td", tag("strong", text) if best else text, class_=_kind_class(column))


def _kind_class(column: Column) -> str | None:
    return None if column.kind == "text" else "number"


def _heading(column: Column) -> str:
    return f"{column.heading}, %" if column.kind == "percent" else column.heading


# the tables --------------------------------------------------------------------------------------------------------
_SEEDS = "Mean ± population deviation over seeds; a single seed has no deviation. Finished runs only."


def overview(streams: Sequence[StreamRuns]) -> ReportTable:
    """What was run, a row for each stream."""
    headings = ("Data", "Scenario", "Tasks", "Clients", "Rounds", "Network", "Training", "Methods", "Seeds")
    scaled = any(_values(stream, _scale) != "1" for stream in streams)
    rows = tuple(_overview_row(stream) + ((_values(stream, _scale),) if scaled else ()) for stream in streams)
    columns = (*headings, "Scale") if scaled else headings
    return ReportTable("overview", "What was run", tuple(map(Column, columns)), rows)


def _overview_row(stream: StreamRuns) -> tuple[str, ...]:
    values = (_scenario, _tasks, _clients, _rounds, _network, _training)
    methods = formats.listed(list(dict.fromkeys(run.method for run in stream.runs)))
    return (stream.name, *(_values(stream, value) for value in values), methods, _values(stream, lambda r: str(r.seed)))


def sentence(streams: Sequence[StreamRuns]) -> str:
    """What was run, in words."""
    groups = [group for stream in streams for group in stream.groups]
    methods = list(dict.fromkeys(run.method for group in groups for run in group.runs))
    who = formats.listed(methods) if len(methods) <= 4 else f"{len(methods)} methods"
    seeds = sorted({run.seed for group in groups for run in group.runs})
    ran = f"{'seed' if len(seeds) == 1 else 'seeds'} {formats.listed([str(seed) for seed in seeds])}"
    if len(streams) > 1:
        return f"{who} on {len(streams)} streams ({formats.listed([s.name for s in streams])}), {ran}."
    (stream,) = streams
    task, client, rounds, network = (_values(stream, value) for value in (_tasks, _clients, _rounds, _network))
    what = f"{stream.name}, {_values(stream, _scenario)}"
    return f"{who} on {what}: {task} tasks, {client} clients, {rounds} rounds, network {network}, {ran}."


def _values(stream: StreamRuns, of: Callable[[LoggedRun], str]) -> str:
    """What the runs of a stream have, each value once."""
    return formats.listed(list(dict.fromkeys(of(run) for run in stream.runs)))


def _known(run: LoggedRun, key: str) -> str:
    return str(facts(run).get(key, "?"))


def _scenario(run: LoggedRun) -> str:
    return _known(run, "stream.scenario")


def _tasks(run: LoggedRun) -> str:
    return str(run.log.start.tasks) if run.log.start else _known(run, "stream.tasks")


def _clients(run: LoggedRun) -> str:
    return f"{run.log.start.clients:,}" if run.log.start else _known(run, "stream.clients")


def _rounds(run: LoggedRun) -> str:
    return f"{run.rounds:,}" if run.rounds else "?"


def _network(run: LoggedRun) -> str:
    kind = _known(run, "model.kind")
    return "chosen by the data" if kind == "auto" else kind


def _training(run: LoggedRun) -> str:
    """Local epochs, batch size, optimiser and learning rate."""
    epochs, batch = _known(run, "train.local_epochs"), _known(run, "train.batch_size")
    optimizer, rate = _known(run, "train.optimizer.kind"), _known(run, "train.optimizer.lr")
    return f"{epochs} epoch{'s' if epochs != '1' else ''}, batch {batch}, {optimizer} {rate}"


def _scale(run: LoggedRun) -> str:
    return f"{float(run.settings.get('scale', 1.0)):g}"


def comparison(groups: Sequence[SeedGroup]) -> ReportTable:
    """Methods side by side; where no seed finished because runs diverged, it says so."""
    values = [_metrics(group) for group in groups]
    measured = [result.measured for group in groups for result in group.results]
    known = METRICS | {key: shown for one in measured for key, shown in own_metrics(one).items()}
    keys = [key for key in known if any(key in found for found in values)]
    others = sorted({key for found in values for key in found} - set(METRICS)) if not keys else []
    numbers = [_column(known[key], score(groups)) for key in keys]
    columns = (Column("Method"), Column("Seeds"), *numbers, *(Column(key, "plain") for key in others))
    rows = tuple(_comparison_row(group, found, [*keys, *others]) for group, found in zip(groups, values, strict=True))
    return ReportTable("comparison", "Comparison of methods", columns, rows, _SEEDS)


def metric_lists(groups: Sequence[SeedGroup]) -> list[ReportTable]:
    """The metrics of eval.metrics whose values are lists, by class or by client: a row for every method."""
    kinds = {name: one for group in groups for result in group.results for name, one in result.measured.items()}
    found = []
    for name, kind in kinds.items():
        rows = [(group.label, [lists_of(result).get(name, []) for result in group.results]) for group in groups]
        width = max((len(values) for _, seeds in rows for values in seeds), default=0)
        if width:
            shown = "percent" if kind["percent"] else "plain"
            columns = (Column("Method"), *(Column(f"{i}", shown, kind["better"]) for i in range(width)))
            lines = tuple((label, *(_spread_at(seeds, i) for i in range(width))) for label, seeds in rows)
            found.append(ReportTable(f"metric-{name}", name, columns, lines, f"All tasks together. {_SEEDS}"))
    return found


def _spread_at(seeds: Sequence[Sequence[float | None]], index: int) -> Cell:
    known = [value for values in seeds if index < len(values) and (value := values[index]) is not None]
    return mean_and_deviation(known) if known and len(known) == len(seeds) else None


def _column(metric: ShownMetric, score: Score) -> Column:
    return Column(metric.named(score), metric.kind_of(score), metric.better_of(score))


def _comparison_row(group: SeedGroup, found: dict[str, Spread], keys: Sequence[str]) -> tuple[Cell, ...]:
    diverged, stopped = (sum(getattr(run, how) for run in group.runs) for how in ("diverged", "stopped"))
    kinds = [f", {count} {how}" for count, how in ((diverged, DIVERGED), (stopped, STOPPED)) if count]
    seeds = f"{len(group.finished)}/{len(group.runs)}{''.join(kinds)}"
    cells: list[Cell] = [found.get(key) for key in keys]
    if cells and diverged and not group.finished:
        cells[0] = DIVERGED
    return (group.label, seeds, *cells)


def _metrics(group: SeedGroup) -> dict[str, Spread]:
    """Every metric that all finished seeds have."""
    tables = [_numbers(result) for result in group.results]
    common = set.intersection(*map(set, tables)) if tables else set()
    return {key: mean_and_deviation([table[key] for table in tables]) for key in common}


def _numbers(result: StoredResult) -> dict[str, float]:
    """The metrics that have a value, and the task-IL accuracy of the same run where it is another one."""
    found = {key: value for key, value in result.metrics.items() if value is not None}
    task_il = result.by_logits.get("task", {})
    value = (task_il.get("metrics") or {}).get("acc")
    if value is not None and task_il.get("accuracy_matrix") != result.accuracy_matrix:
        found["acc_task"] = float(value)
    return found


def paired(groups: Sequence[SeedGroup]) -> ReportTable:
    """Every method less the best one, seed by seed."""
    metric = score(groups)
    comparable = [group for group in groups if score([group]) == metric]
    best = _by_seed(comparable[0]) if comparable else {}
    found = [(group.label, paired_by_seed(_by_seed(group), best)) for group in comparable[1:]]
    rows = tuple(
        (label, str(difference.count), difference.mean, difference.low, difference.high)
        for label, difference in found
        if difference is not None
    )
    headings = ("Difference", "Low", "High")
    columns = (Column("Method"), Column("Shared seeds"), *(Column(heading, metric.kind) for heading in headings))
    note = (
        "Differences seed by seed, in points where scores are in per cent. Low and high: the 95 % t-interval of the "
        "mean difference, which needs two seeds. It is not corrected for the number of methods."
    )
    title = f"{metric.short} less that of the best method, {comparable[0].label if comparable else NONE}"
    return ReportTable("paired", title, columns, rows, note)


def _by_seed(group: SeedGroup) -> dict[int, float]:
    found = ((run.seed, run.last_score) for run in group.finished)
    return {seed: value for seed, value in found if value is not None and math.isfinite(value)}


_COSTS = (
    ("rounds", Column("Rounds", "count")),
    ("seconds", Column("Time", "seconds", -1)),
    ("bytes_up", Column("Bytes up", "bytes", -1)),
    ("bytes_down", Column("Bytes down", "bytes", -1)),
    ("client_state_bytes", Column("Client state", "bytes")),
    ("peak_memory_bytes", Column("Peak memory", "bytes")),
    ("samples", Column("Samples", "count")),
)


def cost(groups: Sequence[SeedGroup]) -> ReportTable:
    """What the runs cost, as means over the finished seeds."""
    rows = [(group.label, *(_cost(group, key) for key, _ in _COSTS)) for group in groups]
    columns = (Column("Method"), *(column for _, column in _COSTS))
    note = "Means over finished seeds. Times of different machines compare only as ratios."
    return ReportTable("cost", "Cost", columns, tuple(rows), note)


def _cost(group: SeedGroup, key: str) -> Cell:
    values = [value for result in group.results if (value := getattr(result.cost, key)) is not None]
    return mean_and_deviation([float(value) for value in values]) if values else None


def bytes_by_part(groups: Sequence[SeedGroup]) -> ReportTable:
    """Bytes by part and direction."""
    rows: list[tuple[Cell, ...]] = []
    for group in groups:
        parts = sorted({part for result in group.results for part in result.cost.bytes_by_part})
        rows += [(group.label, part, *(_part(group, part, way) for way in ("up", "down"))) for part in parts]
    columns = (Column("Method"), Column("Part"), Column("Bytes up", "bytes"), Column("Bytes down", "bytes"))
    return ReportTable(
        "bytes_by_part", "Bytes by part and direction", columns, tuple(rows), "Means over finished seeds."
    )


def _part(group: SeedGroup, part: str, direction: str) -> Cell:
    tables = [result.cost.bytes_by_part.get(part, {}) for result in group.results]
    return mean_and_deviation([float(table.get(direction, 0)) for table in tables])


def accuracy_matrices(groups: Sequence[SeedGroup]) -> ReportTable:
    """Every entry of every accuracy matrix, a row per method and task learned."""
    found = [(group, mean_matrix(group.finished or group.runs)) for group in groups]
    width = max((len(row) for _, rows in found for row in rows), default=0)
    kind = score(groups).kind
    lines: list[tuple[Cell, ...]] = []
    for group, rows in found:
        count = len(group.finished or group.runs)
        for t, row in enumerate(rows, start=1):
            cells = [None if entry is None else Spread(*entry, count) for entry in row]
            lines.append((group.label, str(t), *cells, *[None] * (width - len(row))))
    columns = (Column("Method"), Column("After task"), *(Column(f"Task {i}", kind) for i in range(1, width + 1)))
    return ReportTable("accuracy_matrix", "Scores by task", columns, tuple(lines), _SEEDS)


def runs(found: Sequence[LoggedRun]) -> ReportTable:
    """Every run with its state, its score, its faults and the clients that did not train."""
    scores = [score_of(name) for name in sorted({run.score for run in found})]
    columns = (
        *map(Column, ("Run", "Method", "Seed", "State")),
        *(Column(score.short, score.kind) for score in scores),
        Column("Faults", "count"),
        Column("Skipped clients", "count"),
    )
    return ReportTable("runs", "Runs", columns, tuple(_run_row(run, scores) for run in found))


def _run_row(run: LoggedRun, scores: Sequence[Score]) -> tuple[Cell, ...]:
    own = score_of(run.score)
    value = run.result.metrics.get(own.main) if run.result else DIVERGED if run.diverged else None
    known = bool(run.log.lines)
    happened = [float(len(run.log.faults)), float(run.log.skipped)] if known else [None, None]
    scored = (value if score == own else None for score in scores)
    return (run.name, run.method, str(run.seed), state(run), *scored, *happened)


def state(run: LoggedRun) -> str:
    """Finished, or how far it came and how it stopped."""
    if run.result is not None:
        return "finished"
    how = "interrupted" if run.log.interrupted else "failed" if run.log.failed else "unfinished"
    how = DIVERGED if run.diverged else STOPPED if run.stopped else how
    return f"{how} at round {run.rounds_done} of {run.rounds or '?'}"
