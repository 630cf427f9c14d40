"""FedCIL (Qi et al., ICLR 2023): networks, losses, the two steps, consolidation on the server, and what is sent."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from everfed import models
from everfed.core import tree
from everfed.core.data import minibatches
from everfed.core.layout import attach
from everfed.core.part import options_of
from everfed.core.step import Substeps, Training
from everfed.method import Layout, Mean, Optimizer, RoundPlan, Server, Step, TrainOptions
from everfed.methods import registry as methods
from everfed.methods.generative.acgan import ACGAN, Consolidation, balanced, labels_of, noise
from everfed.methods.generative.fedcil import FedCIL
from everfed.models.acgan import ACGANBlueprint
from tests.parity.test_resume import assert_resumes
from tests.support.rehearsal_free import ClassToy, PoolToy
from tests.support.toy import SMALL, Bench, Norm, Toy

ADAM = TrainOptions(1, 6, Optimizer("adam", lr=0.01, beta1=0.5, state="task"))
OFF = {"consistency_real": 0.0, "consistency_fake": 0.0, "consistency_label": 0.0}


def bench(stream: Toy | None = None, train: TrainOptions = ADAM, **options: Any) -> Bench:
    given = {"fedcil": {**SMALL["fedcil"], **options}}
    return Bench("fedcil", given, stream=stream or ClassToy(tasks=2), train=train)


def gan_of(case: Bench) -> ACGAN:
    client = case.client("fedcil", round_index=case.stream.rounds_per_task)
    part = case.build_method().part("fedcil")
    assert isinstance(part, FedCIL)
    client.trainer.replica.module.train()
    return ACGAN(client.trainer, part.blueprint(client.facts), part._competing(client))


# the networks --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("shape", "z_dim", "kind", "parameters"),
    [
        ((1, 32, 32), 110, "wide", 3_664_769),
        ((1, 32, 32), 126, "wide", 3_795_841),
        ((3, 32, 32), 110, "slim", 1_593_888),
    ],
)
def test_generators_have_the_sizes_of_the_release(shape: Any, z_dim: int, kind: str, parameters: int) -> None:
    module = ACGANBlueprint(shape, z_dim, kind).build()
    assert sum(p.numel() for p in module.parameters()) == parameters
    assert not list(module.buffers())


@pytest.mark.parametrize("kind", ["wide", "slim"])
@pytest.mark.parametrize("shape", [(1, 4, 4), (1, 28, 28), (3, 32, 32), (3, 64, 64)])
def test_generators_make_images_of_every_size(shape: tuple[int, ...], kind: str) -> None:
    images = ACGANBlueprint(shape, 5, kind, width=16).build()(torch.randn(2, 5))
    assert images.shape == (2, *shape)
    assert float(images.detach().abs().max()) <= 1.0


@pytest.mark.parametrize(
    ("shape", "classes", "parameters"),
    [
        ((1, 32, 32), 10, 702_795 - 896),  # the release declares BatchNorm layers of 896 numbers, and does not use them
        ((1, 32, 32), 26, 768_347 - 896),
        ((3, 32, 32), 10, 1_663_867),
    ],
)
def test_discriminators_have_the_sizes_of_the_release(shape: Any, classes: int, parameters: int) -> None:
    module = models.build("acgan-cnn", shape, classes, seed=0)
    case = Bench(stream=Toy())
    ctx = case.context()
    facts = replace(ctx.facts, input_shape=shape, classes=classes, layout=Layout.of(module))
    part = FedCIL(width=8)
    whole = attach(module, (part,), lambda name: Server(name, {}, ctx.at(facts=facts)))
    assert Substeps.of((part,), Layout.of(whole)).main == slice(0, parameters)


@pytest.mark.parametrize("shape", [(1, 28, 28), (1, 64, 64), (3, 28, 28), (3, 64, 64)])
def test_discriminators_take_images_of_every_size(shape: tuple[int, ...]) -> None:
    module = models.build("acgan-cnn", shape, 7, seed=0).eval()
    assert module(torch.zeros(2, *shape)).shape == (2, 7)


def test_vectors_are_refused() -> None:
    with pytest.raises(ValueError, match="a GAN makes square images"):
        ACGANBlueprint((7,), 5, "wide").build()


# noise and losses ----------------------------------------------------------------------------------------------------
def test_noise_begins_with_the_label() -> None:
    z = noise(torch.tensor([2, 0, 1] * 500), 3, 103, torch.Generator().manual_seed(1))
    assert torch.equal(z[:, :3], torch.eye(3)[[2, 0, 1] * 500])
    assert z[:, 3:].mean().item() == pytest.approx(0.0, abs=0.01)
    assert z[:, 3:].var().item() == pytest.approx(1.0, abs=0.02)


def test_consistency_is_zero_for_equal_inputs_and_never_negative() -> None:
    gan = gan_of(bench())
    torch.manual_seed(0)
    for _ in range(20):
        rows, others = torch.randn(2, 6, 5)
        assert gan.apart(rows, rows).item() == pytest.approx(0.0, abs=1e-6)
        assert gan.apart(rows, others).item() >= 0.0
    rows = torch.randn(6, 5, requires_grad=True)
    assert torch.autograd.grad(gan.apart(torch.randn(6, 5), rows) + 0 * rows.sum(), rows)[0].abs().sum() == 0


def test_losses_in_numbers() -> None:
    gan = gan_of(bench())
    rows = torch.zeros(4, 5)  # four classes compete, and the logit of "real" is 0
    assert gan.judged(rows, torch.tensor([0, 1, 2, 3]), True).item() == pytest.approx(np.log(2) + np.log(4))
    seen = ACGAN(gan.trainer, gan.blueprint, torch.tensor([False, True, False, True]))
    assert seen.label_loss(rows, torch.tensor([1, 3, 3, 1])).item() == pytest.approx(np.log(2))


# one step ------------------------------------------------------------------------------------------------------------
class Halves:
    """The parameters of a local training before and after the discriminator's step, and at the end."""

    def __init__(self, case: Bench) -> None:
        self.seen: list[Tensor] = []
        part = case.build_method().part("fedcil")
        client = case.client("fedcil", {"client": {}}, round_index=2)
        part.start(client)
        watched, model, params = _watching(part, self.seen), client.model, client.model["params"]
        fitted = client.trainer.fit(
            client.context, (watched,), model, params, client.states, {}, client.data, epochs=1, batch_size=12
        )
        self.start, self.between, self.end = params, self.seen[0], fitted.model["params"]
        self.span = part.generator_span(case.layout())


