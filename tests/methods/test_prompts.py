"""Prompts: components, pools and experts by hand, what a task trains, and what does not depend on the batch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import everfed
from everfed.core.context import TrainOptions
from everfed.core.method import compose
from everfed.core.optimizer import Optimizer
from everfed.core.part import Part
from everfed.errors import CompositionError
from everfed.methods import registry as methods
from everfed.methods.aggregate.fedavg import FedAvg
from everfed.methods.common.layers import features
from everfed.methods.pretrained.prompts import FedCPrompt, PromptShared, before_task, contrast, orthonormal
from everfed.models.prompts import CodaPrompts, DualPrompts, PoolPrompts, SharedPrompts
from everfed.models.vit import ViT, as_vit
from everfed.streams import from_arrays
from tests.methods.test_lora import ClassToy, entries, plain_outputs
from tests.support.toy import SMALL, Bench, Outcome, Toy, tiny_vit

METHODS = ("prompt-l2p", "prompt-dual", "prompt-coda", "fed-cprompt", "prompt-hgp")


def network(prompts: Any = None) -> ViT:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = tiny_vit((1, 4, 4), 4)
    assert isinstance(module, ViT)
    module.prompts = prompts
    return module.eval()


def images(count: int = 5) -> Tensor:
    return torch.randn(count, 1, 4, 4, generator=torch.Generator().manual_seed(3))


# CODA-Prompt ----------------------------------------------------------------------------------------------------------
def coda(tasks: int = 2) -> CodaPrompts:
    return CodaPrompts((0, 1), tasks, 3, 4, 8, seed=0)


@given(st.floats(0.01, 100.0))
def test_weights_of_components_are_cosines(scale: float) -> None:
    components, query = coda().blocks["0"], torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    weights = components.weights(query).detach()
    assert weights.shape == (6, 2, 3) and weights.abs().max() <= 1 + 1e-6
    assert torch.allclose(components.weights(scale * query), weights, atol=1e-5)
    one = torch.nn.functional.cosine_similarity(query[4] * components.A[1, 2], components.K[1, 2], dim=0)
    assert float(weights[4, 1, 2]) == pytest.approx(float(one.detach()), abs=1e-6)


def test_a_prompt_is_the_weighted_sum_of_the_components_of_tasks_so_far() -> None:
    components, query = coda().blocks["0"], torch.randn(6, 8)
    keys, values = components.prompt(query, torch.tensor([1.0, 0.0]))
    weights = components.weights(query)[:, 0]
    expected = sum(weights[:, m, None, None] * components.P[0, m] for m in range(3))
    assert torch.allclose(torch.cat([keys, values], 1), expected, atol=1e-5)
    assert keys.shape == values.shape == (6, 2, 8)


def test_components_of_later_tasks_do_not_matter() -> None:
    prompts = coda()
    module, x = network(prompts), images()
    before = module(x)
    with torch.no_grad():
        prompts.blocks["1"].P[1] += 1.0
    assert torch.equal(module(x), before)
    with torch.no_grad():
        prompts.task.fill_(1)
    assert not torch.allclose(module(x), before, atol=1e-4)


@given(st.integers(0, 4), st.integers(1, 4), st.integers(0, 2**31))
def test_new_components_are_orthonormal_and_orthogonal_to_all_earlier_ones(old: int, new: int, seed: int) -> None:
    """Also where the earlier ones, which were trained, are not orthogonal to each other."""
    generator = torch.Generator().manual_seed(seed)
    earlier, rows = torch.randn(old, 8, generator=generator), torch.randn(new, 8, generator=generator)
    found = orthonormal(rows, earlier)
    assert torch.allclose(found @ found.T, torch.eye(new), atol=1e-5)
    assert old == 0 or (found @ earlier.T).abs().max() < 1e-5 * max(1.0, float(earlier.abs().max()) * 8)


def test_a_task_begins_orthogonal_to_the_last_one() -> None:
    case = Bench("prompt-coda", stream=ClassToy(rounds_per_task=1), train=TrainOptions(1, 5, Optimizer(lr=0.0)))
    found = entries(case, case.run().params, "")
    for end in "PAK":
        rows = found[f"prompts.blocks.0.{end}"].flatten(2) if end == "P" else found[f"prompts.blocks.0.{end}"]
        assert torch.allclose(rows[1] @ rows[1].T, torch.eye(2), atol=1e-5)
        assert (rows[1] @ rows[0].T).abs().max() < 1e-5


def test_a_pool_larger_than_the_width_is_refused() -> None:
    with pytest.raises(CompositionError, match=r"prompt-coda.components must be at most 4: .* of 2 tasks .* got 5"):
        Bench("prompt-coda", {"prompt-coda": {**SMALL["prompt-coda"], "components": 5}}).run()


# Fed-CPrompt ----------------------------------------------------------------------------------------------------------
WEIGHTS = {"near": 1000.0, "far": 10.0}


@pytest.mark.parametrize(("apart", "value"), [(0.05, 0.0), (0.02, 0.6), (0.0, 1.0), (4.0, 0.0)])
def test_the_contrast_with_the_last_task_is_a_hinge(apart: float, value: float) -> None:
    """Two samples at squared distance `apart` from the last task's features, and none from the received model's."""
    z = torch.zeros(2, 4, dtype=torch.float64)
    previous = z + (apart / 4) ** 0.5
    assert float(contrast(z, z, previous, **WEIGHTS)) == pytest.approx(value, abs=1e-12)


def test_the_contrast_of_the_first_task_is_the_squared_drift() -> None:
    z = torch.zeros(2, 4)
    assert float(contrast(z, z, **WEIGHTS)) == 0.0
    assert float(contrast(z + 0.1, z, **WEIGHTS)) == pytest.approx(1000 * 2 * 4 * 0.01)
    assert float(contrast(z + 0.1, z, z, **WEIGHTS)) == pytest.approx(80.0 - 0.8 + 1.0)


def test_the_last_tasks_features_are_those_of_its_global_model() -> None:
    """Bit for bit, though only the current model is sent."""
    bench = Bench("fed-cprompt", stream=ClassToy())
    ended, later = bench.run(rounds=2).state.model, bench.run(rounds=3).state.model
    x, trainer = bench.stream.test(1).x, bench.trainer()
    old, new, rebuilt = (features(trainer, model, x) for model in (ended, later, before_task(later, bench.layout())))
    assert torch.equal(rebuilt, old) and not torch.allclose(new, old, atol=1e-4)


def test_the_terms_of_a_step_in_the_second_task() -> None:
    """At the received model z = z_g, so that a first step's loss is cross-entropy and max(0, 1 - far |z - z_p|^2)."""
    options = {"fed-cprompt": {**SMALL["fed-cprompt"], "far": 0.001}}
    train = TrainOptions(1, 12, Optimizer(lr=0.0))
    bench = Bench("fed-cprompt", options, stream=ClassToy(clients=1, rounds_per_task=1), train=train)
    outcome, data, trainer = bench.run(), bench.stream.data(0, 1), bench.trainer()
    model = outcome.state.model
    z, previous = (features(trainer, one, data.x) for one in (model, before_task(model, bench.layout())))
    apart = 0.001 * float((z - previous).square().sum())
    entropy = torch.nn.functional.cross_entropy(trainer.outputs(model, data.x), data.y)
    losses = [event["loss"] for event in outcome.events if "loss" in event]
    assert 0 < apart < 1 and losses[1] == pytest.approx(float(entropy) + 1 - apart, rel=1e-5)
    first = torch.nn.functional.cross_entropy(
        trainer.outputs(bench.run(rounds=1).state.model, bench.stream.data(0, 0).x), bench.stream.data(0, 0).y
    )
    assert losses[0] == pytest.approx(float(first), rel=1e-5)


