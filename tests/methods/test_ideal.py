"""Ideal: joint training on the client's own data of all tasks so far."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from everfed.method import CompositionError, Data, compose
from everfed.methods import registry as methods
from everfed.methods.aggregate.fedavg import FedAvg
from everfed.methods.replay.ideal import Ideal
from everfed.methods.replay.memory import Memory
from tests.support.spy import Seen, spied
from tests.support.toy import Bench, Norm, Toy


class Shifted(Toy):
    """The same base images in every task, each task brighter by 20."""

    def data(self, client: int, task: int) -> Data:
        base = super().data(client, 0)
        return Data(base.x + 20 * task, base.y, base.ids + 10_000 * task)


def seen_by(bench: Bench, client: int, round_index: int) -> Data:
    handle = bench.client("ideal", {}, client, round_index=round_index)
    bench.build_method().part("ideal").receive(handle)
    return handle.data


def test_the_first_task_is_fedavg_bit_for_bit_and_the_second_is_not() -> None:
    ideal, plain = Bench("ideal", module=Norm), Bench(module=Norm)
    assert torch.equal(ideal.run(rounds=2).params, plain.run(rounds=2).params)
    assert not torch.equal(ideal.run(rounds=3).params, plain.run(rounds=3).params)


def test_a_client_trains_on_the_disjoint_union_of_its_tasks() -> None:
    bench = Bench("ideal", stream=Toy(tasks=3, sizes={(1, 0): 5, (1, 1): 7, (1, 2): 9}))
    for task, expected in enumerate((5, 5 + 7, 5 + 7 + 9)):
        data = seen_by(bench, 1, 2 * task)
        assert len(data) == expected == len(set(data.ids.tolist()))
        parts = [bench.stream.data(1, t) for t in range(task + 1)]
        assert np.array_equal(np.sort(data.ids), np.sort(np.concatenate([part.ids for part in parts])))


def test_only_its_own_data() -> None:
    bench = Bench("ideal")
    data = seen_by(bench, 1, 2)
    own = {tuple(x.flatten().tolist()) for task in (0, 1) for x in bench.stream.data(1, task).x}
    assert {tuple(x.flatten().tolist()) for x in data.x} == own


def test_the_same_image_appears_once_per_transformation() -> None:
    bench = Bench("ideal", stream=Shifted(tasks=3))
    data = seen_by(bench, 0, 4)
    base = bench.stream.data(0, 0).x
    for image in base:
        copies = {k for k in range(3) for x in data.x if torch.equal(x, image + 20 * k)}
        assert copies == {0, 1, 2}


def test_every_sample_of_every_task_is_trained_on() -> None:
    log: list[Seen] = []
    bench = Bench("ideal", stream=Toy(clients=1))
    outcome = bench.change(method=spied(bench.build_method(), log)).run()
    images = {r: {tuple(x.flatten().tolist()) for seen in log if seen.round == r for x in seen.x} for r in range(4)}
    assert [len(images[r]) for r in range(4)] == [12, 12, 24, 24]
    assert outcome.state.samples == 2 * (12 + 12 + 24 + 24)


def test_it_keeps_no_buffer() -> None:
    assert [part.name for part in methods.build("ideal").parts] == ["fedavg", "ideal"]
    assert all("memory" not in state for state in Bench("ideal").run().clients.values())
    with pytest.raises(CompositionError, match="names no part"):
        methods.build("ideal", {"memory": {"size": 10}})


def test_a_buffer_beside_it_changes_nothing() -> None:
    plain = Bench("ideal").run().params
    assert torch.equal(plain, Bench(lambda: compose(FedAvg(), Ideal(), Memory(size=5))).run().params)


def test_a_client_whose_current_task_is_empty_still_trains_on_its_past() -> None:
    outcome = Bench("ideal", stream=Toy(clients=1, sizes={(0, 1): 0})).run()
    assert outcome.state.samples == 2 * 4 * 12
