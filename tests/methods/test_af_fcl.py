"""AF-FCL (Wuerkaixi et al., ICLR 2024): the flow, credibility, the three steps, the networks, and what is sent."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from everfed import models
from everfed.core import tree
from everfed.core.client import run_client
from everfed.core.data import minibatches
from everfed.core.part import options_of
from everfed.core.step import Substeps
from everfed.method import MODEL, Layout, Optimizer, Phase, Step, TrainOptions
from everfed.methods import registry as methods
from everfed.methods.common.layers import head_inputs
from everfed.methods.common.teacher import soft_cross_entropy
from everfed.methods.generative.af_fcl import (
    AFFCL,
    ConditionalFlow,
    FlowBlueprint,
    credibility,
    feature_width,
    head_of,
    log_normal,
    permutations,
    replay_factor,
    replayed_layers,
)
from tests.parity.test_resume import assert_resumes
from tests.parity.test_wire import assert_same
from tests.support.rehearsal_free import ClassToy, PoolToy
from tests.support.toy import SMALL, Bench, Linear, Norm, Toy
from tests.support.wire import run_over_wire

ADAM = TrainOptions(1, 6, Optimizer("adam", lr=0.01, state="kept"))
TRAINING = Phase("train")


class Plain(nn.Module):
    """BatchNorm and nothing that is drawn at random."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(input_shape[0])
        self.head = nn.Linear(math.prod(input_shape), classes)

    def features(self, x: Tensor) -> Tensor:
        return self.norm(x).flatten(1)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))  # type: ignore[no-any-return]


def bench(stream: Toy | None = None, train: TrainOptions = ADAM, **options: Any) -> Bench:
    given = {"af-fcl": {**SMALL["af-fcl"], **options}}
    return Bench("af-fcl", given, stream=stream or ClassToy(tasks=2), train=train)


# the flow ------------------------------------------------------------------------------------------------------------
def random_flow(features: int = 7, classes: int = 3) -> tuple[ConditionalFlow, Tensor]:
    torch.manual_seed(0)
    flow = ConditionalFlow(features, classes, hidden=16)
    for parameter in flow.parameters():
        nn.init.normal_(parameter, std=0.3)
    return flow, permutations(features, 5)


def test_the_way_back_is_the_inverse_and_the_determinants_cancel() -> None:
    flow, orders = random_flow()
    a, context = torch.randn(20, 7), torch.eye(3)[torch.arange(20) % 3]
    z, size = flow(a, context, orders)
    back, undone = flow(z, context, orders, inverse=True)
    assert torch.allclose(back, a, atol=1e-4)
    assert torch.allclose(size + undone, torch.zeros(20), atol=1e-4)
    assert not torch.allclose(z, a, atol=0.1)


def test_the_determinant_is_that_of_the_jacobian() -> None:
    flow, orders = random_flow()
    a, context = torch.randn(1, 7), torch.eye(3)[:1]
    jacobian = torch.autograd.functional.jacobian(lambda x: flow(x, context, orders)[0][0], a)[:, 0]
    assert torch.linalg.slogdet(jacobian)[1].item() == pytest.approx(flow(a, context, orders)[1].item(), abs=1e-4)


def test_scales_contract_and_without_layers_the_density_is_normal() -> None:
    flow, orders = random_flow()
    assert (flow(torch.randn(50, 7), torch.eye(3)[[0] * 50], orders)[1] <= 4 * 4 * math.log(1.001)).all()
    assert log_normal(torch.zeros(1, 2)).item() == pytest.approx(-math.log(2 * math.pi))
    assert log_normal(torch.ones(1, 1)).item() == pytest.approx(-0.5 - 0.5 * math.log(2 * math.pi))


@pytest.mark.parametrize(("classes", "parameters"), [(26, 5_943_296), (100, 6_397_952), (20, 5_906_432)])
def test_flows_have_the_sizes_of_the_release(classes: int, parameters: int) -> None:
    with torch.device("meta"):
        flow = FlowBlueprint(512, classes).build()
    assert sum(p.numel() for p in flow.parameters()) == parameters


def test_permutations_are_two_reversals_and_two_drawn_ones() -> None:
    orders = permutations(9, 1)
    assert orders[:2].tolist() == [list(range(8, -1, -1))] * 2
    assert all(sorted(order.tolist()) == list(range(9)) for order in orders)
    assert torch.equal(orders, permutations(9, 1)) and not torch.equal(orders, permutations(9, 2))


