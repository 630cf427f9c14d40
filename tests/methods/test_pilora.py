"""PILoRA: the server's weights by hand, the terms of the loss, what a task trains and sends, and what is scored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from everfed import models
from everfed.core.context import TrainOptions
from everfed.core.evaluate import correct_counts
from everfed.core.optimizer import Optimizer
from everfed.errors import CompositionError
from everfed.methods.pretrained.pilora import PILoRA, Prototypes, QueryValueLoRA, nearness_weights, prototype_weights
from everfed.models.vit import ViT
from tests.methods.test_lora import ClassToy, entries
from tests.support.toy import Bench, Toy, tiny_vit

WIDTH, RANK = 8, 4  # of the toy's Transformer; the default rank
TRAIN = TrainOptions(2, 5, Optimizer(lr=0.1, momentum=0.9, weight_decay=0.1))


def loaded(bench: Bench, params: Tensor) -> ViT:
    """The network with a run's parameters."""
    module = bench.build_module()
    bench.layout().bind(module, params.clone(), torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    assert isinstance(module, ViT)
    return module.eval()


# the server -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("near", "weights"),
    [
        ((1.0, 2.0), (0.0066929, 0.9933071)),
        ((0.3, 40.0), (0.0066929, 0.9933071)),
        ((1.0, 2.0, 3.0), (0.0061883, 0.0753888, 0.9184230)),
        ((7.0,), (1.0,)),
        ((2.0, 2.0, 2.0, 2.0), (0.25, 0.25, 0.25, 0.25)),
    ],
)
def test_weights_of_clients(near: tuple[float, ...], weights: tuple[float, ...]) -> None:
    found = nearness_weights(torch.tensor(near, dtype=torch.float64), 0.2)
    assert torch.allclose(found, torch.tensor(weights, dtype=torch.float64), atol=1e-7)


def test_the_nearer_prototype_counts_more() -> None:
    """Distances to the features 0 and 4: of the prototype 1, 1 + 3; of 8, 8 + 4; so u is 1/4 and 1/12."""
    prototypes, features = torch.tensor([[1.0], [8.0]]), torch.tensor([[0.0], [4.0]])
    assert torch.allclose(prototype_weights(prototypes, features, 0.2), torch.tensor([0.9933071, 0.0066929]))


@pytest.mark.parametrize("features", [torch.zeros(0, 3), torch.zeros(1, 3)])
def test_weights_are_finite_where_nobody_has_the_class_or_distances_are_zero(features: Tensor) -> None:
    assert torch.equal(prototype_weights(torch.zeros(4, 3), features, 0.2), torch.full((4,), 0.25))


