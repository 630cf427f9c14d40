"""Cells: the runs behind them, what they share, and why some have none."""

from __future__ import annotations

import pytest

from everfed.errors import UserError
from everfed.experiments.papers.planning import Experiment, TableCell, experiments, plan
from everfed.experiments.papers.tables import find, tables
from everfed.methods import registry as methods
from everfed.recipe import read, settled


def one(table: str, **names: str) -> TableCell:
    (found,) = (c for c in plan(find(table)) if all(getattr(c, key) == value for key, value in names.items()))
    return found


def test_a_cell_knows_its_run_and_its_target() -> None:
    cell = one("fedgp/table1", dataset="sequential-CIFAR10 (Task-IL)", method="DER+FedGP")
    assert cell.experiment == Experiment("fedgp/table1-cifar10", "fedgp+der")
    assert cell.logits == "task" and cell.measured.measure == "acc"
    assert cell.target is not None and cell.target.value == 77.99
    assert (cell.missing, cell.not_judged, cell.task) == ("", "", None)


def test_a_claimed_difference_is_the_methods_number_less_its_baselines() -> None:
    improved = one("fedgp/table1", dataset="rotated-MNIST (Domain-IL)", method="DER+FedGP")
    assert improved.baseline == "DER" and improved.claimed == pytest.approx(87.13 - 57.73)


def test_tables_share_runs() -> None:
    """Forgetting and the rows with the usual buffer come from the runs of Table 1."""
    table1 = set(experiments(plan(find("fedgp/table1"))))
    assert set(experiments(plan(find("fedgp/table7")))) == table1
    usual = one("fedgp/table2", dataset="rotated-MNIST (Domain-IL)", setting="B=200", method="DER")
    assert usual.experiment in table1
    assert len(table1) == 44  # 4 recipes x 11 methods; class- and task-IL are one run


def test_every_method_of_the_papers_is_there() -> None:
    assert not [c for table in tables().values() for c in plan(table) if c.missing.startswith("method ")]


def test_baselines_run_with_their_authors_settings() -> None:
    glfc = one("fedssi/table2", dataset="CIFAR100", method="GLFC", metric="A(f)").experiment
    assert (glfc.method, glfc.sets) == ("glfc", ("method.memory.size=300",))
    fedcil = one("mfcl/table1", method="FedCIL", metric="A_tilde").experiment
    assert fedcil.sets[0] == 'stream.normalise="half"' and "lr = 2e-4" in fedcil.sets[1]
    assert one("stamp/table1", dataset="CIFAR100 C=20", method="AF-FCL", metric="AF").experiment.method == "af-fcl"
    gap = one("stamp/fig1", method="AF-FCL").experiment
    assert gap.method == "" and "af-fcl" in gap.sets[0]


def test_a_table_runs_a_method_as_its_recipe_compares_it() -> None:
    """FedCurv with FedGP diverges on CIFAR at the weight that FedCurv alone has."""
    column = "sequential-CIFAR100 (Class-IL)"
    weights = {
        method: settled(read(cell.experiment.recipe, method=cell.experiment.method, sets=cell.experiment.sets))
        for method in ("FedCurv", "FedCurv+FedGP")
        for cell in [one("fedgp/table1", dataset=column, method=method)]
    }
    found = {method: (recipe.method.model_extra or {})["fedcurv"]["weight"] for method, recipe in weights.items()}
    assert found == {"FedCurv": 0.01, "FedCurv+FedGP": 0.001}


def test_the_angles_of_stamps_baselines_are_measured_in_the_same_runs() -> None:
    """Fig. 3 compares with FedAvg, FedL2P, FedWeIT and AF-FCL; every row has a part that measures both angles."""
    temporal, spatial = (plan(find(f"stamp/{figure}")) for figure in ("fig3", "fig4"))
    assert {"FedAvg", "FedL2P", "FedWeIT", "AF-FCL", "STAMP"} <= {cell.method for cell in temporal}
    assert [cell.experiment for cell in temporal] == [cell.experiment for cell in spatial]
    for cell in temporal:
        recipe = settled(read(cell.experiment.recipe, sets=cell.experiment.sets))
        assert methods.build("", recipe.method.model_extra or {}, recipe.method.parts).parts[-1].name == "angles"


def test_stamps_forgetting_is_that_of_equation_6() -> None:
    """Over the whole matrix, which the recipes therefore fill."""
    for table in ("stamp/table1", "stamp/table2", "stamp/table3"):
        for cell in plan(find(table)):
            if cell.metric == "AF":
                assert cell.measured.measure == "forgetting_full"
                assert read(cell.experiment.recipe).eval.zero_shot


