"""DER and DER++ (Buzzega et al., 2020); that rows stay aligned is in the memory's tests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from everfed.core.trainer import Trainer
from everfed.method import Batch, Optimizer, TrainOptions
from everfed.methods.replay.der import DER, DERPlusPlus
from tests.support.spy import Seen, spied
from tests.support.toy import Bench, Norm, Toy


def der(name: str = "der", size: int = 8, **options: Any) -> Bench:
    return Bench(name, {"memory": {"size": size}, name: options})


def watched(bench: Bench, rounds: int | None = None) -> list[Seen]:
    log: list[Seen] = []
    bench.change(method=spied(bench.build_method(), log)).run(rounds=rounds)
    return log


@pytest.mark.parametrize(
    "bench",
    [der(weight=0.0), der("der++", weight=0.0, label_weight=0.0), der(size=0), der("der++", size=0)],
    ids=["alpha = 0", "alpha = beta = 0", "no rows", "no rows, labels"],
)
def test_strength_zero_is_fedavg_bit_for_bit(bench: Bench) -> None:
    """With dropout and BatchNorm in the network: nothing is forwarded, nothing is drawn."""
    assert torch.equal(bench.change(module=Norm).run().params, Bench(module=Norm).run().params)


@pytest.mark.parametrize("name", ["der", "der++"])
def test_an_empty_buffer_leaves_cross_entropy_alone(name: str) -> None:
    train = TrainOptions(1, 1000, Optimizer(lr=0.1))
    assert torch.equal(der(name).change(train=train).run(rounds=1).params, Bench(train=train).run(rounds=1).params)


def test_the_term_vanishes_where_outputs_have_not_moved() -> None:
    """lr = 0: every stored output equals the current one, so the reported loss is FedAvg's."""
    train = TrainOptions(2, 5, Optimizer(lr=0.0))
    losses = [
        [event["loss"] for event in bench.change(train=train).run().events if "loss" in event]
        for bench in (der(weight=100.0), Bench())
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    pushed = watched(der(weight=100.0).change(train=train))
    plain = watched(Bench(train=train))
    assert all(torch.allclose(a.gradient, b.gradient, atol=1e-5) for a, b in zip(pushed, plain, strict=True))


def test_stored_outputs_are_those_of_the_step_that_stored_them() -> None:
    """Train-mode outputs of the very forward pass that made the loss, detached."""
    bench = der(size=50).change(stream=Toy(clients=1, tasks=1), module=Norm)
    log: list[Seen] = []
    own = bench.change(method=spied(bench.build_method(), log)).run().clients[0]["memory"]
    assert not own["logits"].requires_grad and own["logits"].shape == (51, 4)
    first = {
        tuple(x.flatten().tolist()): output
        for seen in reversed(log)
        for x, output in zip(seen.x, seen.outputs, strict=True)
    }
    assert len(first) == 12
    for row in range(12):
        assert torch.equal(own["logits"][row], first[tuple(own["x"][row].flatten().tolist())])


def test_stored_outputs_do_not_change_later() -> None:
    bench = der(size=50).change(stream=Toy(clients=1, tasks=1, rounds_per_task=4))
    early, late = (outcome.clients[0]["memory"]["logits"] for outcome in bench.after(1, 4))
    assert torch.equal(early, late) and early[:12].abs().sum() > 0


@given(st.integers(1, 6), st.integers(1, 5), st.floats(0.1, 3))
def test_the_term_is_the_mean_over_batch_and_classes(m: int, classes: int, weight: float) -> None:
    generator = torch.Generator().manual_seed(m)
    h, z = (torch.randn(m, classes, generator=generator) for _ in range(2))
    batch = Batch(torch.zeros(m), torch.zeros(m), extra={"logits": z}, outputs=h)
    term = DER(weight).loss(SimpleNamespace(batches={"rows": batch}))  # type: ignore[arg-type]
    assert float(term) == pytest.approx(weight * float((h - z).square().sum()) / (m * classes), rel=1e-5)


def expected_gradient(trainer: Trainer, seen: Seen, alpha: float, beta: float, name: str) -> torch.Tensor:
    trainer.replica.params.copy_(seen.params)
    loss = functional.cross_entropy(trainer.forward(seen.x), seen.y)
    if f"{name}/rows" in seen.batches:
        x, _, extra = seen.batches[f"{name}/rows"]
        loss = loss + alpha * (trainer.forward(x) - extra["logits"]).square().mean()
    if f"{name}/labelled" in seen.batches:
        x, y, _ = seen.batches[f"{name}/labelled"]
        loss = loss + beta * functional.cross_entropy(trainer.forward(x), y)
    return trainer.replica.layout.flatten_gradient(torch.autograd.grad(loss, trainer.replica.trainable))


@pytest.mark.parametrize(
    ("name", "alpha", "beta"), [("der", 1.0, 0.0), ("der++", 0.1, 0.5), ("der++", 0.0, 1.0), ("der++", 2.0, 0.0)]
)
def test_the_gradient_is_that_of_the_published_loss(name: str, alpha: float, beta: float) -> None:
    """alpha = 0 and beta = 1 is CE + CE(replay)."""
    options = {"weight": alpha, "batch": 4, **({"label_weight": beta} if name == "der++" else {})}
    bench = der(name, **options)
    log, trainer = watched(bench, rounds=2), bench.trainer()
    assert any(seen.batches for seen in log)
    for seen in log:
        assert (f"{name}/rows" in seen.batches) == bool(alpha and len(seen.batches))
        expected = expected_gradient(trainer, seen, alpha, beta, name)
        assert torch.allclose(seen.gradient, expected, rtol=1e-4, atol=1e-6)


def test_the_second_draw_is_independent_of_the_first() -> None:
    log = [seen for seen in watched(der("der++", size=12, batch=4)) if len(seen.batches) == 2]
    same = [torch.equal(seen.batches["der++/rows"][0], seen.batches["der++/labelled"][0]) for seen in log]
    assert len(same) > 20 and sum(same) <= 2


def test_the_first_draw_of_both_methods_is_of_the_same_size() -> None:
    log = watched(der(size=12, batch=4), rounds=1)
    assert [len(seen.batches["der/rows"][1]) if seen.batches else 0 for seen in log if seen.client == 0] == [
        0,
        4,
        4,
        4,
        4,
        4,
    ]


def test_another_number_of_classes_is_an_error() -> None:
    batch = Batch(torch.zeros(3), torch.zeros(3), extra={"logits": torch.zeros(3, 4)}, outputs=torch.zeros(3, 5))
    with pytest.raises(RuntimeError, match="size"):
        DER().loss(SimpleNamespace(batches={"rows": batch}))  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "forwards"), [("der", 2), ("der++", 3)])
def test_replayed_samples_are_forwarded_on_their_own(name: str, forwards: int) -> None:
    """BatchNorm counts forwards: 6 steps, replay in all but the first."""
    model = der(name).change(module=Norm, stream=Toy(clients=1)).run(rounds=1).state.model
    assert model["counters"].tolist() == [6 + 5 * (forwards - 1)]


def test_the_term_pulls_the_current_outputs_towards_the_stored_ones() -> None:
    """d/dh of the mean of (h - z)^2 over 2 samples and 3 classes is 2 (h - z) / 6, with h = 1 and z = 0."""
    z, h = torch.zeros(2, 3), torch.ones(2, 3, requires_grad=True)
    batch = Batch(torch.zeros(2), torch.zeros(2), extra={"logits": z}, outputs=h)
    term = DERPlusPlus(weight=1.0, label_weight=0.0).loss(SimpleNamespace(batches={"rows": batch}))  # type: ignore[arg-type]
    term.backward()
    assert torch.allclose(batch.outputs.grad, torch.full((2, 3), 2 / 6))
