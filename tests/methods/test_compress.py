"""Compressed updates: bounds and means in closed form, error feedback telescopes, bytes as sent, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from everfed.core import tree
from everfed.core.client import Reply
from everfed.core.context import TrainOptions
from everfed.core.engine import opened
from everfed.core.optimizer import Optimizer
from everfed.core.phase import Phase
from everfed.errors import CompositionError
from everfed.method import MODEL
from everfed.methods import registry as methods
from everfed.methods.common.compress import Compress, largest, lengths_of, quantised
from everfed.privacy import protect
from everfed.recipe.schema import PrivacySection
from tests.support.toy import Bench, Toy, comparable
from tests.support.wire import run_over_wire

KINDS: dict[str, dict[str, Any]] = {"bf16": {}, "int8": {}, "top-k": {"share": 0.1}}
TRAIN = Phase("train", owner="fedavg")
ONE = TrainOptions(1, 12, Optimizer(lr=0.1))


def bench(kind: str, method: str = "fedavg+compress", **options: Any) -> Bench:
    return Bench(method, {"compress": {"kind": kind, **KINDS[kind], **options}})


def crossed(kind: str, update: Tensor, round_index: int = 0, states: Any = None, **options: Any) -> tuple[Tensor, Any]:
    """What the server reads of an update, and the client's state."""
    some = bench(kind, **options)
    model = some.model()
    part = some.build_method().part("compress")
    client = some.client("compress", states, round_index=round_index, messages={MODEL: model})
    sent = part.seal(client, TRAIN, Reply({"fedavg": {"params": model["params"] + update}}))
    place = some.context(0, round_index)
    assert place.round == round_index
    read = part.open(None, TRAIN, sent, model)
    return read.values["fedavg"]["params"] - model["params"], client.states


def drawn(seed: int, scale: float = 1.0) -> Tensor:
    size = len(bench("int8").model()["params"])
    return scale * torch.randn(size, generator=torch.Generator().manual_seed(seed))


def test_bf16_is_within_two_to_the_minus_eight_of_every_number() -> None:
    update = drawn(0)
    found, _ = crossed("bf16", update)
    bound = update.abs() * 2**-8 + 1e-6  # the model is added and subtracted in float32
    assert bool(((found - update).abs() <= bound).all())
    assert not torch.equal(found, update)


def test_int8_is_within_a_scale_of_its_own_tensor_and_unbiased() -> None:
    """The mean of n draws is within 5 standard errors, at most 5 s / (2 sqrt(n))."""
    value = torch.cat([torch.linspace(-1.0, 1.0, 7), torch.linspace(-0.01, 0.01, 5)])
    lengths, n = torch.tensor([7, 5], dtype=torch.int32), 4000
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(n):
        sent = quantised(value, torch.rand(12, generator=generator), lengths)
        found.append(sent["values"].float() * torch.repeat_interleave(sent["scales"], lengths))
    scale = torch.tensor([1.0] * 7 + [0.01] * 5) / 127
    assert torch.allclose(sent["scales"], torch.tensor([1.0, 0.01]) / 127)
    assert bool(((torch.stack(found) - value).abs() <= scale * 1.0001).all())
    assert bool(((torch.stack(found).mean(0) - value).abs() <= 5 * scale / (2 * n**0.5)).all())


def test_int8_has_a_scale_for_every_parameter_tensor() -> None:
    some = bench("int8")
    client = some.client("compress", messages={MODEL: some.model()})
    assert lengths_of(client).tolist() == [entry.size for entry in some.layout().params]


def test_a_tensor_of_zeros_stays_and_one_that_is_not_finite_shows() -> None:
    assert torch.equal(crossed("int8", torch.zeros(len(drawn(0))))[0], torch.zeros(len(drawn(0))))
    for kind in KINDS:
        update = drawn(0)
        update[3] = torch.nan
        assert not bool(crossed(kind, update)[0].isfinite().all()), kind


def test_top_k_sends_the_largest_and_keeps_the_rest() -> None:
    sent, rest = largest(torch.tensor([0.1, -3.0, 0.2, 2.0, 0.0]), 0.4)
    assert sent["at"].tolist() == [1, 3]
    assert sent["values"].tolist() == [-3.0, 2.0]
    assert torch.equal(rest, torch.tensor([0.1, 0.0, 0.2, 0.0, 0.0]))