def test_a_setting_reaches_the_recipe() -> None:
    cell = one("fedssi/table3", dataset="CIFAR10", setting="alpha=10,lambda=0.8")
    assert cell.experiment.sets == ("stream.partition.alpha=10", "method.fedssi.lam=0.8")
    large = one("fedgp/table8", dataset="permuted-MNIST (Domain-IL)", setting="B=5120", method="DER")
    assert large.experiment == Experiment("fedgp/table8-permuted-mnist", "der", ("method.memory.size=5120",))


def test_the_first_block_that_names_a_cell_gives_it() -> None:
    equal = one("fedgp/table3", dataset="R-MNIST dom", method="DER w/ FedGP (equalized comm overhead)")
    double = one("fedgp/table3", dataset="R-MNIST dom", method="DER w/ FedGP (2x comm overhead)")
    assert equal.experiment == Experiment("fedgp/table3-rotated-mnist", "fedgp+der")
    assert double.experiment == Experiment("fedgp/table1-rotated-mnist", "fedgp+der")


def test_forgetting_is_the_clipped_one_for_fedgp() -> None:
    assert {cell.measured.measure for cell in plan(find("fedgp/table7"))} == {"forgetting_clipped"}


def test_cells_after_a_task_know_it() -> None:
    cell = one("fedssi/table8", method="FedSSI", setting="after task 3", metric="A_t")
    assert cell.task == 3 and cell.target is not None and cell.target.value == 59.43


def test_a_method_that_needs_options_gets_them() -> None:
    cell = one("fedssi/table2", dataset="CIFAR10", method="Re-Fed", metric="A(f)")
    assert cell.experiment.sets == ("method.memory.size=300",)


def test_a_cell_may_need_another_methods_run() -> None:
    cell = one("fedssi/table5", method="FL+LwF")
    assert cell.against == Experiment("fedssi/table5-cifar10", "fedavg")
    (chosen,) = plan(find("fedssi/table5"), methods=["lwf"])
    assert experiments([chosen]) == [cell.experiment, cell.against]


@pytest.mark.parametrize(
    ("table", "names", "reason"),
    [
        ("fedssi/table5", {"method": "FedSSI"}, "a ratio on one machine"),
        ("fedssi/table7-scalability", {"method": "FedSSI", "dataset": "CIFAR10", "metric": "A_bar"}, "repeat Table 2"),
        ("fedssi/table8", {"method": "GLFC", "setting": "after task 1", "metric": "A_t"}, "illegible"),
        ("stamp/table1", {"method": "FedAvg", "dataset": "CIFAR100 C=20", "metric": "disk"}, "printed as 'N/A'"),
        ("stamp/table1", {"method": "FedAvg", "dataset": "CIFAR100 C=20", "metric": "C->S"}, "in MiB"),
        ("stamp/fig4", {"method": "STAMP", "dataset": "CIFAR100 C=2"}, "add constants"),
        ("fedgp/table4", {"method": "DER", "dataset": "S-CIFAR100 task"}, "does not say when"),
        ("mfcl/table1", {"method": "MFCL", "metric": "A_tilde"}, ""),
    ],
)
def test_why_cells_are_not_judged(table: str, names: dict[str, str], reason: str) -> None:
    found = one(table, **names).not_judged
    assert reason in found and bool(reason) == bool(found)


def test_methods_are_chosen_by_either_name() -> None:
    ours, theirs = (
        plan(find("fedgp/table1"), methods=["fedgp+agem"]),
        plan(find("fedgp/table1"), methods=["A-GEM+FedGP"]),
    )
    assert ours == theirs and len(ours) == 6
    with pytest.raises(UserError, match="--methods fedapg: not in fedgp/table1. Did you mean fedavg"):
        plan(find("fedgp/table1"), methods=["fedapg"])


def test_columns_are_chosen_by_a_part_of_their_name() -> None:
    found = plan(find("fedgp/table1"), methods=["fedavg"], columns=["rotated", "cifar100 (task"])
    assert [cell.dataset for cell in found] == ["rotated-MNIST (Domain-IL)", "sequential-CIFAR100 (Task-IL)"]
    with pytest.raises(UserError, match="no cell of fedgp/table1 is left; its columns are: rotated-MNIST"):
        plan(find("fedgp/table1"), columns=["imagenet"])
