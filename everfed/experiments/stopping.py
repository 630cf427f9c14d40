"""Stopping the runs of a sweep that fall behind: the median rule of Vizier (Golovin et al., 2017) at task ends."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from everfed.errors import Fault
from everfed.metrics.scores import score_of
from everfed.store.event_log import read_log
from everfed.store.run import RESULT

if TYPE_CHECKING:
    from everfed.core.events import Event, Observer

LEAST = 3  # finished runs of the same seed that a run is compared with


class StoppedEarly(Fault):
    """A run of a sweep was behind the others at a task's end."""


def median_rule(folder: Path, seed: int) -> Observer:
    """Ends a run, after the checkpoint of a task's end, whose mean score so far is worse than the median of what the
    finished runs of this seed in the same sweep had there. They are looked up in the folder beside it, so that
    processes and machines that share it share the rule."""
    behind = ""

    def observe(event: Event) -> None:
        nonlocal behind
        if event["event"] == "evaluation" and event["task_end"] and event["acc"] is not None:
            behind = _behind(event, _at_task_end(folder, seed, event["task"]))
        elif event["event"] == "checkpoint" and behind:
            raise StoppedEarly(behind)

    return observe


def _behind(event: Event, others: list[float]) -> str:
    """By how much a run is behind the others; empty where it is not, or where they are too few."""
    score = score_of(event["score"])
    if len(others) < LEAST or score.better * event["acc"] >= score.better * median(others):
        return ""
    return (
        f"stopped after task {event['task'] + 1}: {score.word} {score.text(event['acc'])} is behind "
        f"{score.text(median(others))}, the median of {len(others)} finished runs there"
    )


def _at_task_end(folder: Path, seed: int, task: int) -> list[float]:
    """The mean scores so far of the finished runs of a seed beside `folder` at the end of a task; none at their own
    ends, where nothing is left to stop."""
    found = []
    for other in sorted(folder.parent.glob(f"*-{seed}")):
        if other != folder and (other / RESULT).exists():
            scores = _scores(other)
            found += [scores[task]] if task in scores and task != max(scores) else []
    return found


@lru_cache(maxsize=1024)
def _scores(folder: Path) -> dict[int, float]:
    """{task: the mean score so far at its end} of a finished run."""
    lines = read_log(folder).evaluations.values()
    return {line.task: line.score for line in lines if line.task_end and line.score is not None}
