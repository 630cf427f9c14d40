"""LANDER (Tran et al., 2024). What it shares with TARGET is in test_target.py."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from everfed.core.layout import registered
from everfed.core.part import options_of
from everfed.core.tree import equal
from everfed.method import CompositionError, Fitted, Optimizer, Server, State, TrainOptions
from everfed.methods.generative.anchors import hashed_names, sentence_anchors
from everfed.methods.generative.lander import Lander, NoisySynthesizer, balanced, bound, class_weights
from tests.support.phases import phase_of
from tests.support.rehearsal_free import ClassToy
from tests.support.toy import SMALL, Bench, Norm


def bench(method: str = "lander", **options: Any) -> Bench:
    return Bench(method, {method: {**SMALL[method], **options}}, stream=ClassToy(), module=Norm)


def part_of(case: Bench) -> Lander:
    return cast(Lander, case.build_method().part("lander"))


# the bound -----------------------------------------------------------------------------------------------------------
def test_inside_the_radius_there_is_no_pull_outside_it_is_that_of_the_mean_square() -> None:
    anchors = torch.zeros(3, 4)
    inside, outside = (torch.full((3, 4), math.sqrt(value)).requires_grad_() for value in (0.0149, 0.02))
    assert bound(inside, anchors, 0.015).item() == 0.0
    assert torch.autograd.grad(bound(inside, anchors, 0.015), inside)[0].abs().max() == 0
    loss = bound(outside, anchors, 0.015)
    assert loss.item() == pytest.approx(0.005, abs=1e-7)
    torch.testing.assert_close(torch.autograd.grad(loss, outside)[0], 2 * outside.detach() / (3 * 4))


def test_the_hinge_is_over_the_batch_or_over_each_sample() -> None:
    projected = torch.tensor([[0.0, 0.0], [0.2, 0.2]])  # mean squares 0 and 0.04
    assert bound(projected, torch.zeros(2, 2), 0.03).item() == 0.0
    assert bound(projected, torch.zeros(2, 2), 0.03, "sample").item() == pytest.approx(0.005)


# weights -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("old", "seen", "c", "p"),
    [
        (20, 40, 0.3472, 1.2423),
        (40, 60, 0.2944, 1.6180),
        (60, 80, 0.2740, 1.8559),
        (80, 100, 0.2630, 2.0294),
        (10, 20, 0.3646, 0.9785),
        (90, 100, 0.2480, 2.1525),
    ],
)
def test_weights_by_the_numbers_of_classes(old: int, seen: int, c: float, p: float) -> None:
    assert class_weights(old, seen) == pytest.approx((c, p), abs=5e-5)


def test_without_old_classes_there_are_no_such_weights_and_the_first_task_is_plain() -> None:
    with pytest.raises(ValueError, match="need some old classes among those seen; got 0 of 20"):
        class_weights(0, 20)
    case = bench()
    part = part_of(case)
    assert part._weights(case.client("lander", round_index=0)).tolist() == [1.0, 0.0]
    assert part._weights(case.client("lander", round_index=2)).tolist() == pytest.approx(class_weights(2, 4))


# the projection ------------------------------------------------------------------------------------------------------
def test_predictions_do_not_depend_on_the_projection() -> None:
    case = bench()
    model, x = case.model(), case.stream.test(0).x
    changed = {**model, "params": model["params"].clone()}
    for name in ("weight", "bias"):
        case.layout().param(registered("lander", name, personal=False)).view(changed["params"]).add_(5.0)
    trainer = case.trainer()
    assert torch.equal(trainer.outputs(model, x), trainer.outputs(changed, x))


def test_the_projection_is_trained_and_averaged() -> None:
    case = bench()
    entry = case.layout().param(registered("lander", "weight", personal=False))
    assert entry.shape == (5, 48)
    before, after = (entry.view(model["params"]) for model in (case.model(), case.run(rounds=1).state.model))
    assert 0 < (before - after).abs().max() < 1
    assert before.abs().max() <= 1 / math.sqrt(48)


# targets -------------------------------------------------------------------------------------------------------------
@given(st.integers(1, 400), st.integers(2, 300))
def test_targets_are_balanced_but_for_a_random_remainder(classes: int, count: int) -> None:
    labels = np.arange(classes) * 2 + 1
    drawn = balanced(labels, count, np.random.default_rng(0))
    assert drawn.shape == (count,) and np.isin(drawn, labels).all()
    counts = np.bincount(drawn, minlength=2 * classes + 1)[labels]
    assert counts.min() >= count // classes
    assert counts.sum() - classes * (count // classes) == count % classes


# synthesis -----------------------------------------------------------------------------------------------------------
def synthesis(case: Bench, states: State, repeat: int = 0) -> Server:
    """The server after a synthesis round at the end of the first task."""
    server = case.server("lander", states, round_index=1, phase="synthesis", repeat=repeat)
    phase_of(part_of(case), "synthesis").update(server)
    return server


def test_noisy_layers_are_redrawn_in_every_round_the_rest_goes_on() -> None:
    case = bench(g_steps=1, lr_g=0.0)
    part = part_of(case)
    states, found = case.run(rounds=1).state.server, []
    for repeat in range(2):
        server = synthesis(case, states, repeat)
        layout = cast(NoisySynthesizer, part.synthesizer(server)).generator.layout
        found.append(layout.named(server.state["work"]["generator"]["params"]))
        states = server.states
    assert not torch.equal(found[0]["weight"], found[1]["weight"])
    assert torch.equal(found[0]["trunk.dense.weight"], found[1]["trunk.dense.weight"])
    assert found[0]["bias"].abs().max() == 0
    assert float(found[1]["weight"].std()) == pytest.approx(1.0, abs=0.2)


def test_channel_statistics_are_learned_from_a_half_and_a_fifth() -> None:
    case = bench(g_steps=1, lr_stats=0.01)
    channels = synthesis(case, case.run(rounds=1).state.server).state["work"]["generator"]["channels"].flatten()
    assert (channels - torch.tensor([0.5, 0.2])).abs().tolist() == pytest.approx([0.01, 0.01], rel=1e-3)


def test_what_is_kept_begins_with_the_last_round_of_the_warm_up_and_the_adversary_three_later() -> None:
    part = Lander()
    turns = [part.turn(index) for index in range(part.rounds)]
    assert part.rounds == 50 and sum(turn.keep for turn in turns) == 41  # 41 x 256 = 10,496 images
    assert [turn.keep for turn in turns].index(True) == 9
    assert [turn.adversary for turn in turns].index(True) == 12
    assert {turn.rate for turn in turns} == {0.0, 0.1}


# anchors stay as they are --------------------------------------------------------------------------------------------
def test_anchors_never_change() -> None:
    case = bench()
    server = case.server("lander")
    part_of(case).init(server)
    before = server.state["anchors"]
    outcome = case.run()
    assert equal({"": outcome.state.server["lander"]["anchors"]}, {"": before})
    assert not before.requires_grad


# a client's loss -----------------------------------------------------------------------------------------------------
def fitted(case: Bench, name: str, teacher: Tensor, pool: Tensor, anchors: Tensor) -> Fitted:
    """Client 0 in the first round of the second task."""
    ctx, model, parts = case.context(round_index=2), case.model(), case.build_method().parts
    stats = {key: value for key, value in model.items() if key != "params"}
    message = {name: {"teacher": {**stats, "params": teacher}, "pool": pool, "anchors": anchors}}
    state: State = {"client": {}, name: {"host": {"pool": len(pool)}}}
    return ctx.train.fit(ctx, parts, model, model["params"], state, message, case.stream.data(0, 1))


def test_without_anchors_and_features_it_is_target() -> None:
    options = {"ltc": 0.0, "features_kd": 0.0, "scaling": False, "cur": 1.0, "pre": 7.0}
    lander, target = bench(**options), bench("target", alpha_kd=7.0)
    generator = torch.Generator().manual_seed(0)
    teacher = torch.randn(lander.layout().size, generator=generator)
    pool = torch.randint(256, (9, 1, 4, 4), dtype=torch.uint8, generator=generator)
    own = target.layout().size
    assert torch.equal(lander.model()["params"][:own], target.model()["params"])
    ours = fitted(lander, "lander", teacher, pool, torch.zeros(4, 5))
    theirs = fitted(target, "target", teacher[:own], pool, torch.zeros(4, 5))
    assert ours.loss.item() == pytest.approx(theirs.loss.item(), rel=1e-6)
    torch.testing.assert_close(ours.model["params"][:own], theirs.model["params"], rtol=1e-5, atol=1e-6)
    assert torch.equal(ours.model["params"][own:], lander.model()["params"][own:])


def test_real_and_synthetic_samples_have_their_own_features() -> None:
    """One step with every term, against the formula written out."""
    train = TrainOptions(1, 12, Optimizer(lr=0.0))
    case = bench(cur=0.3, pre=0.6).change(train=train, module=None)
    layout, x = case.layout(), case.stream.data(0, 1)
    generator = torch.Generator().manual_seed(0)
    teacher = 0.3 * torch.randn(layout.size, generator=generator)
    pool = torch.randint(256, (4, 1, 4, 4), dtype=torch.uint8, generator=generator)
    anchors = torch.randn(4, 5, generator=generator)
    loss = fitted(case, "lander", teacher, pool, anchors).loss.item()

    def passed(params: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
        named = layout.named(params)
        w1, b1, w2, b2, m, b = (named[entry.name] for entry in layout.params)
        hidden = torch.relu(images.flatten(1).float() / 255 @ w1.T + b1)
        return hidden @ w2.T + b2, hidden @ m.T + b

    (s, f), (s_syn, f_syn) = (passed(case.model()["params"], images) for images in (x.x, pool))
    t_syn, t_f = passed(teacher, pool)
    c, p = class_weights(2, 4, 0.3, 0.6)
    labels = torch.nn.functional.cross_entropy(s[:, 2:], x.y - 2)
    pull = max((f - anchors[x.y]).square().mean().item() - 0.015, 0.0)
    kd = -((t_syn[:, :2] / 2).softmax(1) * (s_syn[:, :2] / 2).log_softmax(1)).sum(1).mean()
    expected = c * (labels + 5 * pull) + p * (kd + (f_syn - t_f).square().mean())
    assert loss == pytest.approx(expected.item(), rel=1e-5)


# the best model ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("losses", "best"), [([3.0, 1.0, 1.0, 2.0], 1), ([1.0, 2.0, 3.0, 4.0], 0)])
def test_the_model_that_started_the_best_round_is_restored(losses: list[float], best: int) -> None:
    case = bench()
    part, models = part_of(case), [{"params": torch.tensor([float(i)])} for i in range(5)]
    server = case.server("lander", model=models[0])
    part.init(server)
    phase_of(part, "start").update(server)
    for loss, new in zip(losses, models[1:], strict=True):
        server.model, server.reduced = new, {"loss": torch.tensor(loss)}
        part.update(server)
    assert server.state["lowest"] == losses[best]
    phase_of(part, "restore").update(server)
    assert equal(server.model, models[best])
    assert server.state["lowest"] == math.inf


def test_losses_of_the_first_local_epoch_are_averaged_over_samples() -> None:
    plain = bench(model="last").change(train=TrainOptions(1, 5, Optimizer(lr=0.1)))
    longer = bench(model="last").change(train=TrainOptions(3, 5, Optimizer(lr=0.1)))
    one = [plain.run(rounds=1).clients[client]["lander"]["first"].item() for client in (0, 1)]
    three = [longer.run(rounds=1).clients[client]["lander"]["first"].item() for client in (0, 1)]
    assert one == pytest.approx(three, rel=1e-5) and min(one) > 0
    event = next(e for e in plain.run(rounds=1).events if e.get("phase") == "train")
    assert event["loss"] == pytest.approx(sum(one) / 2, rel=1e-5)
    sizes = bench().change(train=TrainOptions(1, 5, Optimizer(lr=0.1)), stream=ClassToy(sizes={(0, 0): 4}))
    outcome = sizes.run(rounds=1)
    first, second = (outcome.clients[client]["lander"]["first"].item() for client in (0, 1))
    assert outcome.state.server["lander"]["lowest"] == pytest.approx((4 * first + 12 * second) / 16, rel=1e-5)


def test_a_run_ends_with_a_model_that_a_round_began_with() -> None:
    case = bench()
    last = bench(model="last")
    started = [case.model(), last.run(rounds=1).state.model]
    assert any(equal(case.run(rounds=2).state.model, model) for model in started)
    assert not any(equal(last.run(rounds=2).state.model, model) for model in started)


# anchors and options -------------------------------------------------------------------------------------------------
class Named(ClassToy):
    """A stream that knows what its classes are called."""

    class_names = ("apple", "pear", "bus", "tram")


def test_anchors_from_the_streams_own_class_names() -> None:
    case = bench(anchors="names").change(stream=Named())
    assert torch.equal(case.run(rounds=1).state.server["lander"]["anchors"], hashed_names(Named.class_names, 5))
    with pytest.raises(CompositionError, match="this stream has no class names; name a file"):
        bench(anchors="names").run(rounds=1)


def test_anchors_from_a_sentence_encoder() -> None:
    pytest.importorskip("wordllama", reason="pip install 'everfed[text]'")
    case = bench(anchors="wordllama").change(stream=Named())
    anchors = case.run(rounds=1).state.server["lander"]["anchors"]
    assert torch.equal(anchors, sentence_anchors(Named.class_names, 5))


def test_defaults_are_those_of_the_released_code() -> None:
    wanted = {
        "g_steps": 40, "syn_round": 40, "warmup": 10, "synth_batch": 256, "nz": 256, "lr_g": 2e-3, "bn": 1.0, "oh": 0.5,
        "adv": 1.0, "ltc": 5.0, "r": 0.015, "cur": 0.2, "pre": 0.4, "n_syn": 10_000, "kd_steps": 50, "batch": 128,
        "lr_student": 0.1, "t_student": 20.0, "width": 512, "group": 10, "hinge": "batch", "model": "best",
    }  # fmt: skip
    options = options_of(Lander())
    assert {name: options[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ltc": -1.0}, "ltc must be at least 0"),
        ({"group": 0}, "group must be at least 1"),
        ({"hinge": "none"}, "hinge must be one of batch, sample"),
        ({"model": "mean"}, "model must be one of best, last"),
    ],
)
def test_options_outside_their_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Lander(**options)
