"""A recipe's records as a table: a line for every choice of settings."""

from __future__ import annotations

from typing import Any

from everfed.experiments.papers.records import Record
from everfed.experiments.papers.writing import every_run
from everfed.methods import registry as methods
from everfed.recipe import Recipe
from tests.papers.test_records import made


def of_recipe(method: str, seed: int, settings: dict[str, Any], **scores: float) -> Record:
    own = {"recipe": "own", "method": method, "seed": seed, "settings": settings, "metrics": scores, "by_logits": {}}
    return {**made(accuracy=0.5), **own}


def rows_of(records: list[Record]) -> list[list[str]]:
    text = every_run("own", records)
    assert "`own`: " in text
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]


def test_every_choice_of_a_recipe_s_settings_is_a_line_with_those_that_differ() -> None:
    rates = [{"train": {"optimizer": {"lr": lr}}} for lr in (0.1, 0.2)]
    head, *rows = rows_of([of_recipe("fedavg", seed, settings, acc=0.5) for seed, settings in enumerate(rates)])
    assert head[:3] == ["method", "train.optimizer.lr", "seeds"]
    assert [row[:3] for row in rows] == [["fedavg", "0.1", "0"], ["fedavg", "0.2", "1"]]


def test_seeds_of_one_choice_are_one_line_with_their_mean() -> None:
    runs = [of_recipe("fedavg", seed, {}, acc=acc, forgetting=0.1) for seed, acc in ((1, 0.6), (0, 0.5), (2, 0.7))]
    _, row = rows_of(runs)
    assert row == ["fedavg", "0, 1, 2", "- - -", "60.0 ± 8.2 (50.0 60.0 70.0)", "10.0 ± 0.0 (10.0 10.0 10.0)"]


def test_task_il_accuracy_is_a_column_where_it_differs() -> None:
    same, other = of_recipe("fedavg", 0, {}, acc=0.5), of_recipe("fedgp", 0, {}, acc=0.4)
    same["by_logits"] = {"task": {"metrics": {"acc": 0.5}}}
    other["by_logits"] = {"task": {"metrics": {"acc": 0.75}}}
    head, *rows = rows_of([same, other])
    assert head[-1] == "final accuracy, task-IL" and [row[-1] for row in rows] == ["50.0", "75.0"]
    (head, *_), (of_none, *_) = rows_of([same]), rows_of([of_recipe("fedavg", 0, {}, acc=0.5)])
    assert head[-1] == of_none[-1] == "forgetting"


def test_the_last_pass_is_a_column_where_tasks_return() -> None:
    again = of_recipe("stamp", 0, {}, learning_accuracy=0.6)
    again["stream"] = {**again["stream"], "scenario": "task-pool", "classes": 2, "classes_per_task": 2}
    again["accuracy_matrix"] = [[0.5], [0.4, 0.7]]
    head, row = rows_of([again])
    assert head[-1] == "learning accuracy, last pass" and (row[2], row[-1]) == ("60.0", "70.0")


def test_the_accuracy_of_the_clients_own_models_is_a_column_where_it_was_measured() -> None:
    head, row = rows_of([{**of_recipe("fedcil", 0, {}, acc=0.4), "from_events": {"local_accuracy": 55.5}}])
    assert head[-1] == "accuracy of the clients' own models" and row[-1] == "55.5"


def test_runs_on_text_have_perplexities_in_place_of_accuracies() -> None:
    head, row = rows_of([of_recipe("fedavg", 0, {}, perplexity=250.5, forgetting_factor=17.0)])
    assert (head, row) == (["method", "seeds", "perplexity", "forgetting factor"], ["fedavg", "0", "250.5", "17.0"])


def test_a_seed_without_a_score_keeps_its_place() -> None:
    runs = [of_recipe("fedavg", seed, {}, **({} if seed == 1 else {"acc": 0.5 + seed / 10})) for seed in range(3)]
    _, row = rows_of(runs)
    assert row[3] == "60.0 ± 10.0 (50.0 - 70.0)"


def test_a_default_is_one_setting_whether_it_is_written_or_not() -> None:
    default = Recipe.model_validate({"method": {"name": "fedavg"}}).train.optimizer.lr
    rates: list[dict[str, Any]] = [{"train": {"optimizer": {"lr": lr}}} for lr in (9.0, default)]
    head, *rows = rows_of([of_recipe("fedavg", seed, settings, acc=0.5) for seed, settings in enumerate([*rates, {}])])
    assert head[1] == "train.optimizer.lr" and [row[1:3] for row in rows] == [[str(default), "1, 2"], ["9", "0"]]


