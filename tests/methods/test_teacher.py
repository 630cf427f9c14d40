"""The classes of a client's finished tasks, where every client has tasks of its own."""

from __future__ import annotations

import torch

from everfed.methods.common.teacher import classes_of, tasks_before
from tests.support.small_stream import small_stream
from tests.support.toy import Bench


def test_the_classes_are_the_clients_own_in_a_task_pool() -> None:
    stream = small_stream("task-pool", classes_per_task=2)
    bench = Bench("lwf", stream=stream)
    for client in range(4):
        handle = bench.client("lwf", number=client, round_index=8)
        own = sorted({*stream.labels_of(client, 0), *stream.labels_of(client, 1)})
        assert classes_of(handle, tasks_before(handle)).tolist() == own
    assert len({tuple(stream.labels_of(client, 0)) for client in range(4)}) > 1


def test_elsewhere_and_on_the_server_they_are_the_tasks() -> None:
    bench = Bench("lwf", stream=small_stream())
    assert classes_of(bench.client("lwf", number=1, round_index=8), range(2)).tolist() == [0, 1, 2, 3]
    pool = Bench("lwf", stream=small_stream("task-pool", classes_per_task=2))
    server = pool.server("lwf", round_index=8, phase="teacher")
    assert torch.equal(classes_of(server, range(1)), torch.tensor(pool.stream.labels(0)))
