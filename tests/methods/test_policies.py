"""Selection policies of the memory: random ones ("Coordinated Replay Sample Selection for Continual Federated
Learning", Appendix A), GSS (Aljundi et al., 2019), herding (Rebuffi et al., 2017), Re-Fed (Li et al., 2024), a user's
own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from everfed.core import tree
from everfed.method import (
    CLASSES,
    EAGER,
    Client,
    CompositionError,
    Data,
    Method,
    Optimizer,
    TrainOptions,
    compose,
    option,
)
from everfed.methods import registry as methods
from everfed.methods.aggregate.fedavg import FedAvg
from everfed.methods.common.layers import features
from everfed.methods.replay.diversity import select
from everfed.methods.replay.memory import NAME, POLICIES, Memory, Policy, Pool, make_policy, stored
from everfed.methods.replay.refed import ReFed
from everfed.methods.replay.sample_gradients import GradientOptions, gradients_at
from tests.support.phases import phase_of
from tests.support.spy import Seen, spied
from tests.support.toy import Bench, Given, Linear, Norm, Outcome, Toy

AT_END = [kind for kind in POLICIES if kind not in ("reservoir", "gss-greedy", "on-transition")]
ALL = [kind for kind in POLICIES if kind not in ("reservoir", "on-transition")]  # the first is ER's, the last GLFC's
RANDOM = ["naive-uniform", "approximate-uniform", "fixed-proportion"]
LONG = Toy(tasks=3)  # the choice after the last task is never made


def bench(kind: Any, size: int = 8, mode: str = "union", stream: Toy = LONG, **fields: Any) -> Bench:
    options = {"memory": {"size": size, "policy": kind}, "er": {"mode": mode}}
    return Bench("er", options, stream=stream, **fields)


@cache
def ended(kind: str, size: int) -> Outcome:
    """A whole run, made once for all tests that look at its end."""
    return bench(kind, size).run()


@cache
def plain(rounds: int | None = None) -> Outcome:
    """FedAvg on a network with BatchNorm and dropout."""
    return Bench(stream=LONG, module=Norm).run(rounds=rounds)


def buffer(outcome: Outcome, client: int = 0) -> Data:
    return stored(outcome.clients[client][NAME])


def ids_of(stream: Toy, client: int, *tasks: int) -> list[int]:
    return [int(i) for task in tasks for i in stream.data(client, task).ids]


# what every policy keeps ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [1, 13, 100])
@pytest.mark.parametrize("kind", ALL)
def test_a_buffer_holds_different_samples_of_its_own_client_with_their_labels(kind: str, size: int) -> None:
    outcome = ended(kind, size)
    for client, state in outcome.clients.items():
        own, kept = state[NAME], buffer(outcome, client)
        count = int(own["host"]["stored"])
        assert count == len(kept) <= size and len(own["x"]) == size + 1
        assert not own["x"][count:].any() and not own["y"][count:].any()
        assert len(set(kept.ids.tolist())) == count
        assert own["host"]["ids"][count:].tolist() == [-1] * (size + 1 - count)
        known = Data.union([LONG.data(client, task) for task in range(3)])
        where = [known.ids.tolist().index(i) for i in kept.ids.tolist()]
        assert torch.equal(kept.x, known.x[where]) and torch.equal(kept.y, known.y[where])


EXACT = [kind for kind in AT_END if kind not in ("herding", "gss-cluster")]  # these may keep fewer


@pytest.mark.parametrize("size", [1, 13, 100])
@pytest.mark.parametrize("kind", EXACT)
def test_exactly_n_are_kept_once_there_are_n(kind: str, size: int) -> None:
    outcome = ended(kind, size)
    assert len(buffer(outcome)) == min(size, 24)  # two choices were made, from 12 new samples each
    assert outcome.clients[0][NAME]["host"]["n"] == 24


@pytest.mark.parametrize("kind", AT_END)
def test_choices_are_made_at_the_end_of_a_task_from_it_and_the_stored_ones(kind: str) -> None:
    early, *ended = bench(kind, 6).after(1, 2, 4, 5)
    assert len(buffer(early)) == 0
    first, second = (set(buffer(outcome).ids.tolist()) for outcome in ended[:2])
    assert first <= set(ids_of(LONG, 0, 0))
    assert second <= first | set(ids_of(LONG, 0, 1))
    assert tree.equal(ended[2].clients[0][NAME], ended[1].clients[0][NAME])


@pytest.mark.parametrize("kind", AT_END)
def test_after_the_last_task_nothing_is_chosen(kind: str) -> None:
    assert [e["round"] for e in ended(kind, 13).events if e.get("phase") == "remember"] == [1, 3]


@pytest.mark.parametrize("kind", AT_END)
def test_a_period_without_data_leaves_a_buffer_that_is_not_full_as_it_was(kind: str) -> None:
    stream = Toy(tasks=3, samples=5, sizes={(0, 1): 0})
    before, after = (sorted(buffer(outcome).ids) for outcome in bench(kind, 8, stream=stream).after(2, 4))
    assert before == after and len(after) > 0


@pytest.mark.parametrize("kind", AT_END)
def test_a_client_that_never_has_data_keeps_nothing(kind: str) -> None:
    stream = Toy(clients=2, tasks=3, rounds_per_task=1, sizes={(1, task): 0 for task in range(3)})
    outcome = bench(kind, 4, stream=stream).run()
    assert len(buffer(outcome, 1)) == 0 and len(buffer(outcome, 0)) > 0
    assert torch.isfinite(outcome.params).all()


@pytest.mark.parametrize("kind", ALL)
def test_batchnorm_and_dropout_do_not_disturb_a_choice(kind: str) -> None:
    """Gradients and features are taken in eval mode; the shared model stays what training made of it."""
    outcome = bench(kind, 6, module=Norm, mode="per_step").run(rounds=2)
    assert len(buffer(outcome)) > 0
    if kind in AT_END:  # nothing is replayed in the first task
        assert tree.equal(outcome.state.model, plain(2).state.model)


@pytest.mark.parametrize("kind", ALL)
def test_a_buffer_of_no_rows_is_fedavg_bit_for_bit(kind: str) -> None:
    assert torch.equal(bench(kind, 0, module=Norm).run().params, plain().params)


@pytest.mark.parametrize("kind", RANDOM)
def test_random_choices_send_nothing(kind: str) -> None:
    events = [e for e in ended(kind, 13).events if e.get("phase") == "remember"]
    assert events and all(e["bytes_up"] == e["bytes_down"] == 0 for e in events)


@pytest.mark.parametrize("kind", ALL)
def test_other_methods_replay_from_any_buffer(kind: str) -> None:
    """DER's outputs, A-GEM's second gradient and FedGP's reference all come from the same rows."""
    memory = {"memory": {"size": 6, "policy": kind}}
    der = Bench("fedgp+der", memory, stream=LONG).run(rounds=4)
    own = der.clients[0][NAME]
    assert own["logits"][: len(stored(own))].any(1).all() and not own["logits"][len(stored(own)) :].any()
    assert any(e.get("phase") == "reference" and e["bytes_up"] for e in der.events)
    assert torch.isfinite(Bench("agem", memory, stream=LONG).run(rounds=3).params).all()


