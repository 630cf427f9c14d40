"""The tables of REPRODUCIBILITY.md, between marks that name a table of a paper or a recipe, from the records alone.

<!-- records: fedgp/table1 -->
...
<!-- records: end -->

<!-- records: recipe:stamp/cifar100-cnn --> marks a line for every method of a recipe, with the settings that
differ and the scores of its seeds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from statistics import fmean, pstdev
from typing import Any

from everfed.errors import UserError
from everfed.experiments.papers import writing
from everfed.experiments.papers.judging import NOT_JUDGED, Judged, Runs, judge
from everfed.experiments.papers.matching import runs_of
from everfed.experiments.papers.planning import plan
from everfed.experiments.papers.records import Record, complete, settings_of
from everfed.experiments.papers.tables import find
from everfed.methods import registry as methods
from everfed.recipe import parse_set, read
from everfed.reports.markdown import markdown_table
from everfed.store import marked

PRECISION = "engine.precision"
RECIPE = "recipe:"  # what a mark of a recipe begins with
OPTION = "method."  # what the key of a method's option begins with
# titles of columns: which logits, "" for the recipe's own, and the metric
_SCORES = {
    "learning accuracy": ("", "learning_accuracy"),
    "final accuracy": ("", "acc"),
    "forgetting": ("", "forgetting"),
}
_TASK_IL = {"final accuracy, task-IL": ("task", "acc")}  # where it says something else than the final accuracy


def renewed(text: str, records: Iterable[Record]) -> str:
    """The page with every marked table written anew. Raises UserError for a mark of a table that is not there."""
    records = list(records)
    runs = runs_of(records)
    if not marked.names(text, "records"):
        raise UserError("the page has no table to renew; mark its place with <!-- records: PAPER/TABLE -->")

    def written(name: str) -> str:
        return every_run(name.removeprefix(RECIPE), records) if name.startswith(RECIPE) else section(name, runs)

    return marked.renewed(text, "records", written)


def section(name: str, runs: Runs) -> str:
    """The cells of a table that records give, and what made them."""
    judged = [one for one in judge(plan(find(name)), runs) if one.values]
    if not judged:
        return "No records."
    columns, lines = writing.cells(judged)
    reasons = _numbered([line[-1] for line in lines])
    table = markdown_table(columns, [[*line[:-1], reasons.get(line[-1], line[-1])] for line in lines])
    notes = [f"{short.removeprefix(NOT_JUDGED).strip()} {long}" for long, short in reasons.items()]
    return "\n\n".join([table, *notes, _sources(judged, runs)])


def every_run(recipe: str, records: Iterable[Record]) -> str:
    """A line for every method of a recipe and every choice of its settings, in per cent, and what made them."""
    own = sorted((one for one in records if one["recipe"] == recipe), key=lambda one: (one["method"], one["seed"]))
    if not own:
        return "No records."
    differing = _differing(own)
    options = [key for key in differing if key.startswith(OPTION)]
    keys = [key for key in differing if key not in options]
    lines: dict[tuple[str, ...], list[Record]] = {}
    for one in own:
        line = (one["method"], *_options(one, options), *(_setting(one, key) for key in keys))
        lines.setdefault(line, []).append(one)
    task_il = any(_score(one, "task", "acc") not in (None, _score(one, "", "acc")) for one in own)
    scores = {**_SCORES, **(_TASK_IL if task_il else {})}
    rows = [
        [*line, ", ".join(str(one["seed"]) for one in group), *(_over_seeds(group, *of) for of in scores.values())]
        for line, group in sorted(lines.items())
    ]
    columns = ["method", *(["options"] if options else []), *keys, "seeds", *scores]
    ways: dict[str, list[Record]] = {}
    for one in own:
        ways.setdefault(_how(one), []).append(one)
    sources = [_line(recipe, how, group) for how, group in ways.items()]
    return "\n\n".join([markdown_table(columns, rows), *sources])


def _differing(records: Sequence[Record]) -> list[str]:
    """The settings, and the precision, in which records differ; options of methods only where those of one do. What the
    recipe itself gives a method is no difference."""
    values: dict[tuple[str, str], set[str]] = {}
    known = sorted({key for one in records for key in complete(one["settings"])})
    for one in records:
        own = _prescribed(one["recipe"], one["method"])
        for key in (PRECISION, *known):
            value = _setting(one, key)
            if own.get(key) != value:
                values.setdefault((one["method"] if key.startswith(OPTION) else "", key), set()).add(value)
    return sorted({key for (_, key), found in values.items() if len(found) > 1})


@cache
def _prescribed(recipe: str, method: str) -> dict[str, str]:
    """Settings that a recipe's [compare.options] gives a method; none where the recipe is not a shipped one."""
    try:
        compare = read(recipe).compare
    except UserError:
        return {}
    sets = compare.options.get(method, []) if compare else []
    named = [parse_set(entry).key for entry in sets]
    settings = complete(settings_of(read(recipe, method=method, sets=sets)))
    return {k: _text(v) for k, v in settings.items() if any(tuple(k.split("."))[: len(key)] == key for key in named)}


