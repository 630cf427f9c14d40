"""Every refusal names the key and what is allowed."""

from __future__ import annotations

import numpy as np
import pytest

from everfed.data import DataError
from everfed.streams import OptionError, build, from_arrays

DOMAIN = {"dataset": "digits", "scenario": "domain-incremental"}
CLASS = {"dataset": "digits", "scenario": "class-incremental"}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"scenario": "class-incremental"}, "stream.dataset: expected the name or path of a data set, got None"),
        ({"dataset": "digits"}, "stream.scenario: None is not one of the allowed values: domain-incremental"),
        (
            {"dataset": "digits", "scenario": "online"},
            "stream.scenario: 'online' is not one of.*class-incremental, task-incremental",
        ),
        ({**DOMAIN, "transform": "shear"}, "stream.transform: 'shear' is not one of.*rotate, permute"),
        (
            {**CLASS, "transform": "rotate"},
            "stream.transform: is not a key of the class-incremental stream; allowed: .*",
        ),
        ({**DOMAIN, "class_order": "natural"}, "stream.class_order: is not a key of the domain-incremental stream"),
        ({**CLASS, "class_order": "random"}, "stream.class_order: 'random' is not one of.*natural, shuffled"),
        ({**CLASS, "client": 3}, "stream.client: is not a key.*clients"),
        ({**CLASS, "tasks": 11}, "stream.tasks: 11 is too many for 10 classes"),
        ({**CLASS, "tasks": 0}, "stream.tasks: expected a whole number of at least 1, got 0"),
        ({**CLASS, "tasks": 2.0}, "stream.tasks: expected a whole number"),
        ({**CLASS, "clients": True}, "stream.clients: expected a whole number of at least 1, got True"),
        ({**CLASS, "participation": 0}, r"stream.participation: expected a number in \(0, 1\], got 0"),
        ({**CLASS, "participation": 1.5}, "stream.participation: expected a number"),
        ({**CLASS, "participation": float("nan")}, "stream.participation: expected a number"),
        ({**CLASS, "validation": 1.0}, r"stream.validation: expected a number in \[0, 1\), got 1.0"),
        ({**CLASS, "boundaries": 1}, "stream.boundaries: expected true or false, got 1"),
        ({**CLASS, "augment": "cutout"}, "stream.augment: 'cutout' is not one of.*none, crop-flip"),
        ({**CLASS, "normalise": "mnist"}, "stream.normalise: 'mnist' is not one of.*none, half, cifar100"),
        ({**CLASS, "normalise": {"mean": [0.5]}}, "stream.normalise: expected one of.*mean and std"),
        ({**CLASS, "normalise": {"mean": [0.5], "std": [0]}}, "stream.normalise.std: every entry must be positive"),
        ({**CLASS, "normalise": {"mean": ["a"], "std": [1]}}, "stream.normalise.mean: expected a number"),
        ({**CLASS, "normalise": {"mean": [1, 2], "std": [1]}}, "mean has 2 entries and std 1"),
        ({**CLASS, "normalise": "cifar100"}, "stream.normalise: 3 entries for samples with 1 channels"),
        ({**CLASS, "max_train": 0}, "stream.max_train: expected a whole number"),
        ({**CLASS, "channels": 2, "image_size": -1}, "stream.image_size: expected a whole number"),
        ({**CLASS, "seed": -1}, "stream.seed: expected a whole number of at least 0, got -1"),
        ({**CLASS, "class_order": "shuffled", "seed": "a"}, "stream.seed: expected a whole number"),
        ({**CLASS, "partition": "iid"}, "stream.partition: expected a table with a kind"),
        ({**CLASS, "partition": {"alpha": 1}}, "stream.partition: expected a table with a kind"),
        ({**CLASS, "partition": {"kind": "sorted"}}, "stream.partition: unknown kind 'sorted'; allowed: iid, shards"),
        ({**CLASS, "partition": {"kind": "dirichlet"}}, "stream.partition: 'dirichlet' needs the option 'alpha'"),
        ({**CLASS, "partition": {"kind": "shards", "n": 2}}, "'shards' has no option 'n'; allowed: per_client"),
        (
            {**CLASS, "partition": {"kind": "dirichlet", "alpha": -1}},
            "stream.partition: 'dirichlet' in task 1 of 5: alpha must be a positive number, got -1",
        ),
        ({**CLASS, "clients": 300}, "stream.partition: 'iid' in task 1 of 5: .* samples are too few for 300 clients"),
        ({**CLASS, "max_test": 4}, "stream.tasks: task . of 5 has no test sample"),
    ],
)
def test_refusals_name_the_key(table, message):
    with pytest.raises(OptionError, match=message) as caught:
        build(table, 0, 2)
    assert isinstance(caught.value, ValueError)
    assert caught.value.key.startswith("stream.")


@pytest.mark.parametrize(
    ("rounds", "scale", "key"), [(0, 1.0, "rounds_per_task"), (1, 0.0, "scale"), (1, 1.1, "scale")]
)
def test_rounds_and_scale(rounds, scale, key):
    with pytest.raises(OptionError, match=f"stream.{key}: expected"):
        build(CLASS, 0, rounds, scale=scale)


def test_a_missing_set_is_a_data_error(tmp_path):
    with pytest.raises(DataError, match="'mnist' was not found"):
        build({**CLASS, "dataset": "mnist"}, 0, 2, data_dir=tmp_path)


def test_options_that_do_not_fit_the_samples():
    x, y = np.zeros((20, 4), np.float32), np.arange(20) % 10
    for options, message in (
        ({"scenario": "domain-incremental"}, "stream.transform: 'rotate' needs images; allowed.*permute"),
        ({"scenario": "class-incremental", "augment": "crop-flip"}, "stream.augment: 'crop-flip' needs images"),
        ({"scenario": "class-incremental", "image_size": 8}, "stream.image_size: .*need uint8 images"),
    ):
        with pytest.raises(OptionError, match=message):
            from_arrays(x, y, x, y, clients=2, **options)
    tokens = np.ones((20, 4), np.int64)
    with pytest.raises(OptionError, match="stream.normalise: tokens cannot be normalised"):
        from_arrays(tokens, y, tokens, y, scenario="class-incremental", clients=2, normalise="half")


def test_channels_that_cannot_be_made():
    x, y = np.zeros((20, 8, 8, 4), np.uint8), np.arange(20) % 10
    with pytest.raises(OptionError, match="stream.channels: images with 4 channels cannot be given 3"):
        from_arrays(x, y, x, y, scenario="class-incremental", clients=2, channels=3)


def test_an_unknown_option_of_from_arrays():
    x, y = np.zeros((20, 4), np.float32), np.arange(20) % 10
    with pytest.raises(OptionError, match="stream.task: is not a key"):
        from_arrays(x, y, x, y, scenario="class-incremental", task=2)
