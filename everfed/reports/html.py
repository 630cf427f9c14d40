"""The report: one HTML file with everything in it. Its content security policy forbids the browser to load more."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from everfed import __version__
from everfed.core.spans import NAMED, spans
from everfed.errors import UserError
from everfed.metrics.scores import plain_text, score_of
from everfed.reports import figures, formats, paper, sweeps, tables
from everfed.reports.charts import PieceColours
from everfed.reports.colours import Colours, variables
from everfed.reports.formats import NOTHING, Html, join, tag
from everfed.reports.groups import SeedGroup, StreamRuns, by_stream
from everfed.reports.paper import file_name
from everfed.reports.read import LoggedRun, read_runs
from everfed.reports.tables import Column, ReportTable, to_csv, to_latex, to_markdown
from everfed.store.event_log import TRAIN, last_events
from everfed.store.files import Opener, open_file, write_atomic
from everfed.store.run import RunError

# Nothing may be fetched; scripts and styles are those of this file.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)


def asset(name: str) -> str:
    """A file of everfed/reports/static."""
    return resources.files("everfed.reports").joinpath("static", name).read_text(encoding="utf-8")


def write(
    runs: str | Path | Sequence[str | Path],
    out: str | Path | None = None,
    *,
    figures: bool | None = None,
    title: str = "",
) -> Path:
    """Write a report of runs (run folders, or folders that hold some) and return its HTML file.

    out: the HTML file, or a folder in which it is called report.html; by default report.html in the first folder.
    Beside NAME.html a folder NAME gets tables/ (Markdown, CSV, LaTeX) and, unless `figures` is False, figures/ (PNG and
    PDF, which need matplotlib; None: where it is installed); of runs on several streams, each of them has a folder for
    each stream. title: the page's heading, instead of a list of methods.
    Raises UserError: no run, a damaged one, matplotlib missing, a place that cannot be written to.
    """
    folders = [Path(runs)] if isinstance(runs, str | Path) else [Path(run) for run in runs]
    if not folders:
        raise UserError("there is no run to report; name run folders, or folders that hold some")
    if figures is None:
        figures = find_spec("matplotlib") is not None
    if figures:
        paper.check()
    out = folders[0] / "report.html" if out is None else Path(out)
    page = out if out.suffix.lower() in (".html", ".htm") else out / "report.html"
    found = read_runs(folders)
    streams = by_stream(found)
    beside = page.with_suffix("")
    try:
        _write_text(page, render(found, title))
        for stream in streams:
            own = Path(file_name(stream.name)) if len(streams) > 1 else Path()
            _write_tables(the_tables(stream.runs, stream.groups), beside / "tables" / own)
            if figures:
                paper.write(stream.groups, beside / "figures" / own)
    except OSError as error:
        raise UserError(f"cannot write the report to {page}: {error.strerror or error}") from error
    return page


def _write_tables(tables: Sequence[ReportTable], folder: Path) -> None:
    for table in filter(lambda table: table.rows, tables):
        for suffix, text in (("md", to_markdown), ("csv", to_csv), ("tex", to_latex)):
            _write_text(folder / f"{table.name}.{suffix}", text(table))


def _write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text.encode(), shared=True)


def render(runs: Sequence[LoggedRun], title: str = "", colours: Colours | None = None) -> str:
    """The whole page. title: of the user's choice. colours: of methods, where they have some already."""
    streams = by_stream(runs, colours)
    title = title or _subject(streams)
    parts = _parts(streams)
    return document(
        title,
        asset("charts.js"),
        tag("a", "Skip to the report", href="#main", class_="skip"),
        _header(title, runs, streams),
        _contents(parts),
        tag("main", *(part.html(str(i)) for i, part in enumerate(parts, start=1)), id="main"),
    )