# the networks --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kind", "shape", "classes", "parameters"),
    [
        ("s-convnet", (1, 28, 28), 26, 2_112_986),
        ("s-convnet", (3, 32, 32), 20, 3_029_460),
        ("resnet18-deep", (3, 32, 32), 100, 11_884_568 - 87_824 - 51_300),  # without what the release does not use
    ],
)
def test_networks_have_the_sizes_of_the_release(kind: str, shape: Any, classes: int, parameters: int) -> None:
    with torch.device("meta"):
        module = models.build(kind, shape, classes, 0)
    assert sum(p.numel() for p in module.parameters()) == parameters
    assert feature_width(Layout.of(module)) == 512


@pytest.mark.parametrize("kind", ["s-convnet", "resnet18-deep"])
def test_networks_take_64_pixels(kind: str) -> None:
    module = models.build(kind, (3, 64, 64), 5, seed=0).eval()
    assert module(torch.zeros(1, 3, 64, 64)).shape == (1, 5)


def test_the_head_is_all_that_follows_the_features() -> None:
    deep = models.build("s-convnet", (1, 28, 28), 4, seed=0)
    layout = Layout.of(deep)
    assert replayed_layers(layout, "head") == ["head.0.weight", "head.0.bias", "head.2.weight", "head.2.bias"]
    assert replayed_layers(layout, "middle") == ["head.0.weight", "head.0.bias"]  # fc2 of the release
    plain = Linear((1, 4, 4), 3)
    assert head_of(plain) is plain.map and replayed_layers(Layout.of(plain), "head") == ["map.weight"]
    with pytest.raises(ValueError, match="moves no parameter"):
        Substeps.of((AFFCL(replay_layers="middle"),), Layout.of(plain))
    with pytest.raises(ValueError, match="needs a network with a linear layer"):
        head_of(nn.Conv2d(1, 1, 1))


def test_features_of_the_small_network_lie_behind_their_activation() -> None:
    """The release: a = LeakyReLU(fc1(.)), outputs = fc_classifier(LeakyReLU(fc2(a)))."""
    module = models.build("s-convnet", (1, 28, 28), 4, seed=0)
    x = torch.randn(5, 1, 28, 28)
    with head_inputs(module, layer=head_of(module)) as seen:
        outputs = module(x)
    convolved, fc1 = module.features[:-2](x), module.features[-2]
    features = nn.functional.leaky_relu(fc1(convolved))
    assert (fc1(convolved) < 0).any() and torch.equal(seen[0], features)
    fc2, classifier = module.head[0], module.head[2]
    assert torch.equal(outputs, classifier(nn.functional.leaky_relu(fc2(features))))


# credibility ---------------------------------------------------------------------------------------------------------
def pi(latents: Tensor, y: list[int], where: Tensor, labels: list[int], floor: float = 1e-4) -> Tensor:
    return credibility(latents, torch.tensor(y), where, torch.tensor(labels), torch.tensor(0.3), 5, floor)


def test_credibility_in_numbers() -> None:
    latents = torch.tensor([[0.0, 2.0], [2.0, 2.0], [5.0, 5.0]])
    found = pi(latents, [1, 1, 2], torch.tensor([[1.0, 2.0]]), [1], floor=1.0)
    assert found.item() == pytest.approx(1 / math.sqrt(2 * math.pi))  # both dimensions at the mean, variance 1
    wide = pi(torch.tensor([[-2.0], [2.0]]), [0, 0], torch.tensor([[2.0]]), [0])  # variance 4, one deviation off
    assert wide.item() == pytest.approx(math.exp(-0.5) / (2 * math.sqrt(2 * math.pi)))


def test_credibility_of_an_absent_class_is_the_usual_one_and_a_single_sample_stays_finite() -> None:
    found = pi(torch.randn(3, 4), [0, 1, 1], torch.randn(3, 4), [3, 0, 1])
    assert found[0].item() == pytest.approx(0.3)
    assert torch.isfinite(found).all() and (found >= 0).all()