def test_a_large_weight_keeps_features_near_the_received_models() -> None:
    drifts = []
    for near in (0.0, 1.0, 3.0):
        options = {"fed-cprompt": {**SMALL["fed-cprompt"], "near": near}}
        bench = Bench("fed-cprompt", options, stream=Toy(clients=1, tasks=1, rounds_per_task=1))
        x, trainer = bench.stream.test(0).x, bench.trainer()
        start, end = (features(trainer, bench.run(rounds=r).state.model, x) for r in (0, 1))
        drifts.append(float((end - start).square().sum()))
    assert drifts[0] > drifts[1] > drifts[2]


def test_attention_is_a_softmax_over_its_entries() -> None:
    prompts = CodaPrompts((0,), 2, 3, 4, 8, seed=0, softmax=True)
    components, query = prompts.blocks["0"], torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    shares = components.A[1, 2].softmax(0)
    one = torch.nn.functional.cosine_similarity(query[4] * shares, components.K[1, 2], dim=0).detach()
    assert float(components.weights(query)[4, 1, 2].detach()) == pytest.approx(float(one), abs=1e-6)
    with torch.no_grad():
        before = components.weights(query)
        components.A += 3.0  # the same for all entries
    assert torch.allclose(components.weights(query), before, atol=1e-5)