def _watching(part: Any, seen: list[Tensor]) -> Any:
    class Watched(FedCIL):
        def _generator_loss(self, step: Step) -> Tensor:
            seen.append(step.params.clone())
            return super()._generator_loss(step)

    return Watched(**options_of(part))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_each_step_leaves_the_other_network_bit_identical(weight_decay: float) -> None:
    optimizer = Optimizer("adam", lr=0.01, weight_decay=weight_decay)
    halves = Halves(bench(train=TrainOptions(1, 12, optimizer)))
    where = halves.span
    assert torch.equal(halves.between[where], halves.start[where])
    assert not torch.equal(halves.between[: where.start], halves.start[: where.start])
    assert torch.equal(halves.end[: where.start], halves.between[: where.start])
    assert not torch.equal(halves.end[where], halves.between[where])


def test_a_generator_may_have_an_adam_of_its_own_beside_sgd() -> None:
    """The first step of Adam moves every coordinate by its rate, however large the gradient."""
    halves = Halves(bench(train=TrainOptions(1, 12, Optimizer(lr=0.1)), generator_lr=0.02))
    moved = (halves.end - halves.start)[halves.span].abs()
    assert moved.max().item() == pytest.approx(0.02, rel=1e-4)
    assert moved.median().item() == pytest.approx(0.02, rel=1e-3)
    with pytest.raises(methods.MethodError, match="fedcil.generator_lr must be at least 0; got -1"):
        bench(generator_lr=-1.0).build_method()


