"""LoRA by averaging and FFA-LoRA: what averaging misses, what a task starts from, what is scored and sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from everfed import models
from everfed.core.context import TrainOptions
from everfed.core.layout import Layout
from everfed.core.optimizer import Optimizer
from everfed.errors import CompositionError
from everfed.models import lora
from everfed.models.lora import LoRALinear
from everfed.models.vit import ViT
from tests.support.toy import Bench, Outcome, Toy, tiny_vit

WIDTH, DEPTH, RANK = 8, 2, 8  # of the toy's Transformer; the default rank


def entries(bench: Bench, vector: Tensor, end: str) -> dict[str, Tensor]:
    """The tensors of a model vector whose names end so."""
    return {name: value for name, value in bench.layout().named(vector).items() if name.endswith(end)}


def one_round(**fields: Any) -> Bench:
    return Bench("lora", {}, stream=Toy(tasks=2, rounds_per_task=1, **fields))


# averaging ------------------------------------------------------------------------------------------------------------
@given(st.integers(1, 5), st.integers(0, 2**31))
def test_averaging_factors_misses_their_covariance(clients: int, seed: int) -> None:
    """mean(B_k A_k) - mean(B) mean(A) = mean((B_k - B)(A_k - A)); nothing is missed with one client."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(clients, 2, 5, generator=generator, dtype=torch.float64)
    b = torch.randn(clients, 4, 2, generator=generator, dtype=torch.float64)
    missed = (b @ a).mean(0) - b.mean(0) @ a.mean(0)
    assert torch.allclose(missed, ((b - b.mean(0)) @ (a - a.mean(0))).mean(0), atol=1e-12)
    assert clients > 1 or missed.abs().max() < 1e-12


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=5), st.integers(0, 2**31))
def test_averaging_one_factor_misses_nothing(weights: list[float], seed: int) -> None:
    """mean(B_k) A = mean(B_k A), whatever the weights."""
    generator = torch.Generator().manual_seed(seed)
    share = (torch.tensor(weights) / sum(weights)).reshape(-1, 1, 1)
    a, b = torch.randn(2, 5, generator=generator), torch.randn(len(weights), 4, 2, generator=generator)
    assert torch.allclose((share * b).sum(0) @ a, (share * (b @ a)).sum(0), atol=1e-6)


def test_noise_on_one_factor_enters_linearly() -> None:
    """Noise of deviation s on every B_k changes the output at x by variance s^2 |A x|^2 / K in every coordinate; noise
    on A_k as well adds a quadratic term of variance rank s^4 |x|^2 / K (and no other: A enters by the noise alone)."""
    generator = torch.Generator().manual_seed(0)
    clients, draws, sigma = 4, 20_000, 0.5
    a, x = torch.randn(2, 3, generator=generator), torch.randn(3, generator=generator)
    noise = sigma * torch.randn(draws, clients, 5, 2, generator=generator)
    change = noise.mean(1) @ (a @ x)
    expected = sigma**2 * float((a @ x).square().sum()) / clients
    assert torch.allclose(change.var(0), torch.full((5,), expected), rtol=0.05)
    other = sigma * torch.randn(draws, clients, 2, 3, generator=generator)
    both = ((noise @ (a + other)).mean(1) @ x).var(0)
    quadratic = 2 * sigma**4 * float(x.square().sum()) / clients
    assert torch.allclose(both, torch.full((5,), expected + quadratic), rtol=0.05)


# layers ---------------------------------------------------------------------------------------------------------------
def layer(tasks: int = 3, merge: str = "mean", rank: int = 2) -> LoRALinear:
    found = LoRALinear(nn.Linear(6, 4), "name", rank, rank, seed=0)
    found.hold(tasks, 0)
    found.follow(nn.Parameter(torch.zeros(1)), merge)
    with torch.no_grad():
        found.lora_B.normal_(generator=torch.Generator().manual_seed(1))
    return found