@dataclass(frozen=True)
class Doubled(Part):
    name = "doubled"

    def forward(self, module: nn.Module, x: Tensor, state: Any, message: Any) -> Tensor:
        return 2.0 * module(x)  # type: ignore[no-any-return]


def test_a_part_that_changes_the_forward_pass_is_refused_by_the_contrast() -> None:
    with pytest.raises(CompositionError, match="'fed-cprompt' compares features .*; 'doubled' changes"):
        compose(FedAvg(), FedCPrompt(), Doubled())


@pytest.mark.parametrize("option", ["near", "far"])
def test_weights_of_the_contrast_are_not_negative(option: str) -> None:
    with pytest.raises(methods.MethodError, match=rf"method.fed-cprompt.{option} must be at least 0; got -1"):
        methods.build("fed-cprompt", {"fed-cprompt": {option: -1.0}})


# DualPrompt -----------------------------------------------------------------------------------------------------------
def dual(tasks: int = 3) -> DualPrompts:
    return DualPrompts((0,), (1,), tasks, 2, 8, seed=0)


def test_training_uses_the_current_expert_and_pulls_its_key() -> None:
    prompts = dual()
    module, x = network(prompts).train(), images()
    with torch.no_grad():
        prompts.task.fill_(1)
    module(x).sum().backward()
    gradient = prompts.expert["1"].grad
    assert gradient is not None and gradient[1].any() and not gradient[[0, 2]].any()
    query = prompts.query(module, module.embed(x))
    expected = 1 - torch.nn.functional.cosine_similarity(query, prompts.key[1], dim=1).mean()
    assert prompts.pull is not None and float(prompts.pull) == pytest.approx(float(expected), abs=1e-6)


def test_scoring_uses_the_expert_of_the_nearest_key_among_tasks_so_far() -> None:
    prompts = dual()
    module, x = network(prompts), images()
    query = prompts.query(module, module.embed(x))
    with torch.no_grad():
        prompts.key[1, 0], prompts.key[0, 0] = query[0] + 0.1 * query[0].norm(), -query[0]
        prompts.key[2, 0] = query[0]  # the nearest of all, of a task that has not begun
        prompts.task.fill_(1)
    found = module(x[:1])
    with torch.no_grad():
        prompts.expert["1"][2] += 1.0
        prompts.expert["1"][0] += 1.0  # of a key that is far away
    assert torch.equal(module(x[:1]), found)
    with torch.no_grad():
        prompts.expert["1"][1] += 1.0
    assert not torch.allclose(module(x[:1]), found, atol=1e-5)


def test_a_new_expert_is_a_copy_of_the_last() -> None:
    case = Bench("prompt-dual", stream=ClassToy(rounds_per_task=1), train=TrainOptions(1, 5, Optimizer(lr=0.0)))
    found = entries(case, case.run().params, "")
    assert torch.equal(found["prompts.expert.1"][0], found["prompts.expert.1"][1])
    assert torch.equal(found["prompts.key"][0], found["prompts.key"][1])


