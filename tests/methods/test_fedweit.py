"""FedWeIT (Yoon et al., 2021): Eq. 2 and 4, what is sent, and how samples are routed without a task id."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from everfed.core.context import TrainOptions
from everfed.core.handle import Client
from everfed.core.layout import registered
from everfed.core.message import State
from everfed.core.method import compose
from everfed.core.optimizer import Optimizer
from everfed.core.tree import Tree, tensor_bytes
from everfed.errors import CompositionError
from everfed.methods import registry as methods
from everfed.methods.common.layers import hidden_weights
from everfed.methods.personal.fedweit import (
    FedWeIT,
    channel_means,
    composed,
    dense,
    large,
    least_entropy,
    pruned,
    sparse,
)
from everfed.methods.regularise.fedprox import FedProx
from tests.support.rehearsal_free import ClassToy
from tests.support.toy import Bench, Norm, Outcome, Toy

GENTLE = TrainOptions(2, 5, Optimizer(lr=0.02))


def fedweit(**options: Any) -> dict[str, dict[str, Any]]:
    return {"fedweit": options}


def bench(stream: Toy | None = None, train: TrainOptions = GENTLE, module: Any = None, **options: Any) -> Bench:
    return Bench("fedweit", fedweit(**options), stream=stream or Toy(), train=train, module=module)


def piece(b: Bench, kind: str, vector: Tensor, layer: int = 0) -> Tensor:
    """One layer's adaptive, mask or attention in a client's parameter vector."""
    entry = hidden_weights(b.layout())[layer]
    return b.layout().param(registered("fedweit", f"{kind}/{entry.name}", personal=True)).view(vector)


def whole(b: Bench, client: State) -> Tensor:
    """A client's parameter vector after its last training."""
    return torch.cat([client["fedweit"]["base"], client["client"]["personal"]])


def part_of(b: Bench) -> FedWeIT:
    part = b.build_method().parts[0]
    assert isinstance(part, FedWeIT)
    return part


def newcomer(b: Bench) -> Client:
    """A client that received the first model, before its first task began."""
    model = b.model()
    params = torch.cat([model["params"], b.setup().facts.personal])
    return b.client("fedweit", model={**model, "params": params}, messages={"model": model})


# 1 -------------------------------------------------------------------------------------------------------------------
def test_an_open_mask_and_no_adaptive_leave_the_base() -> None:
    base = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    assert torch.equal(composed(base, torch.full((4,), 100.0), torch.zeros_like(base)), base)
    mask, fixed = torch.tensor([0.0, 1.0, -1.0, 2.0]), torch.ones_like(base)
    assert torch.allclose(composed(base, mask, fixed)[1], base[1] / (1 + torch.exp(torch.tensor(-1.0))) + 1)


@pytest.mark.parametrize("module", [None, Norm])
def test_the_networks_forward_pass_is_the_plain_one_then(module: Any) -> None:
    b = bench(module=module)
    plain = Bench("fedavg", module=module)
    client = newcomer(b)
    part_of(b)._begin(client)
    params = part_of(b)._fresh(client)
    for layer in range(len(hidden_weights(b.layout()))):
        piece(b, "adaptive", params, layer).zero_()
        piece(b, "mask", params, layer).fill_(100.0)
    x = b.stream.data(0, 0).x
    found = client.outputs(x, model={**b.model(), "params": params})
    assert torch.allclose(found, plain.trainer().outputs(plain.model(), x), atol=1e-5)


def second_task() -> tuple[Bench, Outcome, Tree, Tensor]:
    """After a first task, client 0 receives the second task's first message: (bench, run so far, state, parameters)."""
    b = bench(stream=Toy(tasks=3))
    state = b.run(rounds=2)
    start = {**state.state.model, "params": torch.cat([state.params, state.clients[0]["client"]["personal"]])}
    client = b.client("fedweit", state.clients[0], model=start, messages={"model": state.state.model}, round_index=2)
    part_of(b).receive(client)
    return b, state, client.state, client.model["params"]


def test_a_task_begins_with_a_third_of_the_first_weights_as_its_adaptive() -> None:
    """The released code makes the adaptives of all tasks from the run's initial weights."""
    b, _, own, params = second_task()
    entry = hidden_weights(b.layout())[0]
    assert torch.allclose(piece(b, "adaptive", params), entry.view(b.model()["params"]) / 3)
    assert piece(b, "attention", params).abs().max() == 0
    assert 0 < piece(b, "mask", params).abs().max() < 1
    assert own["host"]["task"] == 1


