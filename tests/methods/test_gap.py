"""Gap: a part that only measures. What it reports is counted by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from everfed.core.method import Method
from everfed.methods import registry as methods
from everfed.methods.project.gap import Gap
from tests.support.toy import Bench, Outcome, Toy

PARTS = ["fedavg", "everfed.methods.project.gap:Gap"]


def measured(stream: Toy | None = None) -> Bench:
    def build() -> Method:
        return methods.build(parts=PARTS)

    return Bench(build, stream=stream or Toy())


def reported(outcome: Outcome) -> list[dict[str, float]]:
    return [e for e in outcome.events if e["event"] == "measure"]


def test_measuring_changes_nothing() -> None:
    assert torch.equal(measured().run().params, Bench("fedavg").run().params)
    assert [e["round"] for e in reported(measured().run())] == [0, 1, 2, 3]


def test_what_it_reports_is_right() -> None:
    """One client: its model is the shared one, so there is no gap; and the accuracy is that of the evaluation."""
    outcome = measured(Toy(clients=1)).run()
    events = reported(outcome)
    assert all(e["local_global_gap"] == 0.0 and e["local_accuracy"] == e["global_accuracy"] for e in events)
    samples, correct = outcome.state.rows[0][0][:2]
    assert events[1]["global_accuracy"] == pytest.approx(correct / samples)


def test_all_tasks_so_far_are_scored_where_that_is_asked_for() -> None:
    """One client, two tasks of two rounds: at the end as the evaluation of both tasks together."""
    parts = ["fedavg", {"part": "everfed.methods.project.gap:Gap", "seen": True}]
    outcome = Bench(lambda: methods.build(parts=parts), stream=Toy(clients=1)).run()
    rows = outcome.state.rows[1]
    assert len(rows) == 2
    assert reported(outcome)[-1]["local_accuracy"] == pytest.approx(
        sum(row[1] for row in rows) / sum(row[0] for row in rows)
    )


def test_local_models_are_scored_before_aggregation() -> None:
    stream = Toy(clients=2, tasks=1, rounds_per_task=1)
    event = reported(measured(stream).run())[0]
    test, right = stream.test(0), 0
    for client in range(2):
        alone = Bench(stream=Toy(clients=2, tasks=1, rounds_per_task=1, cohorts={0: (client,)}))
        model = alone.run().state.model
        right += int((alone.trainer().outputs(model, test.x).argmax(1) == test.y).sum())
    assert event["local_accuracy"] == pytest.approx(right / 80)
    assert event["local_global_gap"] == pytest.approx(event["local_accuracy"] - event["global_accuracy"])


def test_a_client_that_did_not_train_is_not_scored() -> None:
    nothing = Toy().data(0, 0).take(np.zeros(0, dtype=np.int64))
    assert Gap().score_shared(Bench().client("gap", data=nothing)) == {}


def test_it_costs_no_uplink() -> None:
    ours, plain = (b.run().state.traffic.as_dict() for b in (measured(), Bench("fedavg")))
    assert ours["bytes_up"] == plain["bytes_up"]
