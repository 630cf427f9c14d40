"""What every scenario owes the runner: the protocol, the schedule, the draws, the splits."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everfed.core.data import DataCache
from everfed.core.stream import Stream
from everfed.streams import PARTITIONS, SCENARIOS, build, from_arrays
from everfed.streams.attendance import Attendance
from everfed.streams.draws import generator

SHARED = {"dataset": "digits", "tasks": 5, "clients": 4}
TABLES = [
    {"scenario": "domain-incremental", "transform": "rotate"},
    {"scenario": "domain-incremental", "transform": "permute"},
    {"scenario": "class-incremental"},
    {"scenario": "class-incremental", "class_order": "shuffled"},
    {"scenario": "task-incremental"},
]
every_scenario = pytest.mark.parametrize("table", TABLES, ids=lambda t: "-".join(t.values()))


def stream(table, seed=0, rounds_per_task=3, **change):
    return build({**SHARED, **table, **change}, seed, rounds_per_task)


@every_scenario
def test_it_is_a_stream(table):
    s = stream(table)
    assert isinstance(s, Stream)
    assert (s.clients, s.tasks, s.rounds, s.classes, s.score) == (4, 5, 15, 10, "accuracy")
    assert s.input_shape == (1, 8, 8)
    assert s.task_ids is (table["scenario"] == "task-incremental")


@every_scenario
def test_rounds_follow_the_schedule(table):
    s = stream(table)
    plans = [s.round(i) for i in range(s.rounds)]
    assert [p.task for p in plans] == [t for t in range(5) for _ in range(3)]
    assert [bool(p.begins) for p in plans] == [True, False, False] * 5
    assert [bool(p.ends) for p in plans] == [False, False, True] * 5
    assert [p.evaluate for p in plans] == [False, False, True] * 5
    for p in plans:
        assert p.participants == (0, 1, 2, 3)
        assert dict(p.tasks) == dict.fromkeys(range(4), p.task)
        assert p.begins in ((), (0, 1, 2, 3))


def test_one_round_per_task_begins_and_ends_it():
    plan = stream(TABLES[0], rounds_per_task=1).round(2)
    assert (plan.task, plan.begins, plan.ends, plan.evaluate) == (2, (0, 1, 2, 3), (0, 1, 2, 3), True)


def test_hidden_boundaries_are_nowhere_to_be_seen():
    s = stream(TABLES[0], boundaries=False)
    assert s.boundaries is False
    plans = [s.round(i) for i in range(s.rounds)]
    assert all(p.begins == p.ends == () for p in plans)
    assert [p.evaluate for p in plans] == [False, False, True] * 5


@every_scenario
def test_each_training_sample_belongs_to_one_client_in_a_task(table):
    s = stream(table)
    for task in range(s.tasks):
        ids = np.concatenate([s.data(c, task).ids for c in range(s.clients)])
        assert len(np.unique(ids)) == len(ids)
        in_task = np.isin(s.source.y_train.numpy(), s.labels(task))
        assert np.array_equal(np.sort(ids) - task * 1438, np.flatnonzero(in_task))


@every_scenario
def test_ids_are_unique_over_a_clients_life(table):
    s = stream(table)
    for client in range(s.clients):
        ids = np.concatenate([s.data(client, task).ids for task in range(s.tasks)])
        assert ids.dtype == np.int64
        assert len(np.unique(ids)) == len(ids)


@every_scenario
def test_labels_are_those_of_the_source_and_of_the_task(table):
    s = stream(table)
    for task in range(s.tasks):
        data = s.data(1, task)
        assert torch.equal(data.y, s.source.y_train[torch.from_numpy(data.ids - task * 1438)])
        assert set(data.y.tolist()) <= set(s.labels(task))
        assert set(s.test(task).y.tolist()) == set(s.labels(task))
        assert s.labels(task) == tuple(sorted(s.labels(task)))


@every_scenario
def test_the_stream_depends_on_its_seed_alone(table):
    torch.manual_seed(1)
    np.random.seed(1)
    one = stream(table)
    expected = [one.data(c, t).x for t in range(5) for c in range(4)]
    torch.manual_seed(2)
    np.random.seed(2)
    two = stream(table, seed=99)
    again = build({**SHARED, **table, "seed": 0}, 99, 3)  # the stream's own seed wins over the run's
    got = [again.data(c, t).x for t in reversed(range(5)) for c in reversed(range(4))][::-1]
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert two.describe()["who_got_what"] != one.describe()["who_got_what"]


@every_scenario
def test_rounds_and_participation_do_not_change_the_data(table):
    a, b = stream(table), stream(table, rounds_per_task=7, participation=0.5)
    assert torch.equal(a.data(2, 3).x, b.data(2, 3).x)


@every_scenario
def test_describe_is_json_with_who_got_what(table):
    facts = stream(table).describe()
    json.dumps(facts)
    reports = facts["who_got_what"]
    assert len(reports) == (1 if table["scenario"] == "domain-incremental" else 5)
    assert sum(sum(map(sum, r["table"])) for r in reports) == 1438
    assert facts["samples"] == {"train": 1438, "validation": 0, "test": 359}
    assert facts["partition"] == {"kind": "iid"}


@every_scenario
def test_validation_comes_out_of_training_never_out_of_test(table):
    s = stream(table, validation=0.25)
    size = len(s.source.x_train)
    for task in range(s.tasks):
        held = s.test(task, "validation")
        trained = np.concatenate([s.data(c, task).ids for c in range(4)])
        assert not set(held.ids) & set(trained)
        in_task = np.isin(s.source.y_train.numpy(), s.labels(task)).sum()
        assert len(held) + len(trained) == in_task
        assert len(held) == pytest.approx(0.25 * in_task, abs=len(s.labels(task)))
        base = s.source.x_train[torch.from_numpy(held.ids - task * size)]
        assert torch.equal(held.x, s.view(base, task))
        assert torch.equal(s.test(task).x, stream(table).test(task).x)


def test_validation_that_was_not_held_out_is_refused():
    with pytest.raises(ValueError, match="stream.validation: no validation split was held out"):
        stream(TABLES[0]).test(0, "validation")
    with pytest.raises(ValueError, match="'train' is not one of the allowed values: test, validation"):
        stream(TABLES[0]).test(0, "train")


@every_scenario
def test_scale_and_caps_shrink_every_class_alike(table):
    s = build({**SHARED, **table}, 0, 2, scale=0.5)
    assert s.describe()["samples"] == {"train": 719, "validation": 0, "test": 200}  # 20 of a class
    share = np.array(s.describe()["who_got_what"][0]["samples_per_class"])
    full = np.bincount(s.source.y_train.numpy())[list(s.labels(0))]
    assert np.abs(share - full / 2).max() <= 1
    capped = stream(table, max_train=100, max_test=50)
    assert capped.describe()["samples"] == {"train": 100, "validation": 0, "test": 50}


def participants(seed, index, clients, ratio):
    return Attendance(clients, ratio, seed).chosen(index)[0]


@given(st.integers(1, 60), st.floats(0.001, 1.0), st.integers(0, 10_000), st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_participants_are_so_many_distinct_clients_ascending(clients, ratio, index, seed):
    chosen = participants(seed, index, clients, ratio)
    assert len(chosen) == max(1, round(ratio * clients))
    assert list(chosen) == sorted(set(chosen))
    assert set(chosen) <= set(range(clients))
    assert chosen == participants(seed, index, clients, ratio)


def test_participation_of_the_papers():
    assert len(participants(0, 0, 50, 0.1)) == 5
    assert len(participants(0, 0, 100, 0.1)) == 10
    assert participants(0, 3, 10, 1.0) == tuple(range(10))
    assert len(participants(0, 0, 3, 0.01)) == 1


def test_participation_is_uniform_and_changes_from_round_to_round():
    rounds = [participants(5, i, 10, 0.3) for i in range(3000)]
    times = np.bincount(np.concatenate(rounds), minlength=10)
    assert ((times - 900) ** 2 / 900).sum() < 27.9  # chi-square, 9 degrees of freedom, 0.001
    assert len(set(rounds)) > 100


def test_generators_are_named_by_seed_purpose_and_keys():
    def draw(*name):
        return generator(*name).integers(2**60)

    names = [(0, "angle", 0), (0, "angle", 1), (1, "angle", 0), (0, "partition", 0), (0, "angle")]
    assert len({int(draw(*name)) for name in names}) == 5
    assert draw(0, "angle", 0) == draw(0, "angle", 0)
    # The same on every machine and in every version: streams of published runs must stay what they were.
    assert generator(0, "angle", 0).uniform(0, 180) == 35.047814511994254


@every_scenario
def test_positions_outside_the_stream_are_refused(table):
    s = stream(table)
    for ask in (
        lambda: s.round(15),
        lambda: s.round(-1),
        lambda: s.data(4, 0),
        lambda: s.data(-1, 0),
        lambda: s.data(0, 5),
        lambda: s.test(5),
        lambda: s.labels(5),
        lambda: s.labels(-1),
    ):
        with pytest.raises(IndexError, match=r"is not within 0\.\."):
            ask()


def test_a_client_may_have_no_data():
    s = stream(TABLES[2], clients=12, partition={"kind": "dirichlet", "alpha": 0.02, "min_samples": 0})
    sizes = [len(s.data(c, 0)) for c in range(12)]
    assert min(sizes) == 0
    assert s.data(int(np.argmin(sizes)), 0).x.shape == (0, 1, 8, 8)


def test_data_is_made_once_and_kept_within_bounds():
    s = stream(TABLES[0])
    assert s.data(0, 0) is s.data(0, 0)
    one = s.data(0, 0)
    size = one.x.nbytes + one.y.nbytes + one.ids.nbytes
    cache = DataCache(limit=2 * size)
    made = []

    def make(key):
        return lambda: made.append(key) or one

    for key in (1, 2, 1, 3, 1, 2):
        cache.get(key, make(key))
    assert made == [1, 2, 3, 2]  # 2 was the oldest when 3 came, 1 had been asked for since
    assert cache.bytes <= cache.limit
    small = DataCache(limit=1)
    assert small.get("large", make("large")) is small.get("large", make("large"))


def test_inputs_scale_and_normalise_as_asked():
    x = torch.tensor([0, 255], dtype=torch.uint8).reshape(2, 1, 1, 1).expand(2, 1, 8, 8)
    for normalise, expected in (
        ("none", [0.0, 1.0]),
        ("half", [-1.0, 1.0]),
        ({"mean": 0.25, "std": [0.5]}, [-0.5, 1.5]),
    ):
        s = stream(TABLES[0], normalise=normalise)
        assert s.inputs(x)[:, 0, 0, 0].tolist() == pytest.approx(expected)
        assert s.describe()["normalise"] == normalise
    assert stream(TABLES[0]).describe()["normalise"] == "none"


def test_cifar_is_normalised_as_in_the_papers_code_by_default():
    x, y = np.full((20, 32, 32, 3), 255, np.uint8), np.arange(20) % 10
    arrays = (x, y, x, y)

    def white(name, **options):
        s = from_arrays(*arrays, scenario="class-incremental", name=name, clients=2, **options)
        return s.inputs(s.test(0).x)[0, :, 0, 0].tolist()

    assert white("cifar10") == pytest.approx([1.0, 1.0, 1.0])
    by_hand = [(1 - 0.5071) / 0.2673, (1 - 0.4865) / 0.2564, (1 - 0.4409) / 0.2762]
    assert white("cifar100") == pytest.approx(by_hand)
    assert white("cifar10", normalise="cifar100") == pytest.approx(by_hand)
    assert white("cifar100", normalise="none") == pytest.approx([1.0, 1.0, 1.0])


def test_augmentation_is_drawn_from_the_given_generator_only_when_asked_for():
    rng = np.random.default_rng(0)
    x = stream(TABLES[2]).test(0).x[:5]
    plain = stream(TABLES[2])
    assert plain.draw_augmentation(rng, 5) is None
    s = stream(TABLES[2], augment="crop-flip")
    draws = s.draw_augmentation(np.random.default_rng(3), 5)
    assert np.array_equal(draws, s.draw_augmentation(np.random.default_rng(3), 5))
    assert s.augment(x, torch.from_numpy(draws)).shape == x.shape
    assert torch.equal(s.augment(x, torch.tensor([[4, 4, 0]] * 5)), x)
    assert torch.equal(plain.augment(x, torch.from_numpy(draws)), x)


def test_brightness_is_drawn_beside_crop_and_flip():
    x = stream(TABLES[2]).test(0).x[:5]
    s, plain = (stream(TABLES[2], augment=augment) for augment in ("crop-flip-brightness", "crop-flip"))
    draws = s.draw_augmentation(np.random.default_rng(3), 5)
    assert draws.shape == (5, 4) and (s.colour_draws, plain.colour_draws) == (1, 0)
    bright = torch.tensor([[4, 4, 0, 16191]] * 5)  # 1 + 63/255, to the step
    by_hand = (x.double() * (1 + 16191 / 65536)).clamp(0, 255).to(torch.uint8)
    assert torch.equal(s.augment(x, bright), by_hand)
    draws[:, 3] = 0
    assert torch.equal(s.augment(x, torch.from_numpy(draws)), plain.augment(x, torch.from_numpy(draws[:, :3])))


def test_images_can_be_brought_to_another_format():
    s = stream(TABLES[0], image_size=28, channels=3)
    assert s.input_shape == (3, 28, 28)
    assert s.data(0, 0).x.shape[1:] == (3, 28, 28)
    assert s.data(0, 0).x.dtype == torch.uint8


def test_a_large_population_is_summed_up():
    x, y = np.zeros((30_000, 4), np.float32), np.arange(30_000) % 10
    s = from_arrays(
        *(x, y, x[:10], y[:10]),
        scenario="domain-incremental",
        transform="permute",
        clients=10_000,
        partition={"kind": "shards", "per_client": 2},
        participation=0.001,
    )
    assert len(json.dumps(s.describe())) < 4000
    assert len(s.round(0).participants) == 10
    assert len(s.data(9_999, 4)) in (2, 3, 4)


def test_a_copy_of_a_stream_is_the_same_stream():
    s = stream(TABLES[0])
    twin = copy.deepcopy(s)
    assert torch.equal(twin.data(1, 2).x, s.data(1, 2).x)


def test_listings_have_one_line_each():
    incremental = {"domain-incremental", "by-column", "class-incremental", "task-incremental", "multi-domain"}
    assert set(SCENARIOS) == {*incremental, "blurry", "task-pool", "periods", "driving", "language", "own"}
    assert {"iid", "shards", "exact-labels", "dirichlet", "pathological"} < set(PARTITIONS)
    assert all(
        text and "\n" not in text for text in (*(about for _, about in SCENARIOS.values()), *PARTITIONS.values())
    )


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 50))
@settings(deadline=None, max_examples=15)
def test_any_small_shape_covers_the_training_set(tasks, clients, seed):
    s = build({"dataset": "digits", "scenario": "class-incremental", "tasks": tasks, "clients": clients}, seed, 1)
    total = sum(len(s.data(c, t)) for t in range(tasks) for c in range(clients))
    assert total == 1438
