"""TARGET (Zhang et al., 2023), and the synthesis that it shares with LANDER."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from everfed import api
from everfed.core.context import Context
from everfed.core.part import options_of
from everfed.core.server import Runner, RunState
from everfed.core.tree import clone, equal, tensor_bytes
from everfed.method import Batch, CompositionError, Optimizer, Server, State, Step, TrainOptions, compose
from everfed.methods import registry as methods
from everfed.methods.aggregate.fedavg import FedAvg
from everfed.methods.common.teacher import among, soft_cross_entropy
from everfed.methods.generative.lander import Lander
from everfed.methods.generative.student import affine, cycled, divergences, to_bytes
from everfed.methods.generative.synthesis import adversarial, statistics_distance
from everfed.methods.generative.synthetic_replay import SyntheticReplay
from everfed.methods.generative.target import Target
from everfed.methods.replay.er import Replay
from everfed.methods.replay.memory import Memory
from everfed.store.clients import ClientStore
from everfed.streams import from_arrays
from tests.support.phases import phase_of
from tests.support.rehearsal_free import ClassToy
from tests.support.spy import Seen, spied
from tests.support.toy import SMALL, Bench, Norm, Outcome, Paused, comparable
from tests.support.wire import crossed

OLD, NEW = torch.tensor([True, True, False, False, False]), torch.tensor([False, False, True, True, True])
BOTH = pytest.mark.parametrize("part", [Target(), Lander()], ids=["target", "lander"])


def bench(method: str = "target", tasks: int = 2, **options: Any) -> Bench:
    stream = ClassToy(tasks=tasks, classes=2 * tasks)
    chosen = {method: {**SMALL[method], **options}} if method in SMALL else {}
    return Bench(method, chosen, stream=stream, module=Norm)


def at_step(outputs: Tensor, y: Tensor | None = None) -> Step:
    """The fields of a step that the loss terms read, in a later task."""
    batch = Batch(torch.zeros(0), torch.zeros(0), outputs=outputs)
    return cast(
        Step,
        SimpleNamespace(
            state={"old": OLD, "new": NEW},
            batches={"images": batch},
            outputs=outputs,
            y=y,
            task_loss=torch.nn.functional.cross_entropy,
        ),
    )


def logits(seed: int, rows: int = 6) -> Tensor:
    return 3 * torch.randn(rows, 5, generator=torch.Generator().manual_seed(seed))


# distillation and labels (Eq. 3, 4) ----------------------------------------------------------------------------------
def test_distillation_at_the_teachers_own_answer_is_its_entropy_with_no_gradient() -> None:
    teacher = torch.tensor([[2.0, 0.0, 0.0]])
    student = teacher.clone().requires_grad_()
    loss = soft_cross_entropy(student, teacher, 2.0)
    assert loss.item() == pytest.approx(0.975328, abs=1e-6)
    (gradient,) = torch.autograd.grad(loss, student)
    assert gradient.abs().max() < 1e-7


@BOTH
def test_distillation_does_not_see_new_classes(part: SyntheticReplay) -> None:
    student = logits(0).requires_grad_()
    loss = part.distillation(at_step(student), logits(1))
    other = part.distillation(at_step(torch.where(NEW, logits(2), student)), torch.where(NEW, 99.0, logits(1)))
    assert torch.equal(loss, other)
    (gradient,) = torch.autograd.grad(loss, student)
    assert gradient[:, NEW].abs().max() == 0 and gradient[:, OLD].abs().max() > 0


@BOTH
def test_labels_are_learned_among_the_new_classes_only(part: SyntheticReplay) -> None:
    student, y = logits(0).requires_grad_(), torch.tensor([2, 3, 4, 4, 3, 2])
    loss = part.labels_loss(at_step(student, y))
    assert loss.item() == pytest.approx(torch.nn.functional.cross_entropy(student[:, 2:], y - 2).item(), rel=1e-6)
    (gradient,) = torch.autograd.grad(loss, student)
    assert gradient[:, OLD].abs().max() == 0 and gradient[:, NEW].abs().max() > 0


# losses of synthesis -------------------------------------------------------------------------------------------------
def test_statistics_that_are_equal_are_at_no_distance() -> None:
    stored = [(torch.randn(3), torch.rand(3)), (torch.randn(5), torch.rand(5))]
    assert statistics_distance(stored, [(m.clone(), v.clone()) for m, v in stored]).item() == 0.0
    moved = [(stored[0][0] + 1.0, stored[0][1]), (stored[1][0], stored[1][1] + 2.0)]
    assert statistics_distance(stored, moved).item() == pytest.approx(3**0.5 + 2 * 5**0.5, rel=1e-6)


@given(st.integers(0, 10_000))
def test_the_adversary_counts_where_predictions_agree_or_disagree(seed: int) -> None:
    student, teacher = logits(seed, 4), logits(seed + 1, 4)
    agree = student.argmax(1) == teacher.argmax(1)
    terms = {mask: adversarial(student, teacher, mask).item() for mask in ("agree", "disagree")}
    assert all(term <= 1e-6 for term in terms.values())
    if not agree.any():
        assert terms["agree"] == 0.0
    if agree.all():
        assert terms["disagree"] == 0.0
    assert sum(terms.values()) == pytest.approx(-divergences(student, teacher).mean().item(), rel=1e-5, abs=1e-6)


def test_divergences_by_hand() -> None:
    student, teacher = torch.zeros(1, 2), torch.tensor([[2.0, 0.0]])
    p = 1 / (1 + np.exp(-1))  # softmax([2, 0] / 2)
    expected = 4 * (p * np.log(2 * p) + (1 - p) * np.log(2 * (1 - p)))
    assert divergences(student, teacher, 2.0).item() == pytest.approx(expected, rel=1e-6)
    masked = among(torch.tensor([[2.0, 0.0, 9.0]]), torch.tensor([True, True, False]))
    assert divergences(torch.zeros(1, 3), masked).isfinite().all()


# the pool ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("method", "made"), [("target", 3 * 8), ("lander", 4 * 8)])  # a warm-up round of 1 is kept
def test_the_pool_holds_every_rounds_batch_as_bytes_without_labels(method: str, made: int) -> None:
    own = bench(method, n_syn=1000).run(rounds=2).state.server[method]
    assert {"teacher", "since", "pool"} <= own.keys() and "work" not in own
    assert own["pool"].shape == (made, 1, 4, 4) and own["pool"].dtype == torch.uint8
    assert len(own["pool"].unique()) > 10
    fewer = bench(method, n_syn=5).run(rounds=2).state.server[method]["pool"]
    assert torch.equal(fewer, own["pool"][:5])


@pytest.mark.parametrize("method", ["target", "lander"])
def test_images_are_made_after_every_task_but_the_last_and_measured(method: str) -> None:
    outcome = bench(method, tasks=3).run()
    done = [e for e in outcome.events if e["event"] == "phase" and e["phase"] == "synthesis"]
    rounds = methods.build(method, {method: SMALL[method]}).part(method).rounds
    assert [e["round"] for e in done] == [1] * rounds + [3] * rounds
    measured = [e for e in outcome.events if e["event"] == "measure" and e["part"] == method]
    assert [e["images"] for e in measured if e["round"] == 1] == [8.0 * (i + 1) for i in range(rounds - 1)]
    assert all(np.isfinite(e["loss"]) for e in measured)


def test_the_first_task_is_fedavg_bit_for_bit() -> None:
    plain = bench("fedavg").run(rounds=2).state
    state = bench("target").run(rounds=2).state
    assert equal(state.model, plain.model)
    assert state.traffic.down["fedavg"] == plain.traffic.down["fedavg"] and "target" not in state.traffic.down


# a client's samples --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("pool", [1, 5, 24])
@pytest.mark.parametrize("method", ["target", "lander"])
def test_every_real_sample_is_used_once_an_epoch_whatever_the_size_of_the_pool(method: str, pool: int) -> None:
    log: list[Seen] = []
    case = bench(method, n_syn=pool)
    case.change(method=spied(case.build_method(), log)).run(rounds=3)
    steps = [seen for seen in log if (seen.client, seen.round) == (0, 2)]
    data, epochs = case.stream.data(0, 1), 2
    assert rows(torch.cat([seen.x for seen in steps])) == Counter({k: epochs * n for k, n in rows(data.x).items()})
    assert {len(seen.batches[f"{method}/images"][0]) for seen in steps} == {min(pool, 4)}


def rows(x: Tensor) -> Counter[bytes]:
    return Counter(row.numpy().tobytes() for row in x)


@given(st.integers(1, 20), st.integers(1, 9), st.integers(1, 30))
def test_images_of_the_pool_are_used_equally_often(size: int, batch: int, steps: int) -> None:
    drawn = cycled(size, steps, batch, np.random.default_rng(0))
    counts = np.bincount(drawn.ravel(), minlength=size)
    assert drawn.shape == (steps, batch) and counts.max() - counts.min() <= 1


@dataclass(frozen=True)
class Colourful(ClassToy):
    """Every image is shifted by 0 or 1 pixels and brightened by up to 29."""

    colour_draws: int = 1

    def draw_augmentation(self, rng: np.random.Generator, count: int) -> np.ndarray:
        return rng.integers([0, 1], [2, 30], (count, 2))

    def augment(self, x: Tensor, draws: Tensor) -> Tensor:
        return x + draws[:, 1].to(x.dtype).reshape(-1, 1, 1, 1)


@pytest.mark.parametrize("method", ["target", "lander"])
def test_synthetic_images_keep_their_colours_where_real_ones_do_not(method: str) -> None:
    """The released code of both brightens real images at random, and only crops and mirrors synthetic ones."""
    log: list[Seen] = []
    case = bench(method).change(stream=Colourful())
    outcome = case.change(method=spied(case.build_method(), log)).run()
    steps = [seen for seen in log if (seen.client, seen.round) == (0, 2)]
    pool = rows(outcome.state.server[method]["pool"])
    assert all(image in pool for seen in steps for image in rows(seen.batches[f"{method}/images"][0]))
    real = rows(case.stream.data(0, 1).x)
    assert not any(image in real for seen in steps for image in rows(seen.x))


# frozen things stay frozen -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["target", "lander"])
def test_the_teacher_is_the_model_at_the_tasks_end_and_nothing_changes_it(method: str) -> None:
    ended, outcome = bench(method).run(rounds=2), bench(method).run()
    assert equal(ended.state.server[method]["teacher"], ended.state.model)
    for key in ("teacher", "pool"):
        assert equal({"": outcome.state.server[method][key]}, {"": ended.state.server[method][key]})
    assert not equal(outcome.state.model, ended.state.model)


@pytest.mark.parametrize("method", ["target", "lander"])
def test_synthesis_changes_nothing_that_it_is_given(method: str) -> None:
    case = bench(method)
    part = case.build_method().part(method)
    states = case.run(rounds=1).state.server
    for repeat in range(part.rounds):
        before, server = clone(states), synthesis(case, method, states, repeat)
        phase_of(part, "synthesis").update(server)
        assert equal(states, before) and server.model is states["model"]
        states = server.states


def synthesis(case: Bench, method: str, states: State, repeat: int = 0) -> Server:
    """The server at the end of the first task."""
    return case.server(method, states, round_index=1, phase="synthesis", repeat=repeat)


# degenerate cases ----------------------------------------------------------------------------------------------------
def test_without_distillation_it_is_fedavg_with_a_split_head() -> None:
    train = TrainOptions(2, 5, Optimizer(lr=0.1), logits="task")
    alone, split = bench("target", alpha_kd=0.0).change(train=train).run(), bench("fedavg").change(train=train).run()
    assert equal(alone.state.model, split.state.model)
    assert not any(e.get("phase") == "synthesis" for e in alone.events)


def test_labels_may_compete_among_all_classes() -> None:
    full, plain = bench("target", alpha_kd=0.0, ce="full").run(), bench("fedavg").run()
    assert equal(full.state.model, plain.state.model)


# storage -------------------------------------------------------------------------------------------------------------
def test_images_come_back_from_bytes_within_one_level() -> None:
    x, y = np.zeros((8, 3, 4, 4), dtype=np.uint8), np.arange(8) % 4
    mean, std = [0.5071, 0.4867, 0.4408], [0.2675, 0.2565, 0.2761]
    stream = from_arrays(
        x, y, x, y, scenario="class-incremental", tasks=2, clients=1, normalise={"mean": mean, "std": std}
    )
    images = torch.rand(50, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    offset, scale = affine(stream, (3, 4, 4), "cpu")
    error = (stream.inputs(to_bytes(images)) - (offset + scale * images)).abs().amax((0, 2, 3))
    assert (error <= 1 / 255 / torch.tensor(std)).all()
    assert (error > 0).all()


# what is sent, kept and resumed --------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["target", "lander"])
def test_teacher_and_pool_reach_every_client_once_a_task(method: str) -> None:
    outcome = bench(method, tasks=3).run()
    own = outcome.state.server[method]
    once = tensor_bytes({"teacher": own["teacher"], "pool": own["pool"]})
    anchors = tensor_bytes({"anchors": own["anchors"]}) if method == "lander" else 0
    assert outcome.state.traffic.down[method] == 2 * (2 * once + anchors)  # clients x (tasks x ...)


@pytest.mark.parametrize("method", ["target", "lander"])
@pytest.mark.parametrize("repeat", [1, 2])
def test_a_run_goes_on_in_the_middle_of_synthesis(method: str, repeat: int) -> None:
    case = bench(method)
    whole, stopped = whole_run(method), _until_repeat(case, repeat)
    assert (stopped.state.round, stopped.state.repeat) == (1, repeat)
    assert "work" in stopped.state.server[method]
    state = RunState.from_tree(crossed(stopped.state.to_tree()))
    resumed = case.run(state=state, store=stopped.store)
    assert equal(comparable(resumed.state), comparable(whole.state))


@cache
def whole_run(method: str) -> Outcome:
    return bench(method).run()


def _until_repeat(case: Bench, repeat: int) -> Outcome:
    def save(state: RunState, task_end: bool) -> None:
        if state.repeat == repeat:
            raise Paused

    store, setup = ClientStore(), case.setup()
    runner = Runner(setup, case.eager(setup, store), case.model(), case.evaluation, save=save)
    with pytest.raises(Paused):
        runner.run()
    return Outcome(runner.state, store, [])


@pytest.mark.parametrize("method", ["target", "lander"])
def test_both_run_under_secure_aggregation(method: str, tmp_path: Path) -> None:
    assert methods.build(method).reveals() == {}
    stream = {"dataset": "digits", "scenario": "class-incremental", "tasks": 2, "clients": 3, "max_train": 90}
    recipe = {"stream": {**stream, "max_test": 60}, "model": {"kind": "mlp", "hidden": [8]}}
    recipe |= {"train": {"rounds_per_task": 1}, "method": {"name": method, method: SMALL[method]}}
    ends = {}
    for secure in (False, True):
        api.run({**recipe, "privacy": {"secure_aggregation": secure}}, tmp_path / str(secure))
        ends[secure] = torch.cat([p.flatten() for p in api.load(tmp_path / str(secure)).model.parameters()])
    torch.testing.assert_close(ends[True], ends[False], rtol=0, atol=1e-3)


@pytest.mark.parametrize("method", ["target", "lander"])
def test_the_pool_can_be_looked_at(method: str) -> None:
    case = bench(method)
    part, states = case.build_method().part(method), case.run(rounds=2).state.server
    servers = [case.server(method, states, round_index=2, phase="samples", repeat=i) for i in range(3)]
    images, labels = zip(*(part.sample(server, 12) for server in servers), strict=True)
    assert [len(x) for x in images] == [len(y) for y in labels] == [12, 8, 0]
    assert torch.equal(torch.cat(images), case.stream.inputs(states[method]["pool"]))
    assert set(torch.cat(labels).tolist()) <= {0, 1}  # the classes of the first task
    with pytest.raises(ValueError, match="no images were made yet"):
        part.sample(case.server(method, {}, phase="samples"), 12)


# how the generator learns --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("meta", ["fomaml", "reptile"])
def test_the_generator_takes_one_step_of_adam_with_the_rate_of_all_inner_steps(meta: str) -> None:
    case = bench("target", meta=meta, lr_g=1e-3, g_steps=2)
    part = cast(Target, case.build_method().part("target"))
    server = synthesis(case, "target", case.run(rounds=1).state.server)
    first = part.synthesizer(server).begin(server.model, server)["generator"]
    phase_of(part, "synthesis").update(server)
    own = server.state["work"]["generator"]
    moved = (own["params"] - first["params"]).abs()
    assert moved.max().item() == pytest.approx(2e-3, rel=1e-3)  # Adam's first step is as long as its rate
    assert equal({"": own["stats"]}, {"": first["stats"]})


def test_statistics_of_earlier_rounds_are_mixed_in() -> None:
    case = bench("target", bn_momentum=0.75)
    part = cast(Target, case.build_method().part("target"))
    states, found = case.run(rounds=1).state.server, []
    for repeat in range(2):
        server = synthesis(case, "target", states, repeat)
        phase_of(part, "synthesis").update(server)
        found.append((server.state["work"]["statistics"], part.synthesizer(server).latest.clone()))
        states = server.states
    assert torch.equal(*found[0])
    torch.testing.assert_close(found[1][0], 0.75 * found[0][0] + 0.25 * found[1][1])


def test_the_student_learns_from_the_warm_up_on_with_a_cosine_rate() -> None:
    part = Target()
    assert part.turn(19).rate == 0.0
    assert part.turn(20).rate == 0.2
    assert part.turn(120).rate == pytest.approx((0.2 + 2e-4) / 2)
    assert part.turn(400).rate == pytest.approx(2e-4)
    assert not any(Target(adv=0.0).turn(i).adversary for i in range(40))


@pytest.mark.parametrize("warmup", [0, 1, 20])
def test_adversary_and_student_begin_as_in_the_released_code(warmup: int) -> None:
    """There `ep` is raised before it is compared with the warm-up, and the loop's own `it` is not: the adversary begins
    one round before the student's training."""
    part = Target(warmup=warmup)
    for it in range(40):
        turn, ep = part.turn(it), it + 1
        assert (turn.adversary, turn.rate > 0) == (ep >= warmup, it >= warmup)


