"""The report: one HTML file with everything in it. Its content security policy forbids the browser to load more."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import resources
from typing import Any

from everfed import __version__
from everfed.report import attendance, figures, numbers, rerun, tables
from everfed.report.colours import variables
from everfed.report.groups import Group, Grouping, grouped
from everfed.report.markup import Html, join, tag
from everfed.report.read import Run
from everfed.report.tables import Table

# Nothing may be fetched; scripts and styles are those of this file.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)


def asset(name: str) -> str:
    """A file of everfed/report/static."""
    return resources.files("everfed.report").joinpath("static", name).read_text(encoding="utf-8")


def render(runs: Sequence[Run]) -> str:
    """The whole page."""
    grouping = grouped(runs)
    title = f"everfed report: {_subject(grouping.groups)}"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Html(variables() + asset("page.css"))),
    )
    body = tag(
        "body",
        tag("a", "Skip to the report", href="#main", class_="skip"),
        _header(runs, grouping),
        tag("main", *_sections(runs, grouping), id="main"),
        tag("script", Html(asset("charts.js"))),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def the_tables(runs: Sequence[Run], groups: Sequence[Group]) -> list[Table]:
    """All tables of a report, in their order."""
    several = [tables.comparison(groups), tables.cost(groups), tables.bytes_by_part(groups)]
    return [*several, tables.accuracy_matrices(groups), tables.runs(runs)]


def _subject(groups: Sequence[Group]) -> str:
    labels = [group.label for group in groups]
    return ", ".join(labels) if len(labels) <= 4 else f"{', '.join(labels[:3])} and {len(labels) - 3} more"


def _header(runs: Sequence[Run], grouping: Grouping) -> Html:
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    count = f"{len(runs)} run{'s' if len(runs) != 1 else ''}"
    unfinished = sum(run.result is None for run in runs)
    facts = (
        f"{count}{f', {unfinished} of them unfinished' if unfinished else ''} · made {made} by everfed {__version__}"
    )
    button = tag("button", "Light or dark", type="button", id="theme", class_="theme")
    notes = [tag("p", note, class_="warning") for note in grouping.notes]
    return tag("header", button, tag("h1", _subject(grouping.groups)), tag("p", facts, class_="note"), *notes)


def _sections(runs: Sequence[Run], grouping: Grouping) -> list[Html]:
    groups = grouping.groups
    comparison, cost, by_part, _, of_runs = the_tables(runs, groups)
    two = tag("div", figures.curve("acc_t", groups), figures.curve("forgetting", groups), class_="two")
    by_round = tag("div", figures.curve("acc", groups), figures.curve("loss", groups), class_="two")
    matrices = tag("div", *(figures.accuracy_matrix(group) for group in groups), class_="two")
    measured = figures.measured(groups)
    costs = tag("div", figures.traffic(groups), figures.time(groups), figures.memory(groups), class_="two")
    return [
        _section("Results", tables.to_html(comparison), two),
        _section("Learning", by_round),
        _section("Scores by task", matrices),
        *([_section("What parts measured", tag("div", *measured, class_="two"))] if measured else []),
        _section("Cost", tables.to_html(cost), costs, _folded("Bytes by part as a table", tables.to_html(by_part))),
        _section("Runs", tables.to_html(of_runs), *_run_details(runs)),
    ]


def _section(title: str, *children: Html) -> Html:
    return tag("section", tag("h2", title), *children)


def _folded(title: str, *children: Html, opened: bool = False) -> Html:
    return tag("details", tag("summary", title), *children, open=opened)


def _run_details(runs: Sequence[Run]) -> list[Html]:
    """Runs one by one. A figure that an earlier run already has (methods share their streams) is not repeated."""
    seen: dict[str, str] = {}
    return [_folded(run.name, *run_sections(run, seen), opened=len(runs) == 1) for run in runs]


def run_sections(run: Run, seen: dict[str, str] | None = None) -> list[Html]:
    """The sections about one run."""
    seen = {} if seen is None else seen
    drawn = [figures.who_saw_what(run), figures.suspected_shifts(run), figures.class_mix(run), figures.buffers(run)]
    once = [_once(figure, run.name, seen) for figure in drawn]
    return [
        facts(run),
        happenings(run),
        figures.pictures(run),
        attendance.who_took_part(run),
        attendance.suspected_shifts(run),
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


def facts(run: Run) -> Html:
    """State, place and environment."""
    result = run.result
    known: dict[str, str] = {"state": tables.state(run), "folder": str(run.folder)}
    if run.log.first_time is not None and run.log.last_time is not None:
        known["from"], known["to"] = numbers.moment(run.log.first_time), numbers.moment(run.log.last_time)
    if result is not None:
        known |= {"scored": f"{result.evaluated} model, {result.split} split, logits {result.logits}"}
        known |= {name: _summary(facts) for name, facts in result.parts.items()}
        known |= {"everfed": result.everfed, **{key: str(value) for key, value in result.environment.items()}}
    pairs = [tag("div", tag("dt", key), tag("dd", value)) for key, value in known.items()]
    return tag("dl", *pairs, class_="facts")


def _summary(facts: dict[str, Any]) -> str:
    """A part's facts about the run, such as the privacy budget spent."""
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in facts.items()
    )


def problem(message: str) -> Html:
    """A warning in place of a run that cannot be read."""
    return tag("p", f"This run cannot be read: {message}", class_="warning")


MOST_NOTES = 200


def happenings(run: Run) -> Html:
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
    place = f"round {done}" + (f", {numbers.moment(when)}" if when is not None else "")
    return tag("li", tag("b", kind), f" {message} ", tag("small", f"({place})"), class_=f"kind-{kind}")


def recipe(run: Run) -> Html:
    """The resolved recipe, and the command that repeats the run."""
    if rerun.own_stream(run):
        again = tag("p", "This run got its stream from Python; to run it again, run that program.")
    else:
        again = join(tag("p", "To run it again:"), tag("pre", rerun.command(run), class_="command", tabindex=0))
    text = tag("pre", run.recipe_text, class_="recipe", tabindex=0)
    return join(again, _folded("Recipe, with every default", text))