def document(title: str, script: str, *children: Html, style: str = "") -> str:
    """A page with everything in it; `style` comes after that of all pages."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Html(variables() + asset("page.css") + style)),
    )
    body = tag("body", *children, tag("script", Html(script)))
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def the_tables(runs: Sequence[LoggedRun], groups: Sequence[SeedGroup]) -> list[ReportTable]:
    """All tables about the runs of one stream, in their order."""
    several = [tables.comparison(groups), tables.cost(groups), tables.bytes_by_part(groups), tables.paired(groups)]
    return [*several, tables.accuracy_matrices(groups), tables.runs(runs)]


@dataclass(frozen=True)
class Chapter:
    """A section of the page with its sections."""

    title: str
    body: Sequence[Html] = ()
    parts: Sequence[Chapter] = ()

    def html(self, number: str, level: int = 2) -> Html:
        """number: of its anchor, "2" or "2-1"."""
        inner = (part.html(f"{number}-{i}", level + 1) for i, part in enumerate(self.parts, start=1))
        return tag("section", tag(f"h{level}", self.title, id=f"part-{number}"), *self.body, *inner)

    def entry(self, number: str) -> Html:
        """Its line in the contents."""
        link = tag("a", self.title, href=f"#part-{number}")
        inner = [part.entry(f"{number}-{i}") for i, part in enumerate(self.parts, start=1)]
        return tag("li", link, tag("ol", *inner) if inner else None)


def _contents(parts: Sequence[Chapter]) -> Html:
    entries = [part.entry(str(i)) for i, part in enumerate(parts, start=1)]
    return tag("nav", tag("ol", *entries), class_="contents", aria_label="Contents")


def _subject(streams: Sequence[StreamRuns]) -> str:
    """As "der and fedavg on digits"."""
    methods = list(dict.fromkeys(run.method for stream in streams for run in stream.runs))
    return f"{formats.listed(methods)} on {formats.listed([stream.name for stream in streams])}"


def _header(title: str, runs: Sequence[LoggedRun], streams: Sequence[StreamRuns]) -> Html:
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    unfinished = sum(run.result is None for run in runs)
    count = f"{len(runs)} run{'s' if len(runs) != 1 else ''}"
    known = (
        f"{count}{f', {unfinished} of them unfinished' if unfinished else ''} · made {made} by everfed {__version__}"
    )
    button = tag("button", "Light or dark", type="button", id="theme", class_="theme")
    notes = [tag("p", note, class_="warning") for stream in streams for note in stream.grouping.notes]
    if len(streams) > 1:
        notes.append(
            tag("p", "Scores on different streams do not compare: each has a chapter of its own.", class_="note")
        )
    overview = tables.to_html(tables.overview(streams))
    lead = tag("p", tables.sentence(streams), class_="lead")
    return tag("header", button, tag("h1", title), lead, tag("p", known, class_="note"), overview, *notes)


def _parts(streams: Sequence[StreamRuns]) -> list[Chapter]:
    """The chapters: of one stream its sections, of several one chapter each; then all runs one by one."""
    pieces = PieceColours()
    chapters = [(stream.name, _stream_parts(stream, pieces)) for stream in streams]
    single = len(chapters) == 1
    parts = chapters[0][1] if single else [Chapter(name, parts=inner) for name, inner in chapters]
    ordered = [run for stream in streams for run in stream.runs]
    listed = replace(tables.runs(ordered), anchors=tuple(f"run-{i}" for i in range(1, len(ordered) + 1)))
    return [*parts, Chapter("Runs", [tables.to_html(listed, titled=False), *_run_details(ordered)])]


def _stream_parts(stream: StreamRuns, pieces: PieceColours) -> list[Chapter]:
    groups = stream.groups
    comparison, cost, by_part, paired, *_ = the_tables(stream.runs, groups)
    # a plot by round would repeat the plot by task where scores were measured at the ends of tasks alone
    by_round = [] if figures.only_task_ends(groups) else [figures.curve("acc", groups)]
    measured, swept = figures.measured(groups), sweeps.figures(groups, pieces)
    costs = [figures.traffic(groups, pieces), figures.time(groups, pieces), figures.memory(groups, pieces)]
    return [
        Chapter(
            "Results",
            [
                tables.to_html(comparison, titled=False),
                *([tables.to_html(paired)] if paired.rows else []),
                _two(figures.curve("acc_t", groups), figures.curve("forgetting", groups)),
            ],
        ),
        Chapter("Learning", [_two(*by_round, figures.curve("loss", groups))]),
        *([Chapter("Options", [_two(*swept)])] if swept else []),
        Chapter("Scores by task", [_two(*(figures.accuracy_matrix(group) for group in groups))]),
        *_further(groups),
        *([Chapter("What parts measured", [_two(*measured)])] if measured else []),
        Chapter(
            "Cost",
            [
                tables.to_html(cost, titled=False),
                _two(*costs),
                _folded("Bytes by part as a table", tables.to_html(by_part, titled=False)),
            ],
        ),
    ]


def _further(groups: Sequence[SeedGroup]) -> list[Chapter]:
    """The metrics of eval.metrics that are no single numbers."""
    lists = [tables.to_html(table) for table in tables.metric_lists(groups)]
    matrices = figures.metric_matrices(groups)
    found = [*lists, *([_two(*matrices)] if matrices else [])]
    return [Chapter("By class and by client", found)] if found else []


def _two(*figures: Html) -> Html:
    return tag("div", *figures, class_="two")


def _folded(title: str, *children: Html, opened: bool = False, anchor: str | None = None) -> Html:
    return tag("details", tag("summary", title), *children, open=opened, id=anchor)


def _run_details(runs: Sequence[LoggedRun]) -> list[Html]:
    """Runs one by one. A figure that an earlier run already has (methods share their streams) is not repeated."""
    seen: dict[str, str] = {}
    return [
        _folded(run.name, *run_sections(run, seen), opened=len(runs) == 1, anchor=f"run-{i}")
        for i, run in enumerate(runs, start=1)
    ]


def run_sections(run: LoggedRun, seen: dict[str, str] | None = None) -> list[Html]:
    """The sections about one run."""
    seen = {} if seen is None else seen
    drawn = [figures.who_saw_what(run), figures.suspected_shifts(run), figures.class_mix(run), figures.buffers(run)]
    once = [_once(figure, run.name, seen) for figure in drawn]
    return [
        facts(run),
        happenings(run),
        figures.pictures(run),
        who_took_part(run),
        suspected_shifts(run),
        *once,
        recipe(run),
    ]


def _once(figure: Html, run: str, seen: dict[str, str]) -> Html:
    """The figure, or a reference to the run that has the same one."""
    first = seen.setdefault(figure, run)
    if first == run or len(figure) < 2000:
        return figure
    title = figure.partition("<h3>")[2].partition("</h3>")[0]
    return tag("p", Html(title), f": the same as in {first}.", class_="note")


def facts(run: LoggedRun, left: float | None = None) -> Html:
    """State, place and environment. left: seconds until a run that goes on is finished."""
    result = run.result
    going_on = f"running, round {run.rounds_done:,} of {run.rounds:,}"
    known: dict[str, str] = _scores(run) if result is not None else {}
    known |= {"state": tables.state(run) if left is None else going_on}
    if result is None:
        known |= _now(run, left)
    known["folder"] = str(run.folder)
    if run.log.first_time is not None and run.log.last_time is not None:
        known["from"], known["to"] = formats.moment(run.log.first_time), formats.moment(run.log.last_time)
    known |= {"took": formats.duration(run.seconds)} if result is not None and run.seconds else {}
    if result is not None:
        known |= {"scored": f"{result.evaluated} model, {result.split} split, logits {result.logits}"}
        known |= {name: _summary(facts) for name, facts in result.parts.items()}
        known |= {"everfed": result.everfed, **{key: str(value) for key, value in result.environment.items()}}
    pairs = [tag("div", tag("dt", key), tag("dd", value)) for key, value in known.items()]
    return tag("dl", *pairs, class_="facts")


def _scores(run: LoggedRun) -> dict[str, str]:
    """The score of a finished run, and what it has forgotten."""
    score = score_of(run.score)
    metrics = run.result.metrics if run.result else {}
    named = ((score.main, score.title), (score.lost, "forgetting"))
    return {name: score.text(value) for key, name in named if (value := metrics.get(key)) is not None}


def _now(run: LoggedRun, left: float | None) -> dict[str, str]:
    """What is known of a run that is not finished."""
    log, found = run.log, {}
    if log.phases:
        task = max(line.task for line in log.phases.values()) + 1
        found["task"] = f"{task} of {log.start.tasks}" if log.start else f"{task}"
    latest = max(log.evaluations, default=None)
    if latest is not None and (value := log.evaluations[latest].score) is not None:
        found["score now"] = f"{score_of(run.score).text(value)} (round {latest + 1})"
    if log.loss is not None:
        found["loss now"] = plain_text(log.loss)
    if run.seconds is not None:
        found["so far"] = formats.duration(run.seconds)
    if left is not None:
        found["time left"] = f"about {formats.duration(left)}"
    return found


def _summary(facts: dict[str, Any]) -> str:
    """A part's facts about the run, such as the privacy budget spent."""
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in facts.items()
    )