@pytest.mark.parametrize("kind", AT_END)
def test_a_stream_without_boundaries_is_refused(kind: str) -> None:
    with pytest.raises(CompositionError, match="part 'memory' must know when a task begins or ends"):
        bench(kind).build_method().fit_stream(replace(LONG, boundaries=False))


def test_online_policies_need_no_boundaries() -> None:
    for kind in ("reservoir", "gss-greedy"):
        bench(kind).build_method().fit_stream(replace(LONG, boundaries=False))


# options -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("policy", "problem"),
    [
        ("nothing", r"method.memory.policy must be one of reservoir, naive-uniform, .*; got 'nothing'"),
        ({"exchanges": 2}, "method.memory.policy.kind must be one of"),
        (7, "method.memory.policy must be one of reservoir, .*; got 7"),
        (Data, "method.memory.policy must be one of reservoir"),
        ("nowhere:Newest", "method.memory.policy = 'nowhere:Newest': module 'nowhere' cannot be imported"),
        (
            "numpy:array",
            "method.memory.policy must be one of .*, or package.module:Name of a Policy; got 'numpy:array'",
        ),
        ({"kind": "numpy:nix"}, "method.memory.policy.kind = 'numpy:nix': module 'numpy' has no 'nix'"),
        ({"kind": f"{__name__}:Newest", "q": 1}, "method.memory.policy.q is not an option of .*Newest'; it has share"),
        ({"kind": f"{__name__}:Newest", "share": 2.0}, "method.memory.policy.share must be at most 1"),
        ({"kind": "naive-uniform", "p": 1}, r"policy.p is not an option of 'naive-uniform'; it has none"),
        ({"kind": "coordinated", "swaps": 1}, "policy.swaps is not an option of 'coordinated'; it has exchanges"),
        ({"kind": "fixed-proportion", "proportion": 1.0}, "policy.proportion must be below 1"),
        ({"kind": "re-fed", "informative": 0.0}, "policy.informative must be positive"),
        ({"kind": "re-fed", "power": 3}, "policy.power must be one of 1, 2"),
        ({"kind": "uncoordinated", "relaxation": "linear"}, "policy.relaxation must be one of"),
        ({"kind": "gss-greedy", "references": 0}, "policy.references must be at least 1"),
        ({"kind": "gss-cluster", "growth": 0.0}, "policy.growth must be positive"),
        ({"kind": "coordinated", "exchanges": -1}, "policy.exchanges must be at least 0"),
        ({"kind": "coordinated", "rounding": "up"}, "policy.rounding must be one of"),
        ({"kind": "coordinated", "speakers": "some"}, "policy.speakers must be one of all, sampled"),
    ],
)
def test_options_that_are_not_allowed_are_named(policy: Any, problem: str) -> None:
    with pytest.raises(methods.MethodError, match=problem):
        methods.build("er", {"memory": {"policy": policy}})