# L2P ------------------------------------------------------------------------------------------------------------------
def test_the_nearest_prompts_stand_before_the_patches() -> None:
    prompts = PoolPrompts(4, 2, 1, 8, seed=0)
    module, x = network(prompts), images(1)
    tokens = module.embed(x)
    query = prompts.query(module, tokens)
    with torch.no_grad():
        prompts.key[:, 0] = -query[0]
        prompts.key[2, 0] = query[0]
    sequence = torch.cat([tokens[:, :1], prompts.prompt[2], tokens[:, 1:]], 1)
    out = module.norm(module.run_blocks(sequence))
    assert torch.allclose(module.features(x), out[:, 1:3].mean(1), atol=1e-6)


def key_path(weight: float) -> tuple[Tensor, Outcome, Bench]:
    options = {"prompt-l2p": {**SMALL["prompt-l2p"], "weight": weight}}
    bench = Bench("prompt-l2p", options, stream=Toy(tasks=1, rounds_per_task=3))
    outcome = bench.run()
    return entries(bench, outcome.params - bench.model()["params"], "prompts.key")["prompts.key"], outcome, bench


def test_without_the_pull_keys_never_move() -> None:
    assert not key_path(0.0)[0].any() and key_path(0.5)[0].any()


def test_the_pull_brings_chosen_keys_nearer_to_the_queries() -> None:
    """With all else frozen, the mean cosine of the chosen keys rises."""
    _, outcome, bench = key_path(5.0)
    module, found = bench.build_module(), []
    x = bench.stream.inputs(bench.stream.data(0, 0).x)
    for vector in (bench.model()["params"], outcome.params):
        bench.layout().bind(module, vector.clone(), torch.zeros(0), torch.zeros(0, dtype=torch.int64))
        module.train()(x)
        assert isinstance(module.prompts, PoolPrompts) and module.prompts.pull is not None
        found.append(-float(module.prompts.pull))
    assert found[1] > found[0]


@pytest.mark.parametrize("method", METHODS)
def test_predictions_do_not_depend_on_the_batch(method: str) -> None:
    bench = Bench(method, stream=Toy(clients=1, rounds_per_task=1))
    model, x, trainer = bench.run().state.model, bench.stream.test(0).x, bench.trainer()
    together = trainer.outputs(model, x)
    assert torch.allclose(together, torch.cat([trainer.outputs(model, one) for one in x.split(1)]), atol=1e-5)


# all of them ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["prompt-dual", "prompt-coda", "fedgp+prompt-coda", "fed-cprompt"])
def test_after_a_task_nothing_of_it_changes(method: str) -> None:
    """Not even by weight decay or momentum: prompts, keys, and the head's rows of its classes."""
    train = TrainOptions(2, 5, Optimizer(lr=0.1, momentum=0.9, weight_decay=0.1))
    bench = Bench(method, stream=ClassToy(), train=train)
    middle, last = (entries(bench, outcome.params, "") for outcome in bench.after(2, 4))
    for name, before in middle.items():
        if name.startswith("prompts.") and "general" not in name and name != "prompts.task":
            assert torch.equal(before[0], last[name][0]) and not torch.equal(before[1], last[name][1])
    assert torch.equal(middle["head.weight"][:2], last["head.weight"][:2])
    assert torch.equal(middle["head.bias"][:2], last["head.bias"][:2])


@pytest.mark.parametrize(
    ("method", "numbers"),
    [
        ("prompt-coda", 2 * 2 * (2 * 8 + 8 + 8)),  # blocks x components x (P, A, K)
        ("fed-cprompt", 2 * 2 * (2 * 8 + 8 + 8)),
        ("prompt-dual", 2 * 2 * 8 + 2 * 2 * 8 + 8),  # general, expert, key
    ],
)
def test_replies_hold_the_tasks_slice(method: str, numbers: int) -> None:
    bench = Bench(method, stream=ClassToy(clients=1, rounds_per_task=1))
    assert bench.run(rounds=1).state.traffic.up["fedavg"] // 4 == numbers + 2 * 9