@given(st.integers(1, 5), st.integers(0, 3), st.integers(0, 2**31))
def test_a_prototype_is_a_mixture_whatever_was_sent(clients: int, holders: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    prototypes, features = torch.randn(clients, 3, generator=generator), torch.randn(holders, 3, generator=generator)
    weights = prototype_weights(prototypes, features, 0.2)
    assert float(weights.min()) > 0 and float(weights.sum()) == pytest.approx(1.0)
    if holders:
        distances = (prototypes.unsqueeze(1) - features).norm(dim=2).sum(1)
        assert int(weights.argmax()) == int(distances.argmin())


def test_the_server_averages_factors_by_samples_and_weighs_prototypes() -> None:
    """Client 1 has no sample of class 1, so that only client 0's features count there."""
    bench = Bench("pilora", stream=ClassToy(clients=2))
    (part,) = bench.build_method().parts
    assert isinstance(part, PILoRA)
    prototypes = {0: torch.full((2, WIDTH), 1.0), 1: torch.full((2, WIDTH), 2.0)}
    labels = {0: torch.tensor([0, 1]), 1: torch.tensor([0])}
    features = {0: torch.full((2, WIDTH), 2.0), 1: torch.full((1, WIDTH), 2.0)}
    adapter = torch.arange(4.0 * RANK * WIDTH)
    reduced = {"adapter": adapter, "prototypes": prototypes, "labels": labels, "features": features}
    server = bench.server("pilora", {"pilora": {"classes": torch.tensor([0, 1])}}, reduced=reduced)
    found = bench.layout().named(part.aggregate(server)["params"])
    near = 0.0066929 * 1.0 + 0.9933071 * 2.0
    assert torch.allclose(found["head.weight"][:2], torch.full((2, WIDTH), near), atol=1e-6)
    sent = torch.cat([found[f"blocks.0.attn.qkv.lora_{factor}"][0].flatten() for factor in "AB"])
    assert torch.equal(sent, adapter)
    before = bench.layout().named(bench.model()["params"])
    assert torch.equal(found["head.weight"][2:], before["head.weight"][2:])
    assert torch.equal(found["blocks.0.attn.qkv.lora_A"][1], before["blocks.0.attn.qkv.lora_A"][1])


# the network ----------------------------------------------------------------------------------------------------------
def layer(task: int, tasks: int = 3, rank: int = 2) -> QueryValueLoRA:
    found = QueryValueLoRA(nn.Linear(6, 18), "name", rank, rank, seed=0)
    found.hold(tasks, 0)
    found.follow(nn.Parameter(torch.full((1,), float(task))), "sum")
    with torch.no_grad():
        found.lora_B.normal_(generator=torch.Generator().manual_seed(1))
    return found


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("task", [0, 1, 2])
def test_queries_and_values_get_the_sum_of_all_tasks_so_far(task: int, training: bool) -> None:
    found, x = layer(task).train(training), torch.randn(5, 7, 6)
    dense = found.weight.clone()
    for j in range(task + 1):
        dense[:6] += found.lora_B[j, 0] @ found.lora_A[j, 0]
        dense[12:] += found.lora_B[j, 1] @ found.lora_A[j, 1]
    assert torch.allclose(found(x), functional.linear(x, dense, found.bias), atol=1e-6)
    assert torch.equal(found(x)[..., 6:12], functional.linear(x, found.weight, found.bias)[..., 6:12])


def test_orthogonal_rows_overlap_by_nothing() -> None:
    found = layer(task=1)
    with torch.no_grad():
        found.lora_A.zero_()
        found.lora_A[0, :, 0, 0] = found.lora_A[0, :, 1, 1] = 3.0
        found.lora_A[1, :, 0, 2] = found.lora_A[1, :, 1, 3] = 5.0
    assert found.overlap().item() == 0.0 and found.size().item() == 2 * 2 * 5.0


def test_equal_rows_overlap_by_their_squared_length() -> None:
    """a^2 = 2.25 for queries and for values, for each of two earlier tasks; later tasks do not count."""
    found = layer(task=2, tasks=4, rank=1)
    with torch.no_grad():
        found.lora_A.zero_()
        found.lora_A[:, :, 0, 4] = 1.5
    assert found.overlap().item() == pytest.approx(2 * 2 * 2.25)


@given(st.integers(0, 2), st.integers(0, 2**31))
def test_the_overlap_is_the_sum_of_products_one_by_one(task: int, seed: int) -> None:
    found = layer(task)
    with torch.no_grad():
        found.lora_A.normal_(generator=torch.Generator().manual_seed(seed))
    pairs = ((j, s) for j in range(task) for s in (0, 1))
    expected = sum((found.lora_A[j, s] @ found.lora_A[task, s].T).abs().sum().item() for j, s in pairs)
    assert found.overlap().item() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_penalties_move_the_current_factor_alone() -> None:
    found = layer(task=1)
    (found.overlap() + found.size()).backward()
    gradient = found.lora_A.grad
    assert gradient is not None and gradient[1].any() and not gradient[[0, 2]].any()


def test_outputs_are_scaled_distances() -> None:
    """|(3, 4) - (0, 0)| = 5 and |(3, 4) - (3, 1)| = 3, over sqrt(2); at a prototype the gradient is finite."""
    head = Prototypes(3, 2, seed=0)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[0.0, 0.0], [3.0, 1.0], [3.0, 4.0]]))
    features = torch.tensor([[3.0, 4.0]], requires_grad=True)
    outputs = head(features)
    assert torch.allclose(outputs, -torch.tensor([[5.0, 3.0, 0.0]]) / 2**0.5)
    outputs.sum().backward()
    assert features.grad is not None and torch.isfinite(features.grad).all()


def test_first_prototypes_are_a_tenth_of_normal_draws() -> None:
    weight = Prototypes(200, 100, seed=3).weight.detach()
    assert float(weight.std()) == pytest.approx(0.1, rel=0.03) and abs(float(weight.mean())) < 0.002
    assert torch.equal(weight, Prototypes(200, 100, seed=3).weight)


