"""A search over ranges of recipe keys: trials drawn at random, or proposed by Optuna's TPE from the scores so far."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from everfed.errors import RecipeError, UserError
from everfed.store.files import write_atomic

Cell = tuple[str, ...]  # the `--set` entries of a trial
FILE = "search.json"  # the trials of a search in the order in which they were proposed
STARTUP = 5  # trials that are drawn at random before TPE proposes any
TRIES = 50  # to draw a trial that was not drawn before
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"\s*({_NUMBER})\s*\.\.\s*({_NUMBER})\s*")


@dataclass(frozen=True)
class Axis:
    """A key and what it may be: one of `choices`, or a number from `low` to `high`; whole ones where both bounds are. A
    range over a factor of ten or more is drawn by its logarithm."""

    key: str
    choices: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    whole: bool = False

    @property
    def log(self) -> bool:
        return self.low > 0 and self.high >= 10 * self.low

    def entry(self, value: Any) -> str:
        """The `--set` entry of a value; four digits, so that it can be read, and within the range."""
        if self.choices:
            return f"{self.key}={value}"
        near = min(max(float(f"{value:.4g}"), self.low), self.high)
        return f"{self.key}={round(value) if self.whole else near}"

    def value(self, entry: str) -> Any:
        """The value of an entry."""
        text = entry.partition("=")[2]
        return text if self.choices else int(float(text)) if self.whole else float(text)

    def draw(self, rng: np.random.Generator) -> str:
        """An entry drawn at random."""
        if self.choices:
            return self.entry(self.choices[rng.integers(len(self.choices))])
        low, high = (np.log(self.low), np.log(self.high)) if self.log else (self.low, self.high)
        drawn = rng.uniform(low, high)
        return self.entry(np.exp(drawn) if self.log else drawn)


def has_range(entries: Sequence[str]) -> bool:
    """Is one of these `--set` entries of a key a range, LOW..HIGH?"""
    return any(_RANGE.fullmatch(entry.partition("=")[2]) for entry in entries)


def axis_of(entries: Sequence[str]) -> Axis:
    """From the `--set` entries of one key: its choices, or a single entry KEY=LOW..HIGH. Raises RecipeError."""
    key, _, first = entries[0].partition("=")
    found = _RANGE.fullmatch(first)
    if found is None or len(entries) > 1:
        if has_range(entries):
            raise RecipeError(f"--grid {key}: give values, or one range LOW..HIGH; got {len(entries)} entries")
        return Axis(key, tuple(entry.partition("=")[2] for entry in entries))
    low, high = float(found[1]), float(found[2])
    if not low < high:
        raise RecipeError(f"--grid {key}={first}: the range must go up")
    return Axis(key, (), low, high, all(re.fullmatch(r"[-+]?\d+", text) for text in found.groups()))


def drawn(axes: Sequence[Axis], trials: int, start: int = 0) -> list[Cell]:
    """Different trials at random, as many as there are of `trials`; the same ones every time, so that more trials begin
    with those of fewer."""
    found: dict[Cell, None] = {}
    for number in range(start, start + trials * TRIES):
        rng = np.random.default_rng(number)
        found.setdefault(tuple(axis.draw(rng) for axis in axes))
        if len(found) == trials:
            break
    return list(found)


@dataclass
class Search:
    """Trials that TPE proposes. folder: of the sweep; what was proposed is kept there, so that a search that was
    interrupted goes on with it. width: how many run at a time."""

    axes: Sequence[Axis]
    trials: int
    folder: Path
    width: int
    asked: list[Cell] = field(default_factory=list)
    scores: dict[Cell, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _optuna()
        path = self.folder / FILE
        keys = [axis.key for axis in self.axes]
        try:
            known = json.loads(path.read_text()) if path.exists() else {"asked": []}
            self.asked = [tuple(cell) for cell in known["asked"]]
            alike = all([entry.partition("=")[0] for entry in cell] == keys for cell in self.asked)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{path} cannot be read; remove it, and the search begins anew") from None
        if not alike:
            raise UserError(f"{path} is of a search over other keys; choose another --out")
        more = [cell for cell in drawn(self.axes, min(self.trials, STARTUP)) if cell not in self.asked]
        self.asked += more[: max(0, min(self.trials, STARTUP) - len(self.asked))]

    def tell(self, cell: Cell, score: float, better: int) -> list[Cell]:
        """What a trial came to; returns those that follow from it. better: 1 where more is, -1 where less is."""
        self.scores[cell] = score
        found: list[Cell] = []
        while len(self.asked) < self.trials and len(self.asked) - len(self.scores) < self.width:
            proposed = self._proposed(better)
            if proposed is None:
                break
            self.asked.append(proposed)
            found.append(proposed)
        self._write()
        return found

    def _write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self.folder / FILE, json.dumps({"asked": self.asked}, indent=2).encode(), shared=True)

    def _proposed(self, better: int) -> Cell | None:
        """A trial that was not proposed before; None where there seems to be none left."""
        for seed in range(TRIES):
            cell = self._by_tpe(better, seed)
            if cell not in self.asked:
                return cell
        return None

    def _by_tpe(self, better: int, seed: int) -> Cell:
        optuna = _optuna()
        known = [score for score in self.scores.values() if np.isfinite(score)]
        worst = (min(known) if better > 0 else max(known)) if known else 0.0
        space = {axis.key: _distribution(optuna, axis) for axis in self.axes}
        sampler = optuna.samplers.TPESampler(
            seed=len(self.asked) * TRIES + seed, n_startup_trials=STARTUP, constant_liar=True
        )
        study = optuna.create_study(direction="maximize" if better > 0 else "minimize", sampler=sampler)
        for cell in self.asked:
            facts: dict[str, Any] = {"state": optuna.trial.TrialState.RUNNING}
            if cell in self.scores:  # one without a score counts as the worst
                facts = {"value": self.scores[cell] if np.isfinite(self.scores[cell]) else worst}
            params = {axis.key: axis.value(entry) for axis, entry in zip(self.axes, cell, strict=True)}
            study.add_trial(optuna.trial.create_trial(params=params, distributions=space, **facts))
        params = study.ask(space).params
        return tuple(axis.entry(params[axis.key]) for axis in self.axes)


def _distribution(optuna: Any, axis: Axis) -> Any:
    kinds = optuna.distributions
    if axis.choices:
        return kinds.CategoricalDistribution(axis.choices)
    if axis.whole:
        return kinds.IntDistribution(int(axis.low), int(axis.high), log=axis.log)
    return kinds.FloatDistribution(axis.low, axis.high, log=axis.log)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as missing:
        raise UserError("--search tpe needs Optuna; install it with: pip install 'everfed[search]'") from missing
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def score_of_cell(scores: Mapping[int, float | None], better: int) -> float:
    """The mean over seeds; the worst there is where a seed has none: it diverged, or was stopped."""
    values = [value for value in scores.values() if value is not None]
    return sum(values) / len(values) if len(values) == len(scores) else -better * float("inf")