def test_earlier_tasks_are_held_where_the_client_left_them() -> None:
    """The anchor is the client's own B after its last training; what it trains from is merged with the server's."""
    b, state, own, params = second_task()
    entry, left = hidden_weights(b.layout())[0], state.clients[0]["fedweit"]["base"]
    assert torch.equal(own["start"][entry.name], entry.view(left))
    assert not torch.allclose(entry.view(params), entry.view(left))


# 2 -------------------------------------------------------------------------------------------------------------------
def test_a_large_lambda1_drives_the_adaptives_to_zero() -> None:
    train = TrainOptions(60, 5, Optimizer(lr=0.002))
    for sparsity, empty in ((0.0, False), (1.0, True)):
        b = bench(stream=Toy(clients=1), train=train, sparsity=sparsity)
        outcome = b.run(rounds=2)
        adaptive = piece(b, "adaptive", whole(b, outcome.clients[0]))
        assert bool(adaptive.abs().max() <= 2 * 0.002) is empty  # it swings about 0 by a step's length
        published = outcome.state.server["fedweit"]["knowledge"]["0"]
        assert (len(published["values"]) == 0) is empty


# 3 -------------------------------------------------------------------------------------------------------------------
def test_a_large_lambda2_holds_the_restored_weights_of_earlier_tasks() -> None:
    moved = []
    for retention in (0.0, 100.0):
        b = bench(
            stream=Toy(clients=1, rounds_per_task=1), train=TrainOptions(30, 5, Optimizer(lr=0.05)), retention=retention
        )
        client = b.run().clients[0]["fedweit"]
        entry = hidden_weights(b.layout())[0]
        mask = client["tasks"]["0"]["masks"][entry.name]
        start, end = client["start"][entry.name], entry.view(client["base"])
        change = composed(end, mask, torch.zeros(())) - composed(start, mask, torch.zeros(()))
        moved.append(change.abs().max().item())
    assert moved[1] < 0.02 * moved[0]


def test_the_regularisers_gradient() -> None:
    """One step of rate 1 with and without each of them differs by its gradient."""

    def step(own: dict[str, Any], **options: Any) -> Tensor:
        settings = {"sparsity": 0.0, "retention": 0.0, "weight_decay": 0.0, **options}
        b = bench(train=TrainOptions(1, 12, Optimizer(lr=1.0)), **settings)
        client = newcomer(b)
        params = part_of(b)._fresh(client)
        state = {"client": {}, "fedweit": own}
        fitted = client.fit(b.build_method().parts, model={**b.model(), "params": params}, state=state, tag="train")
        return torch.stack([params, fitted.model["params"]])

    b = bench()
    entry, (start, plain) = hidden_weights(b.layout())[0], step({})
    adaptive, base = piece(b, "adaptive", start), entry.view(start)
    _, with_l1 = step({}, sparsity=0.01)
    assert torch.allclose(piece(b, "adaptive", plain - with_l1), 0.01 * adaptive.sign(), atol=1e-6)
    _, with_wd = step({}, weight_decay=0.1)
    assert torch.allclose(piece(b, "adaptive", plain - with_wd), 0.1 * adaptive, atol=1e-6)
    assert torch.allclose(piece(b, "mask", plain - with_wd), 0.1 * piece(b, "mask", start), atol=1e-6)
    assert torch.allclose(entry.view(plain - with_wd), 0.1 * base, atol=1e-6)
    held = {"start": {entry.name: base - 0.5}, "protect": {entry.name: torch.full((entry.shape[0],), 0.2)}}
    _, with_retention = step(held, retention=3.0, weight_decay=0.1)
    assert torch.allclose(entry.view(plain - with_retention), torch.full_like(base, 3.0 * 0.2 * 0.5), atol=1e-5)


# 4 -------------------------------------------------------------------------------------------------------------------
@given(channels=st.integers(1, 60), seed=st.integers(0, 100))
def test_at_most_seventy_percent_of_the_channels_are_sent(channels: int, seed: int) -> None:
    mask = torch.randn(channels, generator=torch.Generator().manual_seed(seed))
    kept = large(mask, 0.3)
    assert int(kept.sum()) <= 0.7 * channels + 1
    assert channels == 1 or kept.any()
    if kept.any() and not kept.all():
        assert mask.abs()[kept].min() > mask.abs()[~kept].max()


def test_the_uplink_carries_the_kept_channels_and_nothing_else() -> None:
    b = bench(stream=Toy(clients=1))
    outcome = b.run(rounds=1)
    (entry,) = hidden_weights(b.layout())
    channels, fan_in = entry.shape[0], entry.size // entry.shape[0]
    kept = int(large(piece(b, "mask", whole(b, outcome.clients[0])), 0.3).sum())
    assert outcome.state.traffic.up["fedweit"] == 4 * kept * fan_in + channels  # values, and one byte per channel
    assert kept <= 0.7 * channels + 1
    assert tensor_bytes(b.model()) * 0.75 > outcome.state.traffic.up["fedweit"]