@pytest.mark.parametrize(
    ("gradients", "problem"),
    [
        ({"layers": "first"}, "method.memory.gradients.layers must be one of all, last"),
        ({"projection": -1}, "method.memory.gradients.projection must be at least 0"),
        ({"size": 5}, "method.memory.gradients.size is not an option; it has layers, projection, memory"),
    ],
)
def test_gradient_options_that_are_not_allowed_are_named(gradients: Any, problem: str) -> None:
    with pytest.raises(methods.MethodError, match=problem):
        methods.build("coordinated", {"memory": {"gradients": gradients}})


def test_parts_with_policies_are_values() -> None:
    table = {"kind": "coordinated", "exchanges": 4}
    assert Memory(policy=table).chooser == Memory(policy=make_policy(table)).chooser
    assert Memory(policy=table) == Memory(policy=dict(table)) != Memory(policy="coordinated")
    assert hash(Memory(policy=table)) == hash(Memory(policy=dict(table)))
    assert Memory(policy="gss-greedy").needs() == {EAGER} and not Memory().needs()


def test_options_stay_as_they_were_given() -> None:
    table = {"kind": "coordinated", "exchanges": 4}
    part = Memory(policy=table, gradients={"layers": "last"})
    assert part.policy is table and part.gradients == {"layers": "last"}
    assert part.gradient_options == GradientOptions(layers="last")


def test_a_policy_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def counted(value: Any) -> Any:
        made.append(value)
        return make_policy(value)

    monkeypatch.setattr("everfed.methods.replay.memory.make_policy", counted)
    part = Memory(policy="herding")
    assert part.chooser is part.chooser and part.needs() == {CLASSES} and part.phases()
    assert made == ["herding"]


def test_what_a_choice_sends_and_when() -> None:
    """The model, only where the choice or stored outputs need it; in all but the last round."""
    sends = {kind: phase_of(Memory(policy=kind), "remember").sends for kind in AT_END}
    assert {kind for kind, sent in sends.items() if not sent} == set(RANDOM)
    assert all(phase_of(Memory(policy=kind, logits=True), "remember").sends for kind in AT_END)
    assert not any(phase.in_last_round for kind in AT_END for phase in Memory(policy=kind).phases())
    assert phase_of(Memory(policy="on-transition"), "remember").in_last_round


# a user's own policy -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Newest(Policy):
    """The last samples of the pool's new ones, at most `share` of the buffer."""

    share: float = option(1.0, at_most=1)

    needs_model = False

    def choose(self, pool: Pool, size: int) -> np.ndarray:
        return np.arange(pool.new)[-int(self.share * size) :]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (f"{__name__}:Newest", 8),
        ({"kind": f"{__name__}:Newest", "share": 0.5}, 4),
        (Newest, 8),
        (Newest(0.25), 2),
        ({"kind": Newest, "share": 0.5}, 4),
    ],
    ids=["name", "table", "class", "object", "class in a table"],
)
def test_a_policy_of_ones_own(policy: Any, expected: int) -> None:
    outcome = bench(policy, 8).run()
    assert buffer(outcome).ids.tolist() == ids_of(LONG, 0, 1)[-expected:]
    assert all(e["bytes_down"] == 0 for e in outcome.events if e.get("phase") == "remember")