@pytest.mark.parametrize("merge", ["mean", "sum"])
@pytest.mark.parametrize("task", [0, 1, 2])
def test_factored_and_dense_merged_updates_agree(merge: str, task: int) -> None:
    found, x = layer(merge=merge).eval(), torch.randn(7, 6)
    with torch.no_grad():
        found.lora_merge.task.fill_(task)
        found.lora_B[task + 1 :] = 0.0  # later tasks have not begun
    products = [b @ a for a, b in zip(found.lora_A, found.lora_B, strict=True)][: task + 1]
    dense = torch.stack(products).sum(0) / (task + 1 if merge == "mean" else 1)
    assert torch.allclose(found(x), functional.linear(x, found.weight + dense, found.bias), atol=1e-6)


def test_training_uses_the_current_task_alone() -> None:
    found, x = layer().train(), torch.randn(7, 6)
    with torch.no_grad():
        found.lora_merge.task.fill_(1)
    dense = found.lora_B[1] @ found.lora_A[1]
    assert torch.allclose(found(x), functional.linear(x, found.weight + dense, found.bias), atol=1e-6)
    found(x).sum().backward()
    assert found.lora_B.grad is not None and not found.lora_B.grad[[0, 2]].any() and found.lora_B.grad[1].any()
    assert found.weight.grad is None


def test_alpha_over_rank_scales() -> None:
    base, x = nn.Linear(6, 4), torch.randn(3, 6)
    plain, scaled = (LoRALinear(base, "name", 2, alpha, 0) for alpha in (2.0, 5.0))
    for one in (plain, scaled):
        nn.init.ones_(one.lora_B)
    assert torch.allclose(scaled(x) - base(x), 2.5 * (plain(x) - base(x)), atol=1e-5)


def test_first_factors_come_from_seed_task_and_layer() -> None:
    made = [
        LoRALinear(nn.Linear(6, 4), name, 2, 2, seed).lora_A for name, seed in (("a", 0), ("a", 0), ("b", 0), ("a", 1))
    ]
    assert torch.equal(made[0], made[1]) and not torch.equal(made[0], made[2]) and not torch.equal(made[0], made[3])
    held = layer().lora_A
    assert not torch.equal(held[0], held[1]) and held.abs().max() <= 6**-0.5


# the key model.lora ---------------------------------------------------------------------------------------------------
def test_a_networks_own_key_leaves_factors_and_head_to_train() -> None:
    """Rank 2 on the two projections of both blocks: 2 (8 + 24) and 2 (8 + 8) numbers a block; a head of 9 x 4."""
    options = {"patch": 2, "width": 8, "depth": 2, "heads": 2, "lora": {"rank": 2, "targets": ["qkv", "attn.proj"]}}
    module = models.build("vit", (1, 4, 4), 4, 0, options)
    assert Layout.of(module).size == 2 * (2 * 32 + 2 * 16) + 36
    plain = models.build("vit", (1, 4, 4), 4, 0, {k: v for k, v in options.items() if k != "lora"})
    x = torch.randn(3, 1, 4, 4)
    assert torch.equal(module(x), plain(x))


def test_any_network_with_linear_layers_takes_the_key() -> None:
    module = models.build("mlp", (4,), 3, 0, {"hidden": [6, 5], "lora": {"rank": 2}})
    assert len(lora.layers(module)) == 2 and Layout.of(module).size == 2 * (4 + 6) + 2 * (6 + 5) + 5 * 3 + 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (8, r"model\.lora must be a table such as"),
        ({"rank": 0}, r"model\.lora\.rank must be a whole number of at least 1; got 0"),
        ({"ranks": 2}, r"model\.lora\.ranks is not an option; it has rank, targets, alpha"),
        (
            {"targets": ["query"]},
            r"model\.lora\.targets must be ends of names .*qkv, proj, fc1, fc2.*; got \['query'\]",
        ),
        ({"targets": "qkv"}, r"model\.lora\.targets must be a list"),
        ({"alpha": -1}, r"model\.lora\.alpha must be positive; got -1"),
    ],
)
def test_wrong_options_name_the_key(options: Any, message: str) -> None:
    with pytest.raises(models.ModelError, match=message):
        models.build("vit", (1, 4, 4), 4, 0, {"patch": 2, "width": 8, "depth": 1, "heads": 2, "lora": options})


def test_a_network_without_a_hidden_linear_layer_is_refused() -> None:
    with pytest.raises(CompositionError, match="part 'lora': lora.targets must be ends of names of linear layers"):
        Bench("lora", module=lambda shape, classes: nn.Sequential(nn.Flatten(), nn.Linear(16, classes))).run()


