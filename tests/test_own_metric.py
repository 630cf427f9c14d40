"""A metric of one's own, the metrics by class and by client, and the models of earlier tasks, as a researcher asks for
them in a recipe."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import one_hot
from typer.testing import CliRunner

import everfed
from everfed import streams
from everfed.cli import app
from everfed.core.metric import METRICS, NewcomerGap

ROOT = Path(__file__).resolve().parent.parent
BRIER = re.search(r"example: brier.py -->\n```python\n(.*?)```", (ROOT / "docs/metrics.md").read_text(), re.S)
METRIC = '''
import torch
from everfed.method import Metric, Scored

class Where(Metric):
    """What it may know: the task and the client, as sums."""
    name = "where"

    def measure(self, scored: Scored):
        seen = scored.task * 100.0 + (10.0 if scored.client is None else scored.client) + len(scored.seen) / 100
        return torch.tensor([seen * len(scored.y), float(len(scored.y))])

class Off(Metric):
    """The mean absolute error, of regression."""
    name = "off"

    def measure(self, scored: Scored):
        return torch.stack([(scored.outputs - scored.y).abs().sum(), torch.tensor(float(scored.y.numel()))])

class Wrong(Metric):
    name = "wrong"

    def measure(self, scored: Scored):
        return scored.outputs @ scored.y

class Growing(Metric):
    name = "growing"

    def measure(self, scored: Scored):
        return torch.ones(1 + scored.task)

    def value(self, sums):
        return sums[0]
'''
TINY: dict[str, Any] = {
    "name": "tiny",
    "stream": {"dataset": "digits", "tasks": 2, "clients": 2, "max_train": 80, "max_test": 40},
    "train": {"rounds_per_task": 1},
    "engine": {"kind": "eager"},
    "method": {"name": "fedavg"},
}


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert BRIER is not None  # the metric of the documents is the one that is tested
    Path("day_metric.py").write_text(BRIER[1] + METRIC)
    yield tmp_path
    sys.modules.pop("day_metric", None)


def with_metrics(*metrics: Any, **changes: Any) -> dict[str, Any]:
    return {**TINY, "eval": {"metrics": list(metrics)}, **changes}


def own_periods(client: int) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(client)
    labels = rng.integers(0, 3, (2, 40))
    return [(np.eye(3, 8)[y].astype("float32") + rng.normal(size=(40, 8)).astype("float32"), y) for y in labels]


# a metric of one's own -----------------------------------------------------------------------------------------------
def test_a_metric_of_ones_own_is_in_result_tables_report_and_dashboard(work: Path) -> None:
    recipe = with_metrics({"metric": "day_metric:Brier", "power": 1.0})
    result = everfed.run(recipe, "run")
    stream = streams.build({**TINY["stream"], "scenario": "domain-incremental"}, seed=0, rounds_per_task=1)
    loaded = everfed.load("run")
    expected = []
    for task in range(2):
        test = stream.test(task)
        probabilities = loaded.outputs(test.x).softmax(1)
        expected.append(float((probabilities - one_hot(test.y, 10)).abs().sum() / len(test)))
    measured = result.data["measured"]["brier"]
    assert measured["by_task"] == pytest.approx(expected) and measured["better"] == -1
    assert result.metrics["brier"] == pytest.approx(sum(expected) / 2)
    assert measured["matrix"][1] == measured["by_task"] and measured["matrix"][0][1] is None
    plain = everfed.run(TINY, "plain")  # it changes no other number
    assert {**result.metrics, "brier": 0} == {**plain.metrics, "brier": 0}
    assert result.data["by_logits"] == plain.data["by_logits"]

    compared = everfed.compare(recipe, ["fedavg", "er"], out="compared")
    assert "| brier" in repr(compared) and "brier_mean" in Path("compared/compare.csv").read_text()
    assert "brier" in compared.report("compared.html", figures=False).read_text()
    found = [json.loads(line) for line in Path("run/events.jsonl").read_text().splitlines()]
    drawn = [event["brier"] for event in found if event["event"] == "measure"]  # what the dashboard draws
    assert drawn[-1] == pytest.approx(result.metrics["brier"]) and len(drawn) == 2


def test_a_metric_knows_task_and_client(work: Path) -> None:
    shared = everfed.run(with_metrics("day_metric:Where"), "shared").data["measured"]["where"]
    assert shared["by_task"] == pytest.approx([10.1, 110.1])  # None of a client; all ten classes were seen
    stream = streams.from_function(own_periods, classes=3, clients=2, tasks=2, rounds_per_task=1)
    recipe = {**with_metrics("day_metric:Where"), "model": {"kind": "mlp"}, "train": {}}
    recipe = {key: value for key, value in recipe.items() if key not in ("stream", "train")}
    own = everfed.run(recipe, "own", stream=stream).data["measured"]["where"]
    assert own["by_task"] == pytest.approx([0.53, 100.53])  # the mean of clients 0 and 1; three classes


@pytest.mark.parametrize("kind", ["eager", "processes"])
def test_every_engine_measures_the_same_and_a_resumed_run_too(kind: str, work: Path) -> None:
    recipe = with_metrics("day_metric:Brier", "confusion", engine={"kind": kind}, method={"name": "fedala"})
    events: list[str] = []

    def stop(event: dict[str, Any]) -> None:
        events.append(event["event"])
        if "checkpoint" in events and event["event"] == "phase":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        everfed.run(recipe, "run", observers=[stop], checkpoint_every=0)
    whole = everfed.run({**recipe, "engine": {"kind": "eager"}}, "whole")
    assert everfed.resume("run").data["measured"] == whole.data["measured"]


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        (
            "day_metric:Wrong",
            r"'wrong' \(Wrong\) fails on outputs \(2, 10\) and labels \(2,\): .*day_metric.py, line 46",
        ),
        ("day_metric:Growing", "'growing' gave 2 sums for task 2, not 1: they are added up"),
        ("brir", "'brir' is no metric; Did you mean .*, or package.module:Name"),
        ({"metric": "day_metric:Brier", "pover": 1.0}, "pover is not an option; it has power"),
        ("per-client", "'per-client' needs tests that are a client's"),
        (7, "an entry is a metric's name or a table with metric = NAME; got 7"),
    ],
)
def test_a_mistake_in_a_metric_is_named(metric: Any, words: str, work: Path) -> None:
    with pytest.raises(everfed.UserError, match=words):
        everfed.run(with_metrics(metric), "run")


def test_a_metric_of_regression_is_added_up_over_pieces(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores from other sums (MSE, R²) stay what they are."""
    monkeypatch.setattr("everfed.core.evaluate._LOGITS_AT_ONCE", 7)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 4)).astype("float32")
    y = x @ rng.normal(size=(4, 2))
    stream = streams.from_arrays(x[:40], y[:40], x[40:], y[40:], scenario="domain-incremental", transform="permute",
                                 tasks=2, clients=2, rounds_per_task=1)  # fmt: skip
    recipe = {"method": {"name": "fedavg"}, "model": {"kind": "mlp"}, "engine": {"kind": "eager"}}
    result = everfed.run({**recipe, "eval": {"metrics": ["day_metric:Off"]}}, "run", stream=stream)
    plain = everfed.run(recipe, "plain", stream=stream)
    assert result.data["by_score"] == plain.data["by_score"] and result.metrics["acc"] == plain.metrics["acc"]
    loaded = everfed.load("run", stream=stream)
    off = [float((loaded.outputs(stream.test(t).x) - stream.test(t).y).abs().mean()) for t in range(2)]
    assert result.data["measured"]["off"]["by_task"] == pytest.approx(off, rel=1e-5)