# 5, 6 ----------------------------------------------------------------------------------------------------------------
def test_channels_are_averaged_over_their_senders() -> None:
    b = bench()
    (entry,) = hidden_weights(b.layout())
    fan_in = entry.size // entry.shape[0]
    rows = torch.arange(entry.size, dtype=torch.float32).reshape(entry.shape) + 1.0

    def reply(weights: Tensor, channels: list[int]) -> dict[str, Tensor]:
        kept = torch.zeros(entry.shape[0], dtype=torch.bool)
        kept[channels] = True
        return {"values": weights[kept].reshape(-1), "kept": kept}

    (disjoint,) = channel_means([reply(rows, [0, 1]), reply(2 * rows, [2, 5])], [entry])
    assert torch.equal(disjoint[[0, 1]], rows[[0, 1]]) and torch.equal(disjoint[[2, 5]], 2 * rows[[2, 5]])
    assert disjoint[[3, 4, 6, 7]].abs().max() == 0
    (shared,) = channel_means([reply(rows, [0, 1]), reply(3 * rows, [1])], [entry])
    assert torch.equal(shared[0], rows[0]) and torch.allclose(shared[1], 2 * rows[1])
    assert fan_in == 16


def test_where_the_aggregate_is_zero_a_client_keeps_its_own_value() -> None:
    received = {"params": torch.tensor([0.0, 2.0, 0.0])}
    state = {"fedweit": {"base": torch.tensor([5.0, 6.0, 7.0])}}
    model = {"params": torch.tensor([0.0, 2.0, 0.0, 9.0])}
    client = bench().client("fedweit", state, model=model, messages={"model": received})
    assert FedWeIT().personalise(client)["params"].tolist() == [5.0, 2.0, 7.0, 9.0]


def test_a_client_that_joins_late_goes_on_from_the_first_model_there() -> None:
    b = bench(stream=Toy(clients=2, cohorts={0: (0,), 1: (0,), 2: (1,)}))
    stopped = b.run(rounds=2)
    aggregate = stopped.state.model["params"]
    assert (aggregate == 0).any()
    merged = part_of(b).personalise(b.client("fedweit", stopped.clients[1], model=stopped.state.model))["params"]
    assert torch.equal(merged[aggregate == 0], b.model()["params"][aggregate == 0])


# 7 -------------------------------------------------------------------------------------------------------------------
def test_the_first_task_has_no_knowledge_and_does_not_train_its_attention() -> None:
    b = bench()
    for optimizer in (Optimizer(lr=0.02), Optimizer("adam", lr=0.01)):
        outcome = b.change(train=TrainOptions(2, 5, optimizer)).run(rounds=1)
        assert "fedweit" not in outcome.state.server
        for client in outcome.clients.values():
            assert piece(b, "attention", whole(b, client)).abs().max() == 0


def test_in_the_second_task_it_does_and_the_knowledge_is_what_was_published() -> None:
    b = bench(stream=Toy(cohorts={1: (0, 2)}), sparsity=1e-2)
    first, outcome = b.run(rounds=2), b.run(rounds=3)
    published = first.state.server["fedweit"]["knowledge"]
    assert set(published) == {"0", "2"}
    own = piece(b, "adaptive", whole(b, first.clients[2])).reshape(-1)
    assert torch.equal(dense(published["2"]), pruned(own, 1e-2))
    attention = piece(b, "attention", whole(b, outcome.clients[1]))
    assert attention[[0, 2]].abs().min() > 0 and attention[1] == 0
    assert all("knowledge" not in client["fedweit"] for client in outcome.clients.values())


def test_the_knowledge_is_sent_once_per_task() -> None:
    b = bench(stream=Toy(tasks=2, rounds_per_task=3))
    knowledge = tensor_bytes(b.run(rounds=3).state.server["fedweit"]["knowledge"])
    down = b.run().state.traffic.down["fedweit"]
    assert down == (6 + 1) * 3 * tensor_bytes(b.model()) + 3 * knowledge  # the last model reaches clients to be scored


# 8 -------------------------------------------------------------------------------------------------------------------
def columns(outcome: Outcome, row: int, rule: int) -> list[int]:
    return [counts[rule] for counts in outcome.state.rows[row] if counts]


@pytest.mark.parametrize("stream", [Toy(), ClassToy()], ids=["domains", "classes"])
def test_with_one_task_routing_equals_the_task_id(stream: Toy) -> None:
    outcome = bench(stream=stream).run()
    assert columns(outcome, 0, 2) == columns(outcome, 0, 3)
    if isinstance(stream, ClassToy):  # there a wrong route cannot give a right answer
        assert all(seen <= known for seen, known in zip(columns(outcome, 1, 2), columns(outcome, 1, 3), strict=True))
    assert outcome.state.rows[0][0][0] == 40 * stream.clients  # type: ignore[index]