@dataclass(frozen=True)
class Oldest(Policy):
    """What is stored already, then the first new samples."""

    def choose(self, pool: Pool, size: int) -> np.ndarray:
        return np.concatenate([np.arange(pool.new, len(pool)), np.arange(pool.new)])[:size]


def test_stored_outputs_are_those_of_the_model_under_which_a_sample_was_stored() -> None:
    def build() -> Method:
        return compose(FedAvg(), Memory(size=4, logits=True, policy=Oldest()))

    made = Bench(build, stream=Toy(clients=1, tasks=3, rounds_per_task=1))
    first, second = (outcome.clients[0][NAME] for outcome in made.after(1, 2))
    assert first["logits"][:4].all() and torch.equal(first["logits"], second["logits"])


def test_a_policy_that_does_not_choose_is_refused_when_it_should() -> None:
    with pytest.raises(CompositionError, match=r"policy 'Policy' has a phase to choose in, but no choose\(\)"):
        phase_of(Memory(policy=Policy), "remember").run(bench("reservoir").client(NAME))  # type: ignore[misc]


def test_presets_are_named_after_their_policies() -> None:
    for kind in ALL:
        parts = {part.name: part for part in methods.build(kind).parts}
        assert parts["memory"].chooser == make_policy(kind) and parts["er"].mode == "union"
        assert methods.build(f"fedgp+{kind}", {"memory": {"size": 5}}).part("memory").chooser == make_policy(kind)


# replay as a union ---------------------------------------------------------------------------------------------------
def watched(running: Bench, rounds: int | None = None) -> list[Seen]:
    log: list[Seen] = []
    running.change(method=spied(running.build_method(), log)).run(rounds=rounds)
    return log


def test_a_union_with_nothing_stored_is_fedavg_bit_for_bit() -> None:
    same = Bench(stream=LONG).run(rounds=2).params
    assert torch.equal(bench("naive-uniform").run(rounds=2).params, same)
    assert not torch.equal(bench("naive-uniform").run(rounds=3).params, Bench(stream=LONG).run(rounds=3).params)


@pytest.mark.parametrize("kind", ["naive-uniform", "reservoir"])
def test_every_element_of_the_union_is_used_once_per_epoch(kind: str) -> None:
    running = bench(kind, 5, train=TrainOptions(1, 4, Optimizer(lr=0.1)))
    kept = buffer(running.run(rounds=2))
    used = [x for seen in watched(running, 3) if seen.client == 0 and seen.round == 2 for x in seen.x]
    new = LONG.data(0, 1)
    expected = {tuple(x.flatten().tolist()) for x in torch.cat([new.x, kept.x])}
    assert len(used) == 12 + 5 and {tuple(x.flatten().tolist()) for x in used} == expected


def test_a_reservoir_in_a_union_adds_no_sample_of_the_current_task_twice() -> None:
    log = watched(bench("reservoir", 100, train=TrainOptions(1, 50, Optimizer(lr=0.1))), 2)
    assert [len(seen.x) for seen in log if seen.client == 0] == [12, 12]


def test_replayed_elements_are_not_offered_to_the_reservoir_again() -> None:
    """It holds what it holds under per-step replay: each sample is offered once in its life."""
    union, per_step = (bench("reservoir", 6, mode).run().clients[1][NAME] for mode in ("union", "per_step"))
    assert union["host"]["n"] == per_step["host"]["n"] == 36


def test_the_reservoir_knows_the_ids_of_its_rows() -> None:
    outcome = bench("reservoir", 6, "per_step").run()
    kept, known = buffer(outcome, 1), Data.union([LONG.data(1, task) for task in range(3)])
    where = [known.ids.tolist().index(i) for i in kept.ids.tolist()]
    assert len(where) == 6 and torch.equal(kept.x, known.x[where])


def test_a_client_with_a_buffer_and_no_new_data_trains_on_the_buffer() -> None:
    running = bench("naive-uniform", 5, stream=Toy(tasks=3, sizes={(0, 1): 0}))
    log = [seen for seen in watched(running, 3) if seen.client == 0 and seen.round == 2]
    assert sum(len(seen.x) for seen in log) == 2 * 5  # two epochs