def test_a_client_with_other_latents_finds_memories_less_credible() -> None:
    torch.manual_seed(0)
    memories, labels = torch.randn(200, 16), [0] * 200
    clean = pi(torch.randn(64, 16), [0] * 64, memories, labels).mean()
    noisy = pi(torch.randn(64, 16) + 6.0, [0] * 64, memories, labels).mean()
    assert noisy < 0.1 * clean


@pytest.mark.parametrize(("theta", "factor"), [(1.0, 1.0), (0.0, 0.25), (0.5, 0.625)])
def test_theta_says_how_much_the_density_counts(theta: float, factor: float) -> None:
    assert replay_factor(torch.tensor(0.25), theta).item() == factor


def test_distillation_from_oneself_is_the_entropy_and_has_no_gradient() -> None:
    outputs = torch.tensor([[2.0, 0.0, -1.0]], requires_grad=True)
    p = torch.softmax(outputs.detach() / 2, dim=1)
    loss = soft_cross_entropy(outputs, outputs.detach(), 2.0)
    assert loss.item() == pytest.approx(-(p * p.log()).sum().item())
    assert torch.autograd.grad(loss, outputs)[0].abs().max() < 1e-7


def test_distillation_takes_the_square_roots_of_both_distributions() -> None:
    """As the release does at temperature 2. Teacher 4 : 1 : 1 -> 2 : 1 : 1; student 16 : 1 : 1 -> 4 : 1 : 1."""
    teacher, student = torch.log(torch.tensor([[4.0, 1.0, 1.0]])), torch.log(torch.tensor([[16.0, 1.0, 1.0]]))
    expected = -(0.5 * math.log(4 / 6) + 0.5 * math.log(1 / 6))
    assert soft_cross_entropy(student, teacher, 2.0).item() == pytest.approx(expected)


# the three steps -----------------------------------------------------------------------------------------------------
def watched(case: Bench, rounds: int = 0) -> tuple[list[tuple[str, Tensor]], Tensor, Any]:
    """(name, parameters before) of every step of a local training of one minibatch; parameters at its end; layout."""
    log: list[tuple[str, Tensor]] = []

    class Watched(AFFCL):
        def _flow_loss(self, step: Step) -> Tensor:
            log.append(("flow", step.params.clone()))
            return super()._flow_loss(step)

        def _replay_loss(self, step: Step) -> Tensor:
            log.append(("replay", step.params.clone()))
            return super()._replay_loss(step)

        def objective(self, step: Step) -> Tensor:
            log.append(("classifier", step.params.clone()))
            return super().objective(step)

    outcome = case.run(rounds=rounds) if rounds else None
    part = Watched(**options_of(case.build_method().part("af-fcl")))
    ctx, data = case.context(round_index=rounds), case.stream.data(0, case.stream.round(rounds).task)
    state = {"client": {}} if outcome is None else outcome.clients[0]
    model = case.model() if outcome is None else outcome.state.model
    fitted = ctx.train.fit(ctx, (part,), model, model["params"], state, {}, data, epochs=1, batch_size=len(data))
    return log, fitted.model["params"], case.layout()


@pytest.mark.parametrize("rounds", [0, 2])
def test_every_step_moves_its_own_network_only(rounds: int) -> None:
    log, end, layout = watched(bench().change(module=Norm), rounds)
    assert [name for name, _ in log] == ["flow", "replay", "classifier"]
    moved = {}
    for (name, before), after in zip(log, [*(params for _, params in log[1:]), end], strict=True):
        changed = [e.name for e in layout.params if not torch.equal(e.view(before), e.view(after))]
        moved[name] = {n.split("/")[1] if "/" in n else n.split(".")[0] for n in changed}
    assert moved == {"flow": {"af-fcl"}, "replay": {"head"}, "classifier": {"conv", "norm", "head"}}


def test_the_first_task_has_no_teacher_and_samples_no_past_labels() -> None:
    case = bench(ClassToy(tasks=2, classes=4))
    part = case.build_method().part("af-fcl")
    for rounds, past in ((1, None), (2, {0, 1})):
        client = case.client("af-fcl", case.run(rounds=rounds).clients[0], round_index=rounds)
        assert ("last" in client.state) is (past is not None)
        schedule = minibatches(client.data.ids, 20, 5, client.rng("order"))
        tables = part.plan(client, schedule)
        sampled = {int(label) for step in range(schedule.steps) for label in tables["sampled"].row(step)}
        assert sampled == ({0, 1} if past is None else {0, 1, 2, 3})
        assert ("past" in tables) is (past is not None)
        if past:
            assert {int(label) for step in range(schedule.steps) for label in tables["past"].row(step)} == past


