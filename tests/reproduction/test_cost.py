"""Training samples, beside the specification's millions of passes."""

from __future__ import annotations

import pytest

from everfed.recipe import read
from everfed.reproduction.cost import training_samples

MILLIONS = [
    ("fedgp/table1-rotated-mnist", "fedavg", 12.0),
    ("fedgp/table1-cifar100", "fedavg", 5.0),
    ("fedgp/table1-cifar100", "ideal", 5.0 * 5.5),  # task t trains on t tasks: (1 + ... + 10) / 10
    ("fedssi/table2-cifar10", "fedssi", 32.0),
    ("fedssi/table2-cifar100", "fedssi", 50.0),
    ("fedssi/table2-tiny-imagenet", "fedssi", 120.0),
    ("fedssi/table2-digit10", "fedssi", 182.66304),
    ("stamp/table1-cifar100", "stamp", 62.5),
    ("stamp/table2-cifar100", "stamp", 62.5),
]


@pytest.mark.parametrize(("recipe", "method", "millions"), MILLIONS)
def test_passes(recipe: str, method: str, millions: float) -> None:
    assert training_samples(read(recipe), method) == pytest.approx(millions * 1e6)


def test_a_scaled_run_has_fewer_rounds_of_fewer_samples() -> None:
    recipe = read("fedgp/table1-rotated-mnist")
    assert training_samples(recipe, "fedavg", 0.1) == pytest.approx(12e6 / 100)
    assert training_samples(recipe, "fedavg", 0.01) == pytest.approx(60_000 * 0.01 * 10)  # one round at least


def test_limits_and_held_out_data_count() -> None:
    small = read("fedssi/digit10-small")  # at most 6,000 of each of 4 domains, a tenth held out
    assert training_samples(small, "fedssi") == pytest.approx(4 * 6000 * 0.9 * 15 * 5 * 0.4)


def test_what_cannot_be_told_is_not_guessed() -> None:
    assert training_samples(read("demo", sets=["stream.dataset=mine"]), "fedavg") is None
