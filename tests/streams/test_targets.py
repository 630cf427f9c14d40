"""Streams whose samples have several labels, or numbers to predict: from arrays to reports, on every engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset
from typer.testing import CliRunner

import everfed
from everfed import streams
from everfed.cli import app
from everfed.core import tree
from everfed.core.context import Setup, TrainOptions
from everfed.core.evaluate import EvalOptions
from everfed.core.optimizer import Optimizer
from everfed.core.stream import Stream
from everfed.data.sources import load
from everfed.data.targets import strata
from everfed.engines.processes import Processes
from everfed.errors import CompositionError, DataError
from everfed.methods import registry as methods
from everfed.reports import tables
from everfed.reports.groups import grouped
from everfed.reports.read import read_runs
from everfed.reports.series import forgetting_by_task
from everfed.store.clients import ClientStore
from everfed.streams.objectives import objective_of
from everfed.streams.options import OptionError
from tests.federation.loop import federated, loop_of
from tests.parity.test_resume import assert_resumes
from tests.support.toy import Bench, Outcome, comparable
from tests.support.wire import run_over_wire

FEATURES = 6
RNG = np.random.default_rng(0)
X = RNG.normal(size=(90, FEATURES)).astype(np.float32)
MAP = RNG.normal(size=(FEATURES, 3))
TARGETS: dict[str, np.ndarray] = {
    "labels": (X @ MAP > 0).astype(np.int64),
    "number": (X @ MAP)[:, 0],
    "numbers": (X @ MAP)[:, :2].astype(np.float32),
}
KINDS = ["labels", "numbers"]
WORK_WITH_ANY_LOSS = ("fedavg", "fedprox", "er", "der", "der++", "agem", "ewc", "si", "fedgp", "fedgp+er", "fedgp+der")
NEED_CLASSES = (
    *("lwf", "fedlwf2t", "mfcl", "glfc", "fedcil", "af-fcl", "target", "lander", "fedweit", "ogd", "fedas"),
    *("stamp", "stamp-temporal", "pilora"),
    *("herding", "ridge", "ranpac", "fedproto", "fedproto-personal", "ccvr", "hgp", "prompt-hgp"),
    *("icarl", "fedcbdr", "lga", "fedran", "stsa", "stsa-e", "fisheravg", "coda-lwf"),
)


def stream(kind: str, **changes: Any) -> Stream:
    given = {"scenario": "domain-incremental", "transform": "permute", "tasks": 2, "clients": 3, "rounds_per_task": 2}
    y = TARGETS[kind]
    return streams.from_arrays(X[:60], y[:60], X[60:], y[60:], **{**given, **changes})  # type: ignore[arg-type]


def bench(kind: str, method: str, **changes: Any) -> Bench:
    return Bench(method, stream=stream(kind)).change(**changes)  # type: ignore[arg-type]


def recipe(method: str = "fedavg", **tables: Any) -> dict[str, Any]:
    return {
        "model": {"kind": "mlp", "hidden": [8]},
        "train": {"rounds_per_task": 2, "optimizer": {"lr": 0.05}},
        "method": {"name": method},
        "engine": {"kind": "eager"},
        **tables,
    }


# the data ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kind", "width", "dtype", "score", "also"),
    [
        ("labels", 3, torch.uint8, "f1", ("f1_micro",)),
        ("numbers", 2, torch.float32, "mse", ("r2",)),
        ("number", 1, torch.float32, "mse", ("r2",)),
    ],
)
def test_targets_are_what_their_type_and_shape_say(
    kind: str, width: int, dtype: torch.dtype, score: str, also: tuple[str, ...]
) -> None:
    made = stream(kind)
    assert (made.classes, made.score, made.also) == (width, score, also)
    whole = [made.data(client, 1) for client in range(3)]
    rows = np.concatenate([data.ids for data in whole]) - 60
    assert sorted(rows) == list(range(60))
    found = torch.cat([data.y for data in whole])
    assert found.dtype == dtype and found.shape == (60, width)
    assert np.allclose(found.numpy(), TARGETS[kind].reshape(90, width)[rows])
    assert np.allclose(made.test(0).y.numpy(), TARGETS[kind].reshape(90, width)[60:])


@pytest.mark.parametrize("dtype", [bool, np.int8, np.float32])
def test_zeros_and_ones_of_any_type_are_labels(dtype: Any) -> None:
    y = TARGETS["labels"].astype(dtype)
    given: dict[str, Any] = {"scenario": "domain-incremental", "transform": "permute"}
    assert streams.from_arrays(X[:60], y[:60], X[60:], y[60:], **given).score == "f1"
    if dtype is np.float32:
        numbers = streams.from_arrays(X[:60], y[:60], X[60:], y[60:], **given, label_kind="regression")
        assert (numbers.score, numbers.classes) == ("mse", 3)


@pytest.mark.parametrize(
    ("train", "test"),
    [
        (TARGETS["number"], TARGETS["labels"]),  # two kinds
        (TARGETS["labels"][:, 0], TARGETS["number"]),
        (TARGETS["labels"] * 2, TARGETS["labels"]),  # neither 0 nor 1
        (TARGETS["labels"][:, 0] > 0, TARGETS["labels"][:, 0] > 0),
        (np.zeros((90, 2, 2)), np.zeros((90, 2, 2))),
        (np.zeros((90, 0)), np.zeros((90, 0))),
    ],
)
def test_targets_of_other_shapes_or_of_two_kinds_are_refused(train: np.ndarray, test: np.ndarray) -> None:
    message = (
        r"targets are train .* test .*; allowed, and alike in both parts: one class.*\(n,\); several labels.*0 and 1"
    )
    with pytest.raises(DataError, match=message):
        streams.from_arrays(X[:60], train[:60], X[60:], test[60:], scenario="domain-incremental", transform="permute")


def test_what_is_wrong_with_targets_is_named() -> None:
    number, labels = TARGETS["number"].copy(), TARGETS["labels"]
    number[4] = np.nan
    given: dict[str, Any] = {"scenario": "domain-incremental", "transform": "permute"}
    with pytest.raises(DataError, match="arrays: sample 4 has no finite target"):
        streams.from_arrays(X[:60], number[:60], X[60:], number[60:], **given)
    with pytest.raises(
        DataError, match="test targets have 3 columns, expected 2|train targets have 3 columns, expected 2"
    ):
        streams.from_arrays(X[:60], labels[:60], X[60:], labels[60:], **given, classes=2)
    with pytest.raises(DataError, match=r"targets are float64 of shape \(60,\); allowed: several labels a sample"):
        streams.from_arrays(X[:60], TARGETS["number"][:60], X[60:], number[60:], **given, label_kind="multi-label")
    with pytest.raises(
        OptionError, match="stream.label_kind: 'words' is not one of .*: classes, multi-label, regression"
    ):
        stream("labels", label_kind="words")
    with pytest.raises(OptionError, match="label_kind: digits has classes targets, not regression"):
        streams.build({"dataset": "digits", "scenario": "domain-incremental", "label_kind": "regression"}, 0, 1)


@pytest.mark.parametrize("scenario", ["class-incremental", "task-incremental", "task-pool"])
def test_scenarios_that_divide_classes_are_refused(scenario: str) -> None:
    y = TARGETS["labels"]
    message = (
        f"stream.scenario: {scenario} divides single classes.*multi-label targets; allowed: domain-incremental, multi"
    )
    with pytest.raises(OptionError, match=message):
        streams.from_arrays(X[:60], y[:60], X[60:], y[60:], scenario=scenario)


def test_groups_stand_in_for_classes() -> None:
    """The first label of a sample, one group more without any; tenths of the first number."""
    assert strata(np.array([[0, 1, 1], [1, 0, 0], [0, 0, 0]], dtype=np.uint8)).tolist() == [1, 0, 3]
    assert strata(np.arange(20.0)[::-1].reshape(20, 1)).tolist() == [group for group in range(9, -1, -1) for _ in "ab"]
    for kind in KINDS:
        made = stream(kind, partition={"kind": "dirichlet", "alpha": 0.5}, validation=0.2, max_test=20)
        assert sum(len(made.data(client, 0)) for client in range(3)) == 48
        assert (len(made.test(0, "validation")), len(made.test(0))) == (12, 20)


class Pairs(Dataset[Any]):
    """A sample and its vector of targets, as torch users write it."""

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        self.x, self.y = torch.from_numpy(x), torch.from_numpy(y)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


@pytest.mark.parametrize("kind", ["labels", "number", "numbers"])
@pytest.mark.parametrize("as_set", [Pairs, lambda x, y: TensorDataset(torch.from_numpy(x), torch.from_numpy(y))])
def test_data_sets_have_the_same_targets(kind: str, as_set: Any) -> None:
    y, same = TARGETS[kind], stream(kind)
    made = streams.from_datasets(
        as_set(X[:60], y[:60]),
        as_set(X[60:], y[60:]),
        scenario="domain-incremental",
        transform="permute",
        tasks=2,
        clients=3,
    )
    assert made.score == same.score
    for client in range(3):
        assert torch.equal(made.data(client, 1).y, same.data(client, 1).y)
        assert torch.equal(made.data(client, 1).x, same.data(client, 1).x)


def test_a_column_of_a_table_may_be_what_is_predicted(tmp_path: Path) -> None:
    lines = [f"{a},{b},{2 * a + b + 0.5}" for a, b in np.random.default_rng(1).integers(0, 9, (40, 2))]
    path = tmp_path / "t.csv"
    path.write_text("\n".join(["a,b,target", *lines]))
    source = load(path)
    assert (source.targets, source.classes, len(source.x_train), len(source.x_test)) == ("regression", 1, 32, 8)
    assert torch.equal(source.y_train[:, 0], 2 * source.x_train[:, 0] + source.x_train[:, 1] + 0.5)
    path.write_text("\n".join(["a,b,target", *(line.replace(".5", "") for line in lines)]))  # whole numbers
    assert load(path).targets == "classes" and load(path, label_kind="regression").targets == "regression"
    table = {"dataset": str(path), "scenario": "domain-incremental", "transform": "permute", "clients": 2, "tasks": 2}
    assert streams.build({**table, "label_kind": "regression"}, 0, 1).score == "mse"


def test_an_npz_may_hold_several_labels(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=X, y=TARGETS["labels"], names=["sun", "rain", "snow"])
    source = load(tmp_path / "a.npz")
    assert (source.targets, source.class_names, len(source.x_test)) == ("multi-label", ("sun", "rain", "snow"), 18)


def test_domains_may_have_several_labels(tmp_path: Path) -> None:
    for name, rows in (("a", slice(0, 45)), ("b", slice(45, 90))):
        np.savez(tmp_path / f"{name}.npz", x=X[rows], y=TARGETS["labels"][rows])
    table = {"dataset": "a+b", "scenario": "multi-domain", "tasks": 2, "clients": 2}
    made = streams.build(table, 0, 1, tmp_path)
    assert made.score == "f1" and [len(made.test(task)) for task in range(2)] == [9, 9]
    assert sum(len(made.data(client, 1)) for client in range(2)) == 36
    np.savez(tmp_path / "d.npz", x=X, y=np.hstack([TARGETS["numbers"], TARGETS["numbers"][:, :1]]))
    with pytest.raises(DataError, match="the targets of domain 'd' are regression and those of 'a' multi-label"):
        streams.build({**table, "dataset": "a+d"}, 0, 1, tmp_path)


def test_a_data_set_is_shown_with_what_is_predicted(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=X, y=TARGETS["labels"], names=["sun", "rain", "snow"])
    shown = CliRunner().invoke(app, ["show", str(tmp_path / "a.npz")]).output
    assert "labels, several a sample: 3: sun, rain, snow" in shown


# periods as they arrive ----------------------------------------------------------------------------------------------
def arriving(kind: str, **changes: Any) -> Stream:
    y = TARGETS[kind]

    def periods(client: int) -> list[Any]:
        rows = np.arange(client, 90, 3)
        return [(X[half], y[half]) for half in np.array_split(rows, 2)]

    given = {"label_kind": "multi-label" if kind == "labels" else "regression", "tasks": 2, "clients": 3}
    width = 1 if y.ndim == 1 else y.shape[1]
    return streams.from_function(periods, **{"classes": width, "rounds_per_task": 2, **given, **changes})


@pytest.mark.parametrize("kind", ["labels", "number", "numbers"])
def test_periods_of_ones_own_are_scored_on_every_clients_tests(kind: str) -> None:
    made = arriving(kind)
    for client in range(3):
        train, test = made.data(client, 1), made.test_of(client, 1)
        assert (len(train), len(test)) == (12, 3) and train.y.dtype == stream(kind).data(0, 0).y.dtype
    outcome = Bench("fedgp+er", stream=made).run()  # type: ignore[arg-type]
    row = outcome.state.rows[1][0]
    assert row is not None and row[0] == 3 * 3
    assert made.value(made.score, [row[0], row[1], *row[4:]]) is not None


def test_a_server_without_data_knows_the_shape_of_targets() -> None:
    assert arriving("labels", input_shape=[FEATURES]).test(0).y.shape == (0, 3)
    assert arriving("number", input_shape=[FEATURES]).test(0).y.dtype == torch.float32
    with pytest.raises(DataError, match="client 0, period 1: targets have 3 columns, expected stream.classes = 2"):
        arriving("labels", classes=2)
    with pytest.raises(DataError, match=r"client 0, period 1: targets are float64 of shape \(15,\); allowed: several"):
        arriving("number", label_kind="multi-label")


# engines -------------------------------------------------------------------------------------------------------------
CASES = [
    ("labels", "fedavg"),
    ("labels", "fedgp+er"),
    ("numbers", "fedavg"),
    ("numbers", "fedgp+er"),
    ("numbers", "der"),
]


def on_processes(case: Bench) -> Outcome:
    engines: list[Processes] = []

    def build(setup: Setup, store: ClientStore) -> Processes:
        engines.append(Processes(setup, store, case.build_module, 2))
        return engines[0]

    try:
        return case.run(build)
    finally:
        engines[0].close()


@pytest.mark.parametrize(("kind", "method"), CASES)
def test_every_engine_gives_the_same_bits(kind: str, method: str, tmp_path: Path) -> None:
    case = bench(kind, method, evaluation=EvalOptions(every=1))
    eager = case.run()
    assert not torch.equal(eager.params, case.model()["params"])
    for other in (run_over_wire(case), on_processes(case)):
        assert tree.equal(comparable(other.state), comparable(eager.state))
        assert all(tree.equal(other.clients[client], state) for client, state in eager.clients.items())
    served = federated(case, loop_of(case, tmp_path))
    assert torch.equal(served.params, eager.params) and served.state.rows == eager.state.rows
    assert_resumes(case, 2, eager)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", WORK_WITH_ANY_LOSS)
def test_methods_that_work_with_any_loss(kind: str, method: str) -> None:
    case = bench(kind, method)
    if method == "ewc":  # the penalty must not exceed what plain SGD can follow; squared errors have a large curvature
        case = case.change(options={"ewc": {"weight": 1.0}})
    assert torch.isfinite(case.run().params).all()


def of_images(kind: str) -> Stream:
    """For networks that take images."""
    images, y = np.random.default_rng(0).integers(0, 256, (90, 4, 4), dtype=np.uint8), TARGETS[kind]
    given: dict[str, Any] = {"scenario": "domain-incremental", "tasks": 2, "clients": 3, "rounds_per_task": 2}
    return streams.from_arrays(images[:60], y[:60], images[60:], y[60:], **given)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", [name for name in methods.names() if not methods.build(name).needs("classes")])
def test_every_method_that_is_not_refused_runs(kind: str, method: str) -> None:
    train = TrainOptions(1, 5, Optimizer(lr=0.01))
    case = Bench(method, stream=of_images(kind), train=train)  # type: ignore[arg-type]
    case.build_method().fit_stream(case.stream)
    assert torch.isfinite(case.run().params).all()


@pytest.mark.parametrize("method", NEED_CLASSES)
def test_methods_that_need_classes_are_refused(method: str) -> None:
    with pytest.raises(
        CompositionError, match="needs one class for every sample, but stream 'arrays-permute', scored by f1"
    ):
        methods.build(method).fit_stream(stream("labels"))


def test_the_tests_name_every_part_that_needs_classes() -> None:
    needing = {name for name in methods.PRESETS if methods.build(name).needs("classes")}
    assert needing == set(NEED_CLASSES)


@pytest.mark.parametrize("kind", KINDS)
def test_counts_of_clients_that_score_are_added_up(kind: str) -> None:
    """Personalised models: every client scores the whole test set with its own, and the sums are added."""
    case = bench(kind, "fedala")
    counts = case.run().state.rows[1][0]
    assert counts is not None and counts[0] == 3 * 30
    value = case.stream.value(case.stream.score, [counts[0], counts[1], *counts[4:]])
    assert value is not None and value > 0


# runs and reports ----------------------------------------------------------------------------------------------------
def test_a_regression_that_learns_and_forgets(tmp_path: Path) -> None:
    """The features of task 2 are permuted: what is learned of task 1 is lost, so its error grows."""
    settings = recipe(train={"rounds_per_task": 12, "local_epochs": 5, "optimizer": {"lr": 0.1}}, eval={"every": 1})
    found = everfed.run(settings, tmp_path / "a", stream=stream("numbers", rounds_per_task=12))
    first, second = found.data["accuracy_matrix"]
    assert second[0] > first[0] and found.metrics["forgetting"] == pytest.approx(second[0] - first[0])
    assert found.metrics["bwt"] == -found.metrics["forgetting"]
    assert found.metrics["acc"] == pytest.approx(sum(second) / 2) and found.data["n_test"] == [30, 30]
    r2 = found.data["by_score"]["r2"]["accuracy_matrix"]
    assert r2[1][1] > 0.5 > r2[1][0]
    assert "MSE" in repr(found) and "%" not in repr(found)
    loaded = everfed.load(tmp_path / "a")
    predicted, y = loaded.predict(stream("numbers", rounds_per_task=12).test(1).x), TARGETS["numbers"][60:]
    assert predicted.shape == (30, 2) and np.square(predicted - y).mean() == pytest.approx(second[1], rel=1e-5)


def test_macro_f1_counts_labels_that_never_occur_as_0() -> None:
    """Three labels: one always right, one right once and missed once, one that neither occurs nor is predicted."""
    objective, y = objective_of("multi-label", 3), torch.tensor([[1, 1, 0], [1, 1, 0]])
    sums = objective.sums(torch.tensor([[2.0, 1.0, -1.0], [2.0, -1.0, -1.0]]), y)
    assert sums.tolist() == [2, 2, 1, 0, 0, 0, 0, 0, 1, 0]
    assert objective.value("f1", sums.tolist()) == pytest.approx((1 + 2 / 3 + 0) / 3)
    assert objective.value("f1_micro", sums.tolist()) == pytest.approx(6 / 7)


def test_several_labels_are_learned(tmp_path: Path) -> None:
    settings = recipe(train={"rounds_per_task": 12, "local_epochs": 3, "optimizer": {"lr": 0.5}})
    made = stream("labels", rounds_per_task=12)
    found = everfed.run(settings, tmp_path / "a", stream=made)
    last = found.data["accuracy_matrix"][1][1]
    assert last > 0.8 and "F1" in repr(found) and "%" in repr(found)
    predicted = everfed.load(tmp_path / "a").predict(made.test(1).x)
    from sklearn.metrics import f1_score

    assert f1_score(TARGETS["labels"][60:], predicted, average="macro") == pytest.approx(last)
    micro = found.data["by_score"]["f1_micro"]["accuracy_matrix"][1][1]
    assert f1_score(TARGETS["labels"][60:], predicted, average="micro") == pytest.approx(micro)


def test_a_comparison_ranks_small_errors_first(tmp_path: Path) -> None:
    for method, rate in (("fedavg", 0.0001), ("er", 0.05)):
        settings = recipe(method, train={"rounds_per_task": 2, "optimizer": {"lr": rate}})
        everfed.run(settings, tmp_path / method, stream=stream("numbers"))
    runs = read_runs([tmp_path])
    table = tables.comparison(grouped(runs).groups)
    assert [row[0] for row in table.rows] == ["er", "fedavg"] and table.best(2) == {0}
    columns = {column.heading: (column.kind, column.better) for column in table.columns[2:]}
    assert columns["MSE"] == ("plain", -1) and columns["Forgetting"] == ("plain", -1) and columns["BWT"] == ("plain", 1)
    run = next(run for run in runs if run.method == "er")
    assert run.result is not None
    assert forgetting_by_task(run)[2.0] == pytest.approx(run.result.metrics["forgetting"])
