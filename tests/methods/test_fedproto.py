"""FedProto (Tan et al., 2022): prototypes are means of what clients sent, and features are pulled towards them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional

from everfed.core import tree
from everfed.method import CompositionError, Optimizer, TrainOptions, compose
from everfed.methods import registry as methods
from everfed.privacy.secure_client import secured
from tests.support.flaky import secure_run
from tests.support.rehearsal_free import ClassToy
from tests.support.spy import Seen, spied
from tests.support.toy import Bench, Given, Linear, Norm, Toy

FROZEN = TrainOptions(1, 5, Optimizer(lr=0.0))


def of_inputs(table: dict[tuple[int, int], tuple[Tensor, Tensor]], rounds: int = 1, **options: Any) -> Bench:
    """Features are the inputs, and nothing moves."""
    clients = max(client for client, _ in table) + 1
    stream = Given(clients=clients, tasks=1, rounds_per_task=rounds, classes=3, table=table)
    return Bench("fedproto", {"fedproto": options}, stream, FROZEN, Linear)


@pytest.mark.parametrize(("weighting", "expected"), [("count", 3.0), ("client", 2.0)])
def test_counts_1_and_3_with_means_0_and_4(weighting: str, expected: float) -> None:
    table = {
        (0, 0): (torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64)),
        (1, 0): (torch.tensor([[2.0], [4.0], [6.0]]), torch.zeros(3, dtype=torch.int64)),
    }
    own = of_inputs(table, weighting=weighting).run().state.server["fedproto"]
    assert own["prototypes"].tolist() == [[expected], [0.0], [0.0]]
    assert own["known"].tolist() == [True, False, False]


@given(st.lists(st.integers(0, 2), min_size=12, max_size=12))
@settings(deadline=None, max_examples=10)
def test_the_partition_does_not_matter_where_features_are_frozen(owners: list[int]) -> None:
    x, y = torch.randn(12, 2, generator=torch.Generator().manual_seed(1)), torch.arange(12) % 3
    table = {(c, 0): (x[torch.tensor(owners) == c], y[torch.tensor(owners) == c]) for c in range(3)}
    found = of_inputs(table).run().state.server["fedproto"]["prototypes"]
    expected = torch.stack([x[y == label].mean(0) for label in range(3)])
    assert torch.allclose(found, expected, atol=1e-6)


def test_a_client_without_a_class_neither_moves_nor_blocks_it() -> None:
    """In the second task nobody has class 0 any more: its prototype stays."""
    one = torch.ones(1, 1)
    table = {
        (0, 0): (one, torch.tensor([0])), (1, 0): (2 * one, torch.tensor([1])),
        (0, 1): (5 * one, torch.tensor([1])), (1, 1): (7 * one, torch.tensor([2])),
    }  # fmt: skip
    stream = Given(clients=2, tasks=2, rounds_per_task=1, classes=3, table=table)
    own = Bench("fedproto", {}, stream, FROZEN, Linear).run().state.server["fedproto"]
    assert own["prototypes"].flatten().tolist() == [1.0, 5.0, 7.0]
    assert own["known"].all()


def test_without_weight_it_is_fedavg_to_the_bit() -> None:
    ours, plain = Bench("fedproto", {"fedproto": {"weight": 0.0}}, module=Norm).run(), Bench(module=Norm).run()
    assert tree.equal(dict(ours.state.model), dict(plain.state.model))
    assert ours.state.traffic.as_dict() == plain.state.traffic.as_dict()


def test_the_first_round_has_no_term() -> None:
    assert torch.equal(Bench("fedproto").run(rounds=1).params, Bench().run(rounds=1).params)
    assert not torch.equal(Bench("fedproto").run(rounds=2).params, Bench().run(rounds=2).params)


def test_a_step_takes_the_gradient_of_the_whole_loss() -> None:
    """Clients see classes 0 and 1 in the first round only as far as they have them; class 3 has no prototype."""
    weight, log = 3.0, list[Seen]()
    stream, options = Toy(only={0: (0, 1), 1: (1, 2), 2: (2, 0)}), {"fedproto": {"weight": weight}}
    bench = Bench("fedproto", options, stream)
    prototypes = bench.run(rounds=1).state.server["fedproto"]["prototypes"]
    Bench(spied(methods.build("fedproto", options), log), stream=stream).run(rounds=2)
    module, layout = bench.build_module(), bench.layout()
    for seen in (one for one in log if one.round == 1):
        params = seen.params.clone().requires_grad_(True)
        named = layout.named(params)
        hidden = {k.removeprefix("features."): v for k, v in named.items() if "head" not in k}
        z = functional_call(module.features, hidden, (bench.stream.inputs(seen.x),))
        outputs = functional.linear(z, named["head.weight"], named["head.bias"])
        loss = functional.cross_entropy(outputs, seen.y) + weight * functional.mse_loss(z, prototypes[seen.y])
        assert torch.allclose(seen.gradient, torch.autograd.grad(loss, params)[0], atol=1e-6)


@pytest.mark.parametrize(("stream", "classes"), [(Toy(), 4), (ClassToy(clients=3), 2)])
def test_the_numbers_that_travel(stream: Toy, classes: int) -> None:
    """Of the task's classes: features + 1 numbers in 8 bytes up, and which classes they are. Down, prototypes of all
    four classes in 4 bytes and a byte of `known`, from round 1 on."""
    traffic = Bench("fedproto", stream=stream).run().state.traffic
    assert traffic.up["fedproto"] == 4 * 3 * classes * (8 + 1 + 1) * 8
    assert traffic.down["fedproto"] == 3 * 3 * 4 * (8 * 4 + 1)


def test_replayed_samples_of_earlier_classes_do_not_move_their_prototypes() -> None:
    options = {"memory": {"size": 8}, "er": {"mode": "union"}}
    case = Bench(lambda: methods.build("er", options, ["fedavg", "fedproto", "memory", "er"]), stream=ClassToy())
    before, after = (case.run(rounds=rounds).state.server["fedproto"] for rounds in (2, 4))
    assert torch.equal(before["prototypes"][:2], after["prototypes"][:2])
    assert before["known"].tolist() == [True, True, False, False] and after["known"].all()


def test_where_tasks_are_hidden_all_classes_are_sent() -> None:
    hidden = ClassToy(clients=3, boundaries=False, task_ids=False)
    assert Bench("fedproto", stream=hidden).run().state.traffic.up["fedproto"] == 4 * 3 * 4 * (8 + 1 + 1) * 8


def test_secure_aggregation_is_within_its_steps() -> None:
    plain, ours = Bench("fedproto").run(rounds=1), secure_run(Bench("fedproto", stream=Toy(tasks=1, rounds_per_task=1)))
    assert secured(methods.build("fedproto")).reveals() == {}
    expected, found = (o.state.server["fedproto"]["prototypes"] for o in (plain, ours))
    assert torch.allclose(found, expected, atol=1e-3)


# as published: personal models ----------------------------------------------------------------------------------------
def test_the_personal_form_shares_nothing_but_prototypes() -> None:
    outcome = Bench("fedproto-personal").run()
    assert set(+outcome.state.traffic.up) == {"fedproto-personal", "evaluate"}
    assert outcome.params.numel() == 0
    own = [outcome.clients[client]["client"]["personal"] for client in range(3)]
    assert not torch.equal(own[0], own[1])


def test_personal_parameters_are_refused_where_models_are_averaged() -> None:
    with pytest.raises(CompositionError, match="'fedproto' sends all parameters, but 'dbe' keeps some personal"):
        compose(*methods.build("feddbe").parts, methods.build("fedproto").part("fedproto"))


@pytest.mark.parametrize("options", [{"weight": -1.0}, {"weighting": "size"}])
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(methods.MethodError, match=rf"method\.fedproto\.{next(iter(options))} must be"):
        methods.build("fedproto", {"fedproto": options})