def test_the_first_task_replays_nothing_and_later_ones_only_what_the_client_had() -> None:
    case = bench(stream=ClassToy(tasks=2, classes=4))
    part = case.build_method().part("fedcil")
    assert isinstance(part, FedCIL)
    for rounds, replays in ((1, False), (2, True)):
        outcome = case.run(rounds=rounds)
        client = case.client("fedcil", outcome.clients[0], round_index=rounds)
        part.start(client)
        tables = part.plan(client, minibatches(client.data.ids, 1, 5, client.rng("order")))
        assert ("old" in tables) is replays
        assert set(tables["fake"].values.flatten()) <= ({0, 1, 2, 3} if replays else {0, 1})
        if replays:
            assert set(tables["old"].values[tables["old"].values > 0].flatten()) <= {0, 1}
        assert ("known" in tables) is (rounds == 1)  # consistency begins in the second round of a task


def test_consistency_is_over_the_classes_that_any_client_knows() -> None:
    """Each client has classes of its own. Only the labels of the global generator are of all of them, as in C2 and C3,
    and these compete in the loss, so that it stays finite."""
    case = bench(PoolToy())
    part, outcome = case.build_method().part("fedcil"), case.run(rounds=3)
    assert isinstance(part, FedCIL)
    client = case.client("fedcil", outcome.clients[0], round_index=3)
    part.start(client)
    tables = part.plan(client, minibatches(client.data.ids, 40, 5, client.rng("order")))
    drawn = {name: {int(y) for i in range(100) for y in tables[name].row(i)} for name in ("known", "fake", "old")}
    assert drawn == {"known": set(range(8)), "fake": {0, 1, 2, 3}, "old": {0, 1}}
    assert client.state["classes"].all()
    assert torch.isfinite(case.run().params).all() and case.run().params.abs().max() < 10


def test_the_weight_of_real_data_is_one_in_the_first_task_and_half_later() -> None:
    case = bench(**OFF)
    part = case.build_method().part("fedcil")
    assert isinstance(part, FedCIL)
    terms = iter([torch.tensor(3.0), torch.tensor(5.0)])

    class Counting(ACGAN):
        def discriminated(self, *args: Any) -> Tensor:
            return next(terms)

    class Fixed(FedCIL):
        def _gan(self, step: Step) -> ACGAN:
            gan = super()._gan(step)
            return Counting(gan.trainer, gan.blueprint, gan.classes)

    fixed = Fixed(**options_of(part))
    client = case.client("fedcil", {"client": {}}, round_index=2)
    fixed.start(client)
    data, received, trainer = client.data, client.model["params"], client.trainer
    client.state |= {"classes": part._competing(client), "old": received[part.generator_span(case.layout())]}
    given = trainer.forward, lambda o, y: o.sum(), client.states, {}, received
    training = Training(client.context, trainer.replica, [fixed], Optimizer(), {}, *given)
    step, labels = training.of("fedcil"), torch.zeros(4, dtype=torch.int64)
    training.begin(data.x[:4], data.y[:4], {"fedcil": {"fake": labels}})
    assert fixed.objective(step).item() == 3.0
    terms = iter([torch.tensor(3.0), torch.tensor(5.0)])
    training.begin(data.x[:4], data.y[:4], {"fedcil": {"fake": labels, "old": labels, "fake_old": labels}})
    assert fixed.objective(step).item() == 0.5 * 3.0 + 0.5 * 5.0


# the server ----------------------------------------------------------------------------------------------------------
def test_the_mix_is_balanced_over_the_labels_that_are_there() -> None:
    labels = np.array([3] * 90 + [5] * 9 + [7])
    chosen = balanced(labels, 9000, np.random.default_rng(0))
    counts = Counter(labels[chosen].tolist())
    assert set(counts) == {3, 5, 7}
    assert all(count == pytest.approx(3000, abs=200) for count in counts.values())


def test_mixed_images_have_the_labels_they_were_made_for() -> None:
    case = bench()
    gan, part = gan_of(case), case.build_method().part("fedcil")
    assert isinstance(part, FedCIL)
    vector = case.model()["params"][part.generator_span(case.layout())]
    mask = torch.tensor([False, True, False, True])
    clients = {
        "0": {"generator": vector, "labels": mask},
        "4": {"generator": vector, "labels": torch.arange(4) == 1},
    }
    work = Consolidation(part, gan, Optimizer(), 50, 2, clients=5)
    mixes = work.mixes(clients, 2, np.random.default_rng(0))
    assert mixes["y"].shape == (2, 50) and set(mixes["y"].ravel()) == {1, 3}
    for rows, made, taken, y in zip(*(mixes[k] for k in ("rows", "labels", "taken", "y")), strict=True):
        assert np.array_equal(made.reshape(-1)[taken], y)
        for client, labels in zip(rows, made, strict=True):
            assert set(labels) <= ({1, 3} if client == 0 else {1})
    work._bring([vector, 2 * vector])
    given = [torch.from_numpy(mixes[k][0]) for k in ("rows", "labels", "taken")]
    assert work.mixed(*given).shape == (50, 1, 4, 4)
    assert labels_of(list(clients.values())).tolist() == [1, 3]


