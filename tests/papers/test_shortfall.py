"""What a run lacks of the paper's experiment is found from its facts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from everfed.data import DataError, load
from everfed.data.source import make_source
from everfed.experiments.papers.planning import plan
from everfed.experiments.papers.records import settings_of
from everfed.experiments.papers.shortfall import SETS, not_stated, of_run, of_settings
from everfed.experiments.papers.tables import Item, Stated, find, tables
from everfed.recipe import read

STATED = Stated(
    dataset="cifar100", image_size=32, model="resnet18", tasks=10, clients=10, participation=1.0, rounds=20, epochs=5
)
STREAM = {
    "dataset": "cifar100",
    "input_shape": [3, 32, 32],
    "tasks": 10,
    "clients": 10,
    "participation": 1.0,
    "rounds": 200,
    "rounds_per_task": 20,
    "scale": 1.0,
    "samples": {"train": 45_000, "validation": 5_000, "test": 10_000},
    "test_labels": "80031c23f8300724",
}
SETTINGS = {"model": {"kind": "resnet18"}, "train": {"rounds_per_task": 20, "local_epochs": 5}}


def record(**stream: Any) -> dict[str, Any]:
    return {"stream": {**STREAM, **stream}, "settings": SETTINGS, "cost": {"rounds": 200}}


def test_the_papers_experiment_lacks_nothing() -> None:
    assert of_run(STATED, record()) == []


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"dataset": "cifar10"}, "data set cifar10, the paper's is cifar100"),
        ({"samples": {"train": 10_000, "test": 10_000}}, "10,000 of the 50,000 published training samples"),
        ({"samples": {"train": 50_000, "test": 2_000}}, "2,000 of the 10,000 published test samples"),
        ({"test_labels": "a16c06c2fce42f06"}, "not the official test part of cifar100"),
        ({"test_labels": None}, "not the official test part of cifar100"),
        ({"input_shape": [3, 16, 16]}, "image size 16, the paper's is 32"),
        ({"tasks": 5}, "tasks 5, the paper's is 10"),
        ({"clients": 50}, "clients 50, the paper's is 10"),
        ({"participation": 0.5}, "participation 0.5, the paper's is 1.0"),
        ({"rounds_per_task": 10}, "rounds per task 10, the paper's is 20"),
        ({"scale": 0.1, "rounds_per_task": 2}, "--scale 0.1"),
        ({"rounds": 400}, "200 of 400 rounds"),
    ],
)
def test_each_shortfall_is_found(facts: dict[str, Any], reason: str) -> None:
    assert of_run(STATED, record(**facts)) == [reason]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            {"model": {"kind": "two-conv-cnn"}, "train": SETTINGS["train"]},
            "model two-conv-cnn, the paper's is resnet18",
        ),
        ({"model": SETTINGS["model"]}, "local epochs 1, the paper's is 5"),  # the schema's default
    ],
)
def test_the_network_and_the_epochs_are_the_recipes(settings: dict[str, Any], reason: str) -> None:
    assert of_run(STATED, {**record(), "settings": settings}) == [reason]


def test_other_settings_than_the_tables_are_named() -> None:
    assert of_run(STATED, record(), ("train.optimizer.lr",)) == ["another recipe than the table's: train.optimizer.lr"]


def test_a_record_without_facts_is_not_the_papers() -> None:
    assert of_run(STATED, {"stream": {}, "settings": SETTINGS}) == ["the record holds no facts about the data"]


def test_fedgp_on_other_questions_with_another_encoder() -> None:
    """Table 6: 10,000 questions of 1.4 million, and WordLlama in place of DistilBERT."""
    stated = find("fedgp/table6").stated("sequential-YahooQA (Class-IL)")
    assert stated is not None
    facts = {"dataset": "yahooqa", "encoder": "wordllama:256", "input_shape": [256], "tasks": 5, "clients": 10}
    few = {**facts, "samples": {"train": 10_000, "validation": 0, "test": 10_000}}
    run = {"stream": few, "settings": settings_of(read("fedgp/table6-yahooqa")), "cost": {}}
    assert of_run(stated, run) == [
        "encoder wordllama:256, the paper's is distilbert",
        "10,000 of the 1,400,000 published training samples",
        "10,000 of the 60,000 published test samples",
    ]
    whole = {**facts, "encoder": "transformer:distilbert-base-uncased"}
    whole["samples"] = {"train": 1_400_000, "validation": 0, "test": 60_000}
    assert of_run(stated, {**run, "stream": whole}) == []
    assert not_stated(stated) == ["rounds per task", "local epochs", "participation"]


def test_the_number_of_images_may_be_the_papers_own() -> None:
    """FedSSI's Digit10 has 110,000 images; the four sets have 380,548 for training and 78,039 for testing."""
    stated = Stated(dataset="digit10", images=110_000)
    run = {"stream": {"dataset": "digit10", "samples": {"train": 380_548, "validation": 0, "test": 78_039}}}
    assert of_run(stated, run) == ["458,587 images, the paper has 110,000"]
    run["stream"]["samples"] = {"train": 90_000, "validation": 0, "test": 20_000}
    assert of_run(stated, run) == []