def problem(message: str) -> Html:
    """A warning in place of a run that cannot be read."""
    return tag("p", f"This run cannot be read: {message}", class_="warning")


MOST_NOTES = 200
LONGEST = 120  # signs of a value in the log


def happenings(run: LoggedRun) -> Html:
    """Faults, warnings and resumes in the order in which they happened, and clients that did not train."""
    log = run.log
    items = [_note(note.kind, note.time, note.round, note.message) for note in log.notes[-MOST_NOTES:]]
    if len(log.notes) > MOST_NOTES:
        items.insert(0, tag("li", f"{len(log.notes) - MOST_NOTES} earlier ones are in events.jsonl."))
    if log.skipped:
        rounds = sum(line.skipped > 0 for line in log.phases.values())
        items.append(tag("li", f"{log.skipped:,} times a participant did not train, in {rounds:,} rounds."))
    if log.unreadable:
        items.append(tag("li", f"{log.unreadable:,} of {log.lines:,} lines of events.jsonl could not be read."))
    if not items:
        return tag("p", "No fault, no warning, no client skipped.", class_="note")
    return tag("ul", *items, class_="happenings")


def _note(kind: str, when: float | None, done: int, message: str) -> Html:
    place = f"round {done}" + (f", {formats.moment(when)}" if when is not None else "")
    return tag("li", tag("b", kind), f" {message} ", tag("small", f"({place})"), class_=f"kind-{kind}")