# a run ----------------------------------------------------------------------------------------------------------------
def test_a_task_starts_at_the_backbone() -> None:
    """B = 0: outputs are the backbone's bit for bit, and A gets no gradient in the first step."""
    bench = Bench("lora")
    x = bench.stream.test(0).x
    assert torch.equal(bench.trainer().outputs(bench.model(), x), plain_outputs(bench, x))
    client = bench.client("lora")
    gradient = client.gradient(client.data.x, client.data.y, tag="test")
    assert not any(a.any() for a in entries(bench, gradient, "lora_A").values())
    assert any(b.any() for b in entries(bench, gradient, "lora_B").values())


def plain_outputs(bench: Bench, x: Tensor) -> Tensor:
    plain = bench.change(method="fedavg", module=tiny_vit)
    return plain.trainer().outputs(plain.model(), x)


def test_one_client_is_averaged_exactly() -> None:
    bench = one_round(clients=1)
    fitted = bench.client("lora").fit((), tag="train")
    after = bench.run(rounds=1)
    frozen = entries(bench, fitted.model["params"], "lora_B")
    for name, value in entries(bench, after.params, "lora_B").items():
        assert torch.equal(value[0], frozen[name][0])


def uploaded(outcome: Outcome) -> int:
    return outcome.state.traffic.up["fedavg"] // 4


@pytest.mark.parametrize(("method", "factor"), [("lora", 16), ("ffa-lora", 9)])
def test_replies_have_the_size_of_the_formula(method: str, factor: int) -> None:
    """16 r d numbers a block for both factors of the four matrices, 9 r d for B alone; the head's rows of 2 classes."""
    stream = ClassToy(clients=1, tasks=2, rounds_per_task=1)
    sizes = [uploaded(Bench(method, {}, stream=stream).run(rounds=r)) for r in (1, 2)]
    once = factor * RANK * WIDTH * DEPTH + 2 * (WIDTH + 1)
    assert sizes == [once, 2 * once]


class ClassToy(Toy):
    """Two classes in each of two tasks."""

    def labels(self, task: int) -> tuple[int, ...]:
        return (2 * task, 2 * task + 1)

    def data(self, client: int, task: int) -> Any:
        return self._draw(np.random.default_rng([client, task]), self.samples, task, self.labels(task))


@pytest.mark.parametrize("method", ["lora", "ffa-lora", "fedgp+lora"])
def test_what_a_task_does_not_train_stays_bit_for_bit(method: str) -> None:
    """Factors of the other task, and the head's rows of its classes; with weight decay and momentum, too."""
    train = TrainOptions(2, 5, Optimizer(lr=0.1, momentum=0.9, weight_decay=0.1))
    bench = Bench(method, stream=ClassToy(), train=train)
    first, middle, last = bench.model()["params"], *(outcome.params for outcome in bench.after(2, 4))
    for end in ("lora_A", "lora_B"):
        for start, half, done in zip(*(entries(bench, v, end).values() for v in (first, middle, last)), strict=True):
            assert torch.equal(start[1], half[1]) and torch.equal(half[0], done[0])
            assert torch.equal(start[0], half[0]) == (end == "lora_A" and method == "ffa-lora")
    for end in ("head.weight", "head.bias"):
        start, half, done = (entries(bench, v, end)[end] for v in (first, middle, last))
        assert torch.equal(start[2:], half[2:]) and torch.equal(half[:2], done[:2])
        assert not torch.equal(start[:2], half[:2]) and not torch.equal(half[2:], done[2:])


