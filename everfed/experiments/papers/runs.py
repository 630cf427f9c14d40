"""The records of a recipe as a table: a line for every choice of settings, and how the runs were made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from statistics import fmean, pstdev
from typing import Any

from everfed.errors import UserError
from everfed.experiments.papers.records import Record, complete, settings_of
from everfed.methods import registry as methods
from everfed.recipe import parse_set, read
from everfed.reports.formats import markdown_table

PRECISION = "engine.precision"
OPTION = "method."  # what the key of a method's option begins with
# titles of columns: which logits, "" for the recipe's own, and the metric
_SCORES = {
    "learning accuracy": ("", "learning_accuracy"),
    "final accuracy": ("", "acc"),
    "forgetting": ("", "forgetting"),
}
_TASK_IL = {"final accuracy, task-IL": ("task", "acc")}  # where it says something else than the final accuracy


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
        [*line, ", ".join(map(_seed, group)), *(_over_seeds(group, *of) for of in scores.values())]
        for line, group in sorted(lines.items())
    ]
    columns = ["method", *(["options"] if options else []), *keys, "seeds", *scores]
    return "\n\n".join([markdown_table(columns, rows), sources(own)])


def _seed(record: Record) -> str:
    return f"{record['seed']}{' (diverged)' if 'diverged' in record else ''}"


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


def sources(records: Iterable[Record]) -> str:
    """A line for all runs of one recipe that were made alike: methods, seeds, hardware, seconds, remark."""
    alike: dict[tuple[str, str], list[Record]] = {}
    for one in records:
        alike.setdefault((one["recipe"], _how(one)), []).append(one)
    return "\n".join(f"* {_line(recipe, how, group)}" for (recipe, how), group in alike.items())


def _how(record: Record) -> str:
    environment, remark = record["environment"], record.get("remark", "")
    device = environment.get("device_name") or f"{environment.get('cores', '?')} cores ({environment.get('machine')})"
    shared = " (shared)" if record.get("shared_device") else ""
    engine = f"{environment.get('engine')}, {environment.get('precision', 'fp32')}, torch {environment.get('torch')}"
    return f"{device}{shared}, {engine}{f'; {remark}' if remark else ''}"


def _line(recipe: str, how: str, group: Sequence[Record]) -> str:
    methods, seeds = (", ".join(dict.fromkeys(str(one[key]) for one in group)) for key in ("method", "seed"))
    seconds = sorted(one["cost"]["seconds"] for one in group if "seconds" in one["cost"])
    took = f"; {seconds[0]:,.0f} to {seconds[-1]:,.0f} s a run" if seconds else ""
    return f"`{recipe}`: {methods}; seeds {seeds}; {how}{took}"
