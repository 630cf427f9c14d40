"""When each client goes on to its next task: all together, or each by a clock of its own (FedGP, Table 4).

A run has tasks * R rounds. Client k is in task t while b[k, t] <= round < b[k, t + 1], with b[k, 0] = 0:

    synchronous   b[k, t] = t R
    jitter        b[k, t] = t R + uniform whole number in [-J, J], sorted, at least one round apart; J = R // 2 if not
                  given. Every client has all tasks, and T R rounds in all
    speed         b[k, t] = t R / s_k, with s_k uniform in [low, high]: fast clients stay in the last task, slow ones do
                  not reach it
    behind        b[k, t] = t R, but for a share of the clients, drawn: they take T / (T - by) times as long, so that
                  they are `by` tasks behind in the end
    file, table   first rounds as given

For the server a task ends with the first round after which at least a share `quorum` of all clients have left it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from everfed.streams import traces
from everfed.streams.draws import generator
from everfed.streams.options import OptionError, require_choice, require_number, require_whole

KEY = "asynchronous"
_OWN: Mapping[str, tuple[str, ...]] = {
    "jitter": ("jitter",),
    "speed": ("low", "high"),
    "behind": ("share", "by"),
    "file": ("path",),
    "table": ("first",),
}


def _by_task(entry: Any) -> Iterable[Sequence[Any]]:
    if not isinstance(entry, (list, tuple)):
        raise TypeError
    return list(enumerate(entry))


SCHEDULE = traces.Form(("client", "task", "round"), _by_task, "[0, 12, 25]")


@dataclass(frozen=True)
class Clocks:
    """first: (clients, tasks + 1), b above; its last column is the number of rounds; one row for all clients where they
    share the `common` clock, whatever their number. server: (tasks + 1,) the same for the server. fingerprint: of the
    file that it was read from."""

    first: np.ndarray
    server: np.ndarray
    fingerprint: str = ""
    common: bool = False

    @property
    def together(self) -> bool:
        """Do all clients change tasks in the same rounds?"""
        return bool((self.first == self.first[0]).all())


def check(options: Mapping[str, Any]) -> None:
    """Raises OptionError for an option `asynchronous` that is not allowed."""
    if not isinstance(options, Mapping):
        raise OptionError(KEY, f"expected a table such as {{ kind = 'jitter' }}, got {options!r}")
    require_choice(f"{KEY}.kind", options.get("kind"), tuple(_OWN))
    allowed = ("kind", "quorum", *_OWN[options["kind"]])
    for name in options:
        if name not in allowed:
            raise OptionError(
                f"{KEY}.{name}", f"is not an option of {options['kind']!r}; allowed: {', '.join(allowed)}"
            )
    require_number(f"{KEY}.quorum", options.get("quorum", 0.5), above=0.0, to=1.0)


def make(options: Mapping[str, Any] | None, clients: int, tasks: int, rounds_per_task: int, seed: int) -> Clocks:
    """The clocks that the option `asynchronous` describes."""
    end, fingerprint = tasks * rounds_per_task, ""
    common = np.arange(tasks + 1) * rounds_per_task
    synchronous = Clocks(common[None], common, common=True)
    if options is None:
        return synchronous
    check(options)
    if options["kind"] == "jitter":
        jitter = options.get("jitter", rounds_per_task // 2)
        require_whole(f"{KEY}.jitter", jitter, least=0)
        inner = jittered(clients, tasks, rounds_per_task, jitter, generator(seed, "clocks"))
    elif options["kind"] == "speed":
        inner = np.minimum(at_speed(clients, tasks, rounds_per_task, options, generator(seed, "speeds")), end)
    elif options["kind"] == "behind":
        inner = lagging(clients, tasks, rounds_per_task, options, generator(seed, "behind"))
    elif options["kind"] == "file":
        rows, fingerprint = traces.read(f"{KEY}.path", str(options.get("path", "")), SCHEDULE, clients)
        inner = scheduled(rows, clients, tasks, common)
    else:
        rows = traces.table_rows(f"{KEY}.first", options.get("first"), SCHEDULE, clients)
        inner = scheduled(rows, clients, tasks, common)
    first = np.concatenate([np.zeros((clients, 1), np.int64), inner, np.full((clients, 1), end)], axis=1)
    if (first == common).all():  # without jitter, say
        return synchronous
    return Clocks(first, _quorum(first, options.get("quorum", 0.5)), fingerprint)


def jittered(clients: int, tasks: int, rounds_per_task: int, jitter: int, rng: np.random.Generator) -> np.ndarray:
    """(clients, tasks - 1): b[k, 1 ... T - 1], increasing strictly, within 1 ... T R - 1."""
    step = np.arange(1, tasks)
    drawn = np.sort(step * rounds_per_task + rng.integers(-jitter, jitter + 1, (clients, tasks - 1)), axis=1)
    # at least one round apart, from the front and then from the back
    forward = np.maximum.accumulate(np.maximum(drawn - step, 0), axis=1) + step
    room = tasks * rounds_per_task - tasks
    backward = np.minimum.accumulate(np.minimum(forward - step, room)[:, ::-1], axis=1)[:, ::-1] + step
    return np.asarray(backward, dtype=np.int64)


def at_speed(
    clients: int, tasks: int, rounds_per_task: int, options: Mapping[str, Any], rng: np.random.Generator
) -> np.ndarray:
    """(clients, tasks - 1): b[k, 1 ... T - 1] of clients with constant speeds."""
    low, high = options.get("low", 0.75), options.get("high", 1.25)
    require_number(f"{KEY}.low", low, above=0.0)
    require_number(f"{KEY}.high", high, least=low)
    step = np.arange(1, tasks)
    reached = np.rint(step * rounds_per_task / rng.uniform(low, high, (clients, 1))).astype(np.int64)
    return np.asarray(np.maximum.accumulate(np.maximum(reached - step, 0), axis=1) + step)


def lagging(
    clients: int, tasks: int, rounds_per_task: int, options: Mapping[str, Any], rng: np.random.Generator
) -> np.ndarray:
    """(clients, tasks - 1): b[k, 1 ... T - 1] where some are on time and the others fall back evenly."""
    share, by = options.get("share", 0.5), options.get("by", 1)
    require_number(f"{KEY}.share", share, least=0.0, to=1.0)
    require_whole(f"{KEY}.by", by, least=0)
    if by >= tasks:
        raise OptionError(f"{KEY}.by", f"expected fewer than the stream's {tasks} tasks, got {by}")
    on_time = np.tile(np.arange(1, tasks) * rounds_per_task, (clients, 1))
    slow = rng.permutation(clients)[: round(share * clients)]
    on_time[slow] = np.rint(on_time[slow] * tasks / (tasks - by))
    return np.minimum(on_time, tasks * rounds_per_task)


def scheduled(rows: Sequence[traces.Fact], clients: int, tasks: int, common: np.ndarray) -> np.ndarray:
    """(clients, tasks - 1): the first rounds as given, the common ones where none are. A task that begins in the same
    round as the next one is skipped."""
    first = np.tile(common[:-1], (clients, 1))
    for row in rows:
        task, begin = row.whole(0), row.whole(1)
        if task >= tasks:
            raise row.refuse(f"task {task} is not one of 0 to {tasks - 1}")
        if task == 0 and begin != 0:
            raise row.refuse(
                "the first task must begin with round 0; for clients that come later set stream.availability"
            )
        first[row.client, task] = min(begin, int(common[-1]))
    for row in rows:
        if (np.diff(first[row.client]) < 0).any():
            raise row.refuse(f"the tasks of client {row.client} do not begin in order: {first[row.client].tolist()}")
    return np.asarray(first[:, 1:])


def _quorum(first: np.ndarray, share: float) -> np.ndarray:
    """(tasks + 1,): the round from which on the server is in each task."""
    needed = math.ceil(share * len(first) - 1e-9)
    return np.asarray(np.sort(first, axis=0)[max(needed, 1) - 1])
