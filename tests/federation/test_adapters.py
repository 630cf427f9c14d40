"""Adapters in a federation: what travels of a Vision Transformer with LoRA of rank 8 beside full fine-tuning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn

from everfed.core import tree
from everfed.models.vit import ViT
from tests.federation.field import field, outcome, simulated
from tests.federation.loop import federated, loop_of
from tests.methods.test_lora import ClassToy
from tests.support.toy import Bench, Toy, comparable

NETWORK = 'model={ kind = "vit", patch = 2, width = 512, depth = 1, heads = 8 }'


def wide(shape: tuple[int, ...], classes: int) -> nn.Module:
    return ViT(shape, classes, patch=2, width=512, depth=1, heads=8)


def on_sockets(method: str, folder: Path) -> int:
    """Bytes of all replies of a run, as they came through sockets: headers, names and all."""
    bench = Bench(method, {}, stream=ClassToy(clients=2, rounds_per_task=1, samples=4), module=wide)
    loop = loop_of(bench, folder / method)
    federated(bench, loop)
    return sum(len(data) for _, packet in loop.received for data in packet.pieces.values())


def test_rank_eight_sends_less_than_three_hundredths_of_full_fine_tuning(tmp_path: Path) -> None:
    """4 r / (3 d) = 2.1 % of the blocks' weights at a width of 512, and the head's rows of a task's classes."""
    sizes = {method: on_sockets(method, tmp_path) for method in ("fedavg", "lora", "ffa-lora")}
    assert sizes["lora"] < 0.03 * sizes["fedavg"]
    assert sizes["ffa-lora"] < 0.6 * sizes["lora"]


QUICK = ("lora", "lorm", "pilora", "prompt-coda")  # one of each kind of adapter
SLOW = (pytest.param(method, marks=pytest.mark.slow) for method in ("ffa-lora", "prompt-dual", "fed-cprompt"))


@pytest.mark.parametrize("method", [*QUICK, *SLOW])
def test_pieces_that_clients_hold_already_give_the_same_run(method: str, tmp_path: Path) -> None:
    """Messages leave out what a client has; with clients that miss rounds, too, the run is the simulation's."""
    bench = Bench(method, stream=Toy(clients=2, rounds_per_task=3, cohorts={1: (0,), 3: (1,)}))
    eager, real = bench.run(), federated(bench, loop_of(bench, tmp_path))
    assert tree.equal(comparable(real.state), comparable(eager.state))


@pytest.mark.slow
@pytest.mark.federation
def test_real_processes_measure_the_same(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="the extra `flower` is not installed")
    with field(tmp_path, 2) as small:
        recipes = {m: small.recipe(NETWORK, "stream.max_train=20", method=m) for m in ("fedavg", "lora")}
        runs = {method: small.serve(recipe, method) for method, recipe in recipes.items()}
        results = {method: json.loads((folder / "result.json").read_text()) for method, folder in runs.items()}
        sizes = {method: result["environment"]["piece_bytes_received"] for method, result in results.items()}
        assert sizes["lora"] < 0.03 * sizes["fedavg"]
        assert outcome(runs["lora"]) == outcome(simulated(recipes["lora"], tmp_path / "reference"))