def test_samples_counted_per_client_and_period_are_left_alone() -> None:
    stream = {"dataset": "chitchat", "samples": {"train": [[3, 4]], "test": [[1, 1]]}}
    assert of_run(Stated(dataset="chitchat"), {"stream": stream}) == []


def test_a_recipe_is_compared_before_it_runs() -> None:
    wanted = find("stamp/table1-32px").stated("ImageNet1K C=20")
    assert wanted is not None
    assert of_settings(wanted, settings_of(read("stamp/table1-imagenet32"))) == [
        "data set imagenet-32, the paper's is imagenet-224",
        "model two-conv-cnn, the paper's is swin-t",
    ]


def test_every_cell_that_can_be_judged_has_a_statement_of_the_paper() -> None:
    lacking = {
        (table.name, cell.dataset)
        for table in tables().values()
        for cell in plan(table)
        if cell.stated is None and not cell.not_judged and not cell.missing
    }
    assert lacking == set()


def test_statements_name_columns_and_keys_that_there_are() -> None:
    for table in tables().values():
        assert set(table.item.unstated) <= set(Stated.model_fields)
    twenty = find("fedgp/table5").stated("rotated-MNIST (Domain-IL)")
    assert twenty is not None and twenty.clients == 20 and twenty.rounds == 20
    halved = find("fedssi/table7-bandwidth").stated("CIFAR10")
    assert halved is not None and (halved.participation, halved.rounds, halved.epochs) == (0.2, None, 20)
    with pytest.raises(ValueError, match="rouns"):
        Item.model_validate({"name": "a", "about": "b", "nothing": "c", "states": {"rouns": 3}})


def test_a_test_part_is_known_by_its_labels_in_order() -> None:
    x = np.zeros((3, 4, 4), dtype=np.uint8)

    def digest(labels: list[int], kind: type) -> str:
        return make_source("s", x, np.arange(3), x, np.array(labels, dtype=kind), origin="").test_labels

    assert digest([0, 2, 1], np.int64) == digest([0, 2, 1], np.uint8) != digest([0, 1, 2], np.int64)


@pytest.mark.parametrize("name", ["mnist", "cifar10", "cifar100"])
def test_the_labels_of_official_test_parts(data_dir: Path, name: str) -> None:
    """A set that was split anew, or is a part, must not pass for the official one."""
    try:
        source = load(name, data_dir)
    except DataError:
        pytest.skip(f"{name} is not in EVERFED_DATA")
    official = SETS[name]
    first = {"mnist": [7, 2, 1, 0, 4], "cifar10": [3, 8, 8, 0, 6], "cifar100": [49, 33, 72, 51, 71]}[name]
    whole = len(source.y_test) == official.test and source.y_test[:5].tolist() == first
    assert (source.test_labels == official.test_labels) == whole
