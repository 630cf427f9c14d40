"""FL+LwF: learning without forgetting (Li and Hoiem, 2016) under federation, as in the FedSSI paper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from everfed.core.context import TrainOptions
from everfed.core.message import Model
from everfed.core.optimizer import Optimizer
from everfed.core.trainer import Fitted
from everfed.core.tree import clone, equal, tensor_bytes
from everfed.methods import registry as methods
from everfed.methods.common.teacher import divergence
from tests.support.rehearsal_free import ClassToy
from tests.support.toy import Bench, Norm, Toy


def lwf(**options: Any) -> dict[str, dict[str, Any]]:
    return {"lwf": options}


def outputs(rows: int, columns: int, seed: int) -> Tensor:
    return 3 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def one_step(bench: Bench, model: Model, teacher: Model | None) -> Fitted:
    """One full-batch step of client 0 on the second task."""
    ctx = bench.context(round_index=2)
    message = {"lwf": {"teacher": teacher}} if teacher else {}
    parts = bench.build_method().parts
    return ctx.train.fit(ctx, parts, model, model["params"], {"client": {}}, message, bench.stream.data(0, 1))


def step_bench(stream: Toy | None = None, **options: Any) -> Bench:
    return Bench("lwf", lwf(**options), stream=stream or Toy(), train=TrainOptions(1, 12, Optimizer(lr=0.1)))


# the first task ------------------------------------------------------------------------------------------------------
def test_the_first_task_is_fedavg() -> None:
    bench = Bench("fedavg")
    assert equal(bench.run(rounds=2).state.model, bench.change(method="lwf").run(rounds=2).state.model)


# the term ------------------------------------------------------------------------------------------------------------
def test_a_student_that_equals_its_teacher_is_left_alone() -> None:
    bench = step_bench(weight=5.0)
    model = bench.model()
    alone, taught = one_step(bench, model, None), one_step(bench, model, model)
    assert taught.loss.item() == pytest.approx(alone.loss.item(), abs=1e-6)
    assert torch.allclose(alone.model["params"], taught.model["params"], atol=1e-7)


def test_the_term_is_beta_tau_squared_kl() -> None:
    bench, beta, tau = step_bench(weight=0.7, temperature=3.0), 0.7, 3.0
    model, teacher = bench.model(), {**bench.model(), "params": bench.model()["params"] * 1.5}
    trainer, x = bench.trainer(), bench.stream.data(0, 1).x
    p, q = ((trainer.outputs(m, x) / tau).softmax(1).double() for m in (teacher, model))
    expected = beta * tau**2 * (p * (p / q).log()).sum(1).mean()
    gained = one_step(bench, model, teacher).loss - one_step(bench, model, None).loss
    assert gained.item() == pytest.approx(expected.item(), abs=1e-6)


# the divergence ------------------------------------------------------------------------------------------------------
@given(seed=st.integers(0, 1000), temperature=st.floats(0.1, 20.0))
def test_the_divergence_is_never_negative(seed: int, temperature: float) -> None:
    student, teacher = outputs(5, 4, seed), outputs(5, 4, seed + 5000)
    assert divergence(student, teacher, temperature) >= -1e-6
    assert divergence(student, student, temperature).abs() < 1e-6


@given(seed=st.integers(0, 1000), shift=st.floats(-20.0, 20.0))
def test_a_constant_on_all_of_the_teachers_logits_changes_nothing(seed: int, shift: float) -> None:
    student, teacher = outputs(5, 4, seed), outputs(5, 4, seed + 5000)
    assert torch.allclose(divergence(student, teacher, 2.0), divergence(student, teacher + shift, 2.0), atol=1e-5)


# which classes -------------------------------------------------------------------------------------------------------
def test_the_logits_of_new_classes_do_not_enter() -> None:
    bench = step_bench(ClassToy(), weight=1.0)
    model = bench.model()
    teacher = {**model, "params": model["params"] * 1.3}
    changed = clone(teacher)
    bench.layout().param("head.weight").view(changed["params"])[2:] += 7.0
    assert torch.equal(one_step(bench, model, teacher).model["params"], one_step(bench, model, changed).model["params"])


def test_all_classes_are_distilled_when_tasks_share_them() -> None:
    outcome = Bench("lwf").run()
    assert outcome.clients[0]["lwf"]["old"].tolist() == [True] * 4
    assert Bench("lwf", stream=ClassToy()).run().clients[0]["lwf"]["old"].tolist() == [True, True, False, False]


# without distillation ------------------------------------------------------------------------------------------------
def test_no_distillation_is_fedavg() -> None:
    bench = Bench("fedavg")
    assert equal(bench.run().state.model, bench.change(method="lwf", options=lwf(weight=0.0)).run().state.model)
    assert not torch.equal(bench.run().params, bench.change(method="lwf").run().params)


# the teacher ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("module", [None, Norm])
def test_the_teacher_never_changes_during_a_task(module: Any) -> None:
    bench = Bench("lwf", stream=Toy(rounds_per_task=3), module=module)
    end = bench.run(rounds=3).state.model
    for rounds in (4, 5, 6):
        assert equal(bench.run(rounds=rounds).state.server["lwf"]["teacher"], end)


def test_teaching_leaves_the_students_batchnorm_statistics_as_training_alone_makes_them() -> None:
    bench = step_bench(weight=1.0).change(module=Norm)
    model = bench.model()
    alone, taught = one_step(bench, model, None), one_step(bench, model, {**model, "stats": model["stats"] + 3.0})
    assert torch.equal(alone.model["stats"], taught.model["stats"])
    assert torch.equal(alone.model["counters"], taught.model["counters"])
    assert not torch.equal(alone.model["params"], taught.model["params"])


# bytes and options ---------------------------------------------------------------------------------------------------
def test_the_teacher_reaches_each_client_once_per_task() -> None:
    bench = Bench("lwf", stream=Toy(tasks=3))
    traffic = bench.run().state.traffic.as_dict()["bytes_by_part"]
    assert traffic["lwf"] == {"up": 0, "down": 3 * 2 * tensor_bytes(bench.model())}
    assert (
        traffic["fedavg"]
        == Bench("fedavg", stream=Toy(tasks=3)).run().state.traffic.as_dict()["bytes_by_part"]["fedavg"]
    )


@pytest.mark.parametrize(("option", "value"), [("weight", -1.0), ("temperature", 0.0)])
def test_options_are_checked(option: str, value: Any) -> None:
    with pytest.raises(methods.MethodError, match=rf"method\.lwf\.{option} must be"):
        methods.build("lwf", lwf(**{option: value}))
