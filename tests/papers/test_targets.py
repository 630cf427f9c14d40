"""The printed numbers, as the package holds them."""

from __future__ import annotations

import pytest

from everfed.experiments.papers.tables import PrintedCell, number, printed


def find(**names: str) -> PrintedCell:
    (found,) = (t for t in printed() if all(getattr(t, key) == value for key, value in names.items()))
    return found


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("68.02", 68.02),
        ("-1.5", -1.5),
        ("27.6 sec", 27.6),
        ("44.6 MB", 44.6),
        ("1.92 GB", 1.92 * 1024),
        ("N/A", None),
        ("1.2*T", None),
        ("2.5 (T=1), 4.55 (T>1)", None),
        ("", None),
    ],
)
def test_a_number_is_read_where_there_is_one(text: str, value: float | None) -> None:
    assert number(text) == value


def test_there_are_all_of_them() -> None:
    by_paper: dict[str, int] = {}
    for target in printed():
        by_paper[target.paper] = by_paper.get(target.paper, 0) + 1
    assert by_paper == {"FedGP": 398, "MFCL": 29, "STAMP": 380, "FedSSI": 700}


def test_cells_as_the_papers_print_them() -> None:
    der = find(table="T1", dataset="rotated-MNIST (Domain-IL)", method="DER+FedGP")
    assert (der.value, der.std) == (87.13, 1.1)
    assert find(paper="FedSSI", table="T2", dataset="CIFAR10", method="FedSSI", metric="A(f)").value == 42.58
    assert find(paper="MFCL", method="MFCL", metric="A_tilde").value == 43.87
    stamp = find(paper="STAMP", table="T2", dataset="CIFAR100 C=2", method="STAMP", metric="Accuracy")
    assert stamp.value == 52.8
    oracle = find(paper="MFCL", method="Oracle", metric="client s/round T>=1")
    assert oracle.value is None and oracle.text == "1.2*T"