# a run ----------------------------------------------------------------------------------------------------------------
def test_a_task_starts_at_the_backbone_with_prototypes_of_the_seed() -> None:
    bench = Bench("pilora")
    module, plain = bench.build_module(), bench.change(method="fedavg", module=tiny_vit).build_module()
    x = bench.stream.inputs(bench.stream.test(0).x)
    assert isinstance(module, ViT) and isinstance(plain, ViT)
    assert torch.equal(module.eval().features(x), plain.eval().features(x))
    other = bench.change(seed=1).build_module()
    assert isinstance(other, ViT) and not torch.equal(module.head.weight, other.head.weight)


def test_the_terms_of_the_loss() -> None:
    """A first step's loss is the cross-entropy of negative distances and the three terms."""
    options = {"pilora": {"pull": 0.3, "sparsity": 0.02, "orthogonality": 0.7}}
    train = TrainOptions(1, 12, Optimizer(lr=0.0))
    bench = Bench("pilora", options, stream=ClassToy(clients=1, rounds_per_task=1), train=train)
    outcome = bench.run()
    module, data = loaded(bench, outcome.params), bench.stream.data(0, 1)
    qkv = module.blocks[0].attn.qkv
    assert isinstance(qkv, QueryValueLoRA)
    outputs = module(bench.stream.inputs(data.x))
    pull = -outputs[torch.arange(len(data)), data.y].mean()
    expected = functional.cross_entropy(outputs, data.y) + 0.3 * pull + 0.02 * qkv.size() + 0.7 * qkv.overlap()
    losses = [event["loss"] for event in outcome.events if "loss" in event]
    assert losses[-1] == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("method", ["pilora", "fedgp+pilora"])
def test_prototypes_and_factors_of_earlier_tasks_stay_bit_for_bit(method: str) -> None:
    bench = Bench(method, stream=ClassToy(), train=TRAIN)
    first, middle, last = (
        entries(bench, vector, "")
        for vector in (bench.model()["params"], bench.run(rounds=2).params, bench.run().params)
    )
    for end in ("lora_A", "lora_B"):
        start, half, done = (found[f"blocks.0.attn.qkv.{end}"] for found in (first, middle, last))
        assert torch.equal(half[0], done[0]) and torch.equal(start[1], half[1])
        assert not torch.equal(start[0], half[0]) and not torch.equal(half[1], done[1])
    start, half, done = (found["head.weight"] for found in (first, middle, last))
    assert torch.equal(half[:2], done[:2]) and torch.equal(start[2:], half[2:])
    assert not torch.equal(start[:2], half[:2]) and not torch.equal(half[2:], done[2:])


def test_never_seen_prototypes_change_no_prediction() -> None:
    """Not even where they lie on the features themselves."""
    bench = Bench("pilora", stream=ClassToy())
    module, data = loaded(bench, bench.run(rounds=2).params), bench.stream.test(0)
    x, seen = bench.stream.inputs(data.x), torch.tensor([True, True, False, False])
    with torch.no_grad():
        before = module(x)
        module.head.weight[2:] = module.features(x)[:2]
        after = module(x)
    assert not torch.equal(before, after) and torch.equal(before[:, :2], after[:, :2])
    counts = [correct_counts(outputs, data.y, seen, seen)["seen"] for outputs in (before, after)]
    assert torch.equal(*counts)


def test_scored_is_the_sum_of_the_tasks_updates() -> None:
    bench = Bench("pilora", stream=ClassToy(), train=TRAIN)
    outcome, data = bench.run(), bench.stream.test(1)
    module = loaded(bench, outcome.params)
    qkv = module.blocks[0].attn.qkv
    assert isinstance(qkv, QueryValueLoRA)
    dense = nn.Linear(WIDTH, 3 * WIDTH)
    with torch.no_grad():
        dense.weight.copy_(qkv.weight)
        dense.bias.copy_(qkv.bias)
        dense.weight[:WIDTH] += sum(qkv.lora_B[j, 0] @ qkv.lora_A[j, 0] for j in (0, 1))
        dense.weight[2 * WIDTH :] += sum(qkv.lora_B[j, 1] @ qkv.lora_A[j, 1] for j in (0, 1))
        module.blocks[0].attn.qkv = dense
        expected = module(bench.stream.inputs(data.x))
    assert torch.allclose(bench.trainer().outputs(outcome.state.model, data.x), expected, atol=1e-5)


