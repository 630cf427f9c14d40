"""Training samples of the papers' experiments: samples x rounds x epochs x participation."""

from __future__ import annotations

import pytest

from everfed.experiments.papers.overview import training_samples
from everfed.recipe import read

DIGIT10 = 60_000 + 240_000 + 7_291 + 73_257  # MNIST, EMNIST digits, USPS, SVHN
SAMPLES = [
    ("fedgp/table1-rotated-mnist", "fedavg", 10 * 60_000 * 20),  # every task has all images
    ("fedgp/table1-cifar100", "fedavg", 50_000 * 20 * 5),
    ("fedgp/table1-cifar100", "ideal", 50_000 * 20 * 5 * 5.5),  # task t trains on t tasks: (1 + ... + 10) / 10
    ("fedssi/table2-cifar10", "fedssi", 50_000 * 80 * 20 * 0.4),
    ("fedssi/table2-cifar100", "fedssi", 50_000 * 100 * 20 * 0.5),
    ("fedssi/table2-tiny-imagenet", "fedssi", 100_000 * 100 * 20 * 0.6),
    ("fedssi/table2-digit10", "fedssi", DIGIT10 * 60 * 20 * 0.4),
    ("stamp/table1-cifar100", "stamp", 10 * 50_000 * 25 * 5),  # each of 10 clients has all images of its classes
    ("stamp/table2-cifar100", "stamp", 10 * 50_000 * 25 * 5),
]


@pytest.mark.parametrize(("recipe", "method", "expected"), SAMPLES)
def test_samples_of_a_whole_run(recipe: str, method: str, expected: float) -> None:
    assert training_samples(read(recipe), method) == pytest.approx(expected)


def test_a_scaled_run_has_fewer_rounds_of_fewer_samples() -> None:
    recipe = read("fedgp/table1-rotated-mnist")
    assert training_samples(recipe, "fedavg", 0.1) == pytest.approx(12e6 / 100)
    assert training_samples(recipe, "fedavg", 0.01) == pytest.approx(60_000 * 0.01 * 10)  # one round at least


def test_limits_and_held_out_data_count() -> None:
    small = read("fedssi/digit10-small")  # at most 6,000 of each of 4 domains, a tenth held out
    assert training_samples(small, "fedssi") == pytest.approx(4 * 6000 * 0.9 * 15 * 5 * 0.4)


def test_unknown_sizes_are_not_guessed() -> None:
    assert training_samples(read("demo", sets=["stream.dataset=mine"]), "fedavg") is None
