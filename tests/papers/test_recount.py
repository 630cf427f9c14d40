"""What `everfed reproduce --status` counts, counted once more: from the files in results/ and targets.csv, with scipy's
tests in place of ours, for the tables of the FedGP paper that print every method."""

from __future__ import annotations

import csv
import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from everfed.experiments.papers import records
from everfed.experiments.papers.judging import runs_of
from everfed.experiments.papers.overview import SampleRates, overall, status
from everfed.experiments.papers.pages import findings
from everfed.experiments.papers.tables import papers
from everfed.recipe import read

ROOT = Path(__file__).parents[2]
METHODS = {"FedAvg": "fedavg", "FedCurv": "fedcurv", "FedProx": "fedprox", "A-GEM": "agem", "DER": "der"}
METHODS |= {f"{name}+FedGP": f"fedgp+{ours}" for name, ours in METHODS.items()} | {"Ideal": "ideal"}
METHODS["FedAvg+FedGP"] = "fedgp"
COLUMNS = {
    "rotated-MNIST (Domain-IL)": ("rotated-mnist", "full"),
    "permuted-MNIST (Domain-IL)": ("permuted-mnist", "full"),
    "sequential-CIFAR10 (Class-IL)": ("cifar10", "full"),
    "sequential-CIFAR10 (Task-IL)": ("cifar10", "task"),
    "sequential-CIFAR100 (Class-IL)": ("cifar100", "full"),
    "sequential-CIFAR100 (Task-IL)": ("cifar100", "task"),
}
OFFICIAL = {
    "mnist": (60_000, 10_000, "2fd8de6bdb8d1178"),
    "cifar10": (50_000, 10_000, "cbb7365de8ed11f0"),
    "cifar100": (50_000, 10_000, "80031c23f8300724"),
}
TABLES = {"T1": ("table1", "acc"), "T5": ("table5", "acc"), "T7": ("table1", "fgt"), "T9": ("table5", "fgt")}


@cache
def kept(recipe: str, method: str) -> dict[int, dict[str, Any]]:
    """The runs of a recipe with a method by seed: on the whole official data, with the recipe's settings."""
    sets = read(recipe).compare.options.get(method, ())  # type: ignore[union-attr]
    wanted = records.complete(records.settings_of(read(recipe, method=method, sets=sets)))
    found: dict[int, list[tuple[int, int, dict[str, Any]]]] = {}
    for number, path in enumerate(sorted((ROOT / "results" / recipe.replace("/", "-")).glob("*.json"))):
        one = json.loads(path.read_text())
        stream, cost = one["stream"], one["cost"]
        train, test, labels = OFFICIAL[stream["dataset"]]
        samples = stream["samples"]
        official = (samples["train"] + samples.get("validation", 0), samples["test"]) == (train, test)
        official &= stream["test_labels"] == labels and stream["scale"] == 1.0
        whole = "diverged" in one or cost["rounds"] == stream["rounds"]
        if one["method"] == method and official and whole and records.complete(one["settings"]) == wanted:
            exact = ["fp32", "tf32", "bf16"].index(one["environment"].get("precision", "fp32"))
            found.setdefault(one["seed"], []).append((-exact, number, one))
    return {seed: max(several, key=lambda one: one[:2])[2] for seed, several in sorted(found.items())}


def points(run: dict[str, Any], logits: str, what: str) -> float:
    matrix = run["by_logits"][logits]["accuracy_matrix"]
    if what == "acc":
        return 100 * float(np.mean(matrix[-1]))
    best = [max(row[i] for row in matrix[i:]) for i in range(len(matrix) - 1)]
    return 100 * float(np.mean([max(0.0, most - last) for most, last in zip(best, matrix[-1], strict=False)]))