def test_replies_have_the_size_of_the_formula() -> None:
    """4 r d numbers of factors, then prototypes and mean features of the task's two classes, in float32, and the two
    labels as int64; 12,288 and 15,360 numbers for rank 4, width 768 and ten classes."""
    bench = Bench("pilora", stream=ClassToy(clients=1, rounds_per_task=1))
    once = 4 * (4 * RANK * WIDTH + 2 * WIDTH + 2 * WIDTH) + 2 * 8
    assert [bench.run(rounds=r).state.traffic.up["pilora"] for r in (1, 2)] == [once, 2 * once]
    assert (4 * 4 * 768, 2 * 10 * 768) == (12_288, 15_360)


class Half(ClassToy):
    """Client 1 has the even classes alone."""

    def data(self, client: int, task: int) -> Any:
        found = super().data(client, task)
        return found.take((found.y.numpy() % 2 == 0).nonzero()[0]) if client else found


def test_clients_send_mean_features_of_classes_that_they_have() -> None:
    outcome = Bench("pilora", stream=Half(clients=2, rounds_per_task=1)).run(rounds=1)
    always = 4 * (4 * RANK * WIDTH + 2 * WIDTH)
    assert outcome.state.traffic.up["pilora"] == 2 * always + 3 * (4 * WIDTH + 8)


def test_mean_features_are_those_of_the_trained_network() -> None:
    bench = Bench("pilora", stream=Half(clients=2))
    (part,) = bench.build_method().parts
    client = bench.client("pilora", {}, 1, messages={"pilora": {"classes": torch.tensor([0, 1])}})
    client.model = client.fit((part,), tag="train").model
    sent = part.reply(client) or {}
    expected = loaded(bench, client.model["params"]).features(bench.stream.inputs(client.data.x)).mean(0)
    assert sent["labels"].tolist() == [0]
    assert torch.allclose(sent["features"], expected.unsqueeze(0), atol=1e-6)


def test_one_client_keeps_what_it_trained() -> None:
    """Its factors and prototypes after one step, bit for bit."""
    train = TrainOptions(1, 12, Optimizer(lr=0.1))
    bench = Bench("pilora", stream=ClassToy(clients=1, rounds_per_task=1), train=train)
    fitted = bench.client("pilora", {}).fit(bench.build_method().parts, tag="train")
    own, shared = (entries(bench, vector, "") for vector in (fitted.model["params"], bench.run(rounds=1).params))
    assert torch.equal(own["head.weight"][:2], shared["head.weight"][:2])
    for name in ("blocks.0.attn.qkv.lora_A", "blocks.0.attn.qkv.lora_B"):
        assert torch.equal(own[name][0], shared[name][0])


def test_rounds_without_a_message_go_on_from_the_clients_own_weights() -> None:
    train = TrainOptions(1, 5, Optimizer(lr=0.05), sync_every=2)
    bench = Bench("pilora", stream=ClassToy(rounds_per_task=4), train=train)
    assert torch.equal(bench.run(rounds=1).params[:-1], bench.model()["params"][:-1])
    assert not torch.equal(bench.run(rounds=2).params, bench.model()["params"])


def test_domains_train_all_prototypes_in_every_task() -> None:
    bench = Bench("pilora", stream=Toy())
    half, done = (
        entries(bench, v, "head.weight")["head.weight"] for v in (bench.run(rounds=2).params, bench.run().params)
    )
    assert (half != done).any(1).all()


# refusals -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank must be at least 1; got 0"),
        ({"temperature": 0.0}, "temperature must be positive; got 0"),
        ({"pull": -1.0}, "pull must be at least 0; got -1"),
        ({"blocks": ()}, "blocks must name at least one block; got none"),
    ],
)
def test_wrong_options_name_the_key(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PILoRA(**options)


def test_networks_that_do_not_fit_are_refused() -> None:
    with pytest.raises(CompositionError, match="part 'pilora' changes the attention .* set model.kind = 'vit'"):
        Bench("pilora", module=lambda shape, classes: nn.Linear(16, classes)).build_module()
    with pytest.raises(
        CompositionError, match=r"method.pilora.blocks must be below the network's depth, 2; got \(0, 2\)"
    ):
        Bench("pilora", {"pilora": {"blocks": (0, 2)}}).build_module()
    own = {"patch": 2, "width": 8, "depth": 2, "heads": 2, "lora": {"rank": 2}}
    with pytest.raises(CompositionError, match="'pilora' adds its own LoRA layers; leave model.lora out"):
        Bench("pilora", module=lambda shape, classes: models.build("vit", shape, classes, 0, own)).build_module()
