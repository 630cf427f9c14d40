"""A stream of a user's own class is looked at once: numbers, labels and sample ids that would give wrong results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

import everfed
from everfed.errors import UserError
from everfed.method import Data, RoundPlan, Stream

COUNT, CLASSES = 12, 3
Damage = Callable[[Data], Data]


class Mine(Stream):
    """Two tasks of two clients. damage: what becomes of the samples of client 1 in task 1; apart: ids differ."""

    name, clients, tasks, rounds, rounds_per_task, classes, input_shape = "mine", 2, 2, 4, 2, CLASSES, (4,)

    def __init__(self, damage: Damage = replace, apart: bool = True, test: Damage = replace) -> None:
        self.damage, self.apart, self.held = damage, apart, test

    def round(self, index: int) -> RoundPlan:
        task, everyone = index // 2, (0, 1)
        begins, ends = (everyone, ()) if index % 2 == 0 else ((), everyone)
        return RoundPlan(task, everyone, dict.fromkeys(everyone, task), begins, ends, index % 2 == 1)

    def samples(self, *key: int) -> Data:
        rng = np.random.default_rng(key)
        y = torch.from_numpy(rng.integers(0, CLASSES, COUNT))
        return Data(torch.from_numpy(rng.normal(size=(COUNT, 4)).astype("float32")), y, np.arange(COUNT))

    def data(self, client: int, task: int) -> Data:
        found = self.samples(1, client, task)
        found = replace(found, ids=found.ids + task * COUNT * self.apart)
        return self.damage(found) if (client, task) == (1, 1) else found

    def test(self, task: int, split: str = "test") -> Data:
        return self.held(self.samples(2, task)) if task == 1 else self.samples(2, task)

    def labels(self, task: int) -> tuple[int, ...]:
        return tuple(range(CLASSES))


RECIPE = {"name": "checks", "model": {"kind": "mlp", "hidden": [4]}, "engine": {"kind": "eager"}}


def run(stream: Stream, method: str = "fedavg") -> everfed.Result:
    return everfed.run({**RECIPE, "method": {"name": method}}, stream=stream, progress=False)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(str(tmp_path))


def holed(value: float) -> Damage:
    def damage(data: Data) -> Data:
        x = data.x.clone()
        x[5, 2] = value
        return replace(data, x=x)

    return damage


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_refused_where_a_client_sees_it(value: float) -> None:
    with pytest.raises(UserError, match=rf"'mine', client 1, task 2: x\[5, 2\] is {value:g}, no finite number"):
        run(Mine(holed(value)))


def test_and_where_models_are_scored_on_it() -> None:
    with pytest.raises(UserError, match=r"'mine', test samples of task 2: x\[5, 2\] is nan"):
        run(Mine(test=holed(float("nan"))))


def test_ids_that_recur_for_other_samples_are_refused() -> None:
    with pytest.raises(UserError, match=r"client 0, task 2: sample id 0 is another sample of task 1.*of its own"):
        run(Mine(apart=False), "naive-uniform")


def test_all_samples_of_recurring_ids_are_compared() -> None:
    """The first of each task is the same; the others are not."""

    class Alike(Mine):
        def samples(self, *key: int) -> Data:
            found = super().samples(*key)
            found.x[0] = 1.0
            return found

    with pytest.raises(UserError, match=r"client 0, task 2: sample id 1 is another sample of task 1"):
        run(Alike(apart=False), "naive-uniform")


def test_the_same_sample_may_come_again() -> None:
    class Recurring(Mine):
        def data(self, client: int, task: int) -> Data:
            return super().data(client, 0)

    assert run(Recurring()).metrics["acc"] is not None


# a client that drifts -------------------------------------------------------------------------------------------------
class Turning(Mine):
    """What a client sees changes with every round; apart: so do its ids."""

    def round(self, index: int) -> RoundPlan:
        return replace(super().round(index), drifting=frozenset((0, 1)))

    def data_in(self, client: int, index: int) -> Data:
        found = self.samples(3, client, index)
        found = replace(found, ids=found.ids + index * COUNT * self.apart)
        return self.damage(found) if (client, index) == (1, 1) else found


def test_ids_that_recur_in_a_round_for_other_samples_are_refused() -> None:
    said = r"client 0, round 2: sample id 0 is another sample of round 1.*such as ids \+ round \* 1_000_000"
    with pytest.raises(UserError, match=said):
        run(Turning(apart=False), "naive-uniform")
    assert run(Turning()).metrics["acc"] is not None


def test_one_of_many_recurring_ids_is_enough() -> None:
    """Round 1 of client 1 has the ids of round 0 and its samples, but one."""

    class Same(Turning):
        def data_in(self, client: int, index: int) -> Data:
            found = super().data_in(client, 0)
            return replace(found, x=found.x + (torch.arange(COUNT) == 7)[:, None]) if index == 1 else found

    with pytest.raises(UserError, match="client 0, round 2: sample id 7 is another sample of round 1"):
        run(Same())


def test_numbers_and_labels_of_a_round_are_looked_at() -> None:
    with pytest.raises(UserError, match=r"'mine', client 1, round 2: x\[5, 2\] is nan, no finite number"):
        run(Turning(holed(float("nan"))))
    with pytest.raises(UserError, match=r"client 1, round 2: the label y\[5\] is 3; with 3 classes labels are 0 to 2"):
        run(Turning(labelled(3)))


def labelled(label: int) -> Damage:
    def damage(data: Data) -> Data:
        return replace(data, y=torch.where(torch.arange(COUNT) == 5, label, data.y))

    return damage


@pytest.mark.parametrize("label", [-1, 3])
def test_a_label_that_is_no_class_is_refused(label: int) -> None:
    with pytest.raises(UserError, match=rf"client 1, task 2: the label y\[5\] is {label}; with 3 classes"):
        run(Mine(labelled(label)))


# what a stream is scored by -------------------------------------------------------------------------------------------
class Numbers(Mine):
    """Targets are numbers, and the loss is their squared error: as an author writes it before he thinks of scores."""

    def samples(self, *key: int) -> Data:
        found = super().samples(*key)
        return replace(found, y=found.x[:, :1].expand(-1, CLASSES).clone())

    def loss(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (outputs - y).square().mean()


class Scored(Numbers):
    score = "mse"


class Measured(Scored):
    def measure(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.tensor([len(y), float((outputs - y).square().sum())], dtype=torch.float64)


class TwoScores(Measured):
    also = ("r2",)


@pytest.mark.parametrize(
    ("stream", "said"),
    [
        (
            Numbers(),
            r"scored by accuracy.*are float32 of shape \(2, 3\).*`score`.*'mse'.*`measure\(outputs, y\)`",
        ),
        (Scored(), "scored by mse, but its `measure` fails.*NotImplementedError: .* it must define measure"),
        (TwoScores(), "scored by mse, but its `measure` fails on its first test samples: IndexError"),
    ],
    ids=["no score", "no measure", "a sum is missing"],
)
def test_a_score_that_does_not_fit_is_refused_before_the_run(
    stream: Stream, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Mine, "data", lambda *_: pytest.fail("a client trains"))
    with pytest.raises(UserError, match=said):
        run(stream)


def test_a_score_that_fits_is_taken() -> None:
    assert run(Measured()).data["score"] == "mse"


# ----------------------------------------------------------------------------------------------------------------------
def test_a_good_stream_runs_and_replays() -> None:
    assert run(Mine(), "naive-uniform").data["cost"]["samples"] > run(Mine()).data["cost"]["samples"]


def test_a_stream_of_ones_own_class_in_a_recipe() -> None:
    """Its keys are the arguments of the class."""
    from everfed.streams import OptionError, build

    made = build({"scenario": f"{__name__}:Mine", "dataset": "digits", "apart": False}, 0, 2)
    assert isinstance(made, Mine) and made.apart is False
    with pytest.raises(OptionError, match=r"stream.clients: is not an argument of .*:Mine; it has apart, damage"):
        build({"scenario": f"{__name__}:Mine", "dataset": "digits", "clients": 2}, 0, 2)