LAST_EVENTS = 200


def log(run: LoggedRun, opener: Opener = open_file) -> Html:
    """The last events, a line each; nothing where there is none."""
    try:
        found = last_events(run.folder, LAST_EVENTS, opener)
    except (OSError, RunError):
        return NOTHING
    shown = tag("pre", "\n".join(map(_readable, found)), class_="log", tabindex=0)
    return _folded(f"Log: the last {len(found)} events", shown) if found else NOTHING


def _readable(event: dict[str, Any] | str) -> str:
    """As "20:15:02 phase round 3, task 1, phase train, loss 0.1823": rounds and tasks count from 1."""
    if isinstance(event, str):
        return event
    try:
        when = formats.moment(event["time"]).split()[1] if "time" in event else "        "
    except TypeError:
        return str(event)
    facts = ((key, value) for key, value in event.items() if key not in ("time", "event") and value is not None)
    return f"{when} {event['event']} {', '.join(f'{key} {_counted(key, value)}' for key, value in facts)}"


def _counted(key: str, value: Any) -> str:
    if key in ("round", "task") and isinstance(value, int):
        return str(value + 1)
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def recipe(run: LoggedRun) -> Html:
    """The resolved recipe, and the command that repeats the run."""
    if run.settings.get("own_stream"):
        again = tag("p", "This run got its stream from Python; to run it again, run that program.")
    else:
        again = join(tag("p", "To run it again:"), tag("pre", command(run), class_="command", tabindex=0))
    text = tag("pre", run.recipe_text, class_="recipe", tabindex=0)
    return join(again, _folded("Recipe, with every default", text))


