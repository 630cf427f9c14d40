"""FedGP (Dai et al., 2023): the reference of Algorithm 3 and its use by Eq. 4; the projection has tests of its own."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from everfed.core import tree
from everfed.core.client import run_client
from everfed.core.context import TrainOptions
from everfed.core.evaluate import EvalOptions
from everfed.core.method import compose
from everfed.core.optimizer import Optimizer
from everfed.core.option import ParameterGroup
from everfed.core.phase import Reduction
from everfed.core.replica import Gradient, project
from everfed.core.server import Runner
from everfed.methods import registry as methods
from everfed.methods.aggregate.fedavg import FedAvg
from everfed.methods.project.fedgp import FedGP
from everfed.methods.replay.memory import NAME, Memory
from everfed.store.clients import ClientStore
from tests.support.phases import phase_of
from tests.support.spy import Seen, spied
from tests.support.toy import Bench, Norm, Outcome, Toy

BASES = ("fedavg", "fedprox", "fedcurv", "er", "der", "der++", "agem")


def on_top(base: str) -> str:
    return "fedgp" if base == "fedavg" else f"fedgp+{base}"


def gp(options: dict[str, Any] | None = None, size: int = 8, **fields: Any) -> Bench:
    return Bench("fedgp", {"memory": {"size": size}, "fedgp": options or {}}, **fields)


def buffer_gradient(bench: Bench, outcome: Outcome, clients: list[int], mode: str = "eval") -> Tensor:
    """Gradient of the mean loss over everything these clients have stored, at the shared model."""
    rows = {c: min(outcome.clients[c][NAME]["host"]["n"], len(outcome.clients[c][NAME]["x"]) - 1) for c in clients}
    x = torch.cat([outcome.clients[c][NAME]["x"][: rows[c]] for c in clients])
    y = torch.cat([outcome.clients[c][NAME]["y"][: rows[c]] for c in clients])
    ctx = bench.context()
    return ctx.train.gradient(ctx, outcome.state.model, x, y, mode=mode, tag="test")


# neutrality ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("base", BASES)
def test_the_first_round_is_the_base_method_bit_for_bit(base: str) -> None:
    plain, projected = (Bench(name, module=Norm).run(rounds=1).state.model for name in (base, on_top(base)))
    assert tree.equal(plain, projected)


@pytest.mark.parametrize("base", BASES)
def test_without_a_buffer_the_whole_run_is_the_base_method_bit_for_bit(base: str) -> None:
    """No rows, no reference: FedGP is off."""
    empty: dict[str, Any] = {"memory": {"size": 0}}
    with_memory = "memory" in [part.name for part in methods.build(base).parts]
    plain = Bench(base, empty if with_memory else {}, module=Norm).run()
    off = Bench(on_top(base), empty, module=Norm).run()
    assert tree.equal(plain.state.model, off.state.model)
    assert "reference" not in off.state.server.get("fedgp", {})


def test_it_changes_the_run_from_the_second_round_on() -> None:
    assert not torch.equal(Bench("fedgp").run().params, Bench("fedavg").run().params)


def test_turning_it_on_changes_neither_data_order_nor_reservoir() -> None:
    logs: dict[str, list[Seen]] = {"er": [], "fedgp+er": []}
    buffers = []
    for name, log in logs.items():
        bench = Bench(name)
        buffers.append(bench.change(method=spied(bench.build_method(), log, before="er")).run().clients[0][NAME]["x"])
    assert torch.equal(*buffers)
    assert all(torch.equal(a.x, b.x) for a, b in zip(*logs.values(), strict=True))


# the reference -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("size", [4, 8])
def test_the_reference_is_the_gradient_on_the_union_of_all_buffers(clients: int, size: int) -> None:
    """Equal buffers, m = all, eval mode: the mean of means is the mean over the union."""
    bench = gp({"samples": 0, "mode": "eval"}, size=size, stream=Toy(clients=clients), module=Norm)
    outcome = bench.run(rounds=2)
    union = buffer_gradient(bench, outcome, list(range(clients)))
    assert torch.allclose(outcome.state.server["fedgp"]["reference"], union, rtol=1e-5, atol=1e-7)


def test_the_reference_is_taken_at_the_aggregated_model_after_every_round() -> None:
    bench = gp({"samples": 0, "mode": "eval"})
    references = []
    for rounds in (1, 2, 3, 4):
        outcome = bench.run(rounds=rounds)
        reference = outcome.state.server["fedgp"]["reference"]
        if rounds < 4:  # the last one is never used
            assert torch.allclose(reference, buffer_gradient(bench, outcome, [0, 1, 2]), rtol=1e-4, atol=1e-6)
        references.append(reference)
    assert not torch.equal(references[0], references[1]) and not torch.equal(references[1], references[2])


def test_the_mean_is_uniform_over_clients_not_samples() -> None:
    """One client with 4 samples weighs as much as one with 40."""
    bench = gp({"samples": 0, "mode": "eval"}, size=40, stream=Toy(clients=2, sizes={(0, 0): 4, (1, 0): 40}))
    outcome = bench.run(rounds=1)
    mean = (buffer_gradient(bench, outcome, [0]) + buffer_gradient(bench, outcome, [1])) / 2
    assert torch.allclose(outcome.state.server["fedgp"]["reference"], mean, rtol=1e-5, atol=1e-7)


def test_it_is_computed_on_labels_also_with_der() -> None:
    bench = Bench("fedgp+der", {"memory": {"size": 8}, "fedgp": {"samples": 0, "mode": "eval"}})
    outcome = bench.run(rounds=1)
    assert torch.allclose(
        outcome.state.server["fedgp"]["reference"], buffer_gradient(bench, outcome, [0, 1, 2]), rtol=1e-5, atol=1e-7
    )


def referenced(bench: Bench, state: dict[str, Any], client: int = 0, round_index: int = 0) -> dict[str, Any]:
    """The reply of one `reference` call at the first model."""
    method, ctx = bench.build_method(), bench.context(client, round_index, "reference")
    data = bench.stream.data(client, 0)
    phase = method.phases_by_name()["reference"]
    return run_client(method, phase, state, {"model": dict(bench.model())}, data, ctx)[1].values


def full_state(bench: Bench) -> dict[str, Any]:
    return bench.run(rounds=1).clients[0]


def test_m_samples_are_drawn_without_replacement_and_anew_in_every_round() -> None:
    bench = gp({"samples": 3, "mode": "eval"}, size=8)
    state, trainer, ctx = full_state(bench), bench.trainer(), bench.context()
    x, y = state[NAME]["x"], state[NAME]["y"]
    seen = set()
    for round_index in range(4):
        gradient = referenced(bench, state, round_index=round_index)["fedgp"]["gradient"]
        chosen = bench.context(0, round_index, "reference").rng("reference").permutation(8)[:3]
        assert len(set(chosen.tolist())) == 3
        expected = trainer.gradient(ctx, bench.model(), x[chosen], y[chosen], mode="eval", tag="t")
        assert torch.allclose(gradient, expected, rtol=1e-5, atol=1e-7)
        seen.add(tuple(sorted(chosen.tolist())))
    assert len(seen) > 1


def test_more_samples_than_the_buffer_holds_are_all_of_it() -> None:
    many, every = (gp({"samples": m, "mode": "eval"}, size=8) for m in (1000, 0))
    state = full_state(many)
    a, b = (referenced(bench, state)["fedgp"]["gradient"] for bench in (many, every))
    assert torch.allclose(a, b, rtol=1e-5, atol=1e-7)


def test_train_mode_has_dropout_and_batch_statistics_and_eval_mode_has_not() -> None:
    train, evaluation = (gp({"samples": 0, "mode": mode}, module=Norm) for mode in ("train", "eval"))
    state = full_state(train)
    a, b = (referenced(bench, state)["fedgp"]["gradient"] for bench in (train, evaluation))
    assert not torch.allclose(a, b, rtol=1e-2)
    assert torch.equal(a, referenced(train, state)["fedgp"]["gradient"])  # and its draws are repeatable


# empty buffers -------------------------------------------------------------------------------------------------------
def test_a_client_with_an_empty_buffer_sends_nothing() -> None:
    bench = gp()
    assert referenced(bench, bench.new_client()) == {}


def test_a_client_with_an_empty_buffer_is_left_out_of_the_mean() -> None:
    two = gp({"mode": "eval"}, stream=Toy(clients=2)).run(rounds=1)
    three = gp({"mode": "eval"}, stream=Toy(clients=3, sizes={(2, 0): 0})).run(rounds=1)
    assert torch.equal(two.state.server["fedgp"]["reference"], three.state.server["fedgp"]["reference"])


def test_when_all_buffers_are_empty_training_goes_on_unprojected() -> None:
    g = Gradient.of(None, torch.tensor([1.0, 2.0]))  # type: ignore[arg-type]
    assert FedGP().gradient(SimpleNamespace(message={}, state={}), g) is g  # type: ignore[arg-type]
    assert FedGP().broadcast(gp().server("fedgp")) == {}
    assert torch.equal(gp(size=0).run().params, Bench().run().params)


def test_when_no_client_of_a_round_has_a_buffer_there_is_no_reference() -> None:
    """Client 1 takes part in round 1 alone, without data: g_ref = None."""
    bench = gp(stream=Toy(clients=2, cohorts={0: (0,), 1: (1,)}, sizes={(1, 0): 0}))
    assert "reference" not in bench.run(rounds=2).state.server.get("fedgp", {})


def test_a_reference_that_is_not_finite_stops_the_run() -> None:
    phase = phase_of(FedGP(), "reference")
    reduction = Reduction({"fedgp": dict(phase.reduce)})
    reduction.add(0, {"fedgp": {"gradient": torch.tensor([1.0, float("nan")])}}, 1.0)
    with pytest.raises(FloatingPointError, match="buffer gradient is not finite"):
        phase.update(gp().server("fedgp", reduced=reduction.result()["fedgp"]))  # type: ignore[misc]


# no side effects -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_computing_the_reference_changes_nothing(mode: str) -> None:
    """Model, statistics, client state and the training that follows are bit-identical with and without it."""
    bench = gp({"mode": mode}, module=Norm, train=TrainOptions(1, 5, Optimizer(lr=0.1, momentum=0.9, state="kept")))
    method, data, state = bench.build_method(), bench.stream.data(0, 0), full_state(bench)
    trainer, message = bench.trainer(), {"model": dict(bench.model())}
    before = tree.clone({"state": state, "message": message})
    call, reference = (bench.context(0, 1, phase).at(trainer=trainer) for phase in ("train", "reference"))
    plain = run_client(method, method.train_phase(), state, message, data, call)
    after, _ = run_client(method, method.phases_by_name()["reference"], state, message, data, reference)
    again = run_client(method, method.train_phase(), state, message, data, call)
    assert tree.equal(before, {"state": state, "message": message}) and tree.equal(after, state)
    assert tree.equal(plain[0], again[0]) and tree.equal(plain[1].values, again[1].values)


def test_the_shared_model_is_the_same_before_and_after_the_reference() -> None:
    bench = gp(module=Norm, evaluation=EvalOptions(every=1))
    setup, saved = bench.setup(), []
    runner = Runner(
        setup,
        bench.eager(setup, ClientStore()),
        bench.model(),
        bench.evaluation,
        save=lambda state, end: saved.append((state.round, state.position, tree.clone(state.model))),
    )
    runner.run()
    after_train = {r: model for r, position, model in saved if position == 1}
    after_reference = {r: model for r, position, model in saved if position == 2}
    assert after_train.keys() >= after_reference.keys() >= {0, 1, 2}
    assert all(tree.equal(after_train[r], after_reference[r]) for r in after_reference)


# composition ---------------------------------------------------------------------------------------------------------
def test_agem_and_fedgp_project_in_this_order() -> None:
    """g_c = (1, -1), g_b = (0, 1), g_ref = (-1, 1): inner (1, 0), outer (0.5, 0.5)."""
    g_c, g_b, g_ref = torch.tensor([1.0, -1.0]), torch.tensor([0.0, 1.0]), torch.tensor([-1.0, 1.0])
    stored = {"x": torch.zeros(2, 1), "y": torch.zeros(2, dtype=torch.int64)}
    message, states = {"fedgp": {"reference": g_ref}}, {NAME: stored}
    gradient, on_the_way = Gradient.of(None, g_c), []  # type: ignore[arg-type]
    for part in methods.build("fedgp+agem").parts:
        client = gp().client(part.name, states, messages=message)
        part.receive(client)
        own = SimpleNamespace(
            rows={"rows": torch.zeros(1, dtype=torch.int64)},
            state=client.state,
            message=client.message,
            of=lambda name: SimpleNamespace(state=states[name]),
            task_gradient=lambda x, y: g_b,
        )
        gradient = part.gradient(own, gradient)  # type: ignore[arg-type, assignment]
        on_the_way.append((part.name, gradient.vector.tolist()))
    assert on_the_way[-2:] == [("agem", [1.0, 0.0]), ("fedgp", [0.5, 0.5])]


@pytest.mark.parametrize("base", BASES)
def test_every_step_takes_the_projected_gradient_of_the_whole_base_method(base: str) -> None:
    """Penalties and replay are inside g: what reaches the optimiser is Project(g, g_ref)."""
    bench = Bench(on_top(base), stream=Toy(clients=2))
    before: list[Seen] = []
    outcome = bench.change(method=spied(bench.build_method(), before, before="fedgp")).run(rounds=2)
    reference = bench.run(rounds=1).state.server["fedgp"]["reference"]
    steps = [seen for seen in before if (seen.client, seen.round) == (0, 1)]
    conflicts = 0
    for now, following in pairwise(steps):
        conflicts += int(torch.dot(now.gradient, reference) < 0)
        assert torch.allclose(following.params, now.params - 0.1 * project(now.gradient, reference), atol=1e-6)
    assert outcome.state.round == 2
    assert base != "fedavg" or conflicts > 0


def test_it_must_be_the_last_rule_and_wants_plain_sgd() -> None:
    assert compose(FedAvg(), Memory(), FedGP(), optimizer=Optimizer("sgd")).warnings == ()
    assert "reference" in compose(FedAvg(), Memory(), FedGP(), optimizer=Optimizer("adam")).warnings[0]
    assert "momentum" in compose(FedAvg(), Memory(), FedGP(), optimizer=Optimizer(momentum=0.9)).warnings[0]
    grouped = Optimizer("adam", groups=[ParameterGroup(["*bias"], lr=0.5)])
    assert "adam and groups" in compose(FedAvg(), Memory(), FedGP(), optimizer=grouped).warnings[0]


def test_the_reference_carries_over_task_boundaries() -> None:
    """The first round of task 2 is projected on the reference of task 1's end."""
    log: list[Seen] = []
    bench = Bench("fedgp", stream=Toy(clients=1))
    bench.change(method=spied(bench.build_method(), log, before="fedgp")).run()
    reference = bench.run(rounds=2).state.server["fedgp"]["reference"]
    steps = [seen for seen in log if seen.round == 2]
    assert any(torch.dot(seen.gradient, reference) < 0 for seen in steps)
    for now, following in pairwise(steps):
        assert torch.allclose(following.params, now.params - 0.1 * project(now.gradient, reference), atol=1e-6)


def test_only_clients_of_the_round_send_a_gradient() -> None:
    bench = gp({"samples": 0, "mode": "eval"}, stream=Toy(cohorts={1: (1,)}))
    outcome = bench.run(rounds=2)
    expected = buffer_gradient(bench, outcome, [1])
    assert torch.allclose(outcome.state.server["fedgp"]["reference"], expected, rtol=1e-5, atol=1e-7)


def test_a_buffer_of_one_sample_gives_a_reference() -> None:
    outcome = gp(size=1).run(rounds=1)
    assert np.isfinite(outcome.state.server["fedgp"]["reference"].numpy()).all()
