"""Scoring on a GPU waits for the device once, however many tasks there are."""

from __future__ import annotations

import warnings

import pytest
import torch

from everfed.core.evaluate import EvalSpec, score_tasks
from everfed.core.stream import HeldOut
from everfed.core.trainer import Trainer
from tests.support.toy import Bench, Toy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_scoring_waits_for_the_device_once() -> None:
    case = Bench("fedavg", stream=Toy(tasks=4))
    setup = case.setup()
    trainer = Trainer(setup.stream, setup.facts.layout, case.build_module, "cuda")
    held_out, model, spec = HeldOut(setup.stream), trainer.replica.model(), EvalSpec((0, 1, 2, 3), 2)
    first = score_tasks(trainer, held_out, model, spec)  # the test sets cross to the device here
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            again = score_tasks(trainer, held_out, model, spec)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(first, again)
    assert len([one for one in found if "synchronizing" in str(one.message)]) == 1