def test_one_client_with_one_class_is_consolidated() -> None:
    outcome = bench(Toy(clients=1, tasks=2, rounds_per_task=1, only={0: (2,)})).run()
    assert torch.isfinite(outcome.params).all()


def test_without_consistency_and_consolidation_it_is_fedavg_of_gans() -> None:
    """Clients hold 4 and 12 samples: shares of 0.25 and 0.75."""
    case = bench(ClassToy(tasks=1, rounds_per_task=1, sizes={(0, 0): 4, (1, 0): 12}), **OFF, server_steps=0)
    outcome = case.run()
    generators = [outcome.clients[k]["fedcil"]["latest"].double() for k in (0, 1)]
    part = case.build_method().part("fedcil")
    assert isinstance(part, FedCIL)
    mean = (0.25 * generators[0] + 0.75 * generators[1]).float()
    assert torch.allclose(outcome.params[part.generator_span(case.layout())], mean, atol=1e-7)
    assert outcome.state.server.keys() == {"model"}


@pytest.mark.parametrize(("weighting", "mean"), [("samples", 2.5), ("uniform", 2.0)])
def test_the_mean_of_gans_is_weighted_by_samples(weighting: str, mean: float) -> None:
    reduced = {"params": {0: torch.tensor([1.0]), 1: torch.tensor([3.0])}, "samples": {0: 1, 1: 3}}
    model = {"params": torch.tensor([0.0])}
    found = FedCIL(weighting=weighting).aggregate(bench().server("fedcil", {"model": model}, reduced=reduced))
    assert found["params"].tolist() == [mean]
    secure = FedCIL(weighting=weighting, server_steps=0).reducers()["params"]
    assert secure == Mean(weighted=weighting == "samples")


def test_consolidation_changes_the_model_and_is_deterministic() -> None:
    with_it, without = bench().run(rounds=1), bench(server_steps=0).run(rounds=1)
    assert not torch.equal(with_it.params, without.params)
    assert torch.equal(with_it.params, bench().run(rounds=1).params)
    assert set(with_it.state.server["fedcil"]["now"]) == {"0", "1"}
    second = bench().run(rounds=3).state.server["fedcil"]
    assert second["old"]["0"]["labels"].tolist() == [True, True, False, False]
    assert second["now"]["0"]["labels"].tolist() == [False, False, True, True]


@pytest.mark.parametrize("options", [{"server_steps": 0}, {}], ids=["clients", "with the server"])
def test_running_statistics_are_those_of_real_images(options: dict[str, Any]) -> None:
    """The classifier is scored on real images. One minibatch from the same first weights: FedAvg has seen no others."""
    stream = ClassToy(clients=1, tasks=1, rounds_per_task=1, sizes={(0, 0): 6})
    found = bench(stream, **options).change(module=Norm).run().state.model
    plain = Bench("fedavg", stream=stream, train=ADAM).change(module=Norm).run().state.model
    assert plain["stats"].numel() and plain["counters"].tolist() == [1]
    assert torch.equal(found["stats"], plain["stats"]) and torch.equal(found["counters"], plain["counters"])


def test_replay_and_consistency_leave_the_running_statistics_alone() -> None:
    """Later tasks and rounds: as often updated as with FedAvg."""
    stream = ClassToy(clients=1, tasks=2, rounds_per_task=2)
    counts = [
        Bench(method, given, stream=stream, train=ADAM).change(module=Norm).run().state.model["counters"].tolist()
        for method, given in (("fedcil", {"fedcil": SMALL["fedcil"]}), ("fedavg", {}))
    ]
    assert counts[0] == counts[1] and counts[0][0] > 4


