"""FedLwF-2T (Usmanova et al., 2021): the objective and its two teachers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from everfed.core.context import TrainOptions
from everfed.core.data import minibatches
from everfed.core.message import Model
from everfed.core.optimizer import Optimizer
from everfed.core.trainer import Fitted
from everfed.core.tree import clone, equal, tensor_bytes
from everfed.methods import registry as methods
from everfed.methods.common.teacher import soft_cross_entropy
from tests.support.rehearsal_free import ClassToy
from tests.support.toy import Bench, Norm, Toy


def two_teachers(**options: Any) -> dict[str, dict[str, Any]]:
    return {"fedlwf2t": options}


def step_bench(stream: Toy | None = None, **options: Any) -> Bench:
    train = TrainOptions(1, 12, Optimizer(lr=0.1))
    return Bench("fedlwf2t", two_teachers(**options), stream=stream or Toy(), train=train)


def one_step(bench: Bench, model: Model, teacher: Model | None, received: Model | None = None) -> Fitted:
    """One full-batch step of client 0 on the second task."""
    ctx, received = bench.context(round_index=2), received or model
    own = {"teacher": teacher, "host": {"teacher_task": 0}} if teacher else {}
    state, parts = {"client": {}, "fedlwf2t": own}, bench.build_method().parts
    return ctx.train.fit(ctx, parts, model, received["params"], state, {"model": received}, bench.stream.data(0, 1))


def other(model: Model, factor: float = 1.4) -> Model:
    return {**model, "params": model["params"] * factor}


# what it reduces to --------------------------------------------------------------------------------------------------
def test_the_first_task_is_fedavg_to_the_bit() -> None:
    bench = Bench("fedavg", module=Norm)
    assert equal(bench.run(rounds=2).state.model, bench.change(method="fedlwf2t").run(rounds=2).state.model)


def test_labels_alone_are_fedavg_in_all_tasks() -> None:
    bench = Bench("fedavg")
    alone = bench.change(method="fedlwf2t", options=two_teachers(alpha=1.0, beta=0.0)).run()
    assert equal(bench.run().state.model, alone.state.model)
    assert not torch.equal(bench.run().params, bench.change(method="fedlwf2t").run().params)


# the server's teacher ------------------------------------------------------------------------------------------------
def test_the_server_teacher_has_no_gradient_at_the_first_step_of_a_round() -> None:
    """alpha = 0 and no own teacher: the loss is the server's term alone, and the model does not move."""
    bench = step_bench(alpha=0.0, beta=0.0)
    model = bench.model()
    assert torch.allclose(one_step(bench, model, None).model["params"], model["params"], atol=1e-7)
    assert not torch.allclose(one_step(bench, model, None, other(model)).model["params"], model["params"], atol=1e-4)


# teachers stay as they are -------------------------------------------------------------------------------------------
def test_training_changes_neither_teacher() -> None:
    bench = step_bench().change(module=Norm)
    model, teacher = bench.model(), other(bench.model())
    received = other(bench.model(), 0.8)
    before = clone({"teacher": teacher, "received": received})
    one_step(bench, model, teacher, received)
    assert equal(before, {"teacher": teacher, "received": received})


def test_the_own_teacher_is_the_last_model_of_the_task_before() -> None:
    stream = Toy(tasks=3, rounds_per_task=2, cohorts={1: (0, 2)})
    bench = Bench("fedlwf2t", stream=stream)
    latest = bench.run(rounds=1).clients[1]["fedlwf2t"]["latest"]  # client 1 sat out round 1
    for rounds in (3, 4):
        own = bench.run(rounds=rounds).clients[1]["fedlwf2t"]
        assert equal(own["teacher"], latest) and not equal(own["latest"], latest)


# the loss ------------------------------------------------------------------------------------------------------------
def test_the_loss_of_equal_outputs_is_the_teachers_entropy() -> None:
    logits = torch.tensor([[2.0, 0.0, 0.0]])
    assert soft_cross_entropy(logits, logits, 2.0).item() == pytest.approx(0.975328, abs=1e-6)


