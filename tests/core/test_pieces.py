"""Pieces of the shared vector: cut and pasted, sent by version, and whole again on clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from everfed.core.layout import (
    PIECES,
    TRAINED,
    Pieces,
    Spans,
    assembled,
    cut,
    from_text,
    joined,
    only_trained,
    pasted,
    rest,
    shortened,
    to_text,
    trained_spans,
)
from everfed.core.message import Message, payload_bytes, unwrap, versions
from everfed.method import MODEL, Cached, Client, Gradient, Layout, Method, Part, Server, Step, compose
from everfed.methods.aggregate.fedavg import FedAvg
from everfed.methods.aggregate.server_optimizer import FedAvgM
from tests.support.toy import Bench, Toy


@st.composite
def spans_of(draw: st.DrawFn, size: int = 20) -> Spans:
    """Disjoint spans of a vector, in any order."""
    edges = sorted(draw(st.sets(st.integers(0, size), max_size=8)))
    pairs = [slice(a, b) for a, b in zip(edges[::2], edges[1::2], strict=False)]
    return tuple(draw(st.permutations(pairs)))


@given(spans_of())
def test_what_is_cut_out_can_be_pasted_back(spans: Spans) -> None:
    vector = torch.arange(20.0)
    assert torch.equal(pasted(vector, spans, cut(vector, spans)), vector)
    others = rest(spans, 20)
    whole = pasted(pasted(torch.zeros(20), spans, cut(vector, spans)), others, cut(vector, others))
    assert torch.equal(whole, vector)
    assert sum(len(cut(vector, some)) for some in (spans, others)) == 20
    assert from_text(to_text(others)) == others


def test_neighbours_are_one_span() -> None:
    assert joined([slice(4, 6), slice(0, 2), slice(2, 4), slice(7, 7), slice(8, 9)]) == (slice(0, 6), slice(8, 9))


@dataclass(frozen=True)
class Alternating(Part):
    """Trains the first half of the vector in even rounds and the second half in odd ones."""

    name = "alternating"

    def pieces(self, layout: Layout, labels: Sequence[tuple[int, ...]]) -> Mapping[str, Spans]:
        middle = layout.shared // 2
        return {"first": (slice(0, middle),), "second": (slice(middle, layout.shared),)}

    def trained(self, piece: str, server: Server) -> bool:
        return piece == ("first", "second")[server.round % 2]

    def receive(self, client: Client) -> None:
        spans, params = trained_spans(client.messages), client.model["params"]
        assert spans is not None
        client.state["mask"] = pasted(torch.zeros_like(params), spans, torch.ones(len(params)))

    def gradient(self, step: Step, gradient: Gradient) -> Tensor:
        return gradient.vector * step.state["mask"]


def alternating() -> Method:
    return compose(FedAvg(), Alternating())


def pieces_of(bench: Bench) -> Pieces:
    pieces = bench.setup().pieces
    assert pieces is not None
    return pieces


def test_a_client_puts_the_vector_together_again() -> None:
    bench = Bench(alternating)
    server, pieces, model = bench.server("alternating"), pieces_of(bench), bench.model()
    message = pieces.split({MODEL: {k: Cached(7, v) for k, v in model.items()}}, {"second": 3}, server)
    assert versions(message)["pieces/second"] == 3
    short = unwrap(message)
    assert len(short[MODEL]["params"]) == len(model["params"]) // 2
    found = assembled(short)
    assert torch.equal(found[MODEL]["params"], model["params"])
    assert found[PIECES] == {TRAINED: f"0:{len(model['params']) // 2}"}
    assert torch.equal(shortened(found[MODEL], found)["params"], short[MODEL]["params"])
    assert torch.equal(assembled(found)[MODEL]["params"], model["params"])  # once is enough, twice does no harm


def test_a_message_without_pieces_stays_as_it_is() -> None:
    message: Message = {MODEL: {"params": torch.ones(2)}}
    assert assembled(message) is message and trained_spans(message) is None
    assert torch.equal(only_trained(torch.ones(2), message), torch.ones(2))


def test_only_what_a_round_trains_is_sent_and_changes() -> None:
    """Every message holds all: the half that is trained now, and the other, which the last round changed."""
    bench = Bench(alternating, stream=Toy(tasks=1, rounds_per_task=3, clients=1))
    first = len(bench.model()["params"]) // 2
    second = len(bench.model()["params"]) - first
    outcomes = bench.after(1, 2, 3)
    models = [bench.model()["params"], *(o.params for o in outcomes)]
    for index, (before, after) in enumerate(pairwise(models)):
        moved = (slice(0, first), slice(first, None))[index % 2]
        kept = (slice(first, None), slice(0, first))[index % 2]
        assert torch.equal(before[kept], after[kept]) and not torch.equal(before[moved], after[moved])
    up = [o.state.traffic.up["fedavg"] for o in outcomes]
    assert up == [4 * first, 4 * (first + second), 4 * (2 * first + second)]
    down = [o.state.traffic.down["fedavg"] for o in outcomes]
    assert down == [4 * (first + second), 8 * (first + second), 12 * (first + second)]
    assert outcomes[2].state.pieces == {"first": 3, "second": 2}


def test_a_client_that_holds_a_piece_is_not_sent_it_again() -> None:
    bench = Bench(alternating)
    server, pieces, model = bench.server("alternating"), pieces_of(bench), bench.model()
    whole = {MODEL: {"params": Cached(1, model["params"])}}
    message = pieces.split(whole, {"second": 3}, server)
    assert payload_bytes(message, {"pieces/second": 3})["pieces"] == 0
    assert payload_bytes(message, {"pieces/second": 2})["pieces"] == 4 * (
        len(model["params"]) // 2 + len(model["params"]) % 2
    )


def test_momentum_on_the_server_does_not_move_what_was_not_trained() -> None:
    stream = Toy(tasks=1, rounds_per_task=2, clients=1)
    bench = Bench(lambda: compose(FedAvg(), Alternating(), FedAvgM(momentum=0.9)), stream=stream)
    middle = len(bench.model()["params"]) // 2
    one, two = (bench.run(rounds=r).params for r in (1, 2))
    assert torch.equal(one[:middle], two[:middle]) and not torch.equal(one[middle:], two[middle:])


@pytest.mark.parametrize("reducer", ["median", "norm-clipping"])
def test_robust_reducers_work_on_the_trained_half(reducer: str) -> None:
    bench = Bench(lambda: compose(FedAvg(reducer=reducer), Alternating()), stream=Toy(tasks=1, rounds_per_task=1))
    middle = len(bench.model()["params"]) // 2
    after = bench.run().params
    assert torch.equal(after[middle:], bench.model()["params"][middle:])
    assert not torch.equal(after[:middle], bench.model()["params"][:middle])
