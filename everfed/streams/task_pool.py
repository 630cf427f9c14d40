"""Limitless task pool: every client goes through classes in an order of its own, a few at a time (STAMP).

Client u draws a permutation pi_u of all classes; its task t has the classes pi_u[t C : (t + 1) C], with all their
images, and its own test set of the same classes. So tasks of different clients are unrelated, and task i has different
classes on every client: accuracy on task i is that of each client on its own task i. Tasks beyond one pass over the
classes begin the client's order anew.

Only the class orders are kept in memory: the samples of a task are selected on demand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np

from everfed.core.data import Data
from everfed.data.partition import who_got_what
from everfed.data.source import Source
from everfed.streams.draws import generator
from everfed.streams.incremental import Division, IncrementalStream
from everfed.streams.options import OptionError, Options, require_choice, require_whole
from everfed.streams.planned import require_index, require_split

SAMPLE_SPLITS = ("shared", "disjoint")
OVERLAPS = ("random", "forbid")
REPORTED = 100  # (client, task) pairs up to which `describe` lists their classes; the seed determines them anyway


class TaskPool(IncrementalStream):
    """classes_per_task: C. sample_split: every client has all images of its classes ("shared", as in the released code)
    or a share of its own ("disjoint": each class is divided evenly). class_overlap_within_step: clients may have the
    same class at the same time ("random") or may not ("forbid", which needs clients * C <= classes)."""

    scenario = "task-pool"
    own_tests = True

    def __init__(
        self,
        source: Source,
        options: Options,
        *,
        classes_per_task: int = 2,
        sample_split: str = "shared",
        class_overlap_within_step: str = "random",
        **settings: Any,
    ) -> None:
        require_whole("classes_per_task", classes_per_task)
        require_choice("sample_split", sample_split, SAMPLE_SPLITS)
        require_choice("class_overlap_within_step", class_overlap_within_step, OVERLAPS)
        _check(source.classes, options, classes_per_task, class_overlap_within_step)
        self.classes_per_task, self.sample_split = classes_per_task, sample_split
        self.class_overlap_within_step = class_overlap_within_step
        super().__init__(source, options, **settings)

    @cached_property
    def orders(self) -> np.ndarray:
        """(clients, classes): pi_u of every client, all different."""
        if self.class_overlap_within_step == "forbid":
            slots = disjoint_slots(self.clients, self.classes, self.classes_per_task, generator(self.seed, "slots"))
            return np.argsort(slots, axis=1, kind="stable")
        return np.array(list(_different_orders(self.clients, self.classes, generator(self.seed, "class orders"))))

    # by client

    def labels_of(self, client: int, task: int) -> tuple[int, ...]:
        """The classes of a client's task, ascending."""
        require_index("client", client, self.clients)
        require_index("task", task, self.tasks)
        begin = task % self._in_a_pass * self.classes_per_task
        return tuple(sorted(self.orders[client, begin : begin + self.classes_per_task].tolist()))

    def test_of(self, client: int, task: int, split: str = "test") -> Data:
        """The held-out samples of a client's task."""
        labels = self.labels_of(client, task)
        require_split(split, len(self._rows.validation))
        return self._cache.get((split, labels), lambda: self._held_out_of(labels, split))

    def data(self, client: int, task: int) -> Data:
        """The client's training samples of its task's classes; ids are task * (size of the source) + position."""
        labels = self.labels_of(client, task)
        y, rows = self._y_train, self._divisions[0][client]
        if self.options.holds_nothing(client, task):
            rows = rows[:0]
        return self._cache.get((client, task), lambda: self._materialise("train", rows[np.isin(y[rows], labels)], task))

    # What a scenario decides

    @property
    def _in_a_pass(self) -> int:
        """How many tasks it takes to see every class once."""
        return self.classes // self.classes_per_task

    def classes_of(self, task: int) -> tuple[int, ...]:
        """The classes that any client has in `task`."""
        begin = task % self._in_a_pass * self.classes_per_task
        return tuple(np.unique(self.orders[:, begin : begin + self.classes_per_task]).tolist())

    def division_of(self, task: int) -> int:
        """One division for the whole run."""
        return 0

    def facts(self) -> dict[str, Any]:
        """The pool's own settings, and the classes of every client's tasks where they are few."""
        facts: dict[str, Any] = {
            "classes_per_task": self.classes_per_task,
            "sample_split": self.sample_split,
            "class_overlap_within_step": self.class_overlap_within_step,
            "own_tests": True,
        }
        if self.clients * self.tasks <= REPORTED:
            facts["labels"] = [[list(self.labels_of(u, t)) for t in range(self.tasks)] for u in range(self.clients)]
        return facts

    # How data comes about

    def _divide(self, division: int) -> Division:
        rows = self._rows.train
        if self.sample_split == "shared":
            return Everything(rows, np.array([0, len(rows)]))
        rng, labels = generator(self.seed, "sample split"), self._y_train[rows]
        shares: list[list[np.ndarray]] = [[] for _ in range(self.clients)]
        for label in range(self.classes):
            pieces = np.array_split(rng.permutation(rows[labels == label]), self.clients)
            for share, piece in zip(shares, pieces, strict=True):
                share.append(piece)
        return Division.of([np.sort(np.concatenate(share)) for share in shares])

    def _check_tests(self) -> None:
        tested = set(self._y_test[self._rows.test].tolist())
        for label in range(self.classes):
            if label not in tested:
                raise OptionError("dataset", f"class {label} has no test sample to be scored on")

    def _held_out_of(self, labels: tuple[int, ...], split: str) -> Data:
        part, y, rows = "test", self._y_test, self._rows.test
        if split == "validation":
            part, y, rows = "train", self._y_train, self._rows.validation
        return self._materialise(part, rows[np.isin(y[rows], labels)], 0)

    def _report(self, division: int) -> dict[str, Any]:
        """Of all training images, whatever the tasks."""
        rows = self._rows.train
        parts = [np.searchsorted(rows, self._divisions[0][client]) for client in range(self.clients)]
        return who_got_what(self._y_train[rows], parts)


