"""Groups runs that differ only in their seed, and gives groups labels and colours."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from everfed.errors import UserError
from everfed.metrics.scores import Score, score_of
from everfed.metrics.statistics import mean_and_deviation
from everfed.recipe import Recipe, flat, settled
from everfed.reports import formats
from everfed.reports.colours import COLOURS, Colours
from everfed.reports.read import LoggedRun, StoredResult

# keys in which the seeds of one experiment may differ
_NOT_THE_EXPERIMENT = ("seed", "name", "engine", "compare", "stream.seed")
MOST_KEYS = 3  # that a label spells out
DASHED = 4  # variants of a method that dashes tell apart
# sections in the order in which a label names what differs; stream.dataset comes before all
_SECTIONS = ("stream", "scale", "method", "train", "model", "privacy", "monitor", "federation", "eval")


@dataclass(frozen=True)
class SeedGroup:
    """label: the method, with what distinguishes groups of the same method. runs: one per seed."""

    label: str
    colour: int
    runs: tuple[LoggedRun, ...]

    @property
    def finished(self) -> tuple[LoggedRun, ...]:
        return tuple(run for run in self.runs if run.result is not None)

    @property
    def results(self) -> tuple[StoredResult, ...]:
        """Those of `finished`, in the same order."""
        return tuple(run.result for run in self.runs if run.result is not None)


@dataclass(frozen=True)
class Grouping:
    """groups: the best score first, those without a finished run last; notes: caveats for the reader."""

    groups: tuple[SeedGroup, ...]
    notes: tuple[str, ...]


def grouped(runs: Sequence[LoggedRun], colours: Colours | None = None) -> Grouping:
    """Runs by experiment, the best score first. A seed that was run twice counts once, with a note."""
    by_key: dict[str, list[LoggedRun]] = {}
    for run in runs:
        by_key.setdefault(experiment(run), []).append(run)
    notes: list[str] = []
    members = [_one_per_seed(found, notes) for found in by_key.values()]
    firsts = [found[0] for found in members]
    chosen = colours or assigned(runs)
    numbers = _distinct([chosen.of(*variant(run)) for run in firsts])
    if len({run.method for run in firsts}) == 1 and len(firsts) > DASHED:
        numbers = [number // COLOURS for number in numbers]  # of one method alone, its variants have colours
    groups = [
        SeedGroup(label, number, tuple(found))
        for label, number, found in zip(_labels(firsts), numbers, members, strict=True)
    ]
    groups.sort(key=_rank, reverse=True)
    return Grouping(tuple(groups), (*notes, *_scale_notes(firsts), *_stream_notes(firsts), *_seed_notes(groups)))


def score(groups: Sequence[SeedGroup]) -> Score:
    """The score of the runs, from the first one that has reported it."""
    return score_of(next((run.score for group in groups for run in group.runs if run.scored), "accuracy"))


def _rank(group: SeedGroup) -> tuple[bool, float]:
    """The better, the higher: the mean over finished runs, or of what the others have come to."""
    runs = group.finished or group.runs
    known = [value for run in runs if (value := run.last_score) is not None]
    return bool(group.finished), score([group]).better * mean_and_deviation(known).mean if known else -math.inf


def assigned(runs: Iterable[LoggedRun], colours: Colours | None = None) -> Colours:
    """Colours by the order in which runs began: a report and a dashboard of the same folder agree, and a run that is
    added later changes none of them."""
    chosen = colours or Colours()
    began = sorted(runs, key=lambda run: (math.inf if run.log.first_time is None else run.log.first_time, run.name))
    chosen.assign(map(variant, began))
    return chosen


@dataclass(frozen=True)
class StreamRuns:
    """Runs whose scores compare. name: the data set, with what distinguishes streams of the same data."""

    name: str
    runs: tuple[LoggedRun, ...]
    grouping: Grouping

    @property
    def groups(self) -> tuple[SeedGroup, ...]:
        return self.grouping.groups


def by_stream(runs: Sequence[LoggedRun], colours: Colours | None = None) -> list[StreamRuns]:
    """Runs by the stream they are on, in the order in which the first of each was named. Methods keep their colours
    from stream to stream."""
    colours = assigned(runs, colours)
    found: dict[str, list[LoggedRun]] = {}
    for run in runs:
        found.setdefault(stream_of(run), []).append(run)
    firsts = [own[0] for own in found.values()]
    names = [_stream_name(first, firsts) for first in firsts]
    return [
        _stream_runs(_unique(name, names[:i]), own, colours)
        for i, (name, own) in enumerate(zip(names, found.values(), strict=True))
    ]


def _stream_runs(name: str, own: Sequence[LoggedRun], colours: Colours) -> StreamRuns:
    """Its runs are in the order of their groups; those that do not count come last."""
    grouping = grouped(own, colours)
    counted = [run for group in grouping.groups for run in group.runs]
    known = set(map(id, counted))
    return StreamRuns(name, (*counted, *(run for run in own if id(run) not in known)), grouping)


def _stream_name(run: LoggedRun, firsts: Sequence[LoggedRun]) -> str:
    own, alike = facts(run), [other for other in firsts if dataset(other) == dataset(run)]
    keys = [key for key in differing(alike) if _of_stream(key) and own.get(key) is not None]
    spelled = [f"{key.removeprefix('stream.')}={short(own[key])}" for key in keys[:MOST_KEYS]]
    return f"{dataset(run)} ({', '.join(spelled)})" if spelled else dataset(run)


def _distinct(numbers: Sequence[int]) -> list[int]:
    """Colours and dashes of which a later one takes the next dash where an earlier one has the same."""
    found: list[int] = []
    for number in numbers:
        while number in found:
            number += COLOURS
        found.append(number)
    return found


# what distinguishes runs -------------------------------------------------------------------------------------------
def experiment(run: LoggedRun) -> str:
    """What two runs must share to be seeds of one experiment."""
    return json.dumps([run.method, sorted(facts(run).items())], default=str)


def variant(run: LoggedRun) -> tuple[str, str, str]:
    """(method, stream, experiment): what a colour and a dash stand for."""
    return run.method, stream_of(run), experiment(run)


def stream_of(run: LoggedRun) -> str:
    """What two runs must share for their scores to compare: the stream and the scale."""
    return json.dumps(sorted((key, value) for key, value in facts(run).items() if _of_stream(key)), default=str)


def _of_stream(key: str) -> bool:
    return key == "scale" or key.startswith("stream.")


def facts(run: LoggedRun) -> dict[str, Any]:
    """The options that take effect, and the scale, as dotted keys, without those in which seeds may differ."""
    options = flat({**_in_effect(run.recipe_text), "scale": run.settings.get("scale", 1.0)})
    return {key: value for key, value in options.items() if not _left_out(key)}


def _left_out(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in _NOT_THE_EXPERIMENT)


@lru_cache(maxsize=4096)
def _in_effect(text: str) -> dict[str, Any]:
    """A recipe without options that do nothing in it: of parts that its method lacks, of what is switched off.

    Options that an older version did not write get their defaults. A recipe that cannot be read stays as it is.
    """
    table = tomllib.loads(text)
    try:
        found = settled(Recipe.model_validate(table)).model_dump(mode="json", exclude_none=True)
    except (ValueError, UserError, ImportError, AttributeError):
        return table
    found["method"].pop("defaults", None)
    optimizer, privacy = found["train"]["optimizer"], found["privacy"]
    for key in ("beta1", "beta2", "eps") if optimizer["kind"] == "sgd" else ("momentum",):
        optimizer.pop(key, None)
    if optimizer["schedule"] in ("constant", "table"):
        optimizer.pop("lr_end", None)
    if not privacy["secure_aggregation"]:
        found["privacy"] = {key: value for key, value in privacy.items() if key in ("secure_aggregation", "dp")}
    if found["monitor"]["kind"] == "none":
        found["monitor"] = {"kind": "none"}
    return found


def differing(runs: Sequence[LoggedRun]) -> list[str]:
    """The keys in which the runs differ: the data set first, then the stream, the method, training, the network."""
    tables = [facts(run) for run in runs]
    keys = {key for table in tables for key in table}
    return sorted((key for key in keys if any(table.get(key) != tables[0].get(key) for table in tables)), key=_order)


def _order(key: str) -> tuple[int, int, str]:
    section = key.partition(".")[0]
    place = _SECTIONS.index(section) if section in _SECTIONS else len(_SECTIONS)
    return (0 if key == "stream.dataset" else 1, place, key)


def _one_per_seed(runs: Sequence[LoggedRun], notes: list[str]) -> list[LoggedRun]:
    """Of runs with the same seeds the finished one that was named first, or the first."""
    by_seed: dict[Any, list[LoggedRun]] = {}
    for run in runs:
        stream = run.recipe.get("stream")
        own = stream.get("seed") if isinstance(stream, dict) else None
        by_seed.setdefault((run.seed, own), []).append(run)
    kept = []
    for found in by_seed.values():
        best = next((run for run in found if run.result is not None), found[0])
        kept.append(best)
        if len(found) > 1:
            others = ", ".join(run.name for run in found if run is not best)
            notes.append(f"{best.name} and {others} are the same experiment with the same seed; only the first counts.")
    return kept


# labels ------------------------------------------------------------------------------------------------------------
def _labels(firsts: Sequence[LoggedRun]) -> list[str]:
    several = len({dataset(run) for run in firsts}) > 1
    labels = [_label(run, firsts, several) for run in firsts]
    return [_unique(label, labels[:i]) for i, label in enumerate(labels)]


def _label(run: LoggedRun, firsts: Sequence[LoggedRun], name_data: bool) -> str:
    """The method; the data set where there are several; what distinguishes it from the same method on this data."""
    own = facts(run)
    alike = [other for other in firsts if other.method == run.method and dataset(other) == dataset(run)]
    keys = [key for key in differing(alike) if own.get(key) is not None]
    spelled = [dataset(run)] if name_data else []
    spelled += [f"{short_key(key)}={short(own[key])}" for key in keys[:MOST_KEYS]]
    spelled += ["…"] if len(keys) > MOST_KEYS else []
    return f"{run.method} ({', '.join(spelled)})" if spelled else run.method


def dataset(run: LoggedRun) -> str:
    """The name of the data set."""
    return str(facts(run).get("stream.dataset", "")) or "unknown data"


def short_key(key: str) -> str:
    """A key as a label names it: "memory.size" for "method.memory.size"."""
    return key.removeprefix("method.").removeprefix("train.optimizer.")


def short(value: Any) -> str:
    """A value as a label shows it."""
    text = "unset" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 24 else f"{text[:23]}…"


def _unique(label: str, before: Sequence[str]) -> str:
    return f"{label} #{before.count(label) + 1}" if label in before else label


def _scale_notes(firsts: Sequence[LoggedRun]) -> list[str]:
    """Scores of a scaled run do not compare with those of a full one."""
    scales = sorted({float(run.settings.get("scale", 1.0)) for run in firsts} - {1.0})
    if not scales:
        return []
    listed = ", ".join(f"{scale:g}" for scale in scales)
    return [f"Some of these runs were made at --scale {listed} of their recipe's work: fewer rounds and less data. "
            "They do not compare with full runs."]  # fmt: skip


def _stream_notes(firsts: Sequence[LoggedRun]) -> list[str]:
    """Scores on different streams do not compare."""
    found = [key for key in differing(firsts) if key.startswith("stream.")]
    if not found:
        return []
    return [f"These runs are not all on the same stream ({', '.join(found)} differ): their scores do not compare."]


def _seed_notes(groups: Sequence[SeedGroup]) -> list[str]:
    """Means over different seeds differ by the seeds, too."""
    by_seeds: dict[tuple[int, ...], list[str]] = {}
    for group in groups:
        by_seeds.setdefault(tuple(sorted({run.seed for run in group.runs})), []).append(group.label)
    if len(by_seeds) < 2:
        return []
    listed = "; ".join(
        f"{formats.listed(list(map(str, seeds)))} of {formats.listed(own)}" for seeds, own in by_seeds.items()
    )
    return [f"Seeds differ, so means are not over the same draws: {listed}."]