def test_labels_are_drawn_from_the_classes_of_all_clients() -> None:
    """Each client has classes of its own; the release's `available_labels` is their union over clients and tasks."""
    case = bench(PoolToy())
    client = case.client("af-fcl", case.run(rounds=2).clients[0], round_index=2)
    schedule = minibatches(np.arange(200), 20, 5, client.rng("order"))
    tables = case.build_method().part("af-fcl").plan(client, schedule)
    drawn = {name: {int(y) for i in range(schedule.steps) for y in tables[name].row(i)} for name in ("sampled", "past")}
    assert case.stream.labels_of(0, 0) == (0, 1) and case.stream.labels_of(0, 1) == (2, 3)
    assert drawn == {"sampled": set(range(8)), "past": {0, 1, 4, 5}}


def test_features_of_step_f_are_in_eval_mode_and_those_of_step_r_in_train_mode() -> None:
    """The release calls eval() before the flow's step and train() before replay, whose features move the statistics."""
    case = bench(ClassToy(clients=1, samples=6)).change(module=Plain)
    ctx, data, seen = case.context(), case.stream.data(0, 0), []

    class Watched(AFFCL):
        def _log_density(self, step: Step, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            seen.append((features.clone(), step.x.clone()))
            return super()._log_density(step, features, labels)

    part, model = Watched(**SMALL["af-fcl"]), case.model()
    fitted = ctx.train.fit(ctx, (part,), model, model["params"], {"client": {}}, {}, data, epochs=1, batch_size=6)
    (flow, x), (replay, _) = seen
    plain = case.bare_module()
    inputs = case.stream.inputs(x)
    assert torch.allclose(flow, plain.eval().features(inputs), atol=1e-6)
    assert torch.allclose(replay, plain.train().features(inputs), atol=1e-6)
    assert not torch.allclose(flow, replay, atol=0.1)
    assert fitted.model["counters"].tolist() == [2]  # of BatchNorm: once in step R, once in step C


def test_without_flow_and_distillation_it_is_fedavg_bit_for_bit() -> None:
    off = bench(k_loss_flow=0.0, k_kd_last_cls=0.0).change(module=Norm)
    plain = Bench("fedavg", {"fedavg": {"weighting": "samples"}}, stream=off.stream, train=ADAM, module=Norm)
    assert torch.equal(off.run().params, plain.run().params)
    assert off.layout().size == plain.layout().size  # no flow at all
    assert not torch.equal(bench(k_loss_flow=0.0).change(module=Norm).run().params, plain.run().params)


@pytest.mark.parametrize(
    "options",
    [
        {"credibility_space": "feature"},
        {"flow_explore_theta": 1.0},
        {"k_kd_global_cls": 0.5},
        {"k_flow_lastflow": 0.0},
        {"k_kd_last_cls": 0.0},
    ],
)
def test_options_change_the_outcome(options: dict[str, Any]) -> None:
    stream = ClassToy(tasks=2, rounds_per_task=1)
    base = bench(stream).run()
    assert torch.isfinite(base.params).all()
    assert not torch.equal(bench(stream, **options).run().params, base.params)


def test_the_mean_is_weighted_by_samples() -> None:
    case = bench(ClassToy(tasks=1, rounds_per_task=1, sizes={(0, 0): 4, (1, 0): 12}))
    ends = []
    for client in (0, 1):
        ctx, data = case.context(client), case.stream.data(client, 0)
        reply = run_client(case.build_method(), TRAINING, {"client": {}}, {MODEL: case.model()}, data, ctx)[1]
        ends.append(reply.values["fedavg"]["params"].double())
    assert torch.allclose(case.run().params, (0.25 * ends[0] + 0.75 * ends[1]).float(), atol=1e-7)


def test_the_last_model_is_the_aggregate_of_the_last_round_and_stays_as_it_was() -> None:
    """The release copies the client's model after the broadcast that follows a task's last round. Client 1 takes part
    neither in that round nor in the next one."""
    stream = ClassToy(tasks=2, rounds_per_task=3, cohorts={2: (0,), 3: (0,)})
    case = bench(stream).change(module=Norm)
    outcomes = case.after(3, 4, 5, 6)
    aggregate = dict(outcomes[0].state.model)
    for client in (0, 1):
        assert all(tree.equal(outcome.clients[client]["af-fcl"]["last"], aggregate) for outcome in outcomes)


def test_the_last_model_has_the_clients_own_statistics_where_these_are_local() -> None:
    case = bench(train=replace(ADAM, batchnorm="local")).change(module=Norm)
    outcome = case.run(rounds=2)
    own = outcome.clients[0]
    assert torch.equal(own["af-fcl"]["last"]["params"], outcome.params)
    assert torch.equal(own["af-fcl"]["last"]["stats"], own["client"]["stats"])
    assert not torch.equal(own["client"]["stats"], outcome.clients[1]["client"]["stats"])


def test_the_aggregate_of_a_tasks_end_costs_nothing_where_everybody_takes_part() -> None:
    """It is the model that the next round begins with, and no version is sent twice."""
    plain = Bench("fedavg", stream=ClassToy(tasks=2), train=ADAM)
    case = bench(k_loss_flow=0.0)  # no flow: the model of FedAvg
    assert dict(case.run().state.traffic.down) == dict(plain.run().state.traffic.down)


def test_bytes_are_those_of_classifier_and_flow_and_nothing_is_revealed() -> None:
    case = bench()
    model = tree.tensor_bytes(case.model())
    traffic = case.run(rounds=1).state.traffic
    assert dict(traffic.up) == {"fedavg": 2 * model} and dict(traffic.down) == {"fedavg": 2 * model}
    flow = sum(p.numel() for p in FlowBlueprint(8, 4, 6).build().parameters())
    assert case.layout().size == bench(k_loss_flow=0.0).layout().size + flow
    assert methods.build("af-fcl").reveals() == {}


def test_moments_of_all_three_optimisers_are_kept() -> None:
    moments = bench().run(rounds=2).clients[0]["client"]["moments"]
    kinds = {name.rpartition("/")[0] for name in moments}
    assert kinds == {"", "af-fcl/flow", "af-fcl/replay"}
    assert {moments[f"{kind}/t".removeprefix("/")].item() for kind in kinds} == {4.0}  # two rounds of two minibatches


def test_replay_by_adam_beside_sgd_bounds_what_far_out_features_do() -> None:
    """One minibatch: the run's SGD has rate 0, so that only step R moves the head, by its rate at most."""
    train = TrainOptions(1, 12, Optimizer(lr=0.0))
    stream = ClassToy(clients=1, tasks=1, rounds_per_task=1, classes=4)
    still, moved = bench(stream, train), bench(stream, train, replay_lr=0.02)
    head = [e for e in still.layout().params if e.name in replayed_layers(still.layout(), "head")]
    where = slice(head[0].start, head[-1].start + head[-1].size)
    assert torch.equal(still.run().params[where], still.model()["params"][where])
    change = (moved.run().params - moved.model()["params"])[where].abs()
    assert change.max().item() == pytest.approx(0.02, rel=1e-4)
    assert (
        "af-fcl/replay/t"
        in bench(train=replace(ADAM, optimizer=Optimizer(state="kept")), replay_lr=0.02)
        .run(rounds=1)
        .clients[0]["client"]["moments"]
    )


@pytest.mark.parametrize("logits", ["task", "seen"])
def test_restricted_logits_never_lose_a_sampled_label(logits: str) -> None:
    train = TrainOptions(1, 6, Optimizer("adam", lr=0.01), logits=logits)
    assert torch.isfinite(bench(train=train).run().params).all()


def test_parity_with_kept_moments() -> None:
    case = bench().change(module=Norm)
    eager = case.run()
    assert_same(eager, run_over_wire(case))
    assert_resumes(case, 3, eager)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"credibility_space": "pixel"}, "credibility_space must be one of latent, feature"),
        ({"flow_explore_theta": 1.5}, "flow_explore_theta must be at most 1; got 1.5"),
        ({"replay_lr": -1.0}, "replay_lr must be at least 0"),
        ({"k_loss_flow": -1.0}, "k_loss_flow must be at least 0"),
        ({"variance_floor": 0.0}, "variance_floor must be positive; got 0.0"),
    ],
)
def test_options_outside_their_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AFFCL(**options)