class Everything(Division):
    """A division in which every client holds all of `order`."""

    def __getitem__(self, client: int) -> np.ndarray:
        return self.order


def disjoint_slots(clients: int, classes: int, per_task: int, rng: np.random.Generator) -> np.ndarray:
    """(clients, classes): at which place of a client's order (in units of tasks) a class comes, so that no two clients
    have the same class at the same time. Each client's places are a random matching of classes to what is left of them;
    one always exists, since every class and every task has equally many places left."""
    from scipy.optimize import linear_sum_assignment

    task_of = np.arange(classes) // per_task
    taken = np.zeros((classes, classes // per_task), dtype=bool)
    slots = np.empty((clients, classes), dtype=np.int64)
    for client in range(clients):
        cost = rng.random((classes, classes)) + classes * taken[:, task_of]
        slots[client] = task_of[linear_sum_assignment(cost)[1]]
        taken[np.arange(classes), slots[client]] = True
    return slots


def _different_orders(clients: int, classes: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """A permutation of the classes for every client, no two the same."""
    drawn: set[bytes] = set()
    while len(drawn) < clients:
        order = rng.permutation(classes)
        if order.tobytes() not in drawn:
            drawn.add(order.tobytes())
            yield order


def _check(classes: int, options: Options, per_task: int, overlap: str) -> None:
    """Raises OptionError for options from which no pool can be made."""
    if classes % per_task:
        raise OptionError("classes_per_task", f"{per_task} does not divide the {classes} classes")
    if options.order is not None:
        raise OptionError("order", "every client of a task pool has an order of its own; leave it out")
    if options.partition["kind"] != "iid":
        raise OptionError("partition", "a task pool divides by sample_split; leave partition out")
    if overlap == "forbid" and options.clients * per_task > classes:
        need = f"{options.clients} clients with {per_task} classes each"
        raise OptionError("class_overlap_within_step", f"'forbid' needs {need} at a time; there are {classes}")
    if classes < 10 and options.clients > math.factorial(classes):
        raise OptionError("clients", f"{options.clients} different orders of {classes} classes do not exist")
