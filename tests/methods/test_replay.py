"""Experience replay (Chaudhry et al., 2019): what is replayed when, and the loss of the joined batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from everfed.method import Data, Optimizer, TrainOptions
from tests.support.spy import Seen, spied
from tests.support.toy import Bench, Norm, Toy

ONE_EPOCH = TrainOptions(1, 5, Optimizer(lr=0.1))


def er(size: int = 8, batch: int = 32, **fields: Any) -> Bench:
    return Bench("er", {"memory": {"size": size}, "er": {"batch": batch}}, **fields)


def watched(bench: Bench, rounds: int | None = None) -> list[Seen]:
    log: list[Seen] = []
    bench.change(method=spied(bench.build_method(), log)).run(rounds=rounds)
    return log


def test_an_empty_buffer_is_fedavg_bit_for_bit() -> None:
    """The first step of a client's life has nothing to replay."""
    train = TrainOptions(1, 1000, Optimizer(lr=0.1))
    assert torch.equal(er(train=train).run(rounds=1).params, Bench(train=train).run(rounds=1).params)
    assert not torch.equal(er(train=train).run(rounds=2).params, Bench(train=train).run(rounds=2).params)


def test_a_buffer_of_no_rows_is_fedavg_bit_for_bit() -> None:
    assert torch.equal(er(size=0, module=Norm).run().params, Bench(module=Norm).run().params)


@pytest.mark.parametrize(
    ("size", "batch", "expected"), [(3, 32, [0, 3, 3]), (100, 4, [0, 4, 4]), (100, 32, [0, 5, 10])]
)
def test_how_many_are_replayed(size: int, batch: int, expected: list[int]) -> None:
    """min(b_r, what is stored before this step): minibatches of 5, 5 and 2."""
    log = watched(er(size, batch, train=ONE_EPOCH, stream=Toy(clients=1)), rounds=1)
    assert [len(seen.batches["er/rows"][1]) if seen.batches else 0 for seen in log] == expected


def test_samples_are_not_replayed_in_the_step_that_first_offers_them() -> None:
    for seen in watched(er(100, 100, train=ONE_EPOCH), rounds=1):
        current = {tuple(x.flatten().tolist()) for x in seen.x}
        replayed = {tuple(x.flatten().tolist()) for x in seen.batches["er/rows"][0]} if seen.batches else set()
        assert not current & replayed


def test_replayed_samples_are_different_ones() -> None:
    for seen in watched(er(10, 6)):
        if seen.batches:
            x = seen.batches["er/rows"][0].flatten(1)
            assert len(torch.unique(x, dim=0)) == len(x)


def test_the_loss_is_the_mean_over_all_samples_together() -> None:
    """The gradient of every step is that of the mean cross-entropy over the b + b_r samples."""
    bench = er(8, 3)
    trainer, layout = bench.trainer(), bench.layout()
    for seen in watched(bench, rounds=2):
        x, y = seen.x, seen.y
        if seen.batches:
            x, y = torch.cat([x, seen.batches["er/rows"][0]]), torch.cat([y, seen.batches["er/rows"][1]])
        trainer.replica.params.copy_(seen.params)
        loss = functional.cross_entropy(trainer.forward(x), y)
        grads = torch.autograd.grad(loss, trainer.replica.trainable)
        assert torch.allclose(layout.flatten_gradient(grads), seen.gradient, rtol=1e-4, atol=1e-6)


def test_one_forward_for_all() -> None:
    """Joined samples share BatchNorm's statistics: one forward per step, 2 epochs of 3 steps."""
    assert er(module=Norm, stream=Toy(clients=1)).run(rounds=1).state.model["counters"].tolist() == [6]


def test_one_stored_class_trains() -> None:
    outcome = er(stream=Toy(only={0: (1,), 1: (1,), 2: (1,)})).run()
    assert torch.isfinite(outcome.params).all()
    assert set(outcome.clients[0]["memory"]["y"][:8].tolist()) == {1}


def test_earlier_tasks_are_replayed() -> None:
    bench = er(12, 12)
    old = {tuple(x.flatten().tolist()) for x in bench.stream.data(0, 0).x}
    later = [seen for seen in watched(bench) if seen.client == 0 and seen.round == 3]
    assert any(tuple(x.flatten().tolist()) in old for seen in later for x in seen.batches["er/rows"][0])


def test_a_union_holds_every_sample_once() -> None:
    """Samples 0 to 11 are current; the buffer holds 10, 11 (current, too) and 50."""
    bench = Bench("er", {"er": {"mode": "union"}})
    data = bench.stream.data(0, 0)
    kept = Data.union([data.take(np.array([10, 11])), Data(data.x[:1], data.y[:1], np.array([50]))])
    ids = torch.tensor([10, 11, 50, -1])
    held = {"memory": {"x": kept.x, "y": kept.y, "host": {"ids": ids, "stored": 3}}}
    client = bench.client("er", held, data=data)
    bench.build_method().part("er").receive(client)
    found = client.data
    assert found.ids.tolist() == [*range(12), 50]
    assert torch.equal(found.x[12], data.x[0]) and torch.equal(found.y[:12], data.y)
