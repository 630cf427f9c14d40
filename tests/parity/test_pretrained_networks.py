"""Networks of transformers and timm, and some with an adapter of PEFT: every engine gives the same bits, and runs
resume."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from everfed import models
from everfed.core.context import TrainOptions
from everfed.core.layout import Layout
from everfed.core.optimizer import Optimizer
from everfed.core.option import ParameterGroup
from everfed.models.pretrained import HuggingFace, freeze
from tests.parity.test_processes import on_processes
from tests.parity.test_resume import assert_resumes
from tests.parity.test_wire import assert_same
from tests.support.toy import Bench, Toy
from tests.support.wire import run_over_wire

transformers = pytest.importorskip("transformers", reason="the extra `text` is not installed")
SIZES = {
    "image_size": 4, "patch_size": 2, "num_channels": 1, "hidden_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 2, "intermediate_size": 16, "attention_probs_dropout_prob": 0.1,
}  # fmt: skip


def vit(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    config = transformers.ViTConfig(**SIZES, num_labels=classes)
    return HuggingFace(transformers.ViTForImageClassification(config))


def frozen_vit(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    module = vit(input_shape, classes)
    freeze(module, ["*classifier*", "*layernorm*"])
    return module


def lora_vit(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    peft = pytest.importorskip("peft", reason="the extra `peft` is not installed")
    module = vit(input_shape, classes)
    linear = [n for n, m in module.base.named_modules() if isinstance(m, nn.Linear) and "classifier" not in n]  # type: ignore[union-attr, operator]
    config = peft.LoraConfig(r=2, target_modules=linear, modules_to_save=["classifier"], lora_dropout=0.1)
    module.base = peft.get_peft_model(module.base, config)
    return module


def bench(module: Callable[..., nn.Module], method: str) -> Bench:
    optimizer = Optimizer(
        "adamw", lr=0.01, weight_decay=0.1, clip=1.0, groups=[ParameterGroup(["*classifier*"], lr=0.05)]
    )
    return Bench(method, stream=Toy(clients=2, samples=8), module=module, train=TrainOptions(1, 4, optimizer))


CASES = pytest.mark.parametrize(
    ("module", "method"),
    [
        (vit, "fedavg"),
        (frozen_vit, "fedgp+er"),
        pytest.param(lora_vit, "fedavg", marks=pytest.mark.slow),  # a part of the next
        (lora_vit, "fedgp+der"),
    ],
)


@CASES
def test_every_engine_equals_eager_and_runs_resume(module: Callable[..., nn.Module], method: str) -> None:
    made = bench(module, method)
    eager = made.run()
    assert torch.isfinite(eager.params).all()
    assert_same(eager, run_over_wire(bench(module, method)))
    assert_same(eager, on_processes(bench(module, method)))
    assert_resumes(bench(module, method), 2, eager)


@pytest.mark.parametrize("module", [frozen_vit, lora_vit])
def test_only_what_trains_is_in_the_vector(module: Callable[..., nn.Module]) -> None:
    made = module((1, 4, 4), 4)
    layout = Layout.of(made)
    assert layout.size == sum(p.numel() for p in made.parameters() if p.requires_grad) < 0.6 * layout_of_all(made)
    assert layout.stats == () and layout.counters == ()


def layout_of_all(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


# timm -----------------------------------------------------------------------------------------------------------------
TIMM_VIT = {"patch_size": 2, "embed_dim": 8, "depth": 2, "num_heads": 2}
RANDOM = {"drop_path_rate": 0.2, "attn_drop_rate": 0.1, "proj_drop_rate": 0.1}


def timm_network(name: str, **options: Any) -> Callable[..., nn.Module]:
    def build(input_shape: tuple[int, ...], classes: int) -> nn.Module:
        return models.build(f"timm:{name}", input_shape, classes, 0, options)

    return build


def timm_vit(**options: Any) -> Callable[..., nn.Module]:
    return timm_network("vit_tiny_patch16_224", **TIMM_VIT, **options)


def timm_peft(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    peft = pytest.importorskip("peft", reason="the extra `peft` is not installed")
    config = peft.LoraConfig(r=2, target_modules=["qkv", "proj", "fc1"], modules_to_save=["head"], lora_dropout=0.1)
    return peft.get_peft_model(timm_vit()(input_shape, classes), config)  # type: ignore[no-any-return]


TIMM = {
    "random layers": (timm_vit(**RANDOM), "fedavg"),
    "trainable": (timm_vit(trainable=["head.*", "*norm*"]), "fedgp+er"),
    "model.lora": (timm_vit(lora={"rank": 2}), "fedgp+der"),
    "peft": (timm_peft, "fedavg"),
    "peft, FedGP": (timm_peft, "fedgp+der"),
    "lora": (timm_vit(), "lora"),
    "lorm": (timm_vit(), "lorm"),
    "ridge": (timm_vit(trainable=["head.*"]), "ridge"),
    "ranpac": (timm_vit(trainable=["head.*"]), "ranpac"),
    "hgp": (timm_vit(), "hgp"),
    "frozen norms": (timm_network("resnet10t", trainable=["fc.*"]), "ccvr"),
}


@pytest.mark.parametrize("case", TIMM)
def test_networks_of_timm_on_every_engine_and_after_resume(case: str) -> None:
    pytest.importorskip("timm", reason="needs timm and torchvision", exc_type=ImportError)
    module, method = TIMM[case]
    optimizer = Optimizer("adamw", lr=0.01, weight_decay=0.1, clip=1.0)
    made = Bench(method, stream=Toy(clients=2, samples=8), module=module, train=TrainOptions(1, 4, optimizer))
    eager = made.run()
    assert torch.isfinite(eager.params).all()
    assert_same(eager, run_over_wire(made))
    assert_same(eager, on_processes(made))
    assert_resumes(made, 1)
