"""Adapters, prompts and heads from features together with replay, projections, regularisers and server optimisers: a
composition gives the same bits over bytes and after resuming, or is refused with a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from everfed import CompositionError, models
from everfed.core.context import TrainOptions
from everfed.core.engine import ClientError
from everfed.core.method import Method
from everfed.core.optimizer import Optimizer
from everfed.methods import registry as methods
from tests.parity.test_resume import assert_resumes
from tests.parity.test_wire import assert_same
from tests.support.rehearsal_free import ClassToy
from tests.support.toy import SMALL, Bench, tiny_vit
from tests.support.wire import run_over_wire

FFA = {"part": "ffa-lora", "rank": 2}
LORA = {"part": "lora", "rank": 2}
LOGITS = {"part": "memory", "logits": True}
UNION = {"part": "er", "mode": "union"}
Parts = list[str | dict[str, Any]]


def method(parts: Parts) -> Callable[[], Method]:
    """A method of these parts, with options that suit a toy."""
    tables = [{"part": part} if isinstance(part, str) else part for part in parts]
    small = {**SMALL, "memory": {"size": 8}}
    return lambda: methods.build(parts=[{**small.get(table["part"], {}), **table} for table in tables])


def bench(parts: Parts, **changes: Any) -> Bench:
    """Partial participation, and a client without samples in a task."""
    stream = ClassToy(clients=3, samples=9, sizes={(2, 0): 0}, cohorts={1: (0, 1)})
    train = TrainOptions(1, 5, Optimizer("adamw", lr=0.02, weight_decay=0.1))
    return Bench(method(parts), stream=stream, module=tiny_vit, train=train).change(**changes)


def lora_vit(shape: tuple[int, ...], classes: int) -> nn.Module:
    sizes = {"patch": 2, "width": 8, "depth": 2, "heads": 2}
    return models.build("vit", shape, classes, 0, {**sizes, "lora": {"rank": 2}})


TOGETHER: dict[str, Parts] = {
    "FedGP, FFA-LoRA": ["fedavg", FFA, "memory", "fedgp"],
    "FedGP, DER++, LoRA": ["fedavg", LORA, LOGITS, "der++", "fedgp"],
    "FedGP, replay, CODA": ["fedavg", "prompt-coda", "memory", "er", "fedgp"],
    "DER, DualPrompt": ["fedavg", "prompt-dual", LOGITS, "der"],
    "A-GEM, LoRA": ["fedavg", LORA, "memory", "agem"],
    "LwF, CODA": ["fedavg", "prompt-coda", "lwf"],
    "EWC, LoRA": ["fedavg", LORA, "ewc"],
    "MOON, CODA": ["fedavg", "prompt-coda", "moon"],
    "FedAdam, LoRM": ["lorm", "fedadam"],
    "FedYogi, CODA": ["fedavg", "prompt-coda", "fedyogi"],
    "HGP, LoRA": ["fedavg", LORA, "hgp"],
    "HGP with sums, L2P": ["fedavg", "prompt-l2p", {"part": "hgp", "levels": 1}],
    "CCVR, DualPrompt": ["fedavg", "prompt-dual", {"part": "ccvr", "covariance": "full"}],
    "FedProto, CODA, replay": ["fedavg", "prompt-coda", "fedproto", "memory", UNION],
    "ridge after L2P": ["fedavg", "prompt-l2p", {"part": "ridge", "train_first": True}],
    "RanPAC after FedProx": ["fedavg", "fedprox", {"part": "ranpac", "train_first": True}],
    "PILoRA, replay, FedProx": ["pilora", "memory", "er", "fedprox"],
    "RegMean, HGP": ["regmean", "hgp"],
    "FedOMG, CODA": ["fedomg", "prompt-coda"],
    "coordinated replay, LoRA": ["fedavg", LORA, {"part": "memory", "policy": "coordinated"}, UNION],
    "TARGET, CODA": ["fedavg", "prompt-coda", "target"],
    "FedL2P on attention": ["fedavg", "fedl2p"],
}


QUICK = {
    "FedGP, DER++, LoRA",
    "FedGP, replay, CODA",
    "DER, DualPrompt",
    "FedAdam, LoRM",
    "FedL2P on attention",
    "RegMean, HGP",
}


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in TOGETHER])
def test_compositions_give_the_same_bits_over_bytes_and_after_resuming(name: str) -> None:
    case = bench(TOGETHER[name])
    eager = case.run()
    assert torch.isfinite(eager.params).all()
    assert_same(eager, run_over_wire(case))
    assert_resumes(case, 3)


def test_momentum_on_the_server_leaves_earlier_tasks_alone() -> None:
    case = bench(["fedavg", LORA, {"part": "fedavgm", "momentum": 0.9}])
    middle, last = (case.layout().named(case.run(rounds=rounds).params) for rounds in (2, 4))
    for name, value in middle.items():
        if name.endswith(("lora_A", "lora_B")):
            assert torch.equal(value[0], last[name][0])
    assert torch.equal(middle["head.weight"][:2], last["head.weight"][:2])


REFUSED: dict[str, tuple[Parts, dict[str, Any], str]] = {
    "two adapters": (["fedavg", LORA, FFA], {}, "only one part may train the model in pieces; got lora, ffa-lora"),
    "LoRA, CODA": (["fedavg", LORA, "prompt-coda"], {}, "in pieces; got lora, prompt-coda"),
    "L2P, CODA": (["fedavg", "prompt-l2p", "prompt-coda"], {}, "'prompt-coda' freezes all .* prompts of another part"),
    "L2P, LoRA": (["fedavg", "prompt-l2p", LORA], {}, "'lora' freezes all .* leave prompts out"),
    "model.lora, CODA": (["fedavg", "prompt-coda"], {"module": lora_vit}, r"there are LoRA layers \(model.lora\)"),
    "model.lora, L2P": (["fedavg", "prompt-l2p"], {"module": lora_vit}, r"there are LoRA layers \(model.lora\)"),
    "HGP, PILoRA": (["pilora", "hgp"], {}, "'pilora' has prototypes in place of the head of 'hgp'"),
    "ridge, LoRA": (["fedavg", LORA, "ridge"], {}, "'lora' changes the network with every task"),
    "FOT, LoRA": (["fedavg", LORA, "fot"], {}, "projects updates of hidden layers, but none is trained"),
    "FedL2P, LoRA": (["fedavg", LORA, "fedl2p"], {}, "'fedl2p' follows all parameters; 'lora' trains some"),
    "personal FedProto": (["fedavg", LORA, "fedproto-personal"], {}, "follows all parameters; 'lora' trains some"),
    "SCAFFOLD, LoRA": (["fedavg", LORA, "scaffold"], {}, "'scaffold' follows all parameters"),
    "FedDyn, LoRA": (["feddyn", LORA], {}, "'feddyn' follows all parameters"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_with_a_reason(name: str) -> None:
    parts, changes, reason = REFUSED[name]
    with pytest.raises(CompositionError, match=reason):
        bench(parts, **changes).run()


@pytest.mark.parametrize("part", ["ridge", "ranpac", "ccvr", "hgp"])
def test_a_network_whose_outputs_are_not_its_last_layers_is_refused(part: str) -> None:
    class TwoHeads(nn.Module):
        def __init__(self, shape: tuple[int, ...], classes: int) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, classes), nn.Linear(16, classes)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.first(x.flatten(1)) + self.second(x.flatten(1))) / 2  # as distilled networks do

    with pytest.raises(ClientError, match=r"outputs are not those of second\.(own\.)?weight"):
        bench(["fedavg", part], module=TwoHeads).run()