def test_precisions_are_not_averaged() -> None:
    runs = [of_recipe("fedavg", 0, {}, acc=acc) for acc in (0.5, 0.6)]
    for run, precision in zip(runs, ("bf16", "fp32"), strict=True):
        run["environment"] = {**run["environment"], "precision": precision}
    head, *rows = rows_of(runs)
    assert head[1] == "engine.precision" and [row[1:3] for row in rows] == [["bf16", "0"], ["fp32", "0"]]


def test_options_of_methods_are_shown_where_runs_of_one_method_differ() -> None:
    """Not those in which methods differ from each other, which each has."""
    kinds = [
        of_recipe("fedssi", 0, {"method": {"fedssi": {"displacement": kind, "eps": 0.1}}}, acc=0.5)
        for kind in ("psm", "global")
    ]
    head, *rows = rows_of([of_recipe("ewc", 0, {"method": {"ewc": {"weight": 1.0}}}, acc=0.4), *kinds])
    assert head[:3] == ["method", "options", "seeds"]
    assert [row[:2] for row in rows] == [
        ["ewc", ""],
        ["fedssi", "fedssi.displacement = global"],
        ["fedssi", "fedssi.displacement = psm"],
    ]


def test_options_of_several_methods_share_a_column() -> None:
    weights = [of_recipe("ewc", 0, {"method": {"ewc": {"weight": w, "gamma": w}}}, acc=0.5) for w in (1.0, 2.0)]
    rates = [of_recipe("si", 0, {"method": {"si": {"eps": eps}}}, acc=0.5) for eps in (0.1, 0.2)]
    _, *rows = rows_of([*weights, *rates])
    assert [row[1] for row in rows] == [
        "ewc.gamma = 1, ewc.weight = 1",
        "ewc.gamma = 2, ewc.weight = 2",
        "si.eps = 0.1",
        "si.eps = 0.2",
    ]


def test_an_option_that_a_recipe_leaves_out_is_shown_with_the_value_that_the_run_had() -> None:
    """Once written and once left out it is one setting; a method without the part has none, nor one of a user's own."""
    default = methods.part_class("ewc")().weight  # type: ignore[attr-defined]
    settings: list[dict[str, Any]] = [
        {},
        {"method": {"ewc": {"weight": default}}},
        {"method": {"ewc": {"weight": 7.0}}},
    ]
    runs = [of_recipe("ewc", seed, one, acc=0.5) for seed, one in enumerate(settings)]
    _, *rows = rows_of([*(of_recipe(method, 0, {}, acc=0.4) for method in ("fedavg", "mine")), *runs])
    ewc = [["ewc", f"ewc.weight = {default:g}", "0, 1"], ["ewc", "ewc.weight = 7", "2"]]
    expected = [*ewc, ["fedavg", "", "0"], ["mine", "", "0"]]
    assert sorted(row[:3] for row in rows) == sorted(expected)


def test_a_whole_number_is_one_setting_however_it_is_written() -> None:
    weights = enumerate((10**6, 1e6, 1))
    runs = [of_recipe("ewc", seed, {"method": {"ewc": {"weight": w}}}, acc=0.5) for seed, w in weights]
    _, *rows = rows_of(runs)
    assert [row[1:3] for row in rows] == [["ewc.weight = 1", "2"], ["ewc.weight = 1000000", "0, 1"]]


def test_what_a_recipe_gives_one_method_is_no_difference() -> None:
    """FedCIL has an optimiser of its own by the recipe; the same settings of another method are its run's choice."""
    name, adam = "mfcl/table1-cifar100", {"kind": "adam", "lr": 2e-4, "beta1": 0.5, "state": "task"}
    theirs = {"stream": {"normalise": "half"}, "train": {"optimizer": adam}}

    def head(method: str) -> list[str]:
        runs = [of_recipe("af-fcl", 0, {}, acc=0.5), of_recipe(method, 0, theirs, acc=0.4)]
        text = every_run(name, [{**one, "recipe": name} for one in runs])
        return [cell.strip() for cell in text.splitlines()[0].split("|")[1:-1]]

    assert head("fedcil")[:2] == ["method", "seeds"]
    assert {"stream.normalise", "train.optimizer.lr", "train.optimizer.kind"} <= set(head("fedavg"))


def test_a_run_that_diverged_is_a_line() -> None:
    ended = {**of_recipe("fedavg", 1, {}), "diverged": "the loss of client 0 is not finite", "cost": {}}
    _, row = rows_of([of_recipe("fedavg", 0, {}, acc=0.5), ended])
    assert row[1:4] == ["0, 1 (diverged)", "- -", "50.0 ± 0.0 (50.0 -)"]


def test_a_recipe_without_records_says_so() -> None:
    assert every_run("own", []) == "No records."