def test_the_frozen_factor_is_never_sent_again() -> None:
    """A of both tasks is sent with the first message; afterwards clients hold it."""
    bench = Bench("ffa-lora", {}, stream=ClassToy(clients=1, tasks=2, rounds_per_task=3))
    down = [outcome.state.traffic.down["fedavg"] // 4 for outcome in bench.after(1, 2, 3, 4)]
    trained = 9 * RANK * WIDTH * DEPTH + 2 * (WIDTH + 1)
    assert down[0] == len(bench.model()["params"])
    assert down[1] - down[0] == down[2] - down[1] == trained
    assert down[3] - down[2] == 2 * trained + 1  # the first task's end, the second one's start, the task's number


def test_scored_is_the_mean_of_the_tasks_updates() -> None:
    bench = Bench("lora", stream=ClassToy())
    outcome, x = bench.run(), bench.stream.test(0).x
    module = bench.build_module()
    bench.layout().bind(module, outcome.params.clone(), torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    dense = tiny_vit((1, 4, 4), 4)
    weights = {n: t for n, t in module.state_dict().items() if "lora" not in n}
    for name, one in lora.layers(module).items():
        weights[f"{name}.weight"] = one.weight + 0.5 * sum(b @ a for a, b in zip(one.lora_A, one.lora_B, strict=True))
    dense.load_state_dict(weights)
    expected = dense.eval()(bench.stream.inputs(x))
    assert torch.allclose(bench.trainer().outputs(outcome.state.model, x), expected, atol=1e-5)
    assert isinstance(dense, ViT)


def test_layers_of_peft_are_left_to_other_methods() -> None:
    class Foreign(nn.Module):
        def __init__(self, shape: tuple[int, ...], classes: int) -> None:
            super().__init__()
            self.lora_A, self.head = nn.Linear(16, 2), nn.Linear(2, classes)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lora_A(x.flatten(1)))  # type: ignore[no-any-return]

    with pytest.raises(CompositionError, match="set model.lora, or train them with method fedavg"):
        Bench("lora", module=Foreign).run()
    Bench("fedavg", module=Foreign).run(rounds=1)


def test_a_stream_that_hides_its_boundaries_is_refused() -> None:
    """Which task a test sample is of need not be known."""
    method = Bench("lora").build_method()
    method.fit_stream(Toy(task_ids=False))
    with pytest.raises(CompositionError, match="must know when a task begins or ends"):
        method.fit_stream(Toy(boundaries=False))


def test_a_run_needs_no_task_ids() -> None:
    plain, blind = (Bench("lora", stream=Toy(task_ids=known)).run().params for known in (True, False))
    assert torch.equal(plain, blind)


# layers of other kinds ------------------------------------------------------------------------------------------------
class Conv1D(nn.Module):
    """Of transformers, in GPT-2: a linear layer whose weight is (in, out)."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def test_a_conv1d_is_adapted_like_a_linear_layer() -> None:
    base, x = Conv1D(4, 6), torch.randn(3, 6)
    alike = nn.Linear(6, 4)
    alike.weight, alike.bias = nn.Parameter(base.weight.T.clone()), base.bias
    ours, other = (LoRALinear(one, "name", 2, 2, 0) for one in (base, alike))
    assert torch.equal(ours.lora_A, other.lora_A)
    for layer in (ours, other):
        nn.init.constant_(layer.lora_B, 0.3)
    torch.testing.assert_close(ours(x), other(x))
    assert type(ours.merged()) is type(ours.without_factors()) is Conv1D
    torch.testing.assert_close(ours.merged()(x), ours(x))
    torch.testing.assert_close(ours.without_factors()(x), base(x))


def test_factors_and_head_of_a_bf16_network_are_float32() -> None:
    module = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).bfloat16()
    lora.add(module, {"rank": 2}, 0)
    assert {entry.name for entry in Layout.of(module).params} == {"0.lora_A", "0.lora_B", "2.weight", "2.bias"}
    outputs = module(torch.randn(4, 6).bfloat16())
    assert outputs.dtype == torch.float32 and module[0].weight.dtype == torch.bfloat16
    outputs.sum().backward()
    assert module[0].lora_B.grad.abs().sum() > 0


def test_a_head_that_shares_its_weight_is_left_alone() -> None:
    module = nn.ModuleDict({"words": nn.Embedding(7, 4), "inner": nn.Linear(4, 4), "out": nn.Linear(4, 7, bias=False)})
    module["out"].weight = module["words"].weight
    with pytest.raises(ValueError, match=r"head out shares its weight with Embedding.*lora.head = false"):
        lora.add(module, {}, 0)
    lora.add(module, {"head": False}, 0)
    assert {entry.name for entry in Layout.of(module).params} == {"inner.lora_A", "inner.lora_B"}
    with pytest.raises(ValueError, match="lora.head must be true or false; got 'no'"):
        lora.add(module, {"head": "no"}, 0)