def test_l2p_sends_its_pool_and_the_head() -> None:
    bench = Bench("prompt-l2p", stream=ClassToy(clients=1, rounds_per_task=1))
    assert bench.run(rounds=1).state.traffic.up["fedavg"] // 4 == 4 * (2 + 1) * 8 + 4 * 9


@pytest.mark.parametrize("method", METHODS)
def test_the_backbone_is_neither_trained_nor_sent(method: str) -> None:
    names = [entry.name for entry in Bench(method).layout().params]
    assert all(name.startswith(("prompts.", "head.")) for name in names)


@pytest.mark.parametrize("method", METHODS)
def test_another_network_is_refused_with_a_reason(method: str) -> None:
    with pytest.raises(CompositionError, match="set model.kind = 'vit'"):
        Bench(method, module=lambda shape, classes: torch.nn.Linear(16, classes)).build_module()


def test_replay_works_on_prompts() -> None:
    parts: list[Any] = ["fedavg", {"part": "prompt-coda", **SMALL["prompt-coda"]}, {"part": "memory", "size": 8}, "er"]
    bench = Bench(lambda: methods.build(parts=parts), stream=ClassToy())
    outcome = bench.run()
    assert outcome.clients[0]["memory"] and torch.isfinite(outcome.params).all()


def test_blocks_that_the_network_has_not_are_refused() -> None:
    with pytest.raises(CompositionError, match=r"method.prompt-dual.expert must be below the network's depth, 2"):
        Bench("prompt-dual", {}).build_module()


def test_an_empty_prompt_is_the_backbone() -> None:
    """A prefix of length 0 leaves the outputs as they are (see also the tests of the network)."""
    bench = Bench("prompt-coda")
    module, x = bench.build_module(), bench.stream.test(0).x
    assert isinstance(module, ViT)
    module.prompts = None
    assert torch.equal(module.eval()(bench.stream.inputs(x)), plain_outputs(bench, x))


# HGP's own prompt -----------------------------------------------------------------------------------------------------
def test_one_prompt_for_all_samples_and_tasks() -> None:
    """Its keys and values stand before those of attention in the chosen blocks, and nothing else changes."""
    prompts = SharedPrompts((1,), 3, 8, seed=0)
    vit = network()
    tokens = vit.embed(images())
    keys, values = prompts.blocks["1"][0]
    expected = vit.class_token(tokens, {1: (keys.expand(5, -1, -1), values.expand(5, -1, -1))})
    assert torch.equal(prompts(vit, tokens), expected) and not torch.equal(expected, vit.class_token(tokens))


def test_published_sizes_of_hgps_prompt() -> None:
    """Blocks 0 to 4, 100 keys and 100 values of 768 numbers: 768,000."""
    part = methods.build("prompt-hgp").part("prompt-shared")
    assert isinstance(part, PromptShared)
    prompts = SharedPrompts(part.blocks, part.length, 768, seed=0)
    assert sum(parameter.numel() for parameter in prompts.parameters()) == 768_000


def test_hgp_sends_prompt_head_rows_and_moments() -> None:
    """Up in a round: 2 blocks x 2 x 2 x 8 numbers and the task's two rows of 9, in 4 bytes."""
    outcome = Bench("prompt-hgp", stream=ClassToy(clients=1, rounds_per_task=1)).run()
    assert outcome.state.traffic.up["fedavg"] == 2 * 4 * (2 * 2 * 2 * 8 + 2 * 9)
    assert outcome.state.traffic.up["hgp"] == 2 * 8 * 2 * (2 * 8 + 1 + 1)