# options -------------------------------------------------------------------------------------------------------------
def test_defaults_are_those_of_the_paper_and_its_code() -> None:
    wanted = {
        "nz": 256, "synth_batch": 256, "g_steps": 10, "syn_round": 40, "warmup": 20, "lr_g": 2e-3, "lr_z": 1e-2,
        "bn": 10.0, "oh": 0.5, "adv": 1.0, "mask": "agree", "t_student": 20.0, "kd_steps": 400, "n_syn": 8000,
        "alpha_kd": 25.0, "t_kd": 2.0,
    }  # fmt: skip
    options = options_of(Target())
    assert {name: options[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha_kd": -1.0}, "alpha_kd must be at least 0; got -1.0"),
        ({"mask": "both"}, "mask must be one of agree, disagree; got 'both'"),
        ({"ce": "some"}, "ce must be one of split, full"),
        ({"meta": "maml"}, "meta must be one of fomaml, reptile"),
        ({"t_kd": 0.0}, "t_kd must be positive"),
        ({"synth_batch": 1}, "synth_batch must be at least 2"),
        ({"n_syn": 0}, "n_syn must be at least 1"),
        ({"bn_momentum": 1.0}, "bn_momentum must be below 1; got 1.0"),
    ],
)
def test_options_outside_their_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Target(**options)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(CompositionError, match="part 'target' trains on its own synthetic images; remove 'er'"):
        compose(FedAvg(), Memory(8), Replay(), Target())
    ctx = bench().context()

    def begin(context: Context) -> None:
        Target().init(Server("target", {}, context))

    with pytest.raises(CompositionError, match=r"part 'target': a generator makes images whose .* multiples of 4"):
        begin(ctx.at(facts=replace(ctx.facts, input_shape=(1, 30, 30))))
    with pytest.raises(CompositionError, match=r"method.target.bn needs BatchNorm statistics on the server"):
        begin(ctx.at(options=replace(ctx.options, batchnorm="local")))
    blank = ctx.facts.blank.__class__(torch.zeros(0, 7), torch.zeros(0, dtype=torch.int64), np.zeros(0, np.int64))
    floats = ctx.at(facts=replace(ctx.facts, blank=blank))
    with pytest.raises(CompositionError, match=r"synthesises 8-bit images; this stream's samples are float32 of shape"):
        begin(floats)