def test_a_metric_from_python_is_found_again(work: Path) -> None:
    sys.path.insert(0, ".")
    import day_metric  # type: ignore[import-not-found]

    result = everfed.run(with_metrics(day_metric.Brier(power=1.0), day_metric.Where), "run")
    assert everfed.read_recipe("run/recipe.toml").eval.metrics == [
        {"metric": "day_metric:Brier", "power": 1.0},
        "day_metric:Where",
    ]
    assert set(result.data["measured"]) == {"brier", "where"}


# by class, by client, confusions -------------------------------------------------------------------------------------
def test_the_accuracy_by_class_and_the_confusion_matrix(work: Path) -> None:
    result = everfed.run(with_metrics("per-class", "confusion"), "run")
    loaded = everfed.load("run")
    stream = streams.build({**TINY["stream"], "scenario": "domain-incremental"}, seed=0, rounds_per_task=1)
    expected = np.zeros((10, 10), int)
    for task in range(2):
        test = stream.test(task)
        np.add.at(expected, (test.y.numpy(), loaded.predict(test.x)), 1)
    confusion = result.data["measured"]["confusion"]
    assert (np.array(confusion["whole"]) == expected).all()
    assert (np.sum(confusion["by_task"], axis=0) == expected).all()
    per_class = expected.diagonal() / expected.sum(1)
    assert result.data["measured"]["per-class"]["whole"] == pytest.approx(per_class.tolist())
    page = everfed.report(["run"], "page.html", figures=False).read_text()
    assert "By class and by client" in page and "confusion: fedavg" in page and "per-class" in page


def test_the_accuracy_of_every_client(work: Path) -> None:
    stream = streams.from_function(own_periods, classes=3, clients=3, tasks=2, rounds_per_task=1)
    recipe = {"eval": {"metrics": ["per-client"]}, "model": {"kind": "mlp"}, "method": {"name": "fedavg"}}
    result = everfed.run({**recipe, "engine": {"kind": "eager"}}, "run", stream=stream)
    model, found = everfed.load("run", stream=stream).model, []
    for client in range(3):
        tests = [stream.test_of(client, task) for task in range(2)]
        right = [(model(test.x).argmax(1) == test.y).sum().item() for test in tests]
        found.append(sum(right) / sum(map(len, tests)))
    assert result.data["measured"]["per-client"]["whole"] == pytest.approx(found)