def test_prompts_do_not_move_while_the_server_trains_the_head() -> None:
    stream = ClassToy(rounds_per_task=1)
    ours = Bench("prompt-hgp", stream=stream)
    parts: list[Any] = [{"part": "fedavg", "weighting": "samples"}, {"part": "prompt-shared", **SMALL["prompt-shared"]}]
    plain = Bench(lambda: methods.build(parts=parts), stream=stream, module=tiny_vit)
    found, expected = (case.layout().named(case.run(rounds=1).params) for case in (ours, plain))
    for name, value in expected.items():
        assert torch.equal(found[name], value) == name.startswith("prompts.")


def test_every_chosen_key_pulls() -> None:
    """Keys in the direction of a query: the term is -1 for each of the three that are chosen."""
    prompts = PoolPrompts(5, 2, 3, 8, seed=0)
    vit, x = network(prompts).train(), images(1)
    with torch.no_grad():
        prompts.key.copy_(2.0 * prompts.query(vit, vit.embed(x)).expand(5, 1, 8))
    vit(x)
    assert prompts.pull is not None and prompts.pull.item() == pytest.approx(-3.0, abs=1e-5)


# Vision Transformers of other libraries ------------------------------------------------------------------------------
class TimmLike(nn.Module):
    """A network of one's own with timm's names; double: an attention that computes something else."""

    def __init__(self, inner: ViT, double: bool = False) -> None:
        super().__init__()
        self.patch_embed, self.cls_token, self.pos_embed = inner.patch_embed, inner.cls_token, inner.pos_embed
        self.blocks, self.norm, self.head = inner.blocks, inner.norm, inner.head
        self.num_heads, self.double = inner.blocks[0].attn.heads, double

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        for block in self.blocks:
            x = block(x) + (block.attn(x) if self.double else 0.0)
        return self.head(self.norm(x)[:, 0])


def test_a_network_with_timms_names_that_computes_the_same_is_taken() -> None:
    inner = network()
    found = as_vit(TimmLike(inner), (1, 4, 4), 4)
    assert found is not None and found is not inner and as_vit(inner, (1, 4, 4), 4) is inner
    assert torch.equal(found.eval()(images()), inner(images()))
    assert as_vit(TimmLike(inner, double=True), (1, 4, 4), 4) is None
    assert as_vit(nn.Linear(3, 3), (1, 4, 4), 4) is None


@pytest.mark.parametrize("method", ["prompt-l2p", "prompt-coda", "pilora"])
def test_prompts_of_a_network_of_transformers_are_those_of_the_same_vit(method: str, tmp_path: Path) -> None:
    """Every number of the run, and the saved model is read again."""
    transformers = pytest.importorskip("transformers", reason="the extra `text` is not installed")
    sizes = {"image_size": 8, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 5, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = transformers.ViTConfig(**sizes, intermediate_size=64, num_labels=4)
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (40, 3, 8, 8)).astype(np.uint8), np.arange(40) % 4
    options = {"scenario": "class-incremental", "tasks": 2, "clients": 2, "rounds_per_task": 1}
    own = {"kind": "vit", "patch": 4, "width": 16, "depth": 5, "heads": 2, "weights": str(tmp_path / "vit")}
    found = {}
    for name, model in (("own", own), ("hf", {"kind": f"hf:{tmp_path / 'vit'}"})):
        stream = from_arrays(x[:24], y[:24], x[24:], y[24:], **options)
        table = {"name": name, "model": model, "method": {"name": method}, "train": {"rounds_per_task": 1}}
        components = {"prompt-coda": {"components": 2}}.get(method)
        table["method"] |= {method: components} if components else {}
        everfed.run(table, tmp_path / name, stream=stream, progress=False)
        found[name] = everfed.load(tmp_path / name).model
    ours, theirs = (model.state_dict() for model in found.values())
    assert list(ours) == list(theirs)
    for key in ours:
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["prompt-dual", "pilora"])
def test_a_vision_transformer_that_cannot_be_changed_is_refused_with_the_remedy(method: str) -> None:
    inner = network()
    with pytest.raises(CompositionError, match=r"set model.kind = 'vit'.*computes the same; got a TimmLike"):
        Bench(method, module=lambda shape, classes: TimmLike(inner, double=True)).build_module()
