"""Exported networks give the same outputs, in formats that need nothing of everfed."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import everfed
from everfed import models
from everfed.cli import app
from everfed.session.export import export
from tests.session.test_saved_model import ADAPTERS, CLASSES, NAMES, SHAPE, TINY_VIT, Net, recipe, write_data
from tests.support.toy import small_memory

IMAGES = np.random.default_rng(5).integers(0, 256, (3, *SHAPE)).astype(np.uint8)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    everfed.run(recipe(write_data(folder)), folder / "run")
    (folder / "trees.npz").unlink()
    return folder / "run"


def cli(*words: str) -> Any:
    return CliRunner().invoke(app, ["export", *words, "--allow-code", "tests.session"])


load = partial(everfed.load, allow_code=["tests.session"])


def test_torch(run: Path, tmp_path: Path) -> None:
    done = cli(str(run), "--to", "torch", "--out", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    net = Net()
    net.load_state_dict(torch.load(tmp_path / "out/model.pt", weights_only=True))
    loaded = load(run)
    assert torch.equal(net.eval()(torch.ones(2, *SHAPE)), loaded.model(torch.ones(2, *SHAPE)))
    about = json.loads((tmp_path / "out/everfed.json").read_text())
    assert about["class_names"] == list(NAMES) and about["mean"] == [0.5, 0.25, 0.125]


def test_torch_export_takes_pixels_of_any_number(run: Path, tmp_path: Path) -> None:
    assert cli(str(run), "--to", "torch-export", "--out", str(tmp_path / "out")).exit_code == 0
    program = torch.export.load(tmp_path / "out/model.pt2").module()
    torch.testing.assert_close(program(torch.from_numpy(IMAGES)), load(run).outputs(IMAGES))


@pytest.mark.parametrize(
    "method", [pytest.param("fedavg", marks=pytest.mark.slow), "pilora", "prompt-dual", "prompt-hgp", "ranpac"]
)
def test_torch_export_of_a_vision_transformer_takes_any_number(method: str, tmp_path: Path) -> None:
    model = {"kind": "vit", "patch": 4, "width": 16, "depth": 1, "heads": 2}
    small = {**small_memory(method), **({"prompt-shared": {"length": 2, "blocks": [0]}} if "hgp" in method else {})}
    table = {"name": method, **small, **({method: ADAPTERS[method]} if method in ADAPTERS else {})}
    everfed.run(recipe(write_data(tmp_path), model=model, method=table), tmp_path / "run")
    done = cli(str(tmp_path / "run"), "--to", "torch-export", "--out", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    program = torch.export.load(tmp_path / "out/model.pt2").module()
    torch.testing.assert_close(program(torch.from_numpy(IMAGES)), load(tmp_path / "run").outputs(IMAGES))


def test_onnx_takes_pixels_of_any_number(run: Path, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="the extra `export` is not installed")
    pytest.importorskip("onnxscript", reason="the extra `export` is not installed")
    done = cli(str(run), "--to", "onnx", "--out", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    (found,) = onnx.reference.ReferenceEvaluator(str(tmp_path / "out/model.onnx")).run(None, {"samples": IMAGES})
    torch.testing.assert_close(torch.tensor(found), load(run).outputs(IMAGES), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("to", ["hf", "peft", "keras"])
def test_a_format_that_does_not_fit_leaves_nothing(run: Path, tmp_path: Path, to: str) -> None:
    done = cli(str(run), "--to", to, "--out", str(tmp_path / "out"))
    assert done.exit_code == 2 and f"--to {to}" in done.output and not (tmp_path / "out").exists()


def test_a_folder_that_exists_is_left_alone(run: Path, tmp_path: Path) -> None:
    done = cli(str(run), "--to", "torch", "--out", str(tmp_path))
    assert done.exit_code == 2 and "exists already" in done.output and tmp_path.exists()


class Fickle(nn.Module):
    """Another network every time it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.head = 0, nn.Linear(192, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.head(x.flatten(1)) + self.calls  # type: ignore[no-any-return]


def test_other_outputs_are_noticed(run: Path, tmp_path: Path) -> None:
    description = load(run).description
    with pytest.raises(everfed.UserError, match="gives other outputs"):
        export(Fickle(), description, "torch", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_transformers_read_their_own_format(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra `text` is not installed")
    (tmp_path / "vit").mkdir()
    (tmp_path / "vit/config.json").write_text(json.dumps(TINY_VIT))
    everfed.run(recipe(write_data(tmp_path), kind=f"hf:{tmp_path / 'vit'}"), tmp_path / "run")
    done = cli(str(tmp_path / "run"), "--to", "hf", "--out", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    again = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    loaded = load(tmp_path / "run")
    assert torch.equal(again(torch.ones(2, *SHAPE)).logits, loaded.model(torch.ones(2, *SHAPE)))
    assert [again.config.id2label[number] for number in range(CLASSES)] == list(NAMES)


def adapted(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """A network of a user's own with an adapter of PEFT."""
    import peft
    import transformers

    base = transformers.AutoModelForImageClassification.from_config(
        transformers.AutoConfig.for_model(**TINY_VIT, num_labels=classes)
    )
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "query", "value"], modules_to_save=["classifier"])
    return Logits(peft.get_peft_model(base, config))


class Logits(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        return self.base(pixel_values=x).logits  # type: ignore[no-any-return]


def test_an_adapter_alone(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the extra `text` is not installed")
    pytest.importorskip("peft", reason="the extra `peft` is not installed")
    table = recipe(write_data(tmp_path), kind=f"{__name__}:adapted")
    result = everfed.run(table, tmp_path / "run")
    assert len(result.data["frozen_sha256"]) == 64
    done = cli(str(tmp_path / "run"), "--to", "peft", "--out", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out/adapter_model.safetensors").exists()


@pytest.mark.parametrize(("method", "rank"), [("fedavg", 2), ("lora", 4)])
def test_everfeds_own_adapter_is_one_of_peft(method: str, rank: int, tmp_path: Path) -> None:
    """On a plain network of the same weights it gives the trained outputs; two tasks' factors are a pair of rank 4."""
    peft = pytest.importorskip("peft", reason="the extra `peft` is not installed")
    sizes = {"patch": 4, "width": 8, "depth": 1, "heads": 2}
    model = {"kind": "vit", **sizes, "lora": {"rank": 2, "targets": ["qkv", "fc1"], "alpha": 6}}
    everfed.run(recipe(write_data(tmp_path), model=model, method={"name": method}), tmp_path / "run")
    done = cli(str(tmp_path / "run"), "--to", "peft", "--out", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["modules_to_save"]) == (rank, 3 * rank, ["head"])
    trained = load(tmp_path / "run").model
    plain = models.build("vit", SHAPE, CLASSES, 5, sizes)
    own = {name: value for name, value in trained.state_dict().items() if "lora_" not in name and "head" not in name}
    assert not plain.load_state_dict(own, strict=False).unexpected_keys
    adapted = peft.PeftModel.from_pretrained(plain, str(tmp_path / "out")).eval()
    x = torch.randn(3, *SHAPE)
    torch.testing.assert_close(adapted(x), trained(x), rtol=1e-5, atol=1e-5)


def test_an_adapter_of_queries_and_values_alone_is_none_of_peft(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="the extra `peft` is not installed")
    model = {"kind": "vit", "patch": 4, "width": 8, "depth": 1, "heads": 2}
    everfed.run(recipe(write_data(tmp_path), model=model, method={"name": "pilora"}), tmp_path / "run")
    loaded = load(tmp_path / "run")
    with pytest.raises(everfed.UserError, match="no LoRA of whole layers and one rank"):
        export(loaded.model, loaded.description, "peft", tmp_path / "out")


@pytest.mark.parametrize("method", ["fedavg", "lora"])
def test_adapters_are_merged_into_a_folder_of_transformers(method: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra `text` is not installed")
    (tmp_path / "vit").mkdir()
    (tmp_path / "vit/config.json").write_text(json.dumps(TINY_VIT))
    model = {"kind": f"hf:{tmp_path / 'vit'}", "lora": {"rank": 2}}
    everfed.run(recipe(write_data(tmp_path), model=model, method={"name": method}), tmp_path / "run")
    done = cli(str(tmp_path / "run"), "--to", "hf", "--out", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    again = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "out").eval()
    x = torch.randn(3, *SHAPE)
    torch.testing.assert_close(again(x).logits, load(tmp_path / "run").model(x), rtol=1e-4, atol=1e-4)
