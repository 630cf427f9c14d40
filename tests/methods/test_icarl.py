"""iCaRL (Rebuffi et al., 2017) in a federation: the loss, the nearest mean of exemplars, the trained head."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from everfed.core.message import MODEL
from everfed.errors import CompositionError
from everfed.method import Optimizer, TrainOptions
from everfed.methods import registry as methods
from everfed.methods.common.layers import head_entries, head_inputs
from everfed.methods.replay.icarl import ICaRL
from everfed.methods.replay.memory import stored
from tests.support.phases import phase_of
from tests.support.rehearsal_free import ClassToy
from tests.support.toy import Bench, Outcome, Toy

POLICY = {"kind": "herding", "last": True}


def bench(train: TrainOptions | None = None, **options: Any) -> Bench:
    made = Bench("icarl", {"memory": {"size": 8, "policy": POLICY}, "icarl": options}, stream=ClassToy())
    return made if train is None else made.change(train=train)


def outputs_of(one: Bench, params: torch.Tensor, x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """(outputs, features) in float64."""
    module = one.build_module().double().eval()
    with torch.no_grad(), head_inputs(module) as seen:
        outputs = torch.func.functional_call(module, one.layout().named(params.double()), one.stream.inputs(x).double())
    return outputs.numpy(), seen[0].numpy()


# training ------------------------------------------------------------------------------------------------------------
def sigmoid(z: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-z))


def loss_from_the_paper(z: np.ndarray, y: np.ndarray, old: np.ndarray | None, known: int, seen: int) -> float:
    """Algorithm 3, sample by sample: distillation for the first `known` classes, labels for the others."""
    total = 0.0
    for i, label in enumerate(y):
        for c in range(seen):
            g = sigmoid(z[i, c])
            target = sigmoid(old[i, c]) if old is not None and c < known else float(c == label)
            total -= target * np.log(g) + (1 - target) * np.log(1 - g)
    return total / len(y) / seen


@pytest.mark.parametrize("task", [0, 1])
def test_a_step_follows_the_gradient_of_algorithm_3(task: int) -> None:
    """One step of one client on all its samples, against numerical derivatives of the loss in float64."""
    lr, one = 0.1, bench(train=TrainOptions(1, 1000, Optimizer(lr=0.1)))
    one = one.change(stream=ClassToy(tasks=2, clients=1))
    before = one.run(rounds=2 * task) if task else None
    start = one.model()["params"] if before is None else before.state.server["icarl"]["teacher"]["params"]
    state, store = (None, None) if before is None else (before.state, before.store)
    data = one.stream.data(0, task)
    x, y = data.x, data.y
    if before is not None:
        kept = stored(before.clients[0]["memory"])
        x, y = torch.cat([x, kept.x]), torch.cat([y, kept.y])
        assert set(kept.y.tolist()) == {0, 1}
    old = None if before is None else outputs_of(one, start, x)[0]
    after = one.run(rounds=2 * task + 1, state=state, store=store).params

    def loss(params: torch.Tensor) -> float:
        return loss_from_the_paper(outputs_of(one, params, x)[0], y.numpy(), old, 2, 2 * task + 2)

    rng, eps = np.random.default_rng(0), 1e-5
    for _ in range(4):  # along random directions
        direction = torch.from_numpy(rng.standard_normal(len(start)))
        slope = (loss(start.double() + eps * direction) - loss(start.double() - eps * direction)) / (2 * eps)
        moved = float((after.double() - start.double()) @ direction) / -lr
        assert moved == pytest.approx(slope, abs=2e-6)


# classification ------------------------------------------------------------------------------------------------------
def nearest_mean(one: Bench, outcome: Outcome, trained: torch.Tensor, x: torch.Tensor) -> np.ndarray:
    """Algorithm 1: argmin |phi(x) - mu_y| over the classes with exemplars, in numpy."""
    kept = [stored(state["memory"]) for state in outcome.clients.values()]
    phi = outputs_of(one, trained, torch.cat([data.x for data in kept]))[1]
    y = np.concatenate([data.y.numpy() for data in kept])
    phi /= np.linalg.norm(phi, axis=1, keepdims=True)
    means = {label: phi[y == label].mean(0) for label in np.unique(y)}
    labels = list(means)
    mu = np.stack([mean / np.linalg.norm(mean) for mean in means.values()])
    found = outputs_of(one, trained, x)[1]
    found /= np.linalg.norm(found, axis=1, keepdims=True)
    distances = np.linalg.norm(found[:, None] - mu[None], axis=2)
    return np.array(labels)[distances.argmin(1)]


def trained_params(one: Bench, outcome: Outcome) -> torch.Tensor:
    params = outcome.params.clone()
    for entry in head_entries(one.layout()):
        entry.view(params).copy_(outcome.state.server["icarl"]["head"][entry.name])
    return params


@pytest.mark.parametrize("rounds", [2, 4])
def test_the_shared_model_classifies_by_the_nearest_mean_of_exemplars(rounds: int) -> None:
    one = bench()
    outcome = one.run(rounds=rounds)
    x = torch.cat([one.stream.test(task).x for task in range(2)])
    outputs = outputs_of(one, outcome.params, x)[0]
    predicted = outputs.argmax(1)
    assert (predicted == nearest_mean(one, outcome, trained_params(one, outcome), x)).all()
    assert (outputs[:, rounds:] < -1e8).all()  # no class without exemplars


def test_training_never_sees_the_head_of_means() -> None:
    """The next task begins with the trained head: the run is that of the network's outputs, the last head aside."""
    one, plain = bench(), bench(classifier="outputs")
    assert torch.equal(one.run(rounds=3).params, plain.run(rounds=3).params)
    assert torch.equal(trained_params(one, one.run()), plain.run().params)
    assert not torch.equal(one.run().params, plain.run().params)


def test_the_teacher_has_the_trained_head() -> None:
    one, plain = bench(), bench(classifier="outputs")
    first, second = (run.run(rounds=2).state.server["icarl"]["teacher"] for run in (one, plain))
    assert torch.equal(first["params"], second["params"]) and first["known"].tolist() == [True, True, False, False]


def test_without_distillation_there_is_no_teacher() -> None:
    assert "teacher" not in bench(distillation=False).run(rounds=2).state.server["icarl"]
    assert not torch.equal(bench(distillation=False).run().params, bench().run().params)


def test_tasks_that_share_their_classes_distil_nothing() -> None:
    one = bench().change(stream=Toy())
    assert torch.equal(one.run().params, bench(distillation=False).change(stream=Toy()).run().params)


def test_no_exemplars_leave_the_model() -> None:
    one = bench()
    server = one.server("icarl", {MODEL: one.model()}, reduced={"sums": None})
    phase = phase_of(ICaRL(), "means")
    assert phase.update is not None
    phase.update(server)
    assert server.model is not None and torch.equal(server.model["params"], one.model()["params"])


def test_a_policy_that_keeps_nothing_of_the_last_task_is_refused() -> None:
    with pytest.raises(CompositionError, match="last = true"):
        methods.build("icarl", {"memory": {"policy": "herding"}})
    methods.build("icarl", {"memory": {"policy": "herding"}, "icarl": {"classifier": "outputs"}})
    methods.build("icarl", {"memory": {"policy": "reservoir"}})
    with pytest.raises(methods.MethodError):
        methods.build("fedgp+icarl")
