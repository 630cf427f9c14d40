"""Methods whose replies are larger than 64 models, or hold large whole numbers, have room for them and for no more."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from everfed.core.context import Place
from everfed.federation.checking import expected_reply
from everfed.methods import registry as methods
from everfed.privacy.secure_client import SecureAggregation, secured
from tests.federation.loop import federated, loop_of
from tests.support.toy import Bench, Toy


@pytest.fixture(autouse=True)
def _no_wait_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


class Wide(nn.Module):
    """Frozen features in the hundreds, as of a pretrained network, and a small head."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.body = nn.Linear(16, 700).requires_grad_(False)
        self.head = nn.Linear(700, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.body(40 * x.flatten(1))))  # type: ignore[no-any-return]


STREAM = Toy(clients=3, tasks=1, rounds_per_task=1, samples=60)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ranpac", {"width": 1000, "penalty": 1.0}),
        ("ridge", {}),
        ("ccvr", {"covariance": "full", "per_class": 2, "epochs": 1}),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_an_honest_reply_is_taken(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    bench = Bench(name, {name: options}, stream=STREAM, module=Wide)
    outcome = federated(bench, loop_of(bench, tmp_path))
    assert not [event for event in outcome.events if event["event"] == "client"]
    assert torch.equal(outcome.params, bench.run().params)


def test_sums_under_secure_aggregation_have_the_same_room() -> None:
    bench = Bench(lambda: secured(methods.build("ranpac", {"ranpac": {"width": 5000}})), stream=STREAM, module=Wide)
    setup = bench.setup()
    part = setup.method.part("secure")
    assert isinstance(part, SecureAggregation)
    plain, wide = (part.largest_form(phase, setup.facts) for phase in ("train", "statistics"))
    assert wide - plain == 2 * (5000 * 4 + 5000 * 5001 // 2)


def test_a_reply_has_room_for_what_its_values_declare_and_no_more() -> None:
    bench = Bench("ranpac", {"ranpac": {"width": 1200}}, stream=STREAM, module=Wide)
    setup, model = bench.setup(), bench.model()
    phase = next(phase for phase in setup.method.own_phases if phase.name == "statistics")
    plain = expected_reply(setup, setup.method.train_phase(), Place(0, bench.stream.round(0)), model).limits.bytes
    wide = expected_reply(setup, phase, Place(0, bench.stream.round(0)), model).limits.bytes
    assert wide - plain == 8 * 2 * (1200 * 4 + 1200 * 1201 // 2)