def recount(table: str) -> tuple[Counter[str], Counter[str]]:
    """(levels, effects) of a table."""
    group, what = TABLES[table]
    with open(ROOT / "everfed/experiments/papers/targets.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if (row["paper"], row["table"]) == ("FedGP", table)]
    printed = {(row["dataset"], row["method"]): (float(row["value"]), float(row["std"])) for row in rows}
    tests: list[tuple[bool, float]] = []
    levels: Counter[str] = Counter()
    effects: Counter[str] = Counter()
    for (column, method), (value, deviation) in printed.items():
        name, logits = COLUMNS[column]
        recipe = f"fedgp/{group}-{name}"
        runs = kept(recipe, METHODS[method])
        if any("diverged" in run for run in runs.values()):
            levels["diverged"] += 1
            continue
        ours = {seed: points(run, logits, what) for seed, run in runs.items()}
        if len(ours) >= 3:
            tests.append(_equivalent_and_p(list(ours.values()), value, deviation))
        base = method.removesuffix("+FedGP") if method.endswith("+FedGP") else "FedAvg"
        others = kept(recipe, METHODS[base])
        common = sorted(set(ours) & set(others))
        if method == base or len(common) < 3 or any("diverged" in run for run in others.values()):
            continue
        differences = [ours[seed] - points(others[seed], logits, what) for seed in common]
        effects[_effect(differences, value - printed[column, base][0])] += 1
    differ = _holm([p for _, p in tests])
    for (equivalent, _), differs in zip(tests, differ, strict=True):
        levels["equivalent" if equivalent else "differs" if differs else "unresolved"] += 1
    effects.pop("", None)
    return levels, effects


def _equivalent_and_p(ours: list[float], value: float, deviation: float) -> tuple[bool, float]:
    """Two one-sided Welch tests at 3 points, and the two-sided one. The paper's deviation is that of five seeds."""
    mine = (float(np.mean(ours)), float(np.std(ours, ddof=1)), len(ours))
    theirs = (deviation * np.sqrt(5 / 4), 5)

    def p(shift: float, side: str) -> float:
        found = stats.ttest_ind_from_stats(*mine, value + shift, *theirs, equal_var=False, alternative=side)
        return float(found.pvalue)

    return max(p(-3, "greater"), p(3, "less")) < 0.05, p(0, "two-sided")


def _effect(differences: list[float], claimed: float) -> str:
    """Whether the 95 % interval excludes 0, which a paired test says as well; "" where nothing is claimed or seen."""
    sure, mean = stats.ttest_1samp(differences, 0).pvalue < 0.05, float(np.mean(differences))
    if round(abs(claimed), 6) <= 2:
        return "not in the paper" if sure and abs(mean) > 2 else ""
    return ("confirmed" if mean * claimed > 0 else "contradicted") if sure else "unresolved"


def _holm(probabilities: list[float]) -> list[bool]:
    order = np.argsort(probabilities)
    limits = 0.05 / np.arange(len(probabilities), 0, -1)
    first_kept = next((n for n, index in enumerate(order) if probabilities[index] >= limits[n]), len(order))
    return [index in order[:first_kept] for index in range(len(probabilities))]


@pytest.fixture(scope="module")
def found() -> tuple[list[records.Record], Any]:
    all_of_them = records.read_all(ROOT / records.FOLDER)
    return all_of_them, runs_of(all_of_them)


@pytest.mark.parametrize("table", TABLES)
def test_a_second_count_of_the_records_gives_the_same_verdicts(table: str, found: Any) -> None:
    name = f"fedgp/table{table[1:]}"
    (row,) = (one for one in status(name, found[1], lambda recipe: [0], SampleRates(given=1.0)) if one.table == name)
    levels, effects = recount(table)
    assert (row.levels, row.effects) == (dict(levels), dict(effects))


def test_the_status_counts_what_the_pages_count(found: Any) -> None:
    """A number that several tables print is one number in both."""
    of_pages = [findings(key, found[1]) for key in papers()]
    whole = overall("", *found)
    files = (ROOT / "results").glob("*/*.json")
    assert whole.records == sum(path.parent.name != records.LEADERBOARD for path in files)
    assert whole.distinct == sum(len(one.cells) for one in of_pages) >= 44
    for verdict, count in whole.effects.items():
        assert count == sum(one.effects[verdict] for one in of_pages), verdict
    assert whole.effects["confirmed"] >= sum(recount(table)[1]["confirmed"] for table in TABLES)