def test_error_feedback_telescopes() -> None:
    """What was sent in all rounds is the sum of the updates without the last error."""
    states: Any = None
    total, updates = torch.zeros(len(drawn(0))), [drawn(seed, 0.1) for seed in range(6)]
    for index, update in enumerate(updates):
        found, states = crossed("top-k", update, index % 4, states)
        assert int((found != 0).sum()) <= -(-len(update) // 10)
        total += found
    error = states["compress"]["params"]
    assert torch.allclose(total + error, torch.stack(updates).sum(0), atol=1e-5)
    assert float(error.norm()) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_account_has_the_bytes_that_are_sent(kind: str) -> None:
    size, tensors, replies = len(drawn(0)), 4, 3 * 4  # 3 clients, 4 rounds
    expected = {"bf16": 2 * size, "int8": size + 8 * tensors, "top-k": 8 * -(-size // 10)}[kind]
    assert bench(kind).run().state.traffic.up["fedavg"] == replies * expected
    assert Bench("fedavg").run().state.traffic.up["fedavg"] == replies * 4 * size


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["fedgp+der+compress", "scaffold+compress", "fednova+compress", "fedomg+compress"])
def test_any_method_is_the_same_over_bytes(kind: str, method: str) -> None:
    options = {"compress": {"kind": kind}} | ({"memory": {"size": 8}} if "der" in method else {})
    some = Bench(method, options, train=ONE)
    eager, wire = some.run(), run_over_wire(some)
    assert tree.equal(comparable(eager.state), comparable(wire.state))
    assert all(tree.equal(eager.clients[client], wire.clients[client]) for client in eager.clients)
    assert not torch.equal(eager.params, Bench(method.removesuffix("+compress"), train=ONE).run().params)


def test_bf16_hardly_changes_what_is_learned() -> None:
    exact, rounded = Bench("fedavg").run().params, bench("bf16").run().params
    assert float((exact - rounded).norm()) < 0.01 * float((exact - Bench("fedavg").model()["params"]).norm())


@pytest.mark.parametrize(
    "sent",
    [
        torch.zeros(3),
        {"values": torch.zeros(3)},
        {"values": torch.zeros(3), "at": torch.tensor([0, 1, 10**6], dtype=torch.int32)},
        {"values": torch.zeros(3), "at": torch.tensor([-1, 1, 2], dtype=torch.int32)},
        {"values": torch.zeros(2), "at": torch.tensor([0, 1, 2], dtype=torch.int32)},
        {"values": torch.zeros(3), "at": torch.tensor([0, 1, 2], dtype=torch.int64)},
    ],
)
def test_what_no_client_sends_is_refused_by_name(sent: Any) -> None:
    some = bench("top-k")
    place = some.context()
    assert place.round == 0
    with pytest.raises(ValueError, match="params must be compressed as top-k|places"):
        Compress("top-k").open(None, TRAIN, Reply({"fedavg": {"params": sent}}), some.model())


def test_false_lengths_are_refused() -> None:
    sent = quantised(torch.ones(4), torch.zeros(4), torch.tensor([4], dtype=torch.int32))
    for lengths in ([5], [2, 2], [-1]):
        false = {**sent, "lengths": torch.tensor(lengths, dtype=torch.int32)}
        with pytest.raises(ValueError, match="tensors where there are 4"):
            Compress("int8").open(None, TRAIN, Reply({"fedavg": {"params": false}}), {"params": torch.zeros(4)})


def test_a_reply_is_opened_once() -> None:
    some = bench("bf16")
    setup, model = some.setup(), some.model()
    reply = Reply({"fedavg": {"params": drawn(0).bfloat16()}}, sent={"fedavg": 7})
    from everfed.core.context import Place

    place = Place(0, some.stream.round(0))
    assert opened(setup, TRAIN, place, {MODEL: model}, reply) is reply  # type: ignore[dict-item]


def test_compositions_that_cannot_be_are_refused() -> None:
    with pytest.raises(CompositionError, match="'lorm' sends no update of the whole model"):
        methods.build("lorm+compress")
    with pytest.raises(CompositionError, match=r"train.sync_every = 1"):
        Bench("fedavg+compress", train=TrainOptions(1, 5, Optimizer(lr=0.1), sync_every=2)).run()
    for section in ({"secure_aggregation": True}, {"dp": {"noise": 1.0}}):
        with pytest.raises(CompositionError, match="part 'compress' sends others"):
            protect(methods.build("fedavg+compress"), PrivacySection(**section))


def test_pieces_and_personal_models_compose() -> None:
    for method in ("pilora", "lora", "fedas", "feddbe"):
        try:
            some = Bench(f"{method}+compress", stream=Toy(clients=2), train=ONE)
            outcome = some.run()
        except CompositionError as error:
            assert "to compress" in str(error), method
            continue
        assert tree.equal(comparable(outcome.state), comparable(run_over_wire(some).state)), method