@given(seed=st.integers(0, 1000), temperature=st.floats(0.2, 20.0))
def test_the_loss_is_at_least_the_teachers_entropy(seed: int, temperature: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    student, teacher = 3 * torch.randn(4, 5, generator=rng), 3 * torch.randn(4, 5, generator=rng)
    entropy = soft_cross_entropy(teacher, teacher, temperature)
    assert soft_cross_entropy(student, teacher, temperature) >= entropy - 1e-6


def test_the_objective_in_full() -> None:
    bench, alpha, beta = step_bench(alpha=0.2, beta=0.5), 0.2, 0.5
    model, teacher, received = bench.model(), other(bench.model()), other(bench.model(), 0.7)
    trainer, data = bench.trainer(), bench.stream.data(0, 1)
    z, z_own, z_server = (trainer.outputs(m, data.x) for m in (model, teacher, received))
    labels = torch.nn.functional.cross_entropy(z, data.y)
    expected = alpha * labels + beta * soft_cross_entropy(z, z_own, 2.0) + 0.3 * soft_cross_entropy(z, z_server, 2.0)
    assert one_step(bench, model, teacher, received).loss.item() == pytest.approx(expected.item(), abs=1e-6)


# a missing teacher ---------------------------------------------------------------------------------------------------
def test_a_missing_teacher_gives_its_weight_to_the_server_and_is_counted() -> None:
    bench = step_bench(alpha=0.2, beta=0.5)
    model, received = bench.model(), other(bench.model(), 0.7)
    data = bench.stream.data(0, 1)
    z, z_server = (bench.trainer().outputs(m, data.x) for m in (model, received))
    expected = 0.2 * torch.nn.functional.cross_entropy(z, data.y) + 0.8 * soft_cross_entropy(z, z_server, 2.0)
    assert one_step(bench, model, None, received).loss.item() == pytest.approx(expected.item(), abs=1e-6)

    stream = Toy(cohorts={0: (0,), 1: (0,)})  # clients 1 and 2 never took part in the first task
    outcome = Bench("fedlwf2t", stream=stream).run()
    assert torch.isfinite(outcome.params).all()
    assert outcome.state.server["fedlwf2t"]["missing"] == 4.0  # two clients, two rounds


# which classes -------------------------------------------------------------------------------------------------------
def rows_moved(bench: Bench, fitted: Fitted, start: Tensor) -> Tensor:
    return bench.layout().param("head.weight").view(fitted.model["params"] - start)


def test_the_own_teacher_does_not_cover_new_classes() -> None:
    bench = step_bench(ClassToy(), alpha=0.0, beta=1.0)
    model = bench.model()
    moved = rows_moved(bench, one_step(bench, model, other(model)), model["params"])
    assert moved[2:].abs().max() == 0 and moved[:2].abs().max() > 0


def test_with_all_outputs_it_covers_them() -> None:
    bench = step_bench(ClassToy(), alpha=0.0, beta=1.0, outputs="all")
    model = bench.model()
    assert rows_moved(bench, one_step(bench, model, other(model)), model["params"])[2:].abs().max() > 0


def test_an_older_teacher_covers_only_the_classes_it_knew() -> None:
    bench = Bench("fedlwf2t", stream=ClassToy(tasks=3, classes=6, cohorts={2: (0,), 3: (0,)}))
    part = next(p for p in bench.build_method().parts if p.name == "fedlwf2t")
    client = bench.client("fedlwf2t", bench.run(rounds=4).clients[1], 1, round_index=4)
    part.receive(client)
    part.plan(client, minibatches(client.data.ids, 1, 5, client.rng("order")))
    assert client.state["own_classes"].nonzero().flatten().tolist() == [0, 1]
    assert client.state["classes"].nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 5]


# high temperatures ---------------------------------------------------------------------------------------------------
def test_at_a_high_temperature_the_gradient_is_the_centred_difference() -> None:
    rng = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(1, 5, generator=rng, dtype=torch.float64), torch.randn(1, 5, generator=rng).double()
    student.requires_grad_()
    temperature = 1e4
    (found,) = torch.autograd.grad(soft_cross_entropy(student, teacher, temperature), student)
    gap = student.detach() - teacher
    assert torch.allclose(found * 5 * temperature**2, gap - gap.mean(), atol=1e-3)


# memory and traffic --------------------------------------------------------------------------------------------------
def test_a_client_keeps_its_own_teacher_while_it_is_not_sampled() -> None:
    stream = Toy(rounds_per_task=6, cohorts={i: (0, 2) for i in range(1, 11)})
    bench = Bench("fedlwf2t", stream=stream)
    kept = bench.run(rounds=1).clients[1]["fedlwf2t"]
    assert equal(kept, bench.run(rounds=10).clients[1]["fedlwf2t"])
    last = bench.run().clients
    assert equal(last[1]["fedlwf2t"]["teacher"], kept["latest"])
    assert not equal(last[1]["fedlwf2t"]["teacher"], last[0]["fedlwf2t"]["teacher"])


def test_two_models_at_most_on_a_client_and_nothing_more_on_the_wire() -> None:
    bench = Bench("fedlwf2t", stream=Toy(tasks=4))
    outcome = bench.run()
    for client in outcome.clients.values():
        assert tensor_bytes(client) == 2 * tensor_bytes(bench.model())
    plain = Bench("fedavg", stream=Toy(tasks=4)).run().state.traffic
    assert (outcome.state.traffic.up, outcome.state.traffic.down) == (plain.up, plain.down)


def test_local_statistics_are_the_server_teachers_too() -> None:
    train = TrainOptions(1, 5, Optimizer(lr=0.1), batchnorm="local")
    outcome = Bench("fedlwf2t", module=Norm, train=train).run()
    assert torch.isfinite(outcome.params).all()


@pytest.mark.parametrize(
    ("option", "value"), [("alpha", -0.1), ("beta", 0.9), ("temperature", 0.0), ("outputs", "some")]
)
def test_options_are_checked(option: str, value: Any) -> None:
    with pytest.raises(methods.MethodError, match=rf"method\.fedlwf2t\.{option} must be"):
        methods.build("fedlwf2t", two_teachers(**{option: value}))


def test_a_stream_that_hides_its_boundaries_is_refused() -> None:
    with pytest.raises(ValueError, match="must know when a task begins or ends"):
        methods.build("fedlwf2t").fit_stream(Toy(boundaries=False))
