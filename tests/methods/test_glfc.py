"""GLFC (Dong et al., CVPR 2022): the loss, detection of task changes and exemplars, prototypes, the proxy server."""

from __future__ import annotations

from hashlib import sha256
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from everfed.core import tree
from everfed.core.engine import ClientError
from everfed.core.replica import initial_weights
from everfed.method import BOUNDARIES, Cohort, CompositionError, Layout, Optimizer, TrainOptions, Tree, When
from everfed.methods import registry as methods
from everfed.methods.common.layers import features
from everfed.methods.generative.glfc import GLFC, adaptive_weights, class_weights
from everfed.methods.generative.prototypes import EncoderBlueprint, encoded, label_of, nearest_to_mean, reconstructed
from everfed.methods.replay.herding import herd
from everfed.methods.replay.memory import Memory, Pool, stored
from everfed.methods.replay.sample_gradients import GradientOptions
from everfed.methods.replay.transition import OnTransition, entropy
from tests.parity.test_resume import assert_resumes
from tests.parity.test_wire import assert_same
from tests.support.phases import phase_of
from tests.support.rehearsal_free import ClassToy
from tests.support.toy import Bench, Given, Norm, Outcome, Toy
from tests.support.wire import run_over_wire

PROXY: dict[str, Any] = {"old_model": "proxy", "perturbation": 2, "reconstruction": 1, "iterates": 2}
ARRIVED = {"gradients": {0: torch.zeros(1, 3)}}  # a prototype of one client
SGD = TrainOptions(2, 5, Optimizer(lr=0.5))