def test_numbers_made_of_the_clients_accuracies(work: Path) -> None:
    """Of 0.2, 0.4, 0.9 and a client without tests: by hand, and in metrics, report and dashboard of a run."""
    sums = [2.0, 0.0, 4.0, 9.0, 10.0, 0.0, 10.0, 10.0]
    values = {name: METRICS[name]().value(sums) for name in ("worst-client", "client-p10", "client-spread")}
    assert values == pytest.approx({"worst-client": 0.2, "client-p10": 0.24, "client-spread": (0.78 / 9) ** 0.5})
    assert NewcomerGap(clients=(3,)).value(sums) == pytest.approx(0.9 - 0.3)
    assert NewcomerGap(clients=(1,)).value(sums) is None
    metrics = ["worst-client", "client-p10", "client-spread", {"metric": "newcomer-gap", "clients": [2]}]
    stream = streams.from_function(own_periods, classes=3, clients=3, tasks=2, rounds_per_task=1)
    recipe = {"eval": {"metrics": [*metrics, "per-client"]}, "model": {"kind": "mlp"}, "method": {"name": "fedavg"}}
    result = everfed.run({**recipe, "engine": {"kind": "eager"}}, "run", stream=stream)
    by_task = result.data["measured"]["per-client"]["by_task"]
    assert result.metrics["worst-client"] == pytest.approx(sum(min(found) for found in by_task) / 2)
    gaps = [found[2] - (found[0] + found[1]) / 2 for found in by_task]
    assert result.metrics["newcomer-gap"] == pytest.approx(sum(gaps) / 2)
    page = everfed.report(["run"], "page.html", figures=False).read_text()
    assert "worst-client" in page and "newcomer-gap" in page


def test_the_accuracy_of_every_site_of_a_table(work: Path) -> None:
    """One model, scored by the server: a column says whose the test samples are."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(120, 4)).astype("float32"), np.arange(120) % 3
    site = rng.choice(["lund", "oslo", "york"], 120)
    sites = {"site": (site[:60], np.where(np.arange(60) == 7, "rome", site[60:]))}  # nobody trains on rome's
    stream = streams.from_arrays(
        x[:60], y[:60], x[60:], y[60:], columns=sites, partition={"kind": "column", "column": "site"},
        scenario="class-incremental", tasks=2, rounds_per_task=1,
    )  # fmt: skip
    recipe = {"eval": {"metrics": ["per-client"]}, "model": {"kind": "mlp"}, "method": {"name": "fedavg"}}
    result = everfed.run({**recipe, "engine": {"kind": "eager"}}, "run", stream=stream)
    right = everfed.load("run", stream=stream).predict(x[60:]) == y[60:]
    expected = [right[sites["site"][1] == name].mean() for name in ("lund", "oslo", "york")]
    assert result.data["measured"]["per-client"]["whole"] == pytest.approx(expected)


# the models of earlier tasks -----------------------------------------------------------------------------------------
def test_the_model_of_every_tasks_end_is_kept(work: Path) -> None:
    result = everfed.run({**TINY, "eval": {"snapshots": True}}, "run")
    stream = streams.build({**TINY["stream"], "scenario": "domain-incremental"}, seed=0, rounds_per_task=1)
    test = stream.test(0)
    for task in (1, 2):
        right = (everfed.load("run", task=task).predict(test.x) == test.y.numpy()).mean()
        assert right == pytest.approx(result.data["accuracy_matrix"][task - 1][0])
    last, trained = everfed.load("run", task=2).model, everfed.load("run").model
    assert all(torch.equal(a, b) for a, b in zip(last.parameters(), trained.parameters(), strict=True))
    with pytest.raises(
        everfed.UserError, match=r"has no model-task3.safetensors; with eval.snapshots = true a run keeps"
    ):
        everfed.load("run", task=3)


def test_a_folder_of_an_earlier_version_is_gone_on_with(work: Path) -> None:
    """Its recipe.toml has no eval.metrics and no eval.snapshots."""
    first = everfed.run(TINY, "run")
    recipe = Path("run/recipe.toml")
    lines = [line for line in recipe.read_text().splitlines() if not line.startswith(("metrics =", "snapshots ="))]
    recipe.write_text("\n".join(lines) + "\n")
    assert everfed.run(TINY, "run", resume_or_run=True).data == first.data


def test_metrics_are_named_on_the_command_line(work: Path) -> None:
    small = [f"--set=stream.{key}={value}" for key, value in TINY["stream"].items()]
    given = ["--set=eval.metrics=['per-class', 'day_metric:Brier']", "--set=engine.kind=eager", "--out=run"]
    found = CliRunner().invoke(app, ["run", "demo", "--method=fedavg", "--set=train.rounds_per_task=1", *small, *given])
    assert found.exit_code == 0, found.output
    assert "  brier 0." in found.output or "  brier 1." in found.output