class Counting(nn.Module):
    """Counts its forward passes in eval mode."""

    passes = 0

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.dense, self.head = nn.Linear(16, 6), nn.Linear(6, classes)

    def forward(self, x: Tensor) -> Tensor:
        Counting.passes += not self.training
        return self.head(torch.relu(self.dense(x.flatten(1))))  # type: ignore[no-any-return]


def test_one_forward_pass_per_task_and_no_task_id() -> None:
    b = bench(stream=ClassToy(task_ids=False, tasks=2), module=Counting)
    outcome = b.run()
    state, ctx = outcome.clients[0], b.context(round_index=3)
    model = {**outcome.state.model, "params": whole(b, state)}
    x = b.stream.test(0).x
    for tasks in (1, 2):
        own = {**state["fedweit"], "tasks": {str(t): state["fedweit"]["tasks"][str(t)] for t in range(tasks)}}
        Counting.passes = 0
        ctx.train.outputs(model, x, {"fedweit": own})
        assert Counting.passes == tasks
    Counting.passes = 0
    ctx.train.outputs(model, x, {"fedweit": part_of(b).state_for_task(state["fedweit"], 1)})
    assert Counting.passes == 1


def test_the_least_entropy_wins_for_every_sample() -> None:
    sure, unsure = torch.tensor([[0.9, 0.1], [0.5, 0.5]]).log(), torch.tensor([[0.6, 0.4], [0.2, 0.8]]).log()
    assert torch.equal(least_entropy([sure, unsure]), torch.stack([sure[0], unsure[1]]))


def test_knowing_the_task_means_answering_with_its_weights() -> None:
    b = bench(stream=ClassToy())
    outcome = b.run()
    state, ctx = outcome.clients[0], b.context(round_index=3)
    model = {**outcome.state.model, "params": whole(b, state)}
    for task, classes in enumerate(((0, 1), (2, 3))):
        found = ctx.train.outputs(
            model, b.stream.test(task).x, {"fedweit": part_of(b).state_for_task(state["fedweit"], task)}
        )
        assert set(found.argmax(1).tolist()) <= set(classes)


def test_scores_before_the_first_training_use_the_current_weights() -> None:
    b = bench(stream=Toy(cohorts={0: (0,), 1: (0,)}))
    outcome = b.run(rounds=2)
    assert "tasks" not in outcome.clients[1]["fedweit"]
    assert outcome.state.rows[0][0][0] == 3 * 40  # type: ignore[index]


# learning, state, composition ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("module", [None, pytest.param(Norm, marks=pytest.mark.slow)])
def test_it_learns(module: Any) -> None:
    outcome = bench(stream=Toy(samples=60, rounds_per_task=4), train=TrainOptions(5, 10, Optimizer(lr=0.1)),
                    module=module, retention=1.0).run()  # fmt: skip
    for task in range(2):
        scored, *_, known = outcome.state.rows[1][task]  # type: ignore[misc]
        assert known / scored > 0.6


def test_old_answers_change_only_through_the_base() -> None:
    b = bench(stream=Toy(tasks=3))
    first, last = (outcome.clients[0]["fedweit"]["tasks"] for outcome in b.after(2, 6))
    assert torch.equal(dense(first["0"]["fixed"]), dense(last["0"]["fixed"]))
    assert set(last) == {"0", "1", "2"}


@given(seed=st.integers(0, 100), size=st.integers(1, 50))
def test_sparse_vectors_come_back(seed: int, size: int) -> None:
    vector = pruned(torch.randn(size, generator=torch.Generator().manual_seed(seed)), 0.7)
    packed = sparse(vector)
    assert torch.equal(dense(packed), vector)
    assert tensor_bytes(packed) == 8 * int((vector != 0).sum())


def test_it_is_not_composed_with_rules_for_plain_networks() -> None:
    with pytest.raises(methods.MethodError, match=r"'fedgp\+fedweit': FedGP does not go on top of fedweit"):
        methods.build("fedgp+fedweit")
    with pytest.raises(CompositionError, match="fedweit trains decomposed weights, which fedprox"):
        compose(FedWeIT(), FedProx())


@pytest.mark.parametrize(
    ("option", "value"), [("sparsity", -1.0), ("retention", -1.0), ("weight_decay", -1.0), ("share", 1.0)]
)
def test_options_are_checked(option: str, value: Any) -> None:
    with pytest.raises(methods.MethodError, match=rf"method\.fedweit\.{option} must be"):
        methods.build("fedweit", fedweit(**{option: value}))
