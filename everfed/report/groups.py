"""Groups runs that differ only in their seed, and gives groups labels and colours."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from everfed.report.read import Result, Run

# keys in which the seeds of one experiment may differ
_NOT_THE_EXPERIMENT = ("seed", "name", "engine", "compare", "stream.seed")
MOST_KEYS = 3  # that a label spells out


@dataclass(frozen=True)
class Group:
    """label: the method, with the options in which groups of the same method differ. runs: one per seed."""

    label: str
    colour: int
    runs: tuple[Run, ...]

    @property
    def finished(self) -> tuple[Run, ...]:
        return tuple(run for run in self.runs if run.result is not None)

    @property
    def results(self) -> tuple[Result, ...]:
        """Those of `finished`, in the same order."""
        return tuple(run.result for run in self.runs if run.result is not None)


@dataclass(frozen=True)
class Grouping:
    """groups: in the order in which their first runs were named; notes: caveats for the reader."""

    groups: tuple[Group, ...]
    notes: tuple[str, ...]


def grouped(runs: Sequence[Run], colours: Colours | None = None) -> Grouping:
    """Runs by experiment. A seed that was run twice counts once, with a note."""
    by_key: dict[str, list[Run]] = {}
    for run in runs:
        by_key.setdefault(experiment(run), []).append(run)
    notes: list[str] = []
    members = [_one_per_seed(found, notes) for found in by_key.values()]
    labels = _labels([found[0] for found in members])
    chosen = colours or Colours()
    chosen.assign(labels)
    groups = (Group(label, chosen.of(label), tuple(found)) for label, found in zip(labels, members, strict=True))
    firsts = [found[0] for found in members]
    return Grouping(tuple(groups), (*notes, *_scale_notes(firsts), *_stream_notes(firsts)))


def experiment(run: Run) -> str:
    """What two runs must share to be seeds of one experiment."""
    return json.dumps([run.method, sorted(_facts(run).items())], default=str)


def _facts(run: Run) -> dict[str, Any]:
    """The recipe and the scale as dotted keys, without those in which seeds may differ."""
    facts = flat({**run.recipe, "scale": run.settings.get("scale", 1.0)})
    return {key: value for key, value in facts.items() if not _left_out(key)}


def _left_out(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in _NOT_THE_EXPERIMENT)


def flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        found |= flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return found


def _one_per_seed(runs: Sequence[Run], notes: list[str]) -> list[Run]:
    """Of runs with the same seeds the finished one that was named first, or the first."""
    by_seed: dict[Any, list[Run]] = {}
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


def _labels(firsts: Sequence[Run]) -> list[str]:
    labels = [_label(run, [other for other in firsts if other.method == run.method]) for run in firsts]
    return [_unique(label, labels[:i]) for i, label in enumerate(labels)]


def _label(run: Run, alike: Sequence[Run]) -> str:
    facts = [_facts(other) for other in alike]
    keys = sorted({key for table in facts for key in table})
    differing = [key for key in keys if any(table.get(key) != facts[0].get(key) for table in facts)]
    own = _facts(run)
    spelled = [f"{key.removeprefix('method.')}={_short(own.get(key))}" for key in differing[:MOST_KEYS]]
    spelled += ["…"] if len(differing) > MOST_KEYS else []
    return f"{run.method} ({', '.join(spelled)})" if spelled else run.method


def _short(value: Any) -> str:
    return "unset" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)


def _unique(label: str, before: Sequence[str]) -> str:
    return f"{label} #{before.count(label) + 1}" if label in before else label


def _scale_notes(firsts: Sequence[Run]) -> list[str]:
    """Scores of a scaled run do not compare with those of a full one."""
    scales = sorted({float(run.settings.get("scale", 1.0)) for run in firsts} - {1.0})
    if not scales:
        return []
    listed = ", ".join(f"{scale:g}" for scale in scales)
    return [f"Some of these runs were made at --scale {listed} of their recipe's work: fewer rounds and less data. "
            "They do not compare with full runs."]  # fmt: skip


def _stream_notes(firsts: Sequence[Run]) -> list[str]:
    """Scores on different streams do not compare."""
    streams = [{k: v for k, v in _facts(run).items() if k.startswith("stream.")} for run in firsts]
    keys = sorted({key for table in streams for key in table})
    differing = [key for key in keys if any(table.get(key) != streams[0].get(key) for table in streams)]
    if not differing:
        return []
    return [f"These runs are not all on the same stream ({', '.join(differing)} differ): their scores do not compare."]


COLOURS = 10
FIRST_COLOURS = 6  # the most distinct ones; the others are used when these are taken


class Colours:
    """The colour of each label. It stays once assigned; a label prefers the same one in every report."""

    def __init__(self) -> None:
        self._of: dict[str, int] = {}

    def assign(self, labels: Iterable[str]) -> None:
        for label in sorted(set(labels) - set(self._of)):
            self._of[label] = self._free(zlib.crc32(label.encode()) % FIRST_COLOURS)

    def of(self, label: str) -> int:
        """0, 1, ...: below COLOURS a colour of its own, above it a colour with another dash."""
        self.assign([label])
        return self._of[label]

    def _free(self, wish: int) -> int:
        taken = set(self._of.values())
        wishes = [(wish + i) % FIRST_COLOURS for i in range(FIRST_COLOURS)]
        turn = len(taken) // COLOURS * COLOURS
        return next(turn + i for i in [*wishes, *range(FIRST_COLOURS, COLOURS)] if turn + i not in taken)
