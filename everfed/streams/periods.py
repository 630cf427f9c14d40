"""Text over periods: every client is a user, every task a period of time; a masked language model is trained.

"Coordinated Replay Sample Selection for Continual Federated Learning", Sect. 5.2: a period is some weeks, of which the
last are for testing. Utterances without dates have numbered periods (an act of a play, say), of which every user's last
utterances are for testing. The tokenizer is trained on the first period's training text and shared.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from everfed.core.data import Data, DataCache
from everfed.data.tokens import SPECIAL, Tokenizer, draw_masks, mask_anew, mask_tokens, token_counts, token_loss
from everfed.data.utterances import SECONDS_PER_DAY, Utterances, load_utterances
from everfed.streams.draws import generator
from everfed.streams.options import OptionError, Options, require_choice, require_number, require_whole
from everfed.streams.planned import CACHE_BYTES, PlannedStream, require_index, require_split

MASKING = ("dynamic", "static")


class PeriodSplit(NamedTuple):
    """Of every utterance: its period (-1: none) and whether it is for testing. starts: where each period begins."""

    period: np.ndarray
    testing: np.ndarray
    starts: tuple[int, ...]


class Periods(PlannedStream):
    """Clients are users drawn by the stream's seed from those with `min_utterances` training utterances or more.

    train_weeks, test_weeks: of a period, for dated utterances; periods without training or test text are left out.
    test_share: of a user's utterances in a period, for numbered ones. vocabulary: at most so many word pieces.
    length: tokens of a sample. mask_rate: share of tokens to be predicted. masking: which ones is drawn anew whenever a
    sample is trained on ("dynamic", Liu et al., 2019) or once for every sample ("static"); tests have one mask always.
    left_out: so many users are never clients, the same ones for every seed; the tokenizer is then trained on the
    training text of all their periods, and `left_out_tokens` is there to pretrain a model on.
    `max_train` counts per client and period, `max_test` per period, and so does the scale of a quick look.
    """

    scenario = "periods"
    unused = ("partition", "normalise", "augment", "image_size", "channels", "encoder", "label", "label_kind", "order")
    score = "perplexity"
    loss = staticmethod(token_loss)
    measure = staticmethod(token_counts)

    read = staticmethod(load_utterances)

    def __init__(
        self,
        source: Utterances,
        options: Options,
        *,
        seed: int,
        rounds_per_task: int,
        scale: float = 1.0,
        train_weeks: int = 2,
        test_weeks: int = 1,
        test_share: float = 0.2,
        vocabulary: int = 4000,
        length: int = 32,
        mask_rate: float = 0.15,
        masking: str = "dynamic",
        min_utterances: int = 1,
        left_out: int = 0,
    ) -> None:
        if not isinstance(source, Utterances):
            raise OptionError("scenario", "periods takes utterances; arrays fit the other scenarios")
        super().__init__(options, seed=seed, rounds_per_task=rounds_per_task, scale=scale)
        require_whole("min_utterances", min_utterances)
        require_whole("left_out", left_out, least=0)
        require_whole("vocabulary", vocabulary, least=len(SPECIAL) + 1)
        require_whole("length", length, least=3)
        require_number("mask_rate", mask_rate, above=0.0, to=1.0)
        require_choice("masking", masking, MASKING)
        self.utterances = source
        self.mask_rate, self.masking, self.input_shape = mask_rate, masking, (length,)
        self.name = f"{source.name}-periods"
        settings: dict[str, Any] = {"length": length, "mask_rate": mask_rate, "masking": masking}
        settings |= {"min_utterances": min_utterances, **({"left_out": left_out} if left_out else {})}
        if source.dated:
            self._settings = {"train_weeks": train_weeks, "test_weeks": test_weeks, **settings}
            division = divide_dated(source, train_weeks, test_weeks)
        else:
            self._settings = {"test_share": test_share, **settings}
            division = divide_numbered(source, test_share)
        self._use_periods(division, min_utterances, vocabulary, left_out)
        self._cache = DataCache(CACHE_BYTES)

    # The protocol

    def data(self, client: int, task: int) -> Data:
        """The client's training utterances of the period, with their masks; ids are positions in the file."""
        user = self.chosen[require_index("client", client, self.clients)]
        rows = self._train[require_index("task", task, self.tasks)].get(int(user), np.zeros(0, dtype=np.int64))
        if self.options.holds_nothing(client, task):
            rows = rows[:0]
        return self._cache.get((client, task), lambda: self._masked(rows, "train", int(user), task))

    def task_of(self, client: int, ids: np.ndarray) -> np.ndarray:
        """The periods that the client's utterances with these ids belong to."""
        user = int(self.chosen[require_index("client", client, self.clients)])
        found = np.zeros(len(ids), dtype=np.int64)
        for task, by_user in enumerate(self._train):
            found[np.isin(ids, by_user.get(user, ()))] = task
        return found

    def test(self, task: int, split: str = "test") -> Data:
        """All clients' test utterances of the period, or the validation ones held out of the training text."""
        require_split(split, self.options.validation)
        rows = (self._test if split == "test" else self._validation)[require_index("task", task, self.tasks)]
        return self._cache.get((split, task), lambda: self._masked(rows, split, task))

    def draw_augmentation(self, rng: np.random.Generator, count: int) -> np.ndarray | None:
        """The masks of `count` samples in training; None where they are static."""
        return draw_masks(rng, count, self.input_shape[0], self.classes) if self.masking == "dynamic" else None

    def augment_samples(self, x: Tensor, y: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """The samples with other masks, and so with other targets."""
        return mask_anew(x, y, self.mask_rate, draws)

    def labels(self, task: int) -> tuple[int, ...]:
        """All word pieces."""
        return tuple(range(self.classes))

    def describe(self) -> dict[str, Any]:
        """The settings in full, and how many utterances every client has in every period."""
        return {
            **self.outline(),
            "dataset": self.utterances.name,
            "origin": self.utterances.origin,
            "stands_for": self.utterances.stands_for,
            **self._settings,
            "vocabulary": self.classes,
            "period_starts": list(self.starts),
            "users": [self.utterances.users[user] for user in self.chosen],
            "samples": {
                "train": [[len(rows.get(int(user), ())) for user in self.chosen] for rows in self._train],
                "test": [len(rows) for rows in self._test],
            },
        }

    # How data comes about

    def _use_periods(self, division: PeriodSplit, min_utterances: int, vocabulary: int, left_out: int) -> None:
        """Choose the clients, train the tokenizer, and encode all texts that are used."""
        if self.tasks > len(division.starts):
            raise OptionError(
                "tasks", f"{self.tasks} is too many; {self.utterances.name} has {len(division.starts)} periods"
            )
        self.starts = division.starts[: self.tasks]
        self.chosen, outside = self._choose_users(division, min_utterances, left_out)
        train, test = self._split(division)
        self._outside = np.flatnonzero(self._trainable(division) & np.isin(self.utterances.user, outside))
        rows = self._outside if left_out else np.concatenate([np.zeros(0, dtype=np.int64), *train[0].values()])
        first = [self.utterances.texts[row] for row in rows]
        if not first:
            raise OptionError("clients", "the chosen users have no text in the first period to train the tokenizer on")
        self.tokenizer = Tokenizer.train(first, vocabulary)
        self.classes = self.tokenizer.size
        if self.classes <= len(SPECIAL):
            raise OptionError("vocabulary", "the first period's text gives no word piece that occurs twice")
        self._tokenize(train, test)

    def left_out_tokens(self) -> np.ndarray:
        """(n, length) token numbers of the training text of the users that are left out, without masks."""
        return self.tokenizer.encode([self.utterances.texts[row] for row in self._outside], self.input_shape[0])

    def _choose_users(self, division: PeriodSplit, least: int, left_out: int) -> tuple[np.ndarray, np.ndarray]:
        """(the clients, drawn by the stream's seed; the users that are left out, whatever the seed)."""
        counts = np.bincount(self.utterances.user[self._trainable(division)], minlength=len(self.utterances.users))
        eligible = np.flatnonzero(counts >= least)
        if len(eligible) < self.clients + left_out:
            more = f" beside {left_out} that are left out" if left_out else ""
            raise OptionError(
                "clients",
                f"{self.clients}{more} is too many; {len(eligible)} users have {least} training utterances or more",
            )
        outside = generator(0, "left out").choice(eligible, size=left_out, replace=False)
        inside = np.setdiff1d(eligible, outside)
        return np.sort(generator(self.seed, "users").choice(inside, size=self.clients, replace=False)), outside

    def _trainable(self, division: PeriodSplit) -> np.ndarray:
        """(n,) is this an utterance for training, of a period that is used?"""
        return (division.period >= 0) & (division.period < self.tasks) & ~division.testing

    def _split(self, division: PeriodSplit) -> tuple[list[dict[int, np.ndarray]], list[np.ndarray]]:
        """By period: the training rows of every chosen user, and the test rows of all of them."""
        options, user = self.options, self.utterances.user
        ours, train, test = np.isin(user, self.chosen), [], []
        for task in range(self.tasks):
            here = ours & (division.period == task)
            rows = np.flatnonzero(here & ~division.testing)
            by_user = {int(u): rows[user[rows] == u] for u in np.unique(user[rows])}
            train.append({u: self._some(own, options.max_train, u, task) for u, own in by_user.items()})
            test.append(self._some(np.flatnonzero(here & division.testing), options.max_test, -1, task))
        return train, test

    def _some(self, rows: np.ndarray, most: int | None, user: int, task: int) -> np.ndarray:
        """At most so many of the rows, and no more than the scale allows, in order."""
        count = min(math.ceil(self.scale * len(rows)), len(rows) if most is None else most)
        return np.sort(generator(self.seed, "some", user + 1, task).choice(rows, size=count, replace=False))

    def _tokenize(self, train: list[dict[int, np.ndarray]], test: list[np.ndarray]) -> None:
        """Encode the rows that are used; those without an ordinary token are dropped."""
        used = np.unique(np.concatenate([*test, *(rows for period in train for rows in period.values())]))
        tokens = self.tokenizer.encode([self.utterances.texts[row] for row in used], self.input_shape[0])
        usable = (tokens >= len(SPECIAL)).any(axis=1)
        self._used, self._tokens = used[usable], tokens[usable]
        kept = [{user: rows[np.isin(rows, self._used)] for user, rows in period.items()} for period in train]
        self._test = [rows[np.isin(rows, self._used)] for rows in test]
        self._train, self._validation = [], []
        for task, period in enumerate(kept):
            held = {user: self._validated(rows, user, task) for user, rows in period.items()}
            self._train.append({user: np.setdiff1d(rows, held[user]) for user, rows in period.items()})
            self._validation.append(np.sort(np.concatenate([np.zeros(0, dtype=np.int64), *held.values()])))
        untested = [task + 1 for task, rows in enumerate(self._test) if not len(rows)]
        if untested:
            raise OptionError("tasks", f"period {untested[0]} of {self.tasks} has no test utterance to be scored on")

    def _validated(self, rows: np.ndarray, user: int, task: int) -> np.ndarray:
        count = round(self.options.validation * len(rows))
        return generator(self.seed, "validation", user, task).choice(rows, size=count, replace=False)

    def _masked(self, rows: np.ndarray, purpose: str, *keys: int) -> Data:
        tokens = self._tokens[np.searchsorted(self._used, rows)]
        rng = generator(self.seed, f"masking {purpose}", *keys)
        x, y = mask_tokens(tokens, self.mask_rate, self.classes, rng) if len(rows) else (tokens, tokens)
        return Data(torch.from_numpy(x.astype(np.int64)), torch.from_numpy(y.astype(np.int64)), rows)


def divide_dated(source: Utterances, train_weeks: int, test_weeks: int) -> PeriodSplit:
    """Periods of train_weeks + test_weeks weeks, counted from the first day on."""
    require_whole("train_weeks", train_weeks)
    require_whole("test_weeks", test_weeks)
    weeks = train_weeks + test_weeks
    first = int(source.time.min()) // SECONDS_PER_DAY * SECONDS_PER_DAY
    week = (source.time - first) // (7 * SECONDS_PER_DAY)
    testing = week % weeks >= train_weeks
    period, starts = _renumbered(week // weeks, testing)
    return PeriodSplit(period, testing, tuple(first + int(s) * weeks * 7 * SECONDS_PER_DAY for s in starts))


def divide_numbered(source: Utterances, test_share: float) -> PeriodSplit:
    """A period for every number; each user's last utterances in it are for testing, as long as one is left to train."""
    require_number("test_share", test_share, above=0.0, below=1.0)
    testing = np.zeros(len(source), dtype=bool)
    order = np.lexsort((np.arange(len(source)), source.time, source.user))
    changes = np.diff(source.user[order]) | np.diff(source.time[order])
    for rows in np.split(order, np.flatnonzero(changes) + 1):
        count = min(len(rows) - 1, math.ceil(test_share * len(rows)))
        testing[rows[len(rows) - count :]] = True
    period, starts = _renumbered(source.time, testing)
    return PeriodSplit(period, testing, tuple(int(s) for s in starts))


def _renumbered(period: np.ndarray, testing: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Periods that have training and test text, counted from 0; -1 for the others."""
    complete = np.intersect1d(np.unique(period[~testing]), np.unique(period[testing]))
    found = np.searchsorted(complete, period)
    inside = np.isin(period, complete)
    return np.where(inside, found, -1), complete