@dataclass(frozen=True)
class Ahead(ClassToy):
    """The second client is a task ahead of the server all the time."""

    def round(self, index: int) -> RoundPlan:
        plan = super().round(index)
        return replace(plan, tasks={0: plan.task, 1: 1})


def test_labels_of_clients_that_are_ahead_of_the_server_compete() -> None:
    """Where they did not, every image of theirs had a loss of about 1e9."""
    outcome = bench(Ahead()).run()
    losses = [e[name] for e in outcome.events if e["event"] == "measure" for name in ("discriminator", "generator")]
    assert outcome.state.server["fedcil"]["now"]["1"]["labels"].tolist() == [False, False, True, True]
    assert len(losses) == 2 * 2 * 4 and max(losses) < 10  # two chunks in each of four rounds


def test_the_labels_of_all_earlier_tasks_are_remembered() -> None:
    """Three tasks of two classes each: in the third, the classes of both earlier ones are replayed and mixed."""
    outcome = bench(ClassToy(clients=2, tasks=3, classes=6, rounds_per_task=1)).run()
    own = outcome.state.server["fedcil"]
    assert own["old"]["1"]["labels"].tolist() == [True, True, True, True, False, False]
    assert own["now"]["1"]["labels"].tolist() == [False, False, False, False, True, True]
    host = outcome.clients[1]["fedcil"]["host"]
    assert host["past"].tolist() == [0, 1, 2, 3] and host["current"].tolist() == [4, 5]


def test_every_task_begins_with_fresh_moments_on_the_server() -> None:
    """Adam counts its steps: 3 in every round, 6 after two rounds of a task, 3 again after the next task's first."""
    case = bench(ClassToy(tasks=2, rounds_per_task=2))
    steps = [outcome.state.server["fedcil"]["moments"]["t"].item() for outcome in case.after(1, 2, 3)]
    assert steps == [3.0, 6.0, 3.0]


def test_a_run_resumes_in_the_middle_of_consolidation() -> None:
    assert_resumes(bench().change(module=Norm), 1)
    whole = bench().run(rounds=1)
    phases = [e for e in whole.events if e["event"] == "phase" and e["phase"] == "consolidate"]
    assert [event["repeat"] for event in phases] == [0, 1]  # 3 steps in chunks of 2


def test_the_replaying_generator_stays_as_it_was() -> None:
    case = bench(ClassToy(tasks=2, rounds_per_task=3))
    before, *later = (outcome.clients[0]["fedcil"] for outcome in case.after(3, 4, 5, 6))
    assert len({sha256(tree.to_bytes({"old": own["old"]})).hexdigest() for own in later}) == 1
    assert torch.equal(later[0]["old"], before["latest"])


def test_evaluation_is_of_the_consolidated_model_with_class_logits_only() -> None:
    case = bench()
    outcome = case.run(rounds=2)
    trainer = case.trainer()
    outputs = trainer.outputs(outcome.state.model, case.stream.test(0).x)
    assert outputs.shape == (40, 4)
    right = (outputs.argmax(1) == case.stream.test(0).y).sum().item()
    assert outcome.state.rows[0][0][1] == right


def test_bytes_and_what_is_revealed() -> None:
    case = bench()
    model = tree.tensor_bytes(case.model())
    traffic = case.run(rounds=1).state.traffic
    assert traffic.up["fedcil"] == 2 * (model + 4)  # whole GANs, and a mask of labels
    assert traffic.down["fedcil"] == 2 * model
    assert methods.build("fedcil").reveals() == {"train": ["fedcil"]}
    assert methods.build("fedcil", {"fedcil": {"server_steps": 0}}).reveals() == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"generator": "tall"}, "generator must be one of auto, wide, slim"),
        ({"server_chunk": 0}, "server_chunk must be at least 1"),
        ({"consistency_real": -1.0}, "consistency_real must be at least 0"),
        ({"weighting": "rounds"}, "weighting must be one of samples, uniform"),
    ],
)
def test_options_outside_their_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FedCIL(**options)


def test_a_network_without_a_linear_head_is_refused() -> None:
    with pytest.raises(ValueError, match="no linear layer"):
        Bench("fedcil", {"fedcil": SMALL["fedcil"]}, module=lambda shape, classes: nn.Conv2d(1, classes, 4)).run()