class TwoNumbers(nn.Module):
    """Two numbers, which are the features, and a linear head."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(2, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)  # type: ignore[no-any-return]


def bench(size: int = 8, policy: dict[str, Any] | None = None, stream: Toy | None = None, **options: Any) -> Bench:
    chosen = {"memory": {"size": size, "policy": {"kind": "on-transition", **(policy or {})}}, "glfc": options}
    return Bench("glfc", chosen, stream=stream or ClassToy(tasks=2), train=SGD)


def on_boundary(**options: Any) -> Bench:
    """Clients know from the stream when a task changes."""
    return bench(policy={"detect": "boundary"}, **options)


# the loss ------------------------------------------------------------------------------------------------------------
def test_weights_compensate_within_each_group() -> None:
    confidence = torch.tensor([0.9, 0.6, 0.5, 0.2])
    learned = torch.tensor([True, True, False, False])
    weights = class_weights(confidence, learned, torch.tensor(True))
    assert weights.tolist() == pytest.approx([0.4, 1.6, 0.769231, 1.230769], abs=1e-6)
    assert weights[:2].mean().item() == pytest.approx(1.0)
    assert weights[2:].mean().item() == pytest.approx(1.0)


def test_weights_are_one_while_nothing_is_learned() -> None:
    assert class_weights(torch.rand(5), torch.zeros(5, dtype=torch.bool), torch.tensor(False)).tolist() == [1.0] * 5


@pytest.mark.parametrize("learned", [True, False])
def test_a_batch_of_one_group_only_does_not_divide_by_zero(learned: bool) -> None:
    weights = class_weights(torch.tensor([0.5, 0.75]), torch.full((2,), learned), torch.tensor(True))
    assert weights.tolist() == pytest.approx([4 / 3, 2 / 3])
    certain = class_weights(torch.ones(2), torch.full((2,), learned), torch.tensor(True))
    assert certain.tolist() == [0.0, 0.0]


def weights_of_lga(confidence: np.ndarray, group: np.ndarray, task: int) -> np.ndarray:
    """Sample by sample: group 0 is of classes that are not learned, the others of earlier tasks."""
    g = np.abs(confidence - 1.0) ** (task / (task + 1) if task else 1.0)
    return np.array([np.clip(own / g[group == number].mean(), 0.5, 5.0) for own, number in zip(g, group, strict=True)])


@pytest.mark.parametrize("task", [0, 1, 4])
def test_weights_of_lga_are_those_of_its_formula(task: int) -> None:
    rng = np.random.default_rng(task)
    confidence, group = rng.uniform(0, 1, 40), rng.integers(0, task + 1, 40)
    client = on_boundary(weights="lga", head="full").change(stream=ClassToy(tasks=5, classes=10)).client("glfc")
    power = torch.tensor(task / (task + 1) if task else 1.0)
    given = torch.from_numpy(confidence), torch.from_numpy(group), power
    found = adaptive_weights(*given, torch.tensor(True), client.facts.classes).numpy()
    assert np.abs(found - weights_of_lga(confidence, group, task)).max() < 1e-6
    assert adaptive_weights(*given, torch.tensor(False), 10).tolist() == [1.0] * 40


def test_lga_groups_learned_classes_by_their_task() -> None:
    case = on_boundary(weights="lga").change(stream=ClassToy(tasks=3, classes=6))
    states = case.new_client()
    states = {
        **states,
        "memory": {**states["memory"], "host": {**states["memory"]["host"], "learned": torch.tensor([0, 2])}},
    }
    client = case.client("glfc", states, round_index=4)
    GLFC(weights="lga").start(client)
    assert client.state["task"].tolist() == [1, 0, 2, 0, 0, 0]
    assert float(client.state["power"]) == pytest.approx(2 / 3)


def test_lga_weighs_both_losses() -> None:
    """Relations to a model that knows nothing are the labels: then L = 2 L_GC, a step of twice the length."""
    case = on_boundary(weights="lga").change(train=TrainOptions(1, 1000, Optimizer(lr=0.1)))
    ctx, model, data = case.context(round_index=2), case.model(), case.stream.data(0, 1)
    own: dict[str, Any] = {
        "learned": torch.tensor([False, False, True, False]),
        "classes": torch.ones(4, dtype=torch.bool),
        "task": torch.tensor([0, 0, 1, 0]),
        "power": torch.tensor(0.5),
    }
    nothing = {"old": {**model, "known": torch.zeros(4, dtype=torch.bool)}}

    def step(state: dict[str, Any]) -> Tensor:
        part = GLFC(weights="lga", compensation=1.0, relation=1.0)
        given = {**case.new_client(), "glfc": state}
        fitted = ctx.train.fit(ctx, (part,), model, model["params"], given, {}, data, epochs=1, rate=0.1)
        return fitted.model["params"] - model["params"]

    assert torch.allclose(step({**own, **nothing}), 2 * step(own), atol=1e-6)


@pytest.mark.parametrize("form", ["sigmoid", "softmax"])
def test_relations_to_a_model_that_knows_nothing_are_the_labels(form: str) -> None:
    """L_RD equals the distance to one-hot targets when the old model has no outputs; then L = L_GC too."""
    case = on_boundary(form=form)
    ctx, model = case.context(round_index=2), case.model()
    part = GLFC(form=form)
    data = case.stream.data(0, 1)
    nothing = {**model, "known": torch.zeros(4, dtype=torch.bool)}
    state = {
        **case.new_client(),
        "glfc": {"learned": torch.zeros(4, dtype=torch.bool), "classes": torch.ones(4, dtype=torch.bool)},
    }

    def trained(own: dict[str, Any]) -> Tensor:
        given = {**state, "glfc": {**state["glfc"], **own}}
        fitted = ctx.train.fit(ctx, (part,), model, model["params"], given, {}, data, epochs=1, rate=0.5)
        return fitted.model["params"]

    assert torch.allclose(trained({"old": nothing}), trained({}), atol=1e-7)
    everything = {**nothing, "known": torch.ones(4, dtype=torch.bool)}
    assert not torch.allclose(trained({"old": everything}), trained({}), atol=1e-3)


def test_without_memory_and_old_model_it_is_fedavg_with_binary_cross_entropy() -> None:
    class Binary(ClassToy):
        def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
            return functional.binary_cross_entropy_with_logits(outputs, functional.one_hot(y, 4).float())

    plain = Bench("fedavg", stream=Binary(), train=SGD).run()
    ours = bench(size=0, old_model="none", head="full").run()
    assert torch.allclose(ours.params, plain.params, atol=1e-6)
    with_memory = bench(old_model="none", head="full", policy={"detect": "boundary"}).run()
    assert not torch.allclose(with_memory.params, plain.params, atol=1e-3)


def test_a_growing_head_leaves_rows_of_unseen_classes_alone() -> None:
    case = bench()
    start, after = case.model()["params"], case.run(rounds=2).params
    head = case.layout().param("head.weight")
    assert torch.equal(head.view(after)[2:], head.view(start)[2:])
    assert not torch.equal(head.view(after)[:2], head.view(start)[:2])


# the signal and the exemplars ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(("before", "now", "fires"), [(0.5, 1.8, True), (0.5, 1.6, False), (0.0, 1.3, True)])
def test_the_signal_is_a_jump_of_more_than_the_threshold(before: float, now: float, fires: bool) -> None:
    none, rows = torch.zeros(0), np.zeros(0, dtype=np.int64)
    state = {"entropy": before, "task": -1}
    pool = Pool(bench().client("memory"), none, none, rows, 0, 0, 0, state, GradientOptions())
    assert OnTransition().fires(now, pool) is fires


def test_entropy_of_equal_outputs_is_the_logarithm_of_their_number() -> None:
    assert entropy(torch.zeros(3, 10)) == pytest.approx(np.log(10), abs=2e-4)
    assert entropy(torch.tensor([[50.0, 0.0]])) == pytest.approx(0.0, abs=2e-5)


def test_herding_takes_all_when_there_are_few_and_first_the_one_closest_to_the_mean() -> None:
    features = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]])
    assert herd(features, 1).tolist() == [1]
    assert sorted(herd(features, 9).tolist()) == [0, 1, 2]


def held(outcome: Outcome, client: int = 0) -> tuple[list[int], list[int]]:
    """Labels of the exemplars of learned classes, and of those that are set aside."""
    own = outcome.clients[client]["memory"]
    labels, border = stored(own).y.tolist(), int(own["host"]["stored"]) - int(own["host"]["staged"])
    return labels[:border], labels[border:]


def test_exemplars_are_kept_at_a_change_and_the_old_classes_make_room() -> None:
    case = on_boundary(stream=ClassToy(tasks=3, classes=6))
    second, third, fifth = case.after(2, 3, 5)
    assert held(second) == ([], [0, 0, 0, 0, 1, 1, 1, 1])  # 8 rows, two current classes
    assert held(third) == ([0, 0, 1, 1], [2, 2, 3, 3])
    assert held(fifth) == ([0, 1, 2, 3], [4, 5])
    assert fifth.clients[0]["memory"]["host"]["learned"].tolist() == [0, 1, 2, 3]


def test_a_cut_keeps_the_herding_order() -> None:
    case = on_boundary(stream=ClassToy(tasks=3, classes=6))
    ids = {o.state.round: o.clients[0]["memory"]["host"]["ids"] for o in case.after(2, 3, 5)}
    assert ids[3][[0, 1, 2, 3]].tolist() == ids[2][[0, 1, 4, 5]].tolist()
    assert ids[5][[0, 1]].tolist() == ids[3][[0, 2]].tolist()


@pytest.mark.parametrize("size", [0, 1, 3, 7, 2000])
def test_the_memory_never_exceeds_its_size(size: int) -> None:
    for client in bench(size, {"detect": "boundary"}, ClassToy(tasks=2, rounds_per_task=1)).run().clients.values():
        assert int(client["memory"]["host"]["stored"]) <= size


def test_nothing_is_kept_of_a_task_whose_end_is_not_detected() -> None:
    undetected = bench(policy={"threshold": 99.0}).run()
    assert held(undetected) == ([], [2] * 4 + [3] * 4)


def test_a_signal_within_a_task_keeps_nothing_of_current_data() -> None:
    eager = bench(policy={"threshold": 0.0}, stream=ClassToy(tasks=1, rounds_per_task=3)).run()
    assert held(eager)[0] == []


def test_classes_that_come_back_are_learned_and_current_at_once() -> None:
    outcome = on_boundary(stream=Toy(clients=1, tasks=3, samples=20)).run()
    kept, aside = held(outcome)
    assert set(kept) <= {0, 1, 2, 3} and len(kept) + len(aside) <= 8
    assert outcome.clients[0]["memory"]["host"]["learned"].tolist() == sorted(set(kept))


def test_every_client_keeps_exemplars_of_every_task_whoever_is_sampled() -> None:
    """12 clients of whom 4 train in a round: the release updates the exemplars of all of them in every round."""
    cohorts = {index: tuple(range(4 * (index % 2), 4 * (index % 2) + 4)) for index in range(4)}
    case = on_boundary(stream=ClassToy(clients=12, tasks=2, cohorts=cohorts))
    outcome = case.run(rounds=3)
    kept = [held(outcome, client)[0] for client in range(12)]
    assert kept == [[0, 0, 1, 1]] * 12


def test_the_entropy_is_that_of_the_model_every_round_begins_with() -> None:
    """Client 1 never trains; its entropy is the mean over its data under the model that round 1 begins with."""
    case = bench(stream=ClassToy(clients=2, cohorts=dict.fromkeys(range(4), (0,))), old_model="none")
    begun, outcome = case.run(rounds=1).state.model, case.run(rounds=2)
    outputs = case.trainer().outputs(begun, case.stream.data(1, 0).x)[:, :2]  # the classes of the first task
    p = torch.softmax(outputs, dim=1)
    expected = -(p * torch.log(p + 1e-5)).sum(1).mean().item()
    assert outcome.clients[1]["memory"]["host"]["entropy"] == pytest.approx(expected, rel=1e-5)


# prototypes ----------------------------------------------------------------------------------------------------------
def test_the_prototype_is_nearest_to_the_mean_of_features_of_length_one() -> None:
    """The unscaled mean (3.525, 0.45) is nearest to (3.5, 0); of length 1 the features are (1, 0) twice, (0.6, 0.8) and
    (0, 1), and their mean (0.65, 0.45) is nearest to (0.6, 0.8)."""
    rows = torch.tensor([[10.0, 0.0], [3.5, 0.0], [0.6, 0.8], [0.0, 1.0]])
    case = bench().change(module=TwoNumbers, stream=Given(clients=1, table={(0, 0): (rows, torch.zeros(4).long())}))
    trainer, model = case.trainer(), case.model()
    assert torch.equal(features(trainer, model, rows), rows)
    plain = (rows.mean(0) - rows).norm(dim=1).argmin().item()
    unit = nn.functional.normalize(rows)
    assert (plain, (unit.mean(0) - unit).norm(dim=1).argmin().item()) == (1, 2)
    assert nearest_to_mean(trainer, model, rows, torch.zeros(4).long()).tolist() == [2]


BLUEPRINT = EncoderBlueprint((1, 4, 4), 5)


def encoder(blueprint: EncoderBlueprint = BLUEPRINT) -> tuple[Any, Layout, dict[str, Tensor]]:
    module = blueprint.build()
    layout = Layout.of(module)
    return module, layout, layout.named(initial_weights(blueprint, 3)["params"])


@pytest.mark.parametrize(("shape", "fed"), [((1, 28, 28), 588), ((3, 32, 32), 768), ((3, 64, 64), 3072)])
def test_the_encoder_fits_every_size(shape: tuple[int, ...], fed: int) -> None:
    module = EncoderBlueprint(shape, 100).build()
    assert module.head.in_features == fed
    assert all(float(p.detach().abs().max()) <= 0.5 for p in module.parameters())
    if shape == (3, 32, 32):
        assert sum(p.numel() for p in module.parameters()) == 85_036


@pytest.mark.parametrize("label", range(5))
def test_the_label_is_read_off_the_gradient(label: int) -> None:
    module, layout, weights = encoder()
    gradient = encoded(module, weights, torch.randn(1, 4, 4), torch.tensor(label))
    assert int(label_of(gradient, layout)) == label


def test_reconstruction_comes_closer_with_every_accepted_image() -> None:
    module, _, weights = encoder()
    label = torch.tensor(2)
    torch.manual_seed(0)
    target = encoded(module, weights, torch.rand(1, 4, 4), label)

    def gradient_of(x: Tensor) -> Tensor:
        return encoded(module, weights, x, label, differentiable=True)

    images, losses = reconstructed(gradient_of, target, torch.randn(1, 4, 4), steps=8, lr=0.1, keep=5)
    assert all(later < earlier for earlier, later in pairwise(losses))
    assert losses[-1] < 0.01 * losses[0]
    assert images.shape == (5, 1, 4, 4)
    assert (gradient_of(images[-1]) - target).square().sum().item() == pytest.approx(losses[-1])


# the proxy server ----------------------------------------------------------------------------------------------------
def test_the_proxy_chooses_the_old_model_and_clients_forget_their_gradients() -> None:
    case = on_boundary(**PROXY)
    first, second, third, last = case.after(1, 2, 3, 4)
    own = first.state.server["glfc"]
    assert own["images"].shape[0] == own["labels"].shape[0] <= 2 * 2 * 2  # clients x classes x iterates
    assert set(own["labels"].tolist()) == {0, 1}
    assert "queue" not in own and "previous" not in own
    assert torch.equal(own["current"]["params"], first.params)
    assert own["current"]["known"].tolist() == [True, True, False, False]
    previous = third.state.server["glfc"]["previous"]
    assert torch.equal(previous["params"], second.state.server["glfc"]["current"]["params"])
    assert all("prototypes" not in client["glfc"] for client in last.clients.values())


def test_after_a_detected_change_the_old_model_is_the_best_and_otherwise_the_one_before() -> None:
    """In the first round of the second task (round 2); "current" was chosen in the first."""
    case = bench()

    def old(received: Tree, signal: bool) -> Tree | None:
        client = case.client("glfc", round_index=2, messages={"glfc": received})
        return GLFC(old_model="proxy")._old(client, signal)

    received = {"current": {"is": "now"}, "task": 0, "previous": {"is": "before"}}
    assert old(received, signal=True) == {"is": "now"}
    assert old(received, signal=False) == {"is": "before"}
    assert old({"current": {"is": "now"}, "task": 0}, signal=False) is None
    assert old({}, signal=True) is None
    late = {**received, "task": 1}  # a model of the second task is none of an earlier one
    assert old(late, signal=True) == {"is": "before"}


def test_a_late_signal_leaves_the_old_model_of_the_previous_task() -> None:
    """Six rounds of two tasks; a client signals in the first round of the second task, or in its second, too late."""
    case = on_boundary(stream=ClassToy(tasks=2, rounds_per_task=3), **PROXY)
    part, first = case.build_method().part("glfc"), case.run(rounds=1).state
    model = {**first.model, "params": first.model["params"] + 1.0}
    started = {**first.server["glfc"], "best": 0.0}

    def second_task(signals: tuple[int, ...]) -> Any:
        own = started
        for index in (3, 4, 5):
            server = case.server("glfc", {"glfc": own}, round_index=index, phase="choose", model=model, reduced=ARRIVED)
            if index in signals:
                phase_of(part, "prototypes").update(server)
            server.state |= {key: own[key] for key in ("images", "labels")} | {"best": 0.0}
            phase_of(part, "choose").update(server)
            own = server.state
        return own

    for signals in ((3,), (4,), (3, 4), ()):
        own = second_task(signals)
        assert torch.equal(own["previous"]["params"], started["current"]["params"]), signals
        assert torch.equal(own["current"]["params"], model["params"])


@pytest.mark.parametrize("reset", [True, False])
def test_the_best_score_begins_anew_at_a_change(reset: bool) -> None:
    part = GLFC(old_model="proxy", reset=reset)
    own = {"best": 0.9, "current": {"params": torch.tensor(0.0)}, "current_since": 0, "current_task": 0}
    server = bench().server("glfc", {"glfc": own}, round_index=2, reduced=ARRIVED)
    phase_of(part, "prototypes").update(server)
    assert server.state["best"] == (0.0 if reset else 0.9)
    assert server.state["previous_since"] == 0


@pytest.mark.parametrize(("lead", "chosen"), [(0.0, True), (-0.01, True), (0.01, False)])
def test_of_equally_good_models_the_newer_one_is_chosen(lead: float, chosen: bool) -> None:
    """lead: by how much the older model was better on the images."""
    case = on_boundary(**PROXY)
    state = case.run(rounds=1).state
    first = state.server["glfc"]
    older = {"params": torch.zeros_like(case.model()["params"])}
    own = {**first, "best": first["score"] + lead, "current": older, "current_since": 0}
    server = case.server("glfc", {"model": state.model, "glfc": own}, round_index=1, phase="choose")
    phase_of(GLFC(**PROXY), "choose").update(server)
    found = server.state
    assert found["score"] == first["score"]
    assert found["current_since"] == (1 if chosen else 0)
    assert torch.equal(found["current"]["params"], state.model["params"] if chosen else older["params"])


def test_bytes_by_part() -> None:
    case = on_boundary(**PROXY)
    encoder_bytes = 4 * sum(p.numel() for p in EncoderBlueprint((1, 4, 4), 4).build().parameters())
    rounds = {outcome.state.round: outcome.state.traffic for outcome in case.after(1, 2, 3)}
    # two clients, two classes each: gradients when their task has changed, and only then
    assert [rounds[r].up["glfc"] for r in (1, 2, 3)] == [4 * encoder_bytes, 4 * encoder_bytes, 8 * encoder_bytes]
    model = tree.tensor_bytes(case.model()) + 4  # with a mask of what it knows
    assert rounds[1].down["glfc"] == 2 * encoder_bytes
    assert rounds[2].down["glfc"] == 2 * (encoder_bytes + model)
    plain = on_boundary().run().state.traffic
    assert plain.up["glfc"] == 0
    assert plain.down["glfc"] == 2 * model  # the teacher, once


def test_what_it_reveals_and_needs() -> None:
    def glfc(**options: Any) -> Any:
        return methods.build("glfc", {"glfc": options})

    assert glfc().reveals() == {}
    assert glfc(old_model="proxy").reveals() == {"prototypes": ["glfc"]}
    assert glfc().needs(BOUNDARIES)
    assert not glfc(old_model="proxy", head="full").needs(BOUNDARIES)
    hidden = Toy(clients=2, boundaries=False, task_ids=False)
    with pytest.raises(CompositionError, match="part 'glfc' must know when a task begins or ends"):
        glfc().fit_stream(hidden)
    outcome = bench(stream=hidden, **PROXY, head="full").run()
    assert outcome.state.round == hidden.rounds
    with pytest.raises(ClientError, match=r"memory.policy.detect = 'boundary' needs a stream that tells"):
        bench(stream=hidden, policy={"detect": "boundary"}, old_model="none", head="full").run()


def test_the_old_model_stays_as_it_was() -> None:
    case = on_boundary(stream=ClassToy(tasks=2, rounds_per_task=3))
    third, *later = case.after(3, 4, 5)
    frozen = [outcome.state.server["glfc"]["old"] for outcome in (third, *later)]
    assert len({sha256(tree.to_bytes(old)).hexdigest() for old in frozen}) == 1
    assert torch.equal(frozen[-1]["params"], third.params)


def test_wire_and_resume_parity_with_a_proxy() -> None:
    case = on_boundary(stream=ClassToy(clients=2, tasks=2), **PROXY).change(module=Norm)
    eager = case.run()
    assert_same(eager, run_over_wire(case))
    assert_resumes(case, 3, eager)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"old_model": "best"}, "old_model must be one of last, proxy, none"),
        ({"form": "hinge"}, "form must be one of sigmoid, softmax"),
        ({"relation": -1.0}, "relation must be at least 0"),
        ({"iterates": 0}, "iterates must be at least 1"),
    ],
)
def test_options_outside_their_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GLFC(**options)
    with pytest.raises(ValueError, match="detect must be one of entropy, boundary"):
        OnTransition(detect="never")


def test_policies_do_not_choose_after_the_last_task_unless_they_do_so_before_training() -> None:
    before, after = (phase_of(Memory(policy=kind), "remember") for kind in ("on-transition", "herding"))
    assert before.in_last_round and before.when is When.BEFORE and before.cohort is Cohort.ALL
    assert not after.in_last_round and after.when is When.AFTER