def _options(record: Record, keys: Sequence[str]) -> list[str]:
    """One cell with those of the keys that the record's method has, since each is of few methods; none without keys."""
    chosen = {key.removeprefix(OPTION): _setting(record, key) for key in keys}
    return [", ".join(f"{key} = {value}" for key, value in chosen.items() if value)] if keys else []


def _setting(record: Record, key: str) -> str:
    """Nothing for an option that the record's method does not have."""
    if key == PRECISION:
        return str(record["environment"].get("precision", "fp32"))
    settings = complete(record["settings"])
    return _text(settings[key] if key in settings else _default(record["method"], key))


def _text(value: Any) -> str:
    """10 and 10.0 are one value."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _default(method: str, key: str) -> Any:
    """The value of an option, `method.PART.OPTION`, that a recipe leaves to its part; of shipped methods."""
    if method not in methods.names():
        return ""
    part, _, option = key.removeprefix(OPTION).partition(".")
    parts = {one.name: one for one in methods.build(method).parts}
    return getattr(parts.get(part), option, "")


def _score(record: Record, logits: str, metric: str) -> float | None:
    """logits: "" for the recipe's own."""
    scored = record.get("by_logits", {}).get(logits, {}) if logits else record
    value: float | None = scored.get("metrics", {}).get(metric)
    return value


def _over_seeds(records: Sequence[Record], logits: str, metric: str) -> str:
    """Mean ± population deviation, and in brackets the value of each seed, - where it has none."""
    values = [_score(one, logits, metric) for one in records]
    known = [100 * value for value in values if value is not None]
    each = " ".join("-" if value is None else f"{100 * value:.1f}" for value in values)
    return each if len(values) < 2 or not known else f"{fmean(known):.1f} ± {pstdev(known):.1f} ({each})"


def _numbered(verdicts: Iterable[str]) -> dict[str, str]:
    """A short form for every verdict with reasons: these are long, and shared by many cells."""
    reasons = dict.fromkeys(verdict for verdict in verdicts if verdict.startswith(NOT_JUDGED))
    return {long: f"{NOT_JUDGED} ({number})" for number, long in enumerate(reasons, start=1)}


def _sources(judged: Sequence[Judged], runs: Runs) -> str:
    """A line for all runs of one recipe that were made alike: methods, seeds, hardware, seconds, remark."""
    alike: dict[tuple[str, str], list[Record]] = {}
    for experiment in dict.fromkeys(one.cell.experiment for one in judged):
        for run in runs[experiment].values():
            alike.setdefault((run.result["recipe"], _how(run.result)), []).append(run.result)
    return "\n".join(f"* {_line(recipe, how, group)}" for (recipe, how), group in alike.items())


def _how(record: Record) -> str:
    environment, remark = record["environment"], record.get("remark", "")
    device = environment.get("device_name") or f"{environment.get('cores', '?')} cores ({environment.get('machine')})"
    shared = " (shared)" if record.get("shared_device") else ""
    engine = f"{environment.get('engine')}, {environment.get('precision', 'fp32')}, torch {environment.get('torch')}"
    return f"{device}{shared}, {engine}{f'; {remark}' if remark else ''}"


def _line(recipe: str, how: str, group: Sequence[Record]) -> str:
    methods, seeds = (", ".join(dict.fromkeys(str(one[key]) for one in group)) for key in ("method", "seed"))
    seconds = sorted(one["cost"]["seconds"] for one in group)
    return f"`{recipe}`: {methods}; seeds {seeds}; {how}; {seconds[0]:,.0f} to {seconds[-1]:,.0f} s a run"
