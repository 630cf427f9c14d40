"""Reads run folders, finished, unfinished or damaged, as `LoggedRun`s; raises an error that names the damaged file."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from everfed.metrics.scores import score_of
from everfed.store.event_log import STOPPED, Log, ScoredRound, read_log
from everfed.store.files import Opener, open_file
from everfed.store.run import RECIPE, RESULT, RunError, RunFolder

Matrix = list[list[float | None]]
DIVERGED = "Diverged: "  # how the fault of core.events.Diverged begins; a report needs no torch
DEPTH = 3  # levels below a named folder that are searched for run folders


class Cost(BaseModel):
    """result.json: cost."""

    model_config = ConfigDict(extra="allow")

    rounds: int = 0
    seconds: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    bytes_by_part: dict[str, dict[str, int]] = {}
    client_state_bytes: int | None = None
    peak_memory_bytes: int | None = None
    samples: int | None = None


class CurvePoint(BaseModel):
    """result.json: one entry of curves."""

    round: int
    task: int
    accuracy: list[float | None]


class StoredResult(BaseModel):
    """result.json, as far as a report needs it; further keys are kept and ignored."""

    model_config = ConfigDict(extra="allow")

    everfed: str = ""
    method: str
    seed: int = 0
    score: str = "accuracy"
    logits: str = ""
    evaluated: str = ""
    split: str = ""
    accuracy_matrix: Matrix
    metrics: dict[str, float | None]
    by_logits: dict[str, dict[str, Any]] = {}
    curves: list[CurvePoint] = []
    cost: Cost = Cost()
    stream: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}  # facts from parts
    measured: dict[str, dict[str, Any]] = {}  # by metric of eval.metrics
    environment: dict[str, Any] = {}


@dataclass(frozen=True)
class LoggedRun:
    """A run folder as read. name: its name in the report. result: None while the run is unfinished."""

    name: str
    folder: Path
    recipe: dict[str, Any]
    recipe_text: str
    settings: dict[str, Any]
    result: StoredResult | None
    log: Log

    @property
    def method(self) -> str:
        if self.result is not None:
            return self.result.method
        named = self.log.start.method if self.log.start else _table(self.recipe, "method").get("name")
        return str(named or "parts")

    @property
    def seed(self) -> int:
        seed = self.recipe.get("seed", 0)
        return seed if isinstance(seed, int) else 0

    @property
    def score(self) -> str:
        """What is measured: "accuracy", "perplexity", "map"; of an unfinished run, known from its first evaluation."""
        return self.result.score if self.result else self.log.score or "accuracy"

    @property
    def scored(self) -> bool:
        """Is the score known?"""
        return self.result is not None or bool(self.log.score)

    @property
    def last_score(self) -> float | None:
        """The main metric of a finished run, or the score that was measured last."""
        if self.result is not None:
            return self.result.metrics.get(score_of(self.score).main)
        found = self.evaluations()
        return found[-1].score if found else None

    @property
    def diverged(self) -> bool:
        """Did it end because a loss or parameter was no longer finite?"""
        return self.log.failed and self.log.notes[-1].message.startswith(DIVERGED)

    @property
    def stopped(self) -> bool:
        """Was it ended because it was behind the other runs of its sweep?"""
        return self.log.failed and self.log.notes[-1].message.startswith(STOPPED)

    @property
    def rounds(self) -> int:
        """How many rounds the run has in all; 0 where it is not known yet."""
        if self.log.start is not None:
            return self.log.start.rounds
        return self.result.cost.rounds if self.result else 0

    @property
    def rounds_done(self) -> int:
        return self.result.cost.rounds if self.result else self.log.rounds_done

    @property
    def seconds(self) -> float | None:
        """How long it took, or has taken so far."""
        if self.result is not None:
            return self.result.cost.seconds
        first, last = self.log.first_time, self.log.last_time
        return None if first is None or last is None else last - first

    @property
    def seconds_left(self) -> float | None:
        """What the other rounds take if they take as long as those since the last start or resume; None where it is
        not known, or the run is finished."""
        log = self.log
        if self.result is not None or log.start is None or log.started is None or log.last_time is None:
            return None
        done = log.rounds_done - log.start.round
        return (log.last_time - log.started) / done * (self.rounds - log.rounds_done) if done > 0 else None

    def evaluations(self) -> list[ScoredRound]:
        """Every evaluation in round order: from the events, or from result.json where the events are gone."""
        if self.log.evaluations or self.result is None:
            return [self.log.evaluations[index] for index in sorted(self.log.evaluations)]
        return [_evaluation(curve) for curve in self.result.curves]

    def accuracy_matrix(self) -> Matrix:
        """Row t: the scores after task t, one for every task (None where not measured); complete rows only."""
        if self.result is not None:
            return self.result.accuracy_matrix
        ends = [value for value in self.evaluations() if value.task_end]
        width = self.log.start.tasks if self.log.start else 0
        return [[*value.accuracy, *[None] * (width - len(value.accuracy))] for value in ends]


def _evaluation(curve: CurvePoint) -> ScoredRound:
    known = [value for value in curve.accuracy[: curve.task + 1] if value is not None]
    mean = sum(known) / len(known) if known else None
    return ScoredRound(curve.round, curve.task, False, tuple(curve.accuracy), mean)


def read_run(folder: Path, name: str | None = None, opener: Opener = open_file) -> LoggedRun:
    """The run in `folder`. Raises RunError naming the file that is missing or damaged."""
    text, recipe = read_recipe(folder, opener)
    try:
        log = read_log(folder, opener)
    except OSError as error:
        raise RunError(f"the events of {folder} cannot be read: {error.strerror or error}") from error
    settings, result = RunFolder(folder, opener).read_settings(), read_result(folder, opener)
    return LoggedRun(name or folder.name or str(folder), folder, recipe, text, settings, result, log)


def read_recipe(folder: Path, opener: Opener = open_file) -> tuple[str, dict[str, Any]]:
    """(text, table) of recipe.toml."""
    if not folder.is_dir():
        raise RunError(f"{folder} is not a folder" if folder.exists() else f"{folder} does not exist")
    text = RunFolder(folder, opener).read_text(folder / RECIPE)
    if text is None:
        raise RunError(f"{folder} is not a run: it has no {RECIPE}")
    try:
        return text, tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RunError(f"{folder / RECIPE} is not valid TOML: {error}") from error


def read_result(folder: Path, opener: Opener = open_file) -> StoredResult | None:
    """result.json; None while the run is unfinished."""
    data = RunFolder(folder, opener).read_result()
    if data is None:
        return None
    try:
        return StoredResult.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the file"
        raise RunError(f"{folder / RESULT} is not a result of everfed: {key}: {first['msg']}") from error


def _table(table: dict[str, Any], key: str) -> dict[str, Any]:
    inner = table.get(key)
    return inner if isinstance(inner, dict) else {}


def find_runs(folder: Path, depth: int = DEPTH) -> Iterator[Path]:
    """The run folders at or below `folder`, in the order of their names; run folders are not searched further."""
    if (folder / RECIPE).is_file():
        yield folder
    elif depth > 0:
        for inner in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")):
            yield from find_runs(inner, depth - 1)


def read_runs(named: Sequence[Path]) -> list[LoggedRun]:
    """The runs in the folders named and below them, each once. Raises RunError where a folder holds none."""
    folders: dict[Path, Path] = {}  # resolved path -> path as given
    for folder in named:
        if not folder.is_dir():
            raise RunError(f"{folder} is not a folder" if folder.exists() else f"{folder} does not exist")
        found = list(find_runs(folder))
        if not found:
            raise RunError(f"{folder} is not a run and holds none: there is no {RECIPE} in it or below it")
        for path in found:
            folders.setdefault(path.resolve(), path)
    names = _short_names(list(folders))
    return [read_run(folder, name) for folder, name in zip(folders.values(), names, strict=True)]


def _short_names(folders: Sequence[Path]) -> list[str]:
    """The last parts of the paths, as many as make them unique."""
    parts = [folder.parts for folder in folders]
    for length in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]