def test_per_step_replay_leaves_the_data_as_it_is() -> None:
    part = methods.build("er").part("er")
    client = bench("reservoir").client("er")
    before = client.data
    part.receive(client)
    assert client.data is before
    with pytest.raises(methods.MethodError, match="method.er.mode must be one of per_step, union"):
        methods.build("er", {"er": {"mode": "both"}})


# random policies over periods ----------------------------------------------------------------------------------------
class Still(nn.Module):
    """A network that costs nothing."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.bias.expand(len(x), -1)


def shares(kind: Any, size: int, tasks: int, clients: int = 400, samples: int = 10) -> np.ndarray:
    """(tasks,) mean number of rows of each task after the choice at the end of the last, over clients; only the choices
    are run, on one state after the other."""
    stream = Toy(clients=clients, tasks=tasks + 1, rounds_per_task=1, samples=samples)
    running = bench(kind, size, stream=stream, module=Still)
    choose, counts = phase_of(running.build_method().part(NAME), "remember").run, np.zeros(tasks)
    setup, trainer = running.setup(), running.trainer()
    new = running.new_client()
    data = [stream.data(0, task) for task in range(tasks)]
    for client in range(clients):
        state = new
        for task in range(tasks):
            context = setup.server("remember").at(round=task, client=client, trainer=trainer)
            handle = Client(NAME, state, context, {}, None, data[task])
            choose(handle)  # type: ignore[misc]
            state = handle.states
        counts += np.bincount(stored(state[NAME]).ids // 10_000, minlength=tasks)
    return counts / clients


def test_naive_shares_are_geometric() -> None:
    """N (n/(n+N)) (N/(n+N))^(t-tau), and N (N/(n+N))^(t-1) for the first period."""
    n, size, t = 10, 6, 3
    expected = [size * (size / (n + size)) ** (t - 1)]
    expected += [size * (n / (n + size)) * (size / (n + size)) ** (t - tau) for tau in (2, 3)]
    assert shares("naive-uniform", size, t) == pytest.approx(expected, abs=0.2)


def test_approximately_uniform_shares_are_equal() -> None:
    assert shares("approximate-uniform", 8, 4) == pytest.approx([2.0] * 4, abs=0.2)


@pytest.mark.parametrize("p", [0.25, 0.5])
def test_fixed_shares(p: float) -> None:
    """p N (1-p)^(t-tau), and N (1-p)^(t-1) for the first period."""
    size, t = 8, 3
    expected = [size * (1 - p) ** (t - 1)] + [p * size * (1 - p) ** (t - tau) for tau in (2, 3)]
    found = shares({"kind": "fixed-proportion", "proportion": p}, size, t)
    assert found == pytest.approx(expected, abs=0.25)
    assert found[-1] == pytest.approx(p * size)  # whole numbers: nothing to draw


# gradients -----------------------------------------------------------------------------------------------------------
def slow_gradients(running: Bench, x: Tensor, y: Tensor, params: Tensor) -> Tensor:
    """One backward pass per sample."""
    trainer, ctx, model = running.trainer(), running.context(), {**running.model(), "params": params}
    rows = [trainer.gradient(ctx, model, x[i : i + 1], y[i : i + 1], mode="eval", tag="t") for i in range(len(x))]
    return torch.stack(rows)


@pytest.mark.parametrize("module", [None, Norm])
def test_gradients_are_those_of_single_samples(module: Any) -> None:
    running = Bench(module=module)
    data, model = Toy().data(0, 0), running.model()
    found = gradients_at(running.context(), model, data.x, data.y, GradientOptions())
    torch.testing.assert_close(found, slow_gradients(running, data.x, data.y, model["params"]), rtol=1e-4, atol=1e-6)


def test_all_clients_project_alike_and_the_last_layer_is_a_part_of_all() -> None:
    running = Bench()
    data, model = Toy().data(0, 0), running.model()
    full = gradients_at(running.context(), model, data.x, data.y, GradientOptions())
    last = gradients_at(running.context(), model, data.x, data.y, GradientOptions(layers="last"))
    assert torch.equal(last, full[:, -last.shape[1] :]) and last.shape[1] == 8 * 4 + 4
    options = GradientOptions(projection=20)
    projected = [gradients_at(running.context(c, r), model, data.x, data.y, options) for c, r in ((0, 0), (2, 3))]
    assert projected[0].shape == (12, 20) and torch.equal(*projected)


def test_a_budget_too_small_is_refused_with_the_remedy() -> None:
    running, data = Bench(), Toy().data(0, 0)
    with pytest.raises(ValueError, match="raise it, differentiate the last layer only, or use a projection"):
        gradients_at(running.context(), running.model(), data.x, data.y, GradientOptions(memory=1e-6))


def test_uncoordinated_is_select_on_the_gradients_at_the_shared_model() -> None:
    running = bench("uncoordinated", 5)
    outcome = running.run(rounds=2)
    data, ctx = LONG.data(1, 0), running.context(1, 1, "remember")
    gradients = gradients_at(ctx, outcome.state.model, data.x, data.y, GradientOptions())
    expected = select(gradients, 5, seed=ctx.key("selection"))
    assert buffer(outcome, 1).ids.tolist() == data.ids[expected].tolist()


# GSS -----------------------------------------------------------------------------------------------------------------
def opposed(majority: int, minority: int, samples: int) -> Given:
    """Samples of two kinds with exactly opposite gradients: the same input, and labels 0 or 1 of two classes, on a
    network that starts undecided."""
    y = torch.zeros(samples, dtype=torch.int64)
    y[majority : majority + minority] = 1
    table = {(0, task): (torch.ones(samples, 1), y) for task in range(2)}
    return Given(clients=1, tasks=2, rounds_per_task=1, classes=2, table=table)


def greedy(stream: Given, size: int, batch: int = 4) -> Data:
    train = TrainOptions(1, batch, Optimizer(lr=0.0))  # the network stays undecided
    options = {"memory": {"size": size, "policy": {"kind": "gss-greedy", "references": 50}}, "er": {"mode": "per_step"}}
    return stored(Bench("er", options, stream=stream, module=Linear, train=train).run(rounds=1).clients[0][NAME])


def test_greedy_holds_both_of_two_opposite_clusters() -> None:
    """95 to 5: a sample opposed to all stored ones has score 0 and replaces with certainty."""
    kept = greedy(opposed(95, 5, 100), 5)
    assert len(kept) == 5 and set(kept.y.tolist()) == {0, 1}


def test_greedy_never_replaces_without_opposition() -> None:
    """One cluster: every score is 2, and the buffer holds the first samples that came."""
    kept = greedy(opposed(40, 0, 40), 5, batch=40)
    again = greedy(opposed(40, 0, 40), 40, batch=40)
    assert kept.ids.tolist() == again.ids.tolist()[:5]


def test_greedy_fills_up_as_fast_as_samples_come() -> None:
    running = bench("gss-greedy", 7, mode="per_step", train=TrainOptions(2, 5, Optimizer(lr=0.1)))
    log = [seen for seen in watched(running, 1) if seen.client == 0]
    assert [len(seen.batches["er/rows"][1]) if seen.batches else 0 for seen in log] == [0, 5, 7, 7, 7, 7]
    own = running.run().clients[0][NAME]
    scores = own["host"]["scores"]
    assert own["host"]["n"] == 36 and ((scores >= 0) & (scores <= 2)).all()


def test_greedy_scores_are_one_plus_the_largest_cosine() -> None:
    """A buffer larger than the data and references enough: the first sample scores 0.1, the others by their cosines."""
    stream = Toy(clients=1, tasks=1, rounds_per_task=1, samples=6)
    train = TrainOptions(1, 6, Optimizer(lr=0.0))
    policy = {"kind": "gss-greedy", "references": 50}
    running = Bench("er", {"memory": {"size": 9, "policy": policy}, "er": {"mode": "per_step"}}, stream, train)
    own = running.run().clients[0][NAME]
    kept = stored(own)
    units = nn.functional.normalize(slow_gradients(running, kept.x, kept.y, running.model()["params"]).double(), dim=1)
    cosines = units @ units.T
    expected = [0.1, *(1 + cosines[i, :i].max().item() for i in range(1, 6))]
    assert own["host"]["scores"][:6].tolist() == pytest.approx(expected, abs=1e-5)


def test_clusters_keep_their_distance() -> None:
    stream = opposed(6, 4, 10)
    kept = stored(bench("gss-cluster", 4, stream=stream, module=Linear, train=TrainOptions(1, 4, Optimizer(lr=0.0)))
                  .run(rounds=1).clients[0][NAME])  # fmt: skip
    assert sorted(kept.y.tolist()) == [0, 1]  # two directions: two centroids, whatever the buffer holds


# herding -------------------------------------------------------------------------------------------------------------
def test_features_are_what_the_last_layer_is_fed_with() -> None:
    running, data = Bench(), Toy().data(0, 0)
    model = running.model()
    found = features(running.trainer(), model, data.x)
    module = running.build_module().eval()
    head = [layer for layer in module.modules() if isinstance(layer, nn.Linear)][-1]
    assert found.shape == (12, 8)
    torch.testing.assert_close(head(found), module(data.x.float() / 255), rtol=1e-5, atol=1e-6)


def test_every_class_seen_gets_an_equal_share() -> None:
    outcome = bench("herding", 10).run()
    for client in outcome.clients:
        own, kept = outcome.clients[client][NAME], buffer(outcome, client)
        classes = own["host"]["classes"].tolist()
        counts = np.bincount(kept.y.numpy(), minlength=4)
        assert max(counts) <= 10 // len(classes) and len(kept) <= 10
        held = Data.union([LONG.data(client, task) for task in (0, 1)]).y.numpy()
        assert all(counts[c] == min(10 // len(classes), (held == c).sum()) for c in classes)


def test_old_classes_are_cut_to_their_first_exemplars() -> None:
    """Client 0 sees classes 0 and 1, then 2 and 3: four exemplars of each become two, the first two."""
    halves = {0: (0, 1), 1: (2, 3), 2: (0, 1)}

    class Halves(Toy):
        def data(self, client: int, task: int) -> Data:
            rng = np.random.default_rng([client, task])
            return self._draw(rng, 20, task, halves[task])

    running = bench("herding", 8, stream=Halves(tasks=3))
    first, second = (stored(running.run(rounds=r).clients[0][NAME]) for r in (2, 4))
    assert np.bincount(first.y).tolist() == [4, 4] and np.bincount(second.y).tolist() == [2, 2, 2, 2]
    for label in (0, 1):
        assert second.ids[second.y == label].tolist() == first.ids[first.y == label].tolist()[:2]


# Re-Fed --------------------------------------------------------------------------------------------------------------
def pool_of(running: Bench, data: Data) -> Pool:
    client = running.client(NAME, {}, round_index=1, phase="remember")
    return Pool(client, data.x, data.y, data.ids, len(data), 0, 0, {}, GradientOptions())


def test_one_pass_ranks_by_gradient_norms() -> None:
    running, data = Bench(), Toy().data(0, 0)
    norms = slow_gradients(running, data.x, data.y, running.model()["params"]).norm(dim=1)
    scores = ReFed(passes=1).scores(pool_of(running, data))
    assert scores == pytest.approx(norms.numpy(), rel=1e-4)
    outcome = bench({"kind": "re-fed", "passes": 1}, 5).run(rounds=2)
    last = slow_gradients(running, data.x, data.y, outcome.state.model["params"]).norm(dim=1).numpy()
    assert set(buffer(outcome).ids.tolist()) == set(data.ids[np.argsort(-last)[:5]].tolist())


def test_linear_norms_have_a_closed_form() -> None:
    """||p - y|| ||x|| for a linear map without a bias."""
    running, data = Bench(module=Linear), Toy().data(0, 0)
    x = data.x.float().flatten(1) / 255
    error = torch.full((12, 4), 0.25) - nn.functional.one_hot(data.y, 4)
    expected = error.norm(dim=1) * x.norm(dim=1)
    assert ReFed(passes=1).scores(pool_of(running, data)) == pytest.approx(expected.numpy(), rel=1e-5)


def test_exact_scores_do_not_depend_on_minibatches_within_a_pass() -> None:
    """With one minibatch per pass and with all samples' gradients at the start of a pass alike, up to v itself."""
    data = Toy().data(0, 0)
    one, many = (Bench(train=TrainOptions(1, size, Optimizer(lr=0.1))) for size in (12, 3))
    assert ReFed(passes=1).scores(pool_of(one, data)) == pytest.approx(
        ReFed(passes=1).scores(pool_of(many, data)), rel=1e-5
    )
    still = [b.change(train=replace(b.train, optimizer=Optimizer(lr=0.0))) for b in (one, many)]
    first, second = (ReFed(passes=4).scores(pool_of(b, data)) for b in still)
    assert first == pytest.approx(second, rel=1e-5)
    assert first == pytest.approx(ReFed(passes=1).scores(pool_of(one, data)) * (1 + 1 / 2 + 1 / 3 + 1 / 4), rel=1e-5)
