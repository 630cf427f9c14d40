"""FedSSI (ICML 2025), Eq. 2 to 6, against closed forms and its limits."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from everfed.core.context import Hidden, Place, TrainOptions
from everfed.core.optimizer import Optimizer
from everfed.core.phase import Phase
from everfed.core.tree import equal, tensor_bytes
from everfed.methods import registry as methods
from everfed.methods.regularise.fedssi import FedSSI, proximity
from everfed.methods.regularise.si import importance
from tests.support.rehearsal_free import ClassToy, Forgetful, PastIsGone, point, quadratic
from tests.support.toy import Bench, Given, Linear, Norm, Toy, mean_square


def fedssi(**options: Any) -> dict[str, dict[str, Any]]:
    return {"fedssi": options}


def surrogate(lam: float, lr: float, steps: int, start: float = 0.0, **options: Any) -> tuple[float, float]:
    """(v, s) after `steps` steps on L(v) = 0.5 (v - 1)^2 from w = start."""
    v, s = FedSSI(lam=lam, **options).train_surrogate(point(quadratic(lr, steps), start))
    return v.item(), s.item()


# q(lambda) -----------------------------------------------------------------------------------------------------------
def test_q() -> None:
    assert proximity(0.2) == pytest.approx(2.0)
    assert proximity(0.5) == 0.5
    assert proximity(0.8) == pytest.approx(0.125)


@pytest.mark.parametrize("lam", [0.0, 1.0, -0.1, 1.1, float("nan")])
def test_lambda_outside_the_open_interval_is_rejected(lam: float) -> None:
    with pytest.raises(methods.MethodError, match=r"method\.fedssi\.lam must be (positive|below 1)"):
        methods.build("fedssi", fedssi(lam=lam))


# the path of the surrogate (Eq. 5 and 6) -----------------------------------------------------------------------------
@pytest.mark.parametrize(("steps", "v"), [(1, 0.1), (2, 0.185), (3, 0.25725)])
def test_the_surrogates_path(steps: int, v: float) -> None:
    assert surrogate(0.5, 0.1, steps)[0] == pytest.approx(v, abs=1e-7)


def test_the_contribution_along_the_path_is_positive() -> None:
    assert surrogate(0.5, 0.1, 3)[1] == pytest.approx(0.23538375, abs=1e-7)


# its fixed point -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("lam", "v"), [(0.2, 1 / 3), (0.5, 2 / 3), (0.8, 8 / 9)])
def test_the_surrogates_fixed_point(lam: float, v: float) -> None:
    assert surrogate(lam, 0.2, 80)[0] == pytest.approx(v, rel=1e-5)


@pytest.mark.parametrize(
    ("lam", "steps", "drop", "omega"),
    [
        (0.2, 2500, 0.27778, 2.5),
        pytest.param(0.5, 5000, 0.44444, 1.0, marks=pytest.mark.slow),
        pytest.param(0.8, 7000, 0.49383, 0.625, marks=pytest.mark.slow),
    ],
)
def test_the_path_integral_is_the_drop_of_the_loss(lam: float, steps: int, drop: float, omega: float) -> None:
    v, s = surrogate(lam, 1e-3, steps)
    assert s == pytest.approx(drop, rel=1e-3)
    found = importance(torch.zeros(1), torch.tensor([s]), torch.tensor([v * v]), eps=0.0)
    assert found.item() == pytest.approx(omega, rel=2e-3)


def test_the_two_displacements_react_to_lambda_in_opposite_ways() -> None:
    found: dict[str, list[float]] = {}
    for displacement in ("global", "psm"):
        for lam in (0.2, 0.5, 0.8):
            client = point(quadratic(0.1, 200), 0.0, anchor=torch.tensor([-0.5]))
            FedSSI(lam=lam, displacement=displacement, eps=1e-6).consolidate(client)
            found.setdefault(displacement, []).append(client.state["omega"].item())
    assert found["global"] == sorted(found["global"])
    assert found["psm"] == sorted(found["psm"], reverse=True)


# lambda --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(3))
def test_monotone_in_lambda_on_a_strongly_convex_problem(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    x, w = torch.randn(30, 4, generator=rng), torch.randn(4, generator=rng)
    y = x @ torch.randn(4, generator=rng) + torch.randn(30, generator=rng)
    stream = Given(clients=1, tasks=2, rounds_per_task=1, classes=1, table={(0, 0): (x, y)}, objective=mean_square)
    bench = Bench("fedavg", stream=stream, module=Linear, train=TrainOptions(150, 30, Optimizer(lr=0.1)))
    client = bench.client("fedssi", phase="consolidate", model={**bench.model(), "params": w})
    distances, losses = [], []
    for lam in (0.05, 0.2, 0.5, 0.8, 0.99):
        v, _ = FedSSI(lam=lam).train_surrogate(client)
        distances.append((v - w).norm().item())
        losses.append(mean_square(x @ v.unsqueeze(1), y).item())
    assert all(a <= b + 1e-6 for a, b in itertools.pairwise(distances))
    assert all(a >= b - 1e-6 for a, b in itertools.pairwise(losses))


# importance and penalty (Eq. 2 and 3) --------------------------------------------------------------------------------
def test_omega_penalty_and_its_gradient_in_numbers() -> None:
    omega = importance(torch.zeros(1), torch.tensor([0.23538375]), torch.tensor([0.25]), eps=0.1)
    assert omega.item() == pytest.approx(0.672525, abs=1e-6)
    assert (omega * 0.2**2).item() == pytest.approx(0.026901, abs=1e-6)


def test_the_penalty_enters_a_step_with_the_factor_two() -> None:
    """One step from w = 0.2 with Omega = 0.672525, anchor 0, c = 1: the gradient grows by 0.26901."""
    bench = quadratic(1.0, 1, {0: 0.2, 1: 0.2}).change(method="fedssi", options=fedssi(reg_strength=1.0))
    ctx = bench.context(round_index=1)
    state = {"client": {}, "fedssi": {"omega": torch.tensor([0.672525]), "anchor": torch.zeros(1)}}
    model = {**bench.model(), "params": torch.tensor([0.2])}
    fitted = ctx.train.fit(ctx, bench.build_method().parts, model, model["params"], state, {}, bench.stream.data(0, 0))
    assert 0.2 - fitted.model["params"].item() == pytest.approx(0.26901, abs=1e-6)  # the data gradient is 0 at 0.2


@pytest.mark.parametrize(
    ("old", "s", "distance", "new"), [(0.0, -0.02, 0.1, 0.0), (0.5, -0.2, 0.9, 0.3), (0.1, -0.2, 0.9, 0.0)]
)
def test_the_rectifier(old: float, s: float, distance: float, new: float) -> None:
    found = importance(torch.tensor([old]), torch.tensor([s]), torch.tensor([distance]), eps=0.1)
    assert found.item() == pytest.approx(new, abs=1e-7)


@given(
    omega=st.floats(0, 1e6, width=32),
    s=st.floats(-1e6, 1e6, width=32),
    distance=st.floats(0, 1e6, width=32),
    eps=st.floats(1e-6, 1.0),
)
def test_omega_is_never_negative_and_never_nan(omega: float, s: float, distance: float, eps: float) -> None:
    found = importance(torch.tensor([omega]), torch.tensor([s]), torch.tensor([distance]), eps)
    assert found.item() >= 0.0


@pytest.mark.parametrize("eps", [0.0, 1e-3])
def test_no_contribution_and_no_move_leave_omega_unchanged(eps: float) -> None:
    assert importance(torch.tensor([0.7]), torch.zeros(1), torch.zeros(1), eps).item() == pytest.approx(0.7)


# what it reduces to --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("module", [None, Norm])
def test_the_first_task_is_fedavg_to_the_bit(module: Any) -> None:
    bench = Bench("fedavg", module=module)
    assert equal(bench.run(rounds=2).state.model, bench.change(method="fedssi").run(rounds=2).state.model)


def test_no_penalty_is_fedavg_for_all_tasks() -> None:
    bench = Bench("fedavg")
    without = bench.change(method="fedssi", options=fedssi(reg_strength=0.0)).run()
    assert equal(bench.run().state.model, without.state.model)
    assert not torch.equal(bench.run().params, bench.change(method="fedssi").run().params)


def test_lambda_to_zero_gives_no_importance() -> None:
    sizes = []
    for lam in (0.5, 0.1, 0.01, 1e-6):
        q = proximity(lam)
        outcome = Bench("fedssi", fedssi(lam=lam, psm_lr=min(0.01, 1 / q))).run(rounds=2)
        sizes.append(max(client["fedssi"]["omega"].max().item() for client in outcome.clients.values()))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < 1e-3 * sizes[0]


def test_a_diverging_surrogate_is_refused_with_the_bound() -> None:
    with pytest.raises(RuntimeError, match=r"fedssi\.lam = 0\.01.*it must exceed 0\.0243902"):
        Bench("fedssi", fedssi(lam=0.01)).run()


def test_a_strong_penalty_freezes_what_matters_and_nothing_else() -> None:
    bench = Bench("fedssi", fedssi(reg_strength=1e5), train=TrainOptions(200, 12, Optimizer(lr=2e-6)))
    model, ctx = bench.model(), bench.context(round_index=2)
    held = torch.arange(len(model["params"])) % 2 == 0
    state = {"client": {}, "fedssi": {"omega": held.float(), "anchor": model["params"]}}
    data = bench.stream.data(0, 1)
    kept = ctx.train.fit(ctx, bench.build_method().parts, model, model["params"], state, {}, data).model["params"]
    free = ctx.train.fit(ctx, Bench("fedavg").build_method().parts, model, model["params"], {}, {}, data)
    moved = free.model["params"] - model["params"]
    assert (kept - model["params"])[held].abs().max() < 1e-5 < moved[held].abs().max()
    assert torch.allclose((kept - model["params"])[~held], moved[~held], rtol=0.05, atol=1e-6)


def test_with_one_client_and_lambda_near_one_the_surrogate_is_local_training_from_the_global_model() -> None:
    bench = Bench("fedssi", stream=Toy(clients=1, rounds_per_task=1))
    client = bench.client("fedssi", phase="consolidate")
    v, s = FedSSI(lam=1 - 1e-7).train_surrogate(client)
    local = client.fit((), tag="surrogate")
    assert torch.allclose(v, local.model["params"], atol=1e-5)
    assert s.abs().max() > 0


# data, memory, traffic -----------------------------------------------------------------------------------------------
def test_old_data_cannot_be_read_and_is_not_needed() -> None:
    stream = Forgetful()
    Bench("fedssi", stream=stream).run()
    with pytest.raises(PastIsGone):
        stream.data(0, 0)
    with pytest.raises(Hidden, match="data of earlier tasks is gone"):
        Bench("fedssi").context(round_index=2).history()


@pytest.mark.parametrize("tasks", [2, 3, 5])
def test_a_client_keeps_two_vectors(tasks: int) -> None:
    bench = Bench("fedssi", stream=Toy(tasks=tasks))
    size = len(bench.model()["params"])
    for client in bench.run().clients.values():
        assert {name: len(slot) for name, slot in client["fedssi"].items()} == {"omega": size, "anchor": size}
        assert tensor_bytes(client) == 2 * 4 * size


def test_rounds_cost_the_same_bytes_as_fedavg() -> None:
    bench = Bench("fedavg")
    assert bench.run().state.traffic.as_dict() == bench.change(method="fedssi").run().state.traffic.as_dict()


def test_with_partial_participation_the_anchors_cost_one_download_each() -> None:
    stream = Toy(cohorts={i: (0,) for i in range(4)})
    plain, ours = (Bench(name, stream=stream).run().state.traffic for name in ("fedavg", "fedssi"))
    size = tensor_bytes(Bench().model())
    assert ours.up == plain.up
    # clients 1 and 2 get the first model and the first task's last one; client 0 would have got both anyway
    assert sum(ours.down.values()) - sum(plain.down.values()) == 2 * 2 * size


# the anchor ----------------------------------------------------------------------------------------------------------
def test_the_anchor_is_the_previous_tasks_last_global_model_in_all_rounds() -> None:
    bench = Bench("fedssi", stream=Toy(tasks=3, rounds_per_task=3))
    ends = {task: bench.run(rounds=3 * task).params for task in (1, 2)}
    for rounds in range(3, 9):
        for client in bench.run(rounds=rounds).clients.values():
            assert torch.equal(client["fedssi"]["anchor"], ends[rounds // 3])


# unseen classes ------------------------------------------------------------------------------------------------------
def head_rows(bench: Bench, vector: Tensor) -> Tensor:
    return bench.layout().param("head.weight").view(vector)


@pytest.mark.parametrize("logits", ["seen", "full"])
def test_rows_of_unseen_classes(logits: str) -> None:
    bench = Bench("fedssi", stream=ClassToy(), train=TrainOptions(2, 5, Optimizer(lr=0.1), logits=logits))
    stopped = bench.run(rounds=2)
    omega = head_rows(bench, stopped.clients[0]["fedssi"]["omega"])
    moved = head_rows(bench, stopped.params - bench.model()["params"])
    assert omega[:2].max() > 0
    if logits == "seen":
        assert omega[2:].abs().max() == 0 and moved[2:].abs().max() == 0
    else:
        assert omega[2:].max() > 0 and moved[2:].abs().max() > 0


# no gradient ---------------------------------------------------------------------------------------------------------
def test_a_parameter_without_gradient_has_no_importance() -> None:
    x = torch.tensor([[1.0, 0.0], [2.0, 0.0]])
    stream = Given(clients=1, classes=1, table={(0, t): (x, torch.ones(2)) for t in range(2)}, objective=mean_square)
    bench = Bench("fedssi", stream=stream, module=Linear)
    own = {"fedssi": {"anchor": bench.model()["params"]}}
    client = bench.client("fedssi", own, round_index=1, phase="consolidate")
    FedSSI().consolidate(client)
    omega = client.state["omega"]
    assert omega[0] > 0 and omega[1] == 0


def test_no_gradient_at_all_leaves_the_surrogate_at_the_model() -> None:
    assert surrogate(0.5, 0.1, 5, start=1.0) == (1.0, 0.0)


# the options ---------------------------------------------------------------------------------------------------------
def test_a_client_without_data_keeps_its_importance_and_gets_the_anchor() -> None:
    stream = Toy(tasks=3, sizes={(1, 1): 0})
    first, second = (Bench("fedssi", stream=stream).run(rounds=r).clients[1]["fedssi"] for r in (2, 4))
    assert torch.equal(first["omega"], second["omega"])
    assert not torch.equal(first["anchor"], second["anchor"])


def test_without_a_surrogate_there_is_no_contribution() -> None:
    for client in Bench("fedssi", fedssi(psm_epochs=0)).run().clients.values():
        assert client["fedssi"]["omega"].abs().max() == 0


def test_selected_participation_updates_only_the_clients_of_the_next_round() -> None:
    stream = Toy(cohorts={2: (1,)})
    clients = Bench("fedssi", fedssi(psm_participation="selected"), stream=stream).run(rounds=2).clients
    assert [bool(clients[k]["fedssi"]["omega"].max() > 0) for k in range(3)] == [False, True, False]
    assert all(torch.equal(clients[0]["fedssi"]["anchor"], clients[k]["fedssi"]["anchor"]) for k in range(3))


def test_a_sum_over_the_minibatch_scales_the_data_term() -> None:
    x, y = torch.ones(4, 1), torch.ones(4)
    stream = Given(clients=1, classes=1, table={(0, 0): (x, y), (0, 1): (x, y)}, objective=mean_square)
    bench = Bench("fedavg", stream=stream, module=Linear, train=TrainOptions(1, 4, Optimizer(lr=0.01)))
    client = bench.client("fedssi", phase="consolidate")
    mean, _ = FedSSI().train_surrogate(client)
    total, _ = FedSSI(psm_grad_reduction="sum").train_surrogate(client)
    assert (mean.item(), total.item()) == (pytest.approx(0.01), pytest.approx(0.04))


def test_the_surrogate_is_not_trained_after_the_last_task() -> None:
    phases = [(event["round"], event["phase"]) for event in Bench("fedssi").run().events if event["event"] == "phase"]
    assert [p for p in phases if p[1] != "train"] == [(0, "anchor"), (1, "consolidate")]


def test_a_stream_that_hides_its_boundaries_is_refused() -> None:
    with pytest.raises(ValueError, match="must know when a task begins or ends"):
        methods.build("fedssi").fit_stream(Toy(boundaries=False))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("displacement", "local"),
        ("psm_grad_reduction", "max"),
        ("psm_participation", "none"),
        ("psm_epochs", -1),
        ("psm_lr", -0.1),
        ("reg_strength", -1.0),
        ("eps", 0.0),
    ],
)
def test_options_are_checked(option: str, value: Any) -> None:
    with pytest.raises(methods.MethodError, match=rf"method\.fedssi\.{option} must be"):
        methods.build("fedssi", fedssi(**{option: value}))


def test_draws_do_not_depend_on_who_else_runs() -> None:
    bench = Bench("fedssi")
    setup, place = bench.setup(), Place(1, bench.stream.round(1))
    keys = {setup.client(k, Phase("consolidate"), place, bench.trainer()).key("surrogate/order") for k in range(3)}
    assert len(keys) == 3
    assert np.all([key >= 0 for key in keys])