def command(run: LoggedRun) -> str:
    """The exact command line; the stored recipe holds the seed and every default."""
    words = ["everfed", "run", str(run.folder / "recipe.toml"), "--out", f"{run.folder}-again"]
    scale, data = run.settings.get("scale", 1.0), run.settings.get("data_dir")
    if scale != 1.0:
        words += ["--scale", f"{scale!r}"]
    if data:
        words += ["--data", str(data)]
    return shlex.join(words)


# clients of a run --------------------------------------------------------------------------------------------------
MOST = 200  # rounds with suspected shifts that are listed


@dataclass
class Record:
    """The rounds (from 1) of one client."""

    rounds: list[int] = field(default_factory=list)
    late: int = 0

    @property
    def longest_absence(self) -> int:
        """The most rounds between two in which it took part."""
        return max((b - a - 1 for a, b in zip(self.rounds, self.rounds[1:], strict=False)), default=0)


def records(run: LoggedRun) -> dict[int, Record]:
    """By client, of all that were sampled at least once; empty where the events do not name clients."""
    found: dict[int, Record] = {}
    for (index, phase, _), line in sorted(run.log.phases.items()):
        if phase == TRAIN:
            for client in line.clients or ():
                found.setdefault(client, Record()).rounds.append(index + 1)
            for client in line.late:
                found.setdefault(client, Record()).late += 1
    return found


def who_took_part(run: LoggedRun) -> Html:
    """A sentence on participation, with a table where clients are few; nothing where all took part in every round."""
    found, rounds = records(run), len(run.log.rounds())
    clients = max(run.log.start.clients if run.log.start else 0, len(found))
    if not found or (all(len(record.rounds) == rounds for record in found.values()) and len(found) == clients):
        return Html("")
    sentences = [f"{len(found):,} of {clients:,} clients took part in at least one of {rounds:,} rounds."]
    never = sorted(set(range(clients)) - set(found))
    if never and len(never) <= NAMED:
        sentences.append(f"Never: {spans(never)}.")
    late = sum(record.late for record in found.values())
    if late:
        sentences.append(f"{late:,} replies came too late and were dropped.")
    text = tag("p", " ".join(sentences), class_="note")
    return text if len(found) > NAMED else join(text, _table(found))


def _table(found: dict[int, Record]) -> Html:
    columns = (
        Column("Client"),
        Column("Rounds", "count"),
        Column("First"),
        Column("Last"),
        Column("Longest absence", "count"),
        Column("Too late", "count"),
    )
    rows = tuple(
        (
            str(client),
            float(len(record.rounds)),
            str(record.rounds[0]) if record.rounds else "",
            str(record.rounds[-1]) if record.rounds else "",
            float(record.longest_absence),
            float(record.late),
        )
        for client, record in sorted(found.items())
    )
    table = tables.to_html(ReportTable("who_took_part", "Who took part", columns, rows, "Rounds are counted from 1."))
    return tag("details", tag("summary", "Who took part"), table)


def suspected_shifts(run: LoggedRun) -> Html:
    """Rounds in which the drift monitor suspected that clients' data had changed; nothing where there are none."""
    found = sorted(run.log.shifts.items())
    if not found:
        return Html("")
    items = [tag("li", _suspicion(run, index, clients)) for index, clients in found[:MOST]]
    if len(found) > MOST:
        items.append(tag("li", f"and {len(found) - MOST:,} more rounds, in events.jsonl"))
    rounds = f"{len(found):,} round{'s' if len(found) > 1 else ''}"
    title = f"Suspected shifts: {sum(len(clients) for _, clients in found):,} in {rounds}"
    return tag("details", tag("summary", title), tag("ul", *items), open=len(found) <= 10)


def _suspicion(run: LoggedRun, index: int, clients: tuple[int, ...]) -> str:
    by = run.log.shifts_by[index]
    signals = "; ".join(f"{signal}: {spans(sorted(own))}" for signal, own in sorted(by.items()))
    return f"round {index + 1}: clients {spans(sorted(clients))}" + (f" (by {signals})" if set(by) != {"loss"} else "")
